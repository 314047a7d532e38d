"""``AnyPrecision``: nested codes as bit-planes, one look-up table per width.

The code of width b is the top b bits of the 8-bit parent, so dropping planes lowers the
precision and no second copy exists.  The seed has 3 bits; every further bit splits each
cluster in two; 2 bits come from merging pairs of the seed (Any-Precision LLM, arXiv
2402.10517, section 3, which starts at 3).

The one idea beside the published format: tables need not belong to one row.  A table per row
costs ``16 * 2**b / K`` bits per weight, several bits on narrow experts; rows divided by a
scale of their own look alike, and ``rows_per_lut`` of them share one table fitted to all
their values.  Then a row costs 16 bits at any width.

Letters: E experts, N rows, K columns, R rows per table, G groups of rows, b bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from repro.contract import FormatId
from repro.formats.checks import check_importance, check_weight
from repro.formats.clipping import power_of_two
from repro.formats.encoded import (
    EncodedMatrix,
    EncodedStack,
    TensorSpec,
    check_width,
    register_scheme,
)
from repro.formats.kmeans import Problems, fill_empty, nested_seed, split
from repro.formats.layout import pack_planes, row_words, unpack_planes
from repro.formats.row_scales import (
    SEARCH_BITS,
    SMALLEST_SCALE,
    initial_scales,
    search_scales,
)

SEED_BITS = 3
PARENT_BITS = 8
WIDTHS = tuple(range(2, PARENT_BITS + 1))
MAX_SAMPLES = 16_384  # values a table is fitted to; all are encoded with it
SEARCH_SAMPLES = 4_096  # the same while scales are searched, where only narrow tables are read
_CHUNK_VALUES = 1 << 20  # weights encoded at a time on a CPU
_BYTES_PER_VALUE = 160  # of intermediate tensors on a GPU, measured
_LARGEST, _SMALLEST = 60_000.0, 2.0**-14  # float16: range of its normal numbers


@register_scheme
@dataclass(frozen=True)
class AnyPrecisionScheme:
    """Planes ``[N, W]``, tables ``[G, 2**b]`` and, if ``has_scales``, scales ``[N]``."""

    n_rows: int
    n_columns: int
    rows_per_lut: int
    has_scales: bool

    name: ClassVar[str] = "any-precision"
    format_id: ClassVar[FormatId] = FormatId.ANY_PRECISION
    nested: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.n_rows, self.n_columns

    @property
    def widths(self) -> tuple[int, ...]:
        """2 to 8."""
        return WIDTHS

    @property
    def n_groups(self) -> int:
        """G: tables per width."""
        return -(-self.n_rows // self.rows_per_lut)

    def tensors(self, n_bits: int) -> tuple[TensorSpec, ...]:
        """The first ``n_bits`` planes, the scales, and the table of this width."""
        words = (self.n_rows, row_words(self.n_columns))
        planes = [
            TensorSpec(f"plane{plane}", "plane", plane, torch.int32, words)
            for plane in range(n_bits)
        ]
        scales = [TensorSpec("scales", "scales", 0, torch.bfloat16, (self.n_rows,))]
        shape = (self.n_groups, 1 << n_bits)
        lut = TensorSpec(f"lut{n_bits}", "lut", n_bits, torch.float16, shape)
        return (*planes, *(scales if self.has_scales else ()), lut)

    def codes(self, tensors: Mapping[str, Tensor], n_bits: int) -> Tensor:
        """Codes of a width from its planes: ``uint8 [..., N, K]``."""
        check_width(self, n_bits)
        planes = [tensors[f"plane{plane}"] for plane in range(n_bits)]
        return unpack_planes(planes, self.n_columns)

    def decode(self, tensors: Mapping[str, Tensor], n_bits: int) -> Tensor:
        """``scale[n] * lut[n // R][code[n, k]]`` as float32 ``[..., N, K]``."""
        codes = self.codes(tensors, n_bits)
        lut = tensors[f"lut{n_bits}"].to(torch.float32)  # [..., G, 2**b]
        missing = self.n_groups * self.rows_per_lut - self.n_rows
        grouped = F.pad(codes, (0, 0, 0, missing)).unflatten(-2, (self.n_groups, -1)).flatten(-2)
        weight = lut.gather(-1, grouped.to(torch.int64))
        weight = weight.unflatten(-1, (self.rows_per_lut, self.n_columns)).flatten(-3, -2)
        weight = weight[..., : self.n_rows, :]
        if self.has_scales:
            weight = weight * tensors["scales"].to(torch.float32)[..., None]
        return weight


@dataclass(frozen=True)
class AnyPrecision:
    """Encoder of the any-precision format.

    Args:
        rows_per_lut: R; 1 is the published format (a table per row), 0 one table per matrix.
        scale_rounds: how often row scales are searched for the tables, and tables fitted anew.
    """

    rows_per_lut: int = 64
    scale_rounds: int = 2

    def __post_init__(self) -> None:
        if self.rows_per_lut < 0 or self.scale_rounds < 0:
            raise ValueError(
                f"rows_per_lut={self.rows_per_lut} and scale_rounds={self.scale_rounds}: "
                "neither may be negative"
            )

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> EncodedMatrix:
        """Encode ``weight[N, K]``; importance and errors as :meth:`encode_stack`."""
        check_weight(weight, 2)
        stacked = None if importance is None else importance.expand(weight.shape)[None]
        return self.encode_stack(weight[None], stacked)[0]

    def encode_stack(self, weight: Tensor, importance: Tensor | None = None) -> EncodedStack:
        """Encode all experts of a layer.

        Args:
            weight: ``[E, N, K]``, any floating-point type.
            importance: what squared errors count, broadcastable to the weight (usually
                ``[E, 1, K]``, the mean square of each input channel); None: all alike.

        Raises:
            CheckpointError: NaN or infinite weights, or importance that is not a number.
        """
        check_weight(weight, 3)
        spread = None if importance is None else _relative(check_importance(importance, weight))
        _, n_rows, n_columns = weight.shape
        rows = min(self.rows_per_lut or n_rows, n_rows)
        scales = initial_scales(weight, spread)
        low, high = torch.aminmax(weight, dim=-1)
        largest = torch.maximum(-low, high).to(torch.float32)  # of each row
        rescaled = _rows_beyond_float16(largest) if rows == 1 else 0
        scheme = AnyPrecisionScheme(n_rows, n_columns, rows, rows > 1 or rescaled > 0)
        if not scheme.has_scales:
            scales = torch.ones_like(scales)
        pieces = []
        for experts, some_rows in _chunks(weight, rows):
            part = weight[experts, some_rows]
            matters = None if spread is None else spread[experts, some_rows]
            pieces.append(
                self._encode_chunk(
                    part, matters, scales[experts, some_rows], rows, scheme.has_scales
                )
            )
        tensors = _assembled(pieces, weight.shape[0])
        notes = {
            "constant_rows": int((low == high).sum()),
            "zero_experts": int((largest == 0).all(dim=-1).sum()),
            "rescaled_rows": rescaled,
            "vanishing_rows": int(((largest > 0) & (largest < SMALLEST_SCALE)).sum()),
        }
        return EncodedStack(scheme, tensors, {k: n for k, n in notes.items() if n})

    def _encode_chunk(
        self,
        weight: Tensor,
        importance: Tensor | None,
        scales: Tensor,
        rows_per_lut: int,
        has_scales: bool,
    ) -> dict[str, Tensor]:
        """Some experts and some groups of rows; groups do not know of each other."""
        exact = weight.to(torch.float32)
        scheme = AnyPrecisionScheme(exact.shape[1], exact.shape[2], rows_per_lut, has_scales)
        for number in range(self.scale_rounds if rows_per_lut > 1 else 0):
            problems = _problems(exact, importance, scales, scheme, SEARCH_SAMPLES)
            edges = _nested_edges(problems, max(SEARCH_BITS))
            levels = _levels(problems, edges, exact.shape[0])
            scales = search_scales(exact, importance, scales, levels, rows_per_lut, far=number == 0)
        problems = _problems(exact, importance, scales, scheme, MAX_SAMPLES)
        edges = _nested_edges(problems, PARENT_BITS)
        thresholds = problems.thresholds(edges[PARENT_BITS])
        codes = _codes(exact, scales, thresholds.to(torch.float32), scheme)
        planes = pack_planes(codes, PARENT_BITS)
        tensors = {f"plane{plane}": words for plane, words in enumerate(planes)}
        if has_scales:
            tensors["scales"] = scales
        limit = _table_limit(scales, scheme)
        for n_bits, table in _tables(problems, thresholds, exact.shape[0]).items():
            tensors[f"lut{n_bits}"] = table.clamp(-limit, limit).to(torch.float16)
        return tensors


def _chunks(weight: Tensor, rows_per_lut: int) -> Iterator[tuple[slice, slice]]:
    """Experts, or whole groups of rows of one expert, so that intermediate tensors stay small."""
    limit = _CHUNK_VALUES
    if weight.device.type == "cuda":
        limit = max(limit, torch.cuda.mem_get_info(weight.device)[0] // _BYTES_PER_VALUE)
    n_experts, n_rows, n_columns = weight.shape
    step = max(1, limit // (n_rows * n_columns))
    rows = n_rows
    if n_rows * n_columns > limit:
        rows = rows_per_lut * max(1, limit // (rows_per_lut * n_columns))
    for start in range(0, n_experts, step):
        for first in range(0, n_rows, rows):
            yield slice(start, start + step), slice(first, first + rows)


def _assembled(pieces: list[dict[str, Tensor]], n_experts: int) -> dict[str, Tensor]:
    """The pieces of :func:`_chunks` in one; a piece's tensors are freed as they are joined."""
    tensors = {}
    for name in list(pieces[0]):
        parts = [piece.pop(name) for piece in pieces]
        by_expert: list[list[Tensor]] = [[]]
        for part in parts:  # pieces of the same experts follow each other
            by_expert[-1].append(part)
            if sum(p.shape[1] for p in by_expert[-1]) == _full(parts, n_experts):
                by_expert.append([])
        tensors[name] = torch.cat([torch.cat(some, dim=1) for some in by_expert if some])
    return tensors


def _full(parts: list[Tensor], n_experts: int) -> int:
    """Rows (or groups) of a whole matrix, from the pieces of all."""
    return sum(part.shape[0] * part.shape[1] for part in parts) // n_experts


def _relative(importance: Tensor) -> Tensor:
    """Near 1 for what matters most in each expert; ones for an expert never routed, all zero."""
    largest = importance.amax(dim=(-2, -1), keepdim=True)
    # By a power of two, which is exact: sums and products must not leave float32.
    return torch.where(largest > 0, importance * _inverse_power(largest), 1.0)


def _inverse_power(largest: Tensor) -> Tensor:
    """A power of two that brings positive float32 numbers near 1."""
    return power_of_two((-torch.frexp(largest).exponent).clamp(-126, 127))


def _rows_beyond_float16(largest: Tensor) -> int:
    """Rows whose table would overflow float16, or lose its values to its smallest numbers."""
    return int(((largest > _LARGEST) | ((largest > 0) & (largest < _SMALLEST))).sum())


def _table_limit(scales: Tensor, scheme: AnyPrecisionScheme) -> Tensor:
    """Largest entry of each group's table ``[E, G, 1]`` that no scale takes beyond float32."""
    largest = _grouped(scales.to(torch.float32).abs()[..., None], scheme, 0.0).amax(dim=1)
    # 1 % less, so that rounding entry or product to a type of the same range stays finite.
    limit = torch.finfo(torch.float32).max / largest * 0.99
    return limit.clamp_max(torch.finfo(torch.float16).max).view(len(scales), -1, 1)


def _grouped(values: Tensor, scheme: AnyPrecisionScheme, fill: float) -> Tensor:
    """``[E, N, K]`` as ``[E * G, R * K]``; rows that do not exist hold ``fill``."""
    missing = scheme.n_groups * scheme.rows_per_lut - scheme.n_rows
    padded = F.pad(values, (0, 0, 0, missing), value=fill)
    return padded.reshape(values.shape[0] * scheme.n_groups, -1)


def _normalised(weight: Tensor, scales: Tensor) -> Tensor:
    return weight / scales.to(torch.float32)[..., None]


def _problems(
    weight: Tensor,
    importance: Tensor | None,
    scales: Tensor,
    scheme: AnyPrecisionScheme,
    max_samples: int,
) -> Problems:
    """One clustering problem for each table: the normalised values of its rows."""
    # Relative to the largest of the matrix: squares of large or tiny scales leave float32.
    exact = scales.to(torch.float32).abs()[..., None]
    squares = (exact * _inverse_power(exact.amax(dim=1, keepdim=True))).square()
    squares = squares / squares.amax(dim=1, keepdim=True)
    counts = squares.expand(weight.shape) if importance is None else squares * importance
    values = _grouped(_normalised(weight, scales), scheme, 0.0)
    # A row that does not exist weighs nothing, so no table is fitted to it.
    weights = _grouped(counts, scheme, 0.0)
    stride = -(-values.shape[-1] // max_samples)
    stride += stride % 2 == 0  # odd: does not walk down the same few columns
    return Problems.build(values[:, ::stride], weights[:, ::stride])


def _nested_edges(problems: Problems, n_bits: int) -> dict[int, Tensor]:
    """Edges of every width from the seed to ``n_bits``."""
    finer = nested_seed(problems, 1 << SEED_BITS)
    edges = {SEED_BITS: finer[:, ::2].contiguous(), SEED_BITS + 1: finer}
    for width in range(SEED_BITS + 2, n_bits + 1):
        edges[width] = split(problems, edges[width - 1])
    return edges


def _levels(
    problems: Problems, edges: dict[int, Tensor], n_matrices: int
) -> dict[int, tuple[Tensor, Tensor]]:
    """Thresholds and table of the widths that scales are searched at, each ``[E, G, ...]``."""
    return {
        width: tuple(
            part.to(torch.float32).unflatten(0, (n_matrices, -1))
            for part in (
                problems.thresholds(edges[width]), fill_empty(problems.means(edges[width])),
            )
        )
        for width in SEARCH_BITS
    }  # type: ignore[return-value]  # fmt: skip


def _tables(problems: Problems, thresholds: Tensor, n_matrices: int) -> dict[int, Tensor]:
    """Tables of each width ``[E, G, 2**b]`` from the parent's thresholds."""
    parent = problems.cuts(thresholds)  # equal values fall on one side of a threshold
    return {
        n_bits: fill_empty(
            problems.means(parent[:, :: 1 << (PARENT_BITS - n_bits)])
        ).unflatten(0, (n_matrices, -1))
        for n_bits in WIDTHS
    }  # fmt: skip


def _codes(
    weight: Tensor, scales: Tensor, thresholds: Tensor, scheme: AnyPrecisionScheme
) -> Tensor:
    """Parent codes ``uint8 [E, N, K]``."""
    values = _grouped(_normalised(weight, scales), scheme, 0.0)
    codes = torch.searchsorted(thresholds.contiguous(), values, out_int32=True).to(torch.uint8)
    by_row = codes.view(weight.shape[0], -1, scheme.n_columns)
    return by_row[:, : scheme.n_rows].contiguous()
