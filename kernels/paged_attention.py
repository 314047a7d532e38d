"""Decode attention that reads keys and values where they lie: one launch per layer.

The one idea: the tokens of a row are split over programs (flash-decoding, Dao et al. 2023); the
program that finishes last combines the partial softmaxes of its row and head, so that no second
launch is needed.  The row's new token takes part from where the model left it; the program
whose split it ends writes it to its page on the way, so that storing costs no launch either.

The grid depends on the page table's width alone, lengths are read on the device: a captured
graph goes on serving while rows grow.  How a row is split follows its length, so short rows in a
wide table are not cut into crumbs.

The reference, and the meaning of the arguments: :mod:`repro.kernels.paged_attention_reference`.

Letters: R rows, H heads of keys and values, G query heads of each, S splits, D size of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from repro.kernels.paged_attention_reference import (
    KvPlace,
    PagedAttentionError,
    check_arguments,
)
from repro.kernels.paged_attention_workspace import Workspace

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_SIZE, MAX_GROUP = 512, 64
_PROGRAMS = 512  # about four on each multiprocessor of a large GPU
_MIN_SPLIT_TILES = 1
_MAX_SPLITS = 32
_STAGES, _WARPS = 2, 4


@triton.jit
def _addresses(  # type: ignore[no-untyped-def]
    table, tokens, seen, piece0, size: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_PAGES: tl.constexpr, TOKEN_PIECES: tl.constexpr,
    PAGE_PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Where the ``size`` values from piece ``piece0`` of each token lie; ``[len(tokens), BLOCK]``.

    A table look-up per token where a head lies on one page, else one per value.
    """
    d = tl.arange(0, BLOCK)
    slots = tokens // BLOCK_TOKENS * BLOCK_PAGES
    first = piece0 + tokens % BLOCK_TOKENS * TOKEN_PIECES
    if size == PIECE:
        page = tl.load(table + slots + first // PAGE_PIECES, mask=seen, other=0).to(tl.int64)
        at = (page * PAGE_PIECES + first % PAGE_PIECES) * PIECE
        return at[:, None] + d[None, :]
    else:
        pieces = first[:, None] + (d // PIECE)[None, :]
        inside = seen[:, None] & (d < size)[None, :]
        slots = slots[:, None] + pieces // PAGE_PIECES
        page = tl.load(table + slots, mask=inside, other=0).to(tl.int64)
        return (page * PAGE_PIECES + pieces % PAGE_PIECES) * PIECE + (d % PIECE)[None, :]


@triton.jit
def _capped(x, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    if CAPPED:
        y = tl.exp2(tl.abs(x) * (-1.4426950408889634 * 2.0) / softcap)  # never overflows
        y = softcap * (1.0 - y) / (1.0 + y)
        x = tl.where(x < 0, -y, y)
    return x


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    out, at, mask, sinks, heads, real, top, total, acc, SINKS: tl.constexpr
):
    """Divide by the sum of the weights, a sink's among them, and store."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
    total = tl.where(real, total, 1.0)
    tl.store(out + at, acc / total[:, None], mask=mask)


@triton.jit(do_not_specialize=["capacity", "window"])
def _decode(  # type: ignore[no-untyped-def]
    query, arena, table, lengths, new_keys, new_values, sinks, out, partial, extremes, arrived,
    scale, softcap, start, capacity, window, n_splits,
    q_row, q_head, k_row, k_head, v_row, v_head, table_row,
    H: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_PAGES: tl.constexpr, TOKEN_PIECES: tl.constexpr,
    PAGE_PIECES: tl.constexpr, PIECE: tl.constexpr,
    SINKS: tl.constexpr, CAPPED: tl.constexpr,
    TILE: tl.constexpr, MIN_TILES: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    g, dk, dv = tl.arange(0, BG), tl.arange(0, BK), tl.arange(0, BV)
    heads = head * G + g
    out_at = (row * (H * G) + heads[:, None]) * DV + dv[None, :]
    out_mask = (g < G)[:, None] & (dv < DV)[None, :]
    # a length beyond the table would read what follows it
    length = tl.minimum(tl.load(lengths + row), capacity).to(tl.int32)
    if length <= 0:
        if split == 0:
            tl.store(out + out_at, tl.zeros([BG, BV], tl.float32), mask=out_mask)
        return
    first = tl.maximum(length - window, 0)
    per_split = tl.cdiv(length - first, n_splits)
    per_split = tl.maximum(tl.cdiv(per_split, TILE), MIN_TILES) * TILE
    n_active = tl.cdiv(length - first, per_split)
    if split >= n_active:
        return
    begin = first + split * per_split
    end = tl.minimum(begin + per_split, length)
    table += row * table_row

    q_at = row * q_row + heads[:, None] * q_head + dk[None, :]
    q = tl.load(query + q_at, mask=(g < G)[:, None] & (dk < DK)[None, :], other=0.0)
    key_piece = start + head * (DK // PIECE)
    value_piece = start + (H * DK + head * DV) // PIECE
    top = tl.full([BG], float("-inf"), tl.float32)
    total = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, BV], tl.float32)
    last = length - 1  # the new token: it is not read from its page
    for tile in tl.range(begin, tl.minimum(end, last), TILE, num_stages=STAGES):
        tokens = tile + tl.arange(0, TILE)
        seen = tokens < tl.minimum(end, last)
        k_at = _addresses(
            table, tokens, seen, key_piece, DK, BK,
            BLOCK_TOKENS, BLOCK_PAGES, TOKEN_PIECES, PAGE_PIECES, PIECE,
        )  # fmt: skip
        k = tl.load(arena + k_at, mask=seen[:, None] & (dk < DK)[None, :], other=0.0)
        v_at = _addresses(
            table, tokens, seen, value_piece, DV, BV,
            BLOCK_TOKENS, BLOCK_PAGES, TOKEN_PIECES, PAGE_PIECES, PIECE,
        )  # fmt: skip
        v = tl.load(arena + v_at, mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
        # in float32 the tensor cores' shorter type is not wanted; halves have only one way
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = _capped(logits * scale, softcap, CAPPED) * 1.4426950408889634
        logits = tl.where(seen[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(logits - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher

    if end == length:  # this split ends with the new token: attend to it, and store it
        kn = tl.load(new_keys + row * k_row + head * k_head + dk, mask=dk < DK, other=0.0)
        vn = tl.load(new_values + row * v_row + head * v_head + dv, mask=dv < DV, other=0.0)
        logit = tl.sum(q.to(tl.float32) * kn.to(tl.float32)[None, :], 1) * scale
        logit = _capped(logit, softcap, CAPPED) * 1.4426950408889634
        higher = tl.maximum(top, logit)
        shrink, weight = tl.exp2(top - higher), tl.exp2(logit - higher)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * vn.to(tl.float32)[None, :]
        top = higher
        one = last + tl.arange(0, 1)
        k_at = _addresses(
            table, one, one >= 0, key_piece, DK, BK,
            BLOCK_TOKENS, BLOCK_PAGES, TOKEN_PIECES, PAGE_PIECES, PIECE,
        )  # fmt: skip
        tl.store(arena + k_at, kn[None, :], mask=(dk < DK)[None, :])
        v_at = _addresses(
            table, one, one >= 0, value_piece, DV, BV,
            BLOCK_TOKENS, BLOCK_PAGES, TOKEN_PIECES, PAGE_PIECES, PIECE,
        )  # fmt: skip
        tl.store(arena + v_at, vn[None, :], mask=(dv < DV)[None, :])

    if n_active == 1:
        _finish(out, out_at, out_mask, sinks, heads, g < G, top, total, acc, SINKS)
    else:
        unit = row * H + head
        here = (unit * n_splits + split) * G + g
        tl.store(partial + here[:, None] * DV + dv[None, :], acc, mask=out_mask)
        tl.store(extremes + here * 2, top, mask=g < G)
        tl.store(extremes + here * 2 + 1, total, mask=g < G)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(arrived + unit, 1, sem="acq_rel") == n_active - 1:
            tl.store(arrived + unit, 0)  # as it was found, for the next launch
            top = tl.full([BG], float("-inf"), tl.float32)
            total = tl.zeros([BG], tl.float32)
            acc = tl.zeros([BG, BV], tl.float32)
            for other in tl.range(0, n_active, loop_unroll_factor=4):
                there = (unit * n_splits + other) * G + g
                # .cg: what other multiprocessors wrote is in the second-level cache
                t = tl.load(extremes + there * 2, mask=g < G, other=0.0, cache_modifier=".cg")
                n = tl.load(extremes + there * 2 + 1, mask=g < G, other=0.0, cache_modifier=".cg")
                a = tl.load(
                    partial + there[:, None] * DV + dv[None, :],
                    mask=out_mask, other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                higher = tl.maximum(top, t)
                shrink, weight = tl.exp2(top - higher), tl.exp2(t - higher)
                total = total * shrink + n * weight
                acc = acc * shrink[:, None] + a * weight[:, None]
                top = higher
            _finish(out, out_at, out_mask, sinks, heads, g < G, top, total, acc, SINKS)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def unsupported(place: KvPlace, n_query_heads: int, dtype: torch.dtype) -> str | None:
    """Why the kernel does not take a layer; None if it does."""
    if dtype not in DTYPES:
        return f"{dtype} is not bfloat16, float16 or float32"
    if max(place.key_size, place.value_size) > MAX_HEAD_SIZE:
        return f"heads of {max(place.key_size, place.value_size)} are larger than {MAX_HEAD_SIZE}"
    if n_query_heads % place.n_heads:
        return f"{n_query_heads} query heads are no multiple of {place.n_heads} heads of keys"
    if n_query_heads // place.n_heads > MAX_GROUP:
        return f"{n_query_heads // place.n_heads} query heads share a head, more than {MAX_GROUP}"
    return None


def tile_tokens(place: KvPlace) -> int:
    """Tokens of a tile: about 16 KiB of keys in half precision."""
    size = triton.next_power_of_2(max(place.key_size, place.value_size))
    return int(min(64, max(16, 8192 // size)))


def split_count(n_rows: int, n_tokens: int, place: KvPlace) -> int:
    """Splits that fill a GPU; from what is fixed in a captured graph.

    Args:
        n_rows: of the batch.
        n_tokens: a row may see: what its pages hold, or the window.
        place: of the layer.
    """
    wanted = triton.cdiv(_PROGRAMS, n_rows * place.n_heads)
    most = triton.cdiv(n_tokens, _MIN_SPLIT_TILES * tile_tokens(place))
    return int(max(1, min(wanted, most, _MAX_SPLITS)))


def paged_attention(
    query: Tensor,
    arena: Tensor,
    pages: Tensor,
    lengths: Tensor,
    place: KvPlace,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    workspace: Workspace,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    n_splits: int | None = None,
) -> Tensor:
    """As :func:`paged_attention_reference`; nothing is copied to or from the host.

    Args:
        workspace: of this device and stream.
        out: ``[R, Hq, size of a value]``, contiguous; by default a new one.
        n_splits: at most, by default as many as fill a GPU.

    Raises:
        PagedAttentionError: what does not fit together, or is not supported.
    """
    check_arguments(query, arena, pages, lengths, place, keys, values, sinks)
    n_rows, n_query = query.shape[:2]
    reason = unsupported(place, n_query, query.dtype)
    if reason is not None:
        raise PagedAttentionError(f"paged attention: {reason}; use the reference")
    if query.stride(2) != 1 or keys.stride(2) != 1 or values.stride(2) != 1:
        query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    if pages.stride(1) != 1 or not arena.is_contiguous():
        raise PagedAttentionError("a page table or an arena with gaps: make it contiguous")
    if out is None:
        out = query.new_empty(n_rows, n_query, place.value_size)
    if not n_rows:
        return out
    capacity = pages.shape[1] // place.block_pages * place.block_tokens
    most = capacity if window is None else min(window, capacity)
    splits = split_count(n_rows, most, place) if n_splits is None else n_splits
    partial, extremes, arrived = workspace.take(
        n_rows * place.n_heads, n_rows * n_query * splits, place.value_size
    )
    piece = place.piece
    _decode[(place.n_heads, n_rows, splits)](
        query, arena, pages, lengths, keys, values, sinks, out, partial, extremes, arrived,
        scale, softcap or 1.0, place.start // piece, capacity, most, splits,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), pages.stride(0),
        H=place.n_heads, G=n_query // place.n_heads, DK=place.key_size, DV=place.value_size,
        BLOCK_TOKENS=place.block_tokens, BLOCK_PAGES=place.block_pages,
        TOKEN_PIECES=place.token_values // piece, PAGE_PIECES=place.page_values // piece,
        PIECE=piece, SINKS=sinks is not None, CAPPED=softcap is not None,
        TILE=tile_tokens(place), MIN_TILES=_MIN_SPLIT_TILES,
        BG=max(16, triton.next_power_of_2(n_query // place.n_heads)),
        BK=max(16, triton.next_power_of_2(place.key_size)),
        BV=max(16, triton.next_power_of_2(place.value_size)),
        STAGES=_STAGES, num_warps=_WARPS,
    )  # fmt: skip
    return out


if __name__ == "__main__":
    from repro.kernels.paged_attention_bench import main

    main()
