"""Encoded matrices: a scheme, and the tensors it asks for.

The one idea: a format is a *scheme* (which tensors a width needs, and how they become the
matrix again) and an encoder that fills them.  Everything else - parts and bytes, stacks of
experts, saving and reading back - follows from the scheme and is written once, here.  A new
format is one file with both.

Letters: E experts, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from repro.contract import FormatId, Part
from repro.errors import unknown_name

Kind = Literal["plane", "lut", "matrix", "codes", "scales"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an encoded matrix; ``index`` as in :class:`repro.contract.Part`."""

    name: str
    kind: Kind
    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def part(self) -> Part:
        """What residency sees of it."""
        return Part(self.kind, self.index, self.n_bytes)


class Scheme(Protocol):
    """How one matrix ``[N, K]`` is stored; a frozen dataclass of numbers and names."""

    name: ClassVar[str]
    format_id: ClassVar[FormatId]
    nested: ClassVar[bool]

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        ...

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits per weight it can be read at, ascending."""
        ...

    def tensors(self, n_bits: int) -> tuple[TensorSpec, ...]:
        """What a kernel needs at this width, planes first."""
        ...

    def decode(self, tensors: Mapping[str, Tensor], n_bits: int) -> Tensor:
        """The matrix as float32 ``[..., N, K]``; leading dimensions are kept."""
        ...


SCHEMES: dict[str, type[Any]] = {}


def register_scheme(scheme: type[Any]) -> type[Any]:
    """Class decorator: lets stored checkpoints name the scheme."""
    SCHEMES[scheme.name] = scheme
    return scheme


def scheme_to_json(scheme: Any) -> dict[str, Any]:
    """Name and fields, for a manifest."""
    return {"format": scheme.name, **dataclasses.asdict(scheme)}


def scheme_from_json(data: Mapping[str, Any]) -> Any:
    """The inverse of :func:`scheme_to_json`.

    Raises:
        UnknownNameError: a format this version does not know.
    """
    fields = dict(data)
    name = str(fields.pop("format", ""))
    if name not in SCHEMES:
        raise unknown_name("format", name, SCHEMES)
    names = [f.name for f in dataclasses.fields(SCHEMES[name])]
    return SCHEMES[name](**{n: fields[n] for n in names})


def check_width(scheme: Scheme, n_bits: int) -> None:
    """Refuse a width that was not stored.

    Raises:
        UnknownNameError: names the width and those there are.
    """
    if n_bits not in scheme.widths:
        raise unknown_name("width", str(n_bits), [str(w) for w in scheme.widths])


def all_tensors(scheme: Scheme) -> tuple[TensorSpec, ...]:
    """Every tensor of every width once, in a fixed order: planes, then scales, then tables."""
    found: dict[str, TensorSpec] = {}
    for n_bits in reversed(scheme.widths):
        for spec in scheme.tensors(n_bits):
            found.setdefault(spec.name, spec)
    return tuple(found.values())


def to_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, row by row."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, spec: TensorSpec) -> Tensor:
    """The inverse of :func:`to_bytes`.

    Raises:
        ValueError: another number of bytes than the tensor has.
    """
    if len(data) != spec.n_bytes:
        raise ValueError(f"{spec.name} has {spec.n_bytes} bytes, {len(data)} were given")
    flat = torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
    return flat.view(spec.dtype).reshape(spec.shape)


@dataclass(frozen=True)
class EncodedMatrix:
    """One matrix; satisfies :class:`repro.contract.EncodedWeight`."""

    scheme: Any
    tensors: Mapping[str, Tensor]

    @property
    def format_id(self) -> FormatId:
        """How a kernel must read the parts."""
        return self.scheme.format_id  # type: ignore[no-any-return]

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.scheme.shape  # type: ignore[no-any-return]

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits per weight it can be read at, ascending."""
        return self.scheme.widths  # type: ignore[no-any-return]

    @property
    def nested(self) -> bool:
        """Whether the planes of a width are the first planes of every larger one."""
        return self.scheme.nested  # type: ignore[no-any-return]

    def specs(self, n_bits: int) -> tuple[TensorSpec, ...]:
        """The tensors read at this width, planes first.

        Raises:
            UnknownNameError: a width that was not stored.
        """
        check_width(self.scheme, n_bits)
        return self.scheme.tensors(n_bits)  # type: ignore[no-any-return]

    def slices(self, n_bits: int) -> tuple[Part, ...]:
        """The same as parts of the contract."""
        return tuple(spec.part for spec in self.specs(n_bits))

    def read(self, part: Part) -> bytes:
        """The bytes of one part.

        Raises:
            KeyError: not a part of this matrix.
        """
        return to_bytes(self.tensor(part))

    def tensor(self, part: Part) -> Tensor:
        """The tensor of one part, as it is stored.

        Raises:
            KeyError: not a part of this matrix.
        """
        for spec in all_tensors(self.scheme):
            if spec.part == part:
                return self.tensors[spec.name]
        raise KeyError(f"{part} is no part of this matrix")

    def nbytes(self, n_bits: int) -> int:
        """Sum of the parts at this width, tables and scales included."""
        return sum(part.n_bytes for part in self.slices(n_bits))

    def decode(self, n_bits: int, parts: Mapping[Part, bytes] | None = None) -> Tensor:
        """Float32 ``[N, K]``; with ``parts``, from these bytes alone."""
        specs = self.specs(n_bits)
        if parts is None:
            tensors = {spec.name: self.tensors[spec.name] for spec in specs}
        else:
            tensors = {spec.name: from_bytes(parts[spec.part], spec) for spec in specs}
        return self.scheme.decode(tensors, n_bits)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class EncodedStack:
    """The same block of all experts of a layer, encoded alike.

    ``notes`` counts what had to be treated specially (constant rows, tables that needed a
    scale to fit), by name; 0 is left out.
    """

    scheme: Any
    tensors: dict[str, Tensor]  # each [E, *shape of its spec]
    notes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n_matrices = {tensor.shape[0] for tensor in self.tensors.values()}
        if len(n_matrices) != 1:
            raise ValueError(f"tensors of one stack hold {sorted(n_matrices)} matrices")
        for spec in all_tensors(self.scheme):
            tensor = self.tensors.get(spec.name)
            if tensor is None:
                raise ValueError(f"tensor {spec.name!r} is missing from the stack")
            if tensor.shape[1:] != spec.shape or tensor.dtype != spec.dtype:
                raise ValueError(
                    f"tensor {spec.name!r} is {tensor.dtype} {tuple(tensor.shape[1:])} per "
                    f"matrix, the scheme says {spec.dtype} {spec.shape}"
                )

    @property
    def n_matrices(self) -> int:
        """E."""
        return next(iter(self.tensors.values())).shape[0]

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits per weight it can be read at, ascending."""
        return self.scheme.widths  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return self.n_matrices

    def __getitem__(self, expert: int) -> EncodedMatrix:
        return EncodedMatrix(self.scheme, {n: t[expert] for n, t in self.tensors.items()})

    def nbytes(self, n_bits: int) -> int:
        """Bytes of one of its matrices at this width."""
        check_width(self.scheme, n_bits)
        return sum(spec.n_bytes for spec in self.scheme.tensors(n_bits))

    def decode(self, n_bits: int, expert: int | None = None) -> Tensor:
        """Float32 ``[E, N, K]``, or ``[N, K]`` of one expert."""
        if expert is not None:
            return self[expert].decode(n_bits)
        check_width(self.scheme, n_bits)
        return self.scheme.decode(self.tensors, n_bits)  # type: ignore[no-any-return]

    def to(self, device: torch.device | str) -> EncodedStack:
        """The same stack on another device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return EncodedStack(self.scheme, moved, dict(self.notes))
