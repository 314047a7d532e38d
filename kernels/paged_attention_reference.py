"""Decode attention over pages in plain PyTorch, and how keys and values lie on them.

The one idea: one new token per row asks all tokens of its row.  The reference does it as one
would explain it: store the new token, pick the row's tokens from its pages, softmax, average.

Letters: R rows, Hq query heads, H heads of keys and values, D size of a head, P pages of a
block, B blocks of the longest row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.errors import ReproError


class PagedAttentionError(ReproError, ValueError):
    """Arguments that paged attention does not take."""


@dataclass(frozen=True)
class KvPlace:
    """Where the tokens of one layer lie in a block; sizes in values, not bytes.

    A block is ``block_pages`` pages read one after the other.  In it, from ``start`` on, a layer
    has ``block_tokens`` tokens; a token is the keys of all heads, then the values of all heads.
    A token may begin on one page and end on the next.
    """

    start: int
    block_tokens: int
    block_pages: int
    page_values: int
    n_heads: int
    key_size: int
    value_size: int

    @property
    def token_values(self) -> int:
        """Keys and values of one token."""
        return self.n_heads * (self.key_size + self.value_size)

    @property
    def piece(self) -> int:
        """Values that always lie together: no page border cuts them."""
        return math.gcd(self.start, self.key_size, self.value_size, self.page_values)


def check_arguments(
    query: Tensor,
    arena: Tensor,
    pages: Tensor,
    lengths: Tensor,
    place: KvPlace,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
) -> None:
    """Refuse what would give a wrong number.

    Raises:
        PagedAttentionError: shapes, types or devices that do not fit together.
    """
    n_rows = len(query)
    shapes = {
        "query": (query, (n_rows, query.shape[1], place.key_size)),
        "keys": (keys, (n_rows, place.n_heads, place.key_size)),
        "values": (values, (n_rows, place.n_heads, place.value_size)),
        "arena": (arena, (arena.shape[0], place.page_values)),
        "pages": (pages, (n_rows, pages.shape[-1])),
        "lengths": (lengths, (n_rows,)),
    }
    if sinks is not None:
        shapes["sinks"] = (sinks, (query.shape[1],))
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            raise PagedAttentionError(f"{name} of shape {tuple(tensor.shape)}: give {shape}")
        if tensor.device != arena.device:
            raise PagedAttentionError(
                f"{name} on {tensor.device} and the arena on {arena.device}: move one of them"
            )
    for name, tensor in {"query": query, "keys": keys, "values": values}.items():
        if tensor.dtype != arena.dtype:
            raise PagedAttentionError(f"{name} of {tensor.dtype}: the arena has {arena.dtype}")
    for name, tensor in {"pages": pages, "lengths": lengths}.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise PagedAttentionError(f"{name} of {tensor.dtype}: give int32 or int64")
    if query.shape[1] % place.n_heads:
        raise PagedAttentionError(
            f"{query.shape[1]} query heads over {place.n_heads} heads of keys: no whole groups"
        )
    if pages.shape[1] % place.block_pages:
        raise PagedAttentionError(
            f"a page table of {pages.shape[1]} columns: give whole blocks of {place.block_pages}"
        )


def token_indices(pages: Tensor, n_tokens: int, place: KvPlace) -> Tensor:
    """``[n_tokens, token_values]``: where each value lies in the flat arena.

    Args:
        pages: ``[B * P]`` of one row.
        n_tokens: of the row.
        place: of the layer.
    """
    tokens = torch.arange(n_tokens, device=pages.device)
    at = place.start + tokens % place.block_tokens * place.token_values
    at = at[:, None] + torch.arange(place.token_values, device=pages.device)
    slot = (tokens // place.block_tokens * place.block_pages)[:, None] + at // place.page_values
    return pages.long()[slot] * place.page_values + at % place.page_values


def paged_attention_reference(
    query: Tensor,
    arena: Tensor,
    pages: Tensor,
    lengths: Tensor,
    place: KvPlace,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Store each row's new token on its pages, and let it attend to its row.

    Args:
        query: ``[R, Hq, D]`` of the new tokens; query heads of one group are neighbours.
        arena: ``[n_pages, page_values]``, written to.
        pages: ``[R, B * P]`` pages of each row's blocks; what a row lacks is never looked at.
        lengths: ``[R]`` tokens of each row, the new one included; 0: no row, answered by zeros.
        place: of this layer in a block.
        keys: ``[R, H, D]`` of the new tokens.
        values: likewise, of the size of a value.
        scale: of the products.
        window: how many of the last tokens are seen, the new one included; None: all.
        sinks: ``[Hq]`` a logit per head that takes part in the softmax and has no value
            (GPT-OSS).
        softcap: products ``x`` become ``softcap * tanh(x / softcap)``.

    Returns:
        ``[R, Hq, size of a value]`` in the type of ``query``.

    Raises:
        PagedAttentionError: shapes, types or devices that do not fit together.
    """
    check_arguments(query, arena, pages, lengths, place, keys, values, sinks)
    flat = arena.view(-1)
    n_query, group = query.shape[1], query.shape[1] // place.n_heads
    out = query.new_zeros(len(query), n_query, place.value_size)
    exact = torch.promote_types(query.dtype, torch.float32)
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        at = token_indices(pages[row], length, place)
        flat[at[-1]] = torch.cat([keys[row].reshape(-1), values[row].reshape(-1)])
        seen = flat[at[0 if window is None else max(0, length - window) :]].to(exact)
        n_key = place.n_heads * place.key_size
        key = seen[:, :n_key].unflatten(1, (place.n_heads, -1)).repeat_interleave(group, 1)
        value = seen[:, n_key:].unflatten(1, (place.n_heads, -1)).repeat_interleave(group, 1)
        logits = torch.einsum("hd,thd->ht", query[row].to(exact), key) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if sinks is not None:
            logits = torch.cat([logits, sinks.to(exact)[:, None]], 1)
        weights = torch.softmax(logits, 1)[:, : len(seen)]
        out[row] = torch.einsum("ht,thd->hd", weights, value).to(out.dtype)
    return out
