"""The operator's own prompts: a text file, one prompt a line, or JSON lines.

The one idea: what is calibrated on should be what will be served, so any file of prompts will
do, and what is wrong with one is said with its line.

JSON lines are objects with "prompt" or "text", and "domain" if prompts of several kinds should
all be held out in equal shares.

Letters: P prompts, T tokens of the longest one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from repro.errors import DataUnavailableError
from repro.paths import relative
from repro.workloads.tokens import pad_batch

_JSON_LINES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Prompts:
    """Texts, and the domain of each (None: nobody said)."""

    texts: tuple[str, ...]
    domains: tuple[str, ...] | None


@dataclass(frozen=True)
class EncodedPrompts:
    """Tokens, padded on the left."""

    input_ids: Tensor  # [P, T]
    mask: Tensor  # [P, T] bool, True on real tokens
    domains: tuple[str, ...] | None
    n_cut: int  # prompts that were longer than allowed
    n_empty: int  # prompts that the tokenizer made nothing of


def read_prompts(path: Path | str) -> Prompts:
    """The prompts in a file; empty lines are skipped.

    The lines are JSON if the first of them is an object, or if the file's name says so.

    Raises:
        DataUnavailableError: unreadable, no text, empty, or a JSON line without a prompt.
    """
    path = Path(path).expanduser()
    label = relative(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataUnavailableError(
            f"prompts {label!r} cannot be read ({reason}): give a text file, one prompt a line"
        ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataUnavailableError(
            f"prompts {label!r} are no UTF-8 text (byte {error.start}): save the file as UTF-8"
        ) from error
    if "\0" in text:
        raise DataUnavailableError(
            f"prompts {label!r} hold zero bytes, so they are no text: give one prompt a line"
        )
    lines = [(i, line.strip()) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataUnavailableError(f"prompts {label!r} are empty: write one prompt a line")
    if path.suffix not in _JSON_LINES and not _is_json_object(lines[0][1]):
        return Prompts(tuple(line for _, line in lines), None)
    rows = [_json_row(label, i, line) for i, line in lines]
    domains = tuple(str(row.get("domain", "")) for row in rows)
    texts = tuple(str(row["prompt"] if "prompt" in row else row["text"]) for row in rows)
    return Prompts(texts, domains if any(domains) else None)


def _is_json_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _json_row(label: str, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        text = row["prompt"] if "prompt" in row else row["text"]
        text.encode("utf-8")  # half a surrogate pair is no text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataUnavailableError(
            f'line {number} of prompts {label!r} is no JSON object with a text "prompt": '
            "write every line alike, or plain text"
        ) from error
    return dict(row)


def encode_prompts(tokenizer: Any, prompts: Prompts, max_tokens: int) -> EncodedPrompts:
    """Tokens of the prompts, each cut to its first ``max_tokens``.

    Raises:
        DataUnavailableError: nothing is left, or no token is allowed.
    """
    if max_tokens < 1:
        raise DataUnavailableError(f"max_tokens={max_tokens} leaves nothing: allow at least 1")
    encoded: Sequence[list[int]] = tokenizer(list(prompts.texts), verbose=False)["input_ids"]
    kept = [i for i, ids in enumerate(encoded) if len(ids)]
    if not kept:
        raise DataUnavailableError(
            f"the tokenizer makes no token of {len(prompts.texts)} prompt(s): write longer ones"
        )
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = tokenizer.eos_token_id or 0
    cut = [encoded[i][:max_tokens] for i in kept]
    ids, mask = pad_batch(cut, int(pad), side="left")
    domains = None if prompts.domains is None else tuple(prompts.domains[i] for i in kept)
    n_cut = sum(len(encoded[i]) > max_tokens for i in kept)
    return EncodedPrompts(ids, mask, domains, n_cut, len(encoded) - len(kept))
