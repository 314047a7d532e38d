"""Conversations that grow turn by turn and keep their KV memory in between.

The one idea: between two turns a conversation owns its block table; a turn lends it to a
request and takes it back.  Under pressure an idle one gives its memory up and computes it
again at its next turn: slower, with the same answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from repro.serving.request import Completion, Request, RequestError, SamplingParams

if TYPE_CHECKING:
    from repro.serving.engine import Engine


class Conversation:
    """Made by :meth:`repro.Engine.conversation`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table: Any = None
        self._busy = False
        self.tokens: list[int] = []
        self.n_evictions = 0
        self.last_used = time.perf_counter()

    def say(
        self,
        text: str | list[int],
        max_new_tokens: int = 64,
        *,
        sampling: SamplingParams | None = None,
        stop: tuple[str, ...] = (),
        ignore_eos: bool = False,
    ) -> Completion:
        """Append ``text`` and answer it.

        Raises:
            RequestError: the turn is empty, or the whole conversation exceeds the context.
        """
        self._engine._check_open()
        if self._busy:
            raise RequestError("a turn of this conversation is under way: wait for its answer")
        new = self._engine._encode(text)
        if not new:
            raise RequestError("the turn is empty: give at least one token")
        request = self._engine._request(
            self.tokens + new,
            max_new_tokens,
            sampling or SamplingParams(),
            stop=stop,
            ignore_eos=ignore_eos,
            conversation=self,
        )
        request.table, self._table = self._table, None
        self._busy = True
        try:
            (completion,) = self._engine._complete([request])
        finally:
            self._busy = False
            self.last_used = time.perf_counter()
        return completion

    def keep(self, request: Request) -> bool:
        """Take the table over when a turn ends; False if it is not worth keeping."""
        if request.finish_reason not in ("length", "stop", "eos"):
            return False  # the turn failed: the conversation is as before, its KV recomputed
        self.tokens = list(request.tokens)
        self._table = request.table
        return True

    @property
    def n_cached(self) -> int:
        """Tokens whose KV is kept."""
        return 0 if self._table is None else int(self._table.n_tokens)

    @property
    def evictable(self) -> bool:
        """Idle, with memory to give."""
        return self._table is not None and not self._busy

    def evict(self) -> None:
        """Give the KV memory back; the next turn computes it again."""
        if self._table is not None:
            if self._engine._parts is not None:  # a closed engine has given all memory back
                self._engine._parts.scheduler.kv.release(self._table)
            self._table = None
            self.n_evictions += 1

    def close(self) -> None:
        """Forget everything."""
        self.evict()
        self.tokens = []
        if self in self._engine._conversations:
            self._engine._conversations.remove(self)
