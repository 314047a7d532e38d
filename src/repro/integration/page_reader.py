"""Weights read from pages: the plain PyTorch reference of what kernels do.

The one idea: a row of the table says at which width a block is stored and on which pages; the
pages of several experts at one width are gathered, cut into the tensors of their scheme and
decoded together.  Nothing else of residency is seen, so a reader works on the table that a
step began with, whatever is published meanwhile.

Bit-planes are unpacked eight codes at a time: a byte of a plane becomes eight bytes of one
bit each by a table of 256 words, and planes are merged by shifts of whole words.  The result
equals ``scheme.decode`` bit for bit.

Letters: E experts read, N rows, K columns, b bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.contract import HEADER_WORDS, pages_of
from repro.formats.any_precision import AnyPrecisionScheme
from repro.formats.encoded import TensorSpec

# Of all intermediate tensors of a decoded matrix at their largest, per weight: gathered pages and
# merged planes up to 1 + 8, entries 4, values 4, result 4 (8 in float64).
_BYTES_PER_VALUE = 20
_SPREAD: dict[torch.device, Tensor] = {}


class Payload(Protocol):
    """How one block of a layer is stored, at all its widths."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        ...

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits per weight it can be read at."""
        ...

    def scheme(self, n_bits: int) -> Any:
        """The scheme of a width."""
        ...

    def tensors(self, n_bits: int) -> tuple[TensorSpec, ...]:
        """The tensors of a width, in the order of their pages."""
        ...


@dataclass(frozen=True)
class _Piece:
    """Where one tensor lies in the bytes of a block's pages."""

    spec: TensorSpec
    start: int


@dataclass(frozen=True)
class _Width:
    scheme: Any
    n_pages: int
    pieces: tuple[_Piece, ...]


class PageReader:
    """Decodes blocks of one layer from the pages of an arena.

    Args:
        arena: ``uint8 [pages, page_bytes]``.
        payload: how the block is stored.
        scratch_bytes: what decoding takes at a time, intermediate tensors counted; at least
            that of one matrix.
    """

    def __init__(self, arena: Tensor, payload: Payload, scratch_bytes: int) -> None:
        self._arena = arena
        self.shape = payload.shape
        page_bytes = arena.shape[1]
        self._widths: dict[int, _Width] = {}
        for n_bits in payload.widths:
            specs = payload.tensors(n_bits)
            pieces, page = [], 0
            for spec, n_pages in zip(
                specs, pages_of((s.part for s in specs), page_bytes), strict=True
            ):
                pieces.append(_Piece(spec, page * page_bytes))
                page += n_pages
            self._widths[n_bits] = _Width(payload.scheme(n_bits), page, tuple(pieces))
        per_expert = _BYTES_PER_VALUE * self.shape[0] * self.shape[1]
        self._at_once = max(1, scratch_bytes // per_expert)

    def read(self, rows: npt.NDArray[np.int32], dtype: torch.dtype) -> Tensor:
        """Decode the blocks of these table rows, all of one width: ``[E, N, K]`` in ``dtype``."""
        n_bits = int(rows[0, 1])
        width = self._widths[n_bits]
        pages = rows[:, HEADER_WORDS : HEADER_WORDS + width.n_pages]
        index = torch.from_numpy(np.ascontiguousarray(pages).reshape(-1)).to(self._arena.device)
        data = self._arena.index_select(0, index).view(len(rows), -1)
        tensors = {
            piece.spec.name: data[:, piece.start : piece.start + piece.spec.n_bytes]
            .contiguous()
            .view(piece.spec.dtype)
            .view(len(rows), *piece.spec.shape)
            for piece in width.pieces
        }
        if isinstance(width.scheme, AnyPrecisionScheme):
            return decode_planes(width.scheme, tensors, n_bits).to(dtype)
        matrix = tensors.get("matrix")
        if matrix is not None:  # dense: float64 models must not pass through float32
            return matrix.to(dtype)
        decoded: Tensor = width.scheme.decode(tensors, n_bits)
        return decoded.to(dtype)

    def batches(self, experts: list[int], n_bits: npt.NDArray[Any]) -> Iterator[list[int]]:
        """Experts of one width that fit into the scratch, in ascending order of width."""
        by_width: dict[int, list[int]] = {}
        for expert in experts:
            by_width.setdefault(int(n_bits[expert]), []).append(expert)
        for _, same in sorted(by_width.items()):
            for start in range(0, len(same), self._at_once):
                yield same[start : start + self._at_once]


def _spread(device: torch.device) -> Tensor:
    """``int64 [256]``: byte i of word w is bit i of w."""
    if device not in _SPREAD:
        words = torch.arange(256, dtype=torch.uint8)[:, None]
        bits = (words >> torch.arange(8, dtype=torch.uint8)) & 1
        _SPREAD[device] = bits.contiguous().view(torch.int64).reshape(256).to(device)
    return _SPREAD[device]


def decode_planes(scheme: AnyPrecisionScheme, tensors: dict[str, Tensor], n_bits: int) -> Tensor:
    """``scheme.decode`` of a stack, faster: float32 ``[E, N, K]``."""
    lut = tensors[f"lut{n_bits}"]
    device, n_experts = lut.device, lut.shape[0]
    n_rows, n_columns = scheme.shape
    spread = _spread(device)
    merged: Tensor | None = None
    for plane in range(n_bits):
        packed = tensors[f"plane{plane}"].contiguous().view(torch.uint8).reshape(-1)
        bits = spread.index_select(0, packed.to(torch.int32))
        merged = bits if merged is None else merged.bitwise_left_shift_(1).bitwise_or_(bits)
    assert merged is not None
    codes = merged.view(torch.uint8).view(n_experts, n_rows, -1)[..., :n_columns]
    # Entry of the flattened tables: those of one row lie together.
    group = torch.arange(n_rows, dtype=torch.int32, device=device) // scheme.rows_per_lut
    expert = torch.arange(n_experts, dtype=torch.int32, device=device)
    first = (expert[:, None] * scheme.n_groups + group) << n_bits
    entry = codes.to(torch.int32).add_(first[..., None])
    weight = lut.to(torch.float32).reshape(-1).index_select(0, entry.reshape(-1))
    weight = weight.view(n_experts, n_rows, n_columns)
    if scheme.has_scales:
        weight = weight.mul_(tensors["scales"].to(torch.float32)[..., None])
    return weight
