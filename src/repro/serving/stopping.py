"""Text as it grows: what can be shown already, and where it must end.

The one idea: a token is not a piece of text.  Several tokens may be one character, and a stop
string may begin in one token and end three later.  So text is decoded from the tokens at hand,
and the tail that could still become a stop string, or half a character, is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HALF = "\ufffd"  # what decoders print for an incomplete character
_KEEP = 8  # tokens of context that decoding a new one may depend on


class Stopper:
    """Follows one answer.

    Args:
        tokenizer: with ``decode``; None shows no text and never stops.
        stop: strings that end the answer; they are cut off.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._start = 0  # of the tokens that are decoded together
        self._fixed = ""  # text of the tokens before
        self._shown = 0
        self.text = ""
        self.stopped = False

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that may be shown now ("" if none)."""
        self._ids.append(token_id)
        window = self._decode(self._ids[self._start :])
        self.text = self._fixed + window
        if len(self._ids) - self._start > 2 * _KEEP and not window.endswith(_HALF):
            cut = len(self._ids) - _KEEP
            tail = self._decode(self._ids[cut:])
            head = self._decode(self._ids[self._start : cut])
            if head + tail == window:  # not where a character or a merged space is cut
                self._fixed, self._start = self._fixed + head, cut
        at = min((i for s in self._stop if (i := self.text.find(s)) >= 0), default=-1)
        if at >= 0:
            self.text, self.stopped = self.text[:at], True
            return self._show(len(self.text))
        return self._show(len(self.text) - self._held())

    def finish(self) -> str:
        """The answer is over: what had been held back."""
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _held(self) -> int:
        """Characters at the end that may change or may be the beginning of a stop string."""
        held = len(self.text) - len(self.text.rstrip(_HALF))
        for string in self._stop:
            for n in range(min(len(string) - 1, len(self.text)), held, -1):
                if self.text.endswith(string[:n]):
                    held = n
                    break
        return held
