"""One forward pass over requests of different lengths, on a model that knows nothing of pages.

The one idea: rows are padded on the left, to the longest past and the longest chunk.  Then the
last token of every row is in the last column, positions and mask say what is real, and the
model is called as anybody would call it.

The token mask goes to the experts function through a context, so that padding is neither
computed nor counted.

Letters: R rows, T columns of new tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from repro.serving.kv_blocks import BlockTable
from repro.serving.kv_layout import KVError, cache_argument
from repro.serving.paged_cache import PagedCache, Pass


class Row(NamedTuple):
    """A request and the tokens it has not seen yet; its table has room for them."""

    table: BlockTable
    tokens: Sequence[int]


class TokenContext(Protocol):
    """What the experts function reads; :class:`repro.integration.paged_experts.StepContext`."""

    token_mask: Tensor | None  # bool[R * T]; None: all are real


class _Signature(NamedTuple):
    cache: str
    names: frozenset[str]


def _signature(model: Any) -> _Signature:
    """Names of the arguments, kept per class: looking them up takes longer than a small step."""
    known = _SIGNATURES.get(type(model))
    if known is None:
        names = frozenset(inspect.signature(model.forward).parameters)
        known = _SIGNATURES[type(model)] = _Signature(cache_argument(model), names)
    return known


_SIGNATURES: dict[type, _Signature] = {}


@torch.inference_mode()
def run(
    model: nn.Module,
    cache: PagedCache,
    rows: Sequence[Row],
    context: TokenContext | None = None,
    *,
    all_logits: bool = False,
) -> Any:
    """Compute the new tokens of all rows, and cache them.

    Rows of a model with recurrent states are computed in several passes, each of rows that can
    go together.  If a pass raises, its rows are as they were before.

    Args:
        model: a causal language model of Transformers.
        cache: of this model.
        rows: at least one; no table twice.
        context: gets the token mask of each pass.
        all_logits: of every new token, not only of each row's last.

    Returns:
        Logits ``[R, V]`` after the last token of each row, or a list of ``[n_i, V]``.

    Raises:
        KVError: no rows, a row without new tokens or without room for them.
    """
    if not rows:
        raise KVError("no rows: a pass needs at least one request")
    parts = _passes(cache, rows)
    if len(parts) == 1:
        return _one(model, cache, rows, context, all_logits)
    found: list[Any] = [None] * len(rows)
    for part in parts:
        logits = _one(model, cache, [rows[i] for i in part], context, all_logits)
        for place, row in enumerate(part):
            found[row] = logits[place]
    return found if all_logits else torch.stack(found)


def _passes(cache: PagedCache, rows: Sequence[Row]) -> list[list[int]]:
    """Which rows can go together; recurrent states do not bear padding."""
    if not cache.layout.recurrent:
        return [list(range(len(rows)))]
    alike: dict[tuple[bool, int], list[int]] = {}
    for index, row in enumerate(rows):
        alike.setdefault((row.table.n_tokens > 0, len(row.tokens)), []).append(index)
    return list(alike.values())


def _one(
    model: Any,
    cache: PagedCache,
    rows: Sequence[Row],
    context: TokenContext | None,
    all_logits: bool,
) -> Any:
    tables = [row.table for row in rows]
    n_new = [len(row.tokens) for row in rows]
    now = cache.begin(tables, n_new)
    try:
        arguments = _arguments(model, cache, rows, now, all_logits)
        if context is not None:
            context.token_mask = _token_mask(now)
        logits = model(**arguments).logits
        cache.commit(tables, n_new)
    finally:
        cache.end()
        if context is not None:
            context.token_mask = None
    if not all_logits:
        return logits[:, -1]
    return [logits[i, now.n_new - n :] for i, n in enumerate(n_new)]


def _token_mask(now: Pass) -> Tensor | None:
    if now.real is None:
        return None
    mask = torch.zeros(now.n_rows * now.n_new, dtype=torch.bool, device=now.real.device)
    mask[now.real] = True
    return mask


def _arguments(
    model: Any, cache: PagedCache, rows: Sequence[Row], now: Pass, all_logits: bool
) -> dict[str, Any]:
    signature = _signature(model)
    device = now.padding.device
    ids = np.zeros((now.n_rows, now.n_new), dtype=np.int64)
    positions = np.zeros((now.n_rows, now.n_new), dtype=np.int64)
    padded = False
    for index, row in enumerate(rows):
        n = len(row.tokens)
        ids[index, now.n_new - n :] = row.tokens
        past = row.table.n_tokens
        positions[index, now.n_new - n :] = np.arange(past, past + n)
        padded = padded or past + n < now.n_columns
    arguments: dict[str, Any] = {
        "input_ids": torch.from_numpy(ids).to(device),
        "use_cache": True,
        signature.cache: cache,
    }
    if padded:  # without padding the library may leave the mask out altogether
        columns = torch.arange(now.n_columns, device=device)
        arguments["attention_mask"] = columns >= now.padding[:, None]
    if "position_ids" in signature.names:
        arguments["position_ids"] = torch.from_numpy(positions).to(device)
    if "logits_to_keep" in signature.names and (cache.layout.shares_kv or not all_logits):
        # As a tensor: given a number, Gemma-4 drops tokens in front of its last layers'
        # experts, and then the token mask would not fit.
        first = 0 if all_logits else now.n_new - 1
        arguments["logits_to_keep"] = torch.arange(first, now.n_new, device=device)
    return arguments
