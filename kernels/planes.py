"""Triton kernels of a layer of experts whose weights are bit-planes on pages.

The one idea: a program owns one expert and a block of rows, reads width and pages of its block
from the table, and turns words of planes into a tile of weights for the matrix unit.  So every
(expert, block) has its own width in one launch, and a published change needs no new launch.

Four launches for a layer: ``group_pairs`` sorts (token, slot) pairs by expert on the device,
``gate_up_activation``, ``down_projection``, ``combine``.  No program waits for another, the
host learns nothing, and the grid depends on shapes alone, so a captured graph stays valid.

Written for correctness on every device that Triton knows, its interpreter included; ``LOG.md``
says what was measured on the way to a faster one.

Letters: E experts, P pairs (tokens times k), N rows, K columns, W words of a row of a plane.
"""

# Arguments of kernels are pointers and blocks, for which Python has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

_HEADER = tl.constexpr(4)  # words before the pages: repro.contract.HEADER_WORDS


@triton.jit
def group_pairs(index, offsets, order, n_pairs, n_experts, block: tl.constexpr):
    """Program e: where the pairs of expert e begin, and which they are, in ascending order."""
    expert = tl.program_id(0)
    lane = tl.arange(0, block)
    before = 0
    for start in range(0, n_pairs, block):
        chosen = tl.load(index + start + lane, mask=start + lane < n_pairs, other=-1)
        before += tl.sum(((chosen >= 0) & (chosen < expert)).to(tl.int32))
    tl.store(offsets + expert, before)
    place = before
    for start in range(0, n_pairs, block):
        chosen = tl.load(index + start + lane, mask=start + lane < n_pairs, other=-1)
        mine = (chosen == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0) - mine
        tl.store(order + place + rank, start + lane, mask=mine > 0)
        place += tl.sum(mine)
    tl.store(offsets + n_experts, place, mask=expert == n_experts - 1)


@triton.jit
def _weight_tile(
    words, halves, row_ptr, n_bits, row, row_ok, word, n_rows, row_words, page_words, rows_per_lut,
    has_scales: tl.constexpr, block_n: tl.constexpr, block_w: tl.constexpr,
):  # fmt: skip
    """Table values of rows and words: float16 ``[block_n, 32 * block_w]``, before scales."""
    plane_pages = tl.cdiv(n_rows * row_words, page_words)
    offset = row[:, None] * row_words + word[None, :]
    ok = row_ok[:, None] & (word < row_words)[None, :]
    page = offset // page_words
    within = offset % page_words
    bit = tl.arange(0, 32)
    code = tl.zeros((block_n, block_w, 32), tl.int32)
    for plane in range(n_bits):
        number = tl.load(row_ptr + plane * plane_pages + page, mask=ok, other=0)
        packed = tl.load(words + number.to(tl.int64) * page_words + within, mask=ok, other=0)
        code = (code << 1) | ((packed[:, :, None] >> bit[None, None, :]) & 1)
    first = n_bits * plane_pages
    if has_scales:
        first += tl.cdiv(n_rows, page_words * 2)
    # Tables never straddle pages, so the page follows from the row alone.
    entry = (row // rows_per_lut) << n_bits
    number = tl.load(row_ptr + first + entry // (page_words * 2), mask=row_ok, other=0)
    base = number.to(tl.int64) * (page_words * 2) + entry % (page_words * 2)
    flat = tl.reshape(code, (block_n, block_w * 32))
    return tl.load(halves + base[:, None] + flat, mask=row_ok[:, None], other=0.0)


@triton.jit
def _scales(
    scales, row_ptr, n_bits, row, row_ok, n_rows, row_words, page_words,
    has_scales: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """Scales of rows, float32 ``[block_n]``."""
    if has_scales:
        first = n_bits * tl.cdiv(n_rows * row_words, page_words)
        number = tl.load(row_ptr + first + row // (page_words * 2), mask=row_ok, other=0)
        place = number.to(tl.int64) * (page_words * 2) + row % (page_words * 2)
        # bfloat16 is the upper half of float32; read as bits, it needs no type of its own.
        bits = tl.load(scales + place, mask=row_ok, other=0).to(tl.int32) << 16
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = tl.full((block_n,), 1.0, tl.float32)
    return value


@triton.jit
def _product(left, tile, precision: tl.constexpr):
    """``left @ tile.T`` with the table values as they are: float32 ``[block_m, block_n]``."""
    if left.dtype == tl.bfloat16:
        # A float16 value is the sum of two bfloat16 values; one alone would cost 1e-3.
        high = tile.to(tl.bfloat16)
        low = (tile.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
        result = tl.dot(left, tl.trans(high))
        result = tl.dot(left, tl.trans(low), result)
    else:
        result = tl.dot(left, tl.trans(tile.to(left.dtype)), input_precision=precision)
    return result


@triton.jit
def _activation(gate, kind: tl.constexpr):
    if kind == "silu":
        result = gate * tl.sigmoid(gate)
    else:  # tanh(z) = 2 sigmoid(2 z) - 1
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate * tl.sigmoid(2.0 * inner)
    return result


@triton.jit
def gate_up_activation(
    x, words, halves, scales, table, offsets, order, out, top_k, n_half, n_columns,
    row_words, page_words, rows_per_lut, table_stride,
    has_scales: tl.constexpr, kind: tl.constexpr, precision: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_w: tl.constexpr,
):  # fmt: skip
    """``out[place] = act(gate) * up`` for the sorted pairs; program (block of rows, expert)."""
    expert = tl.program_id(1)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    if begin == end:
        return
    row_ptr = table + expert.to(tl.int64) * table_stride + _HEADER
    n_bits = tl.load(row_ptr - 3)
    row = tl.program_id(0) * block_n + tl.arange(0, block_n)
    row_ok = row < n_half
    n_rows = 2 * n_half
    scale_gate = _scales(
        scales, row_ptr, n_bits, row, row_ok, n_rows, row_words, page_words, has_scales, block_n
    )
    scale_up = _scales(
        scales, row_ptr, n_bits, row + n_half, row_ok, n_rows, row_words, page_words, has_scales,
        block_n,
    )  # fmt: skip
    for start in range(begin, end, block_m):
        place = start + tl.arange(0, block_m)
        place_ok = place < end
        token = tl.load(order + place, mask=place_ok, other=0) // top_k
        gate = tl.zeros((block_m, block_n), tl.float32)
        up = tl.zeros((block_m, block_n), tl.float32)
        for first in range(0, row_words, block_w):
            word = first + tl.arange(0, block_w)
            column = first * 32 + tl.arange(0, 32 * block_w)
            ok = place_ok[:, None] & (column < n_columns)[None, :]
            left = tl.load(
                x + token.to(tl.int64)[:, None] * n_columns + column[None, :], mask=ok, other=0.0
            )
            tile = _weight_tile(
                words, halves, row_ptr, n_bits, row, row_ok, word, n_rows, row_words, page_words,
                rows_per_lut, has_scales, block_n, block_w,
            )  # fmt: skip
            gate += _product(left, tile, precision)
            tile = _weight_tile(
                words, halves, row_ptr, n_bits, row + n_half, row_ok, word, n_rows, row_words,
                page_words, rows_per_lut, has_scales, block_n, block_w,
            )  # fmt: skip
            up += _product(left, tile, precision)
        value = _activation(gate * scale_gate[None, :], kind) * (up * scale_up[None, :])
        tl.store(
            out + place.to(tl.int64)[:, None] * n_half + row[None, :],
            value.to(out.dtype.element_ty),
            mask=place_ok[:, None] & row_ok[None, :],
        )


@triton.jit
def down_projection(
    x, words, halves, scales, table, offsets, order, weights, out, n_rows, n_columns,
    row_words, page_words, rows_per_lut, table_stride,
    has_scales: tl.constexpr, precision: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_w: tl.constexpr,
):  # fmt: skip
    """``out[pair] = weight * (W x[place])`` in float32; program (block of rows, expert)."""
    expert = tl.program_id(1)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    if begin == end:
        return
    row_ptr = table + expert.to(tl.int64) * table_stride + _HEADER
    n_bits = tl.load(row_ptr - 3)
    row = tl.program_id(0) * block_n + tl.arange(0, block_n)
    row_ok = row < n_rows
    scale = _scales(
        scales, row_ptr, n_bits, row, row_ok, n_rows, row_words, page_words, has_scales, block_n
    )
    for start in range(begin, end, block_m):
        place = start + tl.arange(0, block_m)
        place_ok = place < end
        pair = tl.load(order + place, mask=place_ok, other=0)
        total = tl.zeros((block_m, block_n), tl.float32)
        for first in range(0, row_words, block_w):
            word = first + tl.arange(0, block_w)
            column = first * 32 + tl.arange(0, 32 * block_w)
            ok = place_ok[:, None] & (column < n_columns)[None, :]
            left = tl.load(
                x + place.to(tl.int64)[:, None] * n_columns + column[None, :], mask=ok, other=0.0
            )
            tile = _weight_tile(
                words, halves, row_ptr, n_bits, row, row_ok, word, n_rows, row_words, page_words,
                rows_per_lut, has_scales, block_n, block_w,
            )  # fmt: skip
            total += _product(left, tile, precision)
        share = tl.load(weights + pair, mask=place_ok, other=0.0).to(tl.float32)
        tl.store(
            out + pair.to(tl.int64)[:, None] * n_rows + row[None, :],
            total * scale[None, :] * share[:, None],
            mask=place_ok[:, None] & row_ok[None, :],
        )


@triton.jit
def combine(pairs, index, out, n_columns, n_experts, top_k: tl.constexpr, block: tl.constexpr):
    """``out[token] = sum of pairs[token, slot]`` over slots whose expert exists."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    ok = column < n_columns
    total = tl.zeros((block,), tl.float32)
    for slot in range(top_k):
        chosen = tl.load(index + token * top_k + slot)
        there = (chosen >= 0) & (chosen < n_experts)
        # What was not written is never read: an absent pair holds old bytes, maybe NaN.
        total += tl.load(
            pairs + (token * top_k + slot) * n_columns + column, mask=ok & there, other=0.0
        )
    tl.store(out + token * n_columns + column, total.to(out.dtype.element_ty), mask=ok)
