"""``GroupAffine``: integer codes with a scale (and a zero) for every group of columns.

The one idea: ``weight = scale * (code - zero)`` with codes of 2 to 8 bits and one scale per
row and group of consecutive columns.  DynaExq's integer tiers are made of it
(:mod:`repro.formats.tiers`), and nested codes are judged against it.  Symmetric codes keep the
zero at ``2**(bits - 1)``, use every code and let the scale have either sign, whichever errs
less; asymmetric ones store a zero, a real number in units of codes.
:mod:`repro.formats.clipping` chooses scale and zero, :mod:`repro.formats.gptq` may choose
codes that make up for each other's errors.

A last group that is shorter than ``group_size`` is a group of its own; nothing is padded, so
no column that does not exist can influence a scale.  Left out: groups over rows, permuted
columns, scales that are themselves quantised.

Letters: E experts, N rows, K columns, C groups of columns, W words of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from repro.contract import FormatId
from repro.errors import CheckpointError, ReproError, unknown_name
from repro.formats.checks import check_importance, check_weight
from repro.formats.clipping import Clip, fit_rows, implicit_zero, quantise
from repro.formats.encoded import EncodedMatrix, EncodedStack, TensorSpec, register_scheme
from repro.formats.gptq import check_hessian, encode_columns
from repro.formats.layout import code_pieces, pack_fields, row_words, unpack_fields

WIDTHS = (2, 3, 4, 5, 6, 8)
# On a CPU and on a GPU: weights converted and packed at once, which bounds memory, and weights
# fitted at once, few enough to stay in a cache or enough to fill a GPU.
_CHUNK_WEIGHTS = (1 << 22, 1 << 27)
_FITTED_WEIGHTS = (1 << 18, 1 << 24)


@register_scheme
@dataclass(frozen=True)
class GroupAffineScheme:
    """Codes in pieces of a power of two, and one part with scales (then zeros)."""

    n_rows: int
    n_columns: int
    n_bits: int
    group_size: int
    symmetric: bool

    name: ClassVar[str] = "group-affine"
    format_id: ClassVar[FormatId] = FormatId.GROUP_AFFINE
    nested: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.n_rows, self.n_columns

    @property
    def widths(self) -> tuple[int, ...]:
        """The one width."""
        return (self.n_bits,)

    @property
    def n_groups(self) -> int:
        """C of one row."""
        return -(-self.n_columns // self.group_size)

    def tensors(self, n_bits: int) -> tuple[TensorSpec, ...]:
        """Words of all pieces; scales ``[N, C]``, or scales and zeros ``[2, N, C]``."""
        n_words = sum(self.n_rows * words for words in self._piece_words())
        grid = (self.n_rows, self.n_groups)
        return (
            TensorSpec("codes", "codes", n_bits, torch.int32, (n_words,)),
            TensorSpec(
                "scales", "scales", n_bits, torch.bfloat16, grid if self.symmetric else (2, *grid)
            ),
        )

    def decode(self, tensors: Mapping[str, Tensor], n_bits: int) -> Tensor:
        """``scale * (code - zero)`` as float32 ``[..., N, K]``."""
        codes = self.unpack(tensors["codes"]).to(torch.float32)
        scale, zero = self.scale_and_zero(tensors["scales"])
        if isinstance(zero, Tensor):
            zero = self._per_column(zero)
        return self._per_column(scale) * (codes - zero)

    def scale_and_zero(self, scales: Tensor) -> tuple[Tensor, Tensor | int]:
        """Float32 ``[..., N, C]`` each; the zero of symmetric codes is one number."""
        if self.symmetric:
            return scales.to(torch.float32), implicit_zero(self.n_bits)
        scale, zero = scales.to(torch.float32).unbind(-3)
        return scale, zero

    def pack(self, codes: Tensor) -> Tensor:
        """``uint8 [..., N, K]`` to the words of all pieces ``int32 [..., n]``."""
        pieces, left = [], self.n_bits
        for field_bits in code_pieces(self.n_bits):
            left -= field_bits
            field = (codes >> left) & ((1 << field_bits) - 1)
            pieces.append(pack_fields(field, field_bits).flatten(-2))
        return torch.cat(pieces, dim=-1)

    def unpack(self, words: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        codes: Tensor | None = None
        for field_bits, piece in zip(code_pieces(self.n_bits), self.pieces(words), strict=True):
            field = unpack_fields(piece, field_bits, self.n_columns)
            codes = field if codes is None else (codes << field_bits) | field
        assert codes is not None  # n_bits > 0
        return codes

    def pieces(self, words: Tensor) -> tuple[Tensor, ...]:
        """Each piece as ``[..., N, W]``, high bits first."""
        lengths = [self.n_rows * n_words for n_words in self._piece_words()]
        parts = torch.split(words, lengths, dim=-1)
        return tuple(part.reshape(*part.shape[:-1], self.n_rows, -1) for part in parts)

    def _piece_words(self) -> list[int]:
        return [row_words(self.n_columns, field_bits) for field_bits in code_pieces(self.n_bits)]

    def _per_column(self, values: Tensor) -> Tensor:
        repeats = min(self.group_size, self.n_columns)  # a group may be wider than the matrix
        return values.repeat_interleave(repeats, dim=-1)[..., : self.n_columns]


@dataclass(frozen=True)
class GroupAffine:
    """Integer codes per group of columns.

    Args:
        n_bits: 8, 6, 5, 4, 3 or 2.
        group_size: columns that share a scale.
        symmetric: no zero is stored; the scale may be negative.
        clip: ``"mse"`` searches scale and zero for the least (weighted) squared error,
            ``"none"`` covers the largest weights.
        encoder: ``"rtn"`` rounds to nearest, ``"gptq"`` lets later columns make up for the
            errors of earlier ones and needs the Hessian of the inputs.
        from_bits: encode what a format of this width decodes to, not the weights themselves:
            the compounded error of a checkpoint made from a quantised one.
        from_group_size: group of that first format; all other options are the same.
    """

    n_bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    clip: Clip = "mse"
    encoder: Literal["rtn", "gptq"] = "rtn"
    from_bits: int | None = None
    from_group_size: int = 128

    def __post_init__(self) -> None:
        for n_bits in (self.n_bits, self.from_bits):
            if n_bits is not None and n_bits not in WIDTHS:
                raise unknown_name("integer width", str(n_bits), map(str, WIDTHS))
        for size in (self.group_size, self.from_group_size):
            if size < 1:
                raise ReproError(f"a group of {size} columns holds nothing: give at least 1")
        if self.clip not in ("none", "mse"):
            raise unknown_name("clipping", self.clip, ("none", "mse"))
        if self.encoder not in ("rtn", "gptq"):
            raise unknown_name("encoder", self.encoder, ("rtn", "gptq"))

    @property
    def source(self) -> GroupAffine | None:
        """The format that is decoded first, if any."""
        if self.from_bits is None:
            return None
        return replace(self, n_bits=self.from_bits, group_size=self.from_group_size, from_bits=None)

    def scheme(self, n_rows: int, n_columns: int) -> GroupAffineScheme:
        """How a matrix of this shape is stored; bytes follow without encoding."""
        return GroupAffineScheme(n_rows, n_columns, self.n_bits, self.group_size, self.symmetric)

    def encode_stack(
        self,
        weight: Tensor,
        importance: Tensor | None = None,
        hessian: Tensor | None = None,
    ) -> EncodedStack:
        """Encode the same block of all experts.

        Args:
            weight: ``[E, N, K]``, any floating type.
            importance: broadcastable to the weights; weighs the errors that the choice of
                scale and zero minimises.  All zero in a group: all alike.
            hessian: ``[E, K, K]`` (or ``[K, K]`` for all) second moments of the inputs, for
                the ``"gptq"`` encoder only.

        Returns:
            The stack.  Its notes count ``short_groups``, ``constant_rows``, ``zero_experts``,
            ``vanished_groups`` (too small for a scale), ``unweighted_experts`` (importance
            zero everywhere) and ``hessian_fallbacks`` (experts rounded to nearest because
            their Hessian is zero or not positive definite); ``source_...`` those of the
            format that is decoded first.

        Raises:
            CheckpointError: weights or importance that are no finite numbers or do not fit.
            ReproError: the ``"gptq"`` encoder without a Hessian.
        """
        check_weight(weight, 3)
        if importance is not None:
            importance = check_importance(importance, weight)
        if self.encoder == "rtn":
            hessian = None
        elif hessian is None:
            raise ReproError(
                "encoder 'gptq' needs hessian [E, K, K], the second moments of the inputs: "
                "collect them in calibration, or use encoder='rtn'"
            )
        else:
            hessian = check_hessian(hessian, weight)
        n_experts, n_rows, n_columns = weight.shape
        scheme = self.scheme(n_rows, n_columns)
        stored = {
            spec.name: torch.empty((n_experts, *spec.shape), dtype=spec.dtype, device=weight.device)
            for spec in scheme.tensors(self.n_bits)
        }
        notes: Counter[str] = Counter()
        # A few experts at a time: the float32 copy must not be as large as the layer.
        size = max(1, _CHUNK_WEIGHTS[weight.device.type != "cpu"] // weight[0].numel())
        for start in range(0, n_experts, size):
            part = slice(start, start + size)
            codes, scale, zero = self._choose(
                _float32(weight[part]),
                None if importance is None else importance[part],
                None if hessian is None else hessian[part],
                notes,
            )
            stored["codes"][part] = scheme.pack(codes)
            stored["scales"][part] = scale if self.symmetric else torch.stack((scale, zero), 1)
        return EncodedStack(scheme, stored, {name: n for name, n in notes.items() if n})

    def encode(
        self,
        weight: Tensor,
        importance: Tensor | None = None,
        hessian: Tensor | None = None,
    ) -> EncodedMatrix:
        """Encode one matrix ``[N, K]``; otherwise as :meth:`encode_stack`."""
        check_weight(weight, 2)
        return self.encode_stack(weight[None], importance, hessian)[0]

    def _choose(
        self,
        weight: Tensor,
        importance: Tensor | None,
        hessian: Tensor | None,
        notes: Counter[str],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes ``uint8 [E, N, K]``, scale and zero ``[E, N, C]``; counts into the notes."""
        target = weight
        if self.source is not None:
            first = self.source.encode_stack(weight, importance, hessian)
            target = first.decode(self.source.n_bits)
            notes.update({f"source_{name}": count for name, count in first.notes.items()})
        if hessian is not None:
            codes, scale, zero, n_fallbacks = encode_columns(
                target, hessian, importance, self.n_bits, self.group_size, self.symmetric, self.clip
            )
            notes["hessian_fallbacks"] += n_fallbacks
        else:
            codes, scale, zero = self._round_to_nearest(target, importance)
        notes.update(self._special_cases(weight, importance, scale))
        return codes, scale, zero

    def _round_to_nearest(
        self, weight: Tensor, importance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        n_experts, n_rows, n_columns = weight.shape
        flat = weight.reshape(-1, n_columns)
        codes = torch.empty(flat.shape, dtype=torch.uint8, device=weight.device)
        scales, zeros = [], []
        chunk_rows = max(1, _FITTED_WEIGHTS[weight.device.type != "cpu"] // n_columns)
        for start in range(0, len(flat), chunk_rows):
            rows = slice(start, start + chunk_rows)
            x, w = flat[rows], None
            if importance is not None:
                index = torch.arange(start, start + len(x), device=weight.device)
                w = importance[index // n_rows, index % n_rows]
            scale, zero = fit_rows(x, w, self.group_size, self.n_bits, self.symmetric, self.clip)
            repeats = min(self.group_size, n_columns)
            s = scale.repeat_interleave(repeats, dim=1)[:, :n_columns]
            z = zero.repeat_interleave(repeats, dim=1)[:, :n_columns]
            codes[rows] = quantise(x, s, z, self.n_bits).to(torch.uint8)
            scales.append(scale)
            zeros.append(zero)
        grid = (n_experts, n_rows, -1)
        return codes.view(weight.shape), torch.cat(scales).view(grid), torch.cat(zeros).view(grid)

    def _special_cases(
        self, weight: Tensor, importance: Tensor | None, scale: Tensor
    ) -> dict[str, int]:
        n_experts, n_rows, n_columns = weight.shape
        low, high = torch.aminmax(weight, dim=2)
        is_zero = (low == 0) & (high == 0)
        notes = {
            "constant_rows": int(((low == high) & ~is_zero).sum()),
            "zero_experts": int(is_zero.all(dim=1).sum()),
            "short_groups": n_experts * n_rows if n_columns % self.group_size else 0,
        }
        if importance is not None:
            notes["unweighted_experts"] = int((importance == 0).all(dim=2).all(dim=1).sum())
        for group in (scale == 0).any(dim=0).any(dim=0).nonzero().flatten().tolist():
            columns = slice(group * self.group_size, (group + 1) * self.group_size)
            filled = (weight[:, :, columns] != 0).any(dim=2)
            vanished = int((filled & (scale[:, :, group] == 0)).sum())
            notes["vanished_groups"] = notes.get("vanished_groups", 0) + vanished
        return notes


def _float32(weight: Tensor) -> Tensor:
    converted = weight.detach().to(torch.float32)
    if weight.dtype == torch.float64 and not bool(torch.isfinite(converted).all()):
        raise CheckpointError(
            f"a weight of {float(weight.abs().max()):.4g} overflows float32: scale the weights"
        )
    return converted
