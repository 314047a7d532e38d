"""From a model's experts to the host store: encoded layer by layer, originals freed on the way.

The one idea: a *recipe* says how a block is stored (planes of one nested format, or one
version per width) and its schemes follow from the shape alone, so memory is planned before a
weight is encoded.  Then each layer is encoded, copied into the store and dropped, and the
model's own copy with it: at no time do two forms of more than one layer exist.

Experts that were quantised before (``repro quantize``) are read from their folder instead;
the model's own are then never looked at and may be on the meta device already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.contract import Block
from repro.errors import CheckpointError
from repro.formats import AnyPrecision, Dense, EncodedStack, GroupAffine, make_format
from repro.formats.any_precision import AnyPrecisionScheme
from repro.formats.dense import DenseScheme
from repro.formats.tiers import PAIRS
from repro.integration.experts import ExpertsLayer
from repro.integration.paged_experts import (
    expert_weights,
    original_weights,
    release_originals,
)
from repro.residency import BlockPayload

Importance = Callable[[int], Mapping[str, Tensor]]
"""Of a decoder layer: ``{"gate_up": [E, 1, K], "down": ...}``, what squared errors count."""

BLOCK_NAMES = {Block.GATE_UP: "gate_up", Block.DOWN: "down"}
_VALUES_AT_ONCE = 1 << 20  # decoded while errors are measured
_DENSE_NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp32",  # only if nothing is lost, see below
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class Checkpoint(Protocol):
    """What is read of :class:`repro.models.quantized.QuantizedCheckpoint`."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers that have experts."""
        ...

    def scheme(self, layer: int, block: Any) -> Any:
        """How a block of a layer is stored."""
        ...

    def stack(self, layer: int, block: Any) -> EncodedStack:
        """All experts of a block."""
        ...


@dataclass(frozen=True)
class EncodedExperts:
    """Experts of a model, encoded once for several engines; see :func:`encode_experts`."""

    stacks: Mapping[tuple[int, str], EncodedStack]  # by decoder layer and name of the block

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers that have experts."""
        return tuple(sorted({layer for layer, _ in self.stacks}))

    def scheme(self, layer: int, block: Any) -> Any:
        """How a block of a layer is stored."""
        return self.stacks[layer, block].scheme

    def stack(self, layer: int, block: Any) -> EncodedStack:
        """All experts of a block."""
        return self.stacks[layer, block]


def encode_experts(
    layers: tuple[ExpertsLayer, ...], name: str, importance: Importance | None = None
) -> EncodedExperts:
    """Encode all experts in one format, leaving the model as it is.

    For ``Engine(model, ..., experts=...)`` where several engines serve the same codes.

    Raises:
        UnknownNameError: no such format, or a pair of tiers (each engine encodes those itself).
    """
    source = Source(layers, Recipe(name, (make_format(name),)), importance=importance)
    stacks = {
        (layer.layer_index, BLOCK_NAMES[block]): source.stacks(row, block)[0]
        for row, layer in enumerate(layers)
        for block in Block
    }
    return EncodedExperts(stacks)


@dataclass(frozen=True)
class Recipe:
    """How experts are stored: a format, or a pair of tiers (``high/low``)."""

    name: str
    formats: tuple[Any, ...]  # one, or the high tier and the low one

    @classmethod
    def named(cls, name: str) -> Recipe:
        """By the name of a format ("any-precision", "int4-g128") or of a pair ("fp16/int4").

        Raises:
            UnknownNameError: neither.
        """
        if name in PAIRS:
            return cls(name, (PAIRS[name].high, PAIRS[name].low))
        if "/" in name:
            from repro.formats.tiers import get_pair

            get_pair(name)  # raises, with the names there are
        return cls(name, (make_format(name),))

    @classmethod
    def lossless(cls, dtype: torch.dtype) -> Recipe:
        """Weights as they are.

        Raises:
            CheckpointError: a type that no format stores.
        """
        if dtype not in _DENSE_NAMES:
            raise CheckpointError(f"experts of type {dtype} cannot be served: load them as float")
        return cls.named(_DENSE_NAMES[dtype])

    def schemes(self, shape: tuple[int, int]) -> tuple[Any, ...]:
        """The schemes of one matrix ``[N, K]``."""
        return tuple(_scheme(each, shape) for each in self.formats)

    def encode(
        self, weight: Tensor, importance: Tensor | None, hessian: Tensor | None = None
    ) -> list[EncodedStack]:
        """All experts of a block ``[E, N, K]``, one stack per format."""
        stacks = []
        for each in self.formats:
            extra = {"hessian": hessian} if isinstance(each, GroupAffine) else {}
            stacks.append(each.encode_stack(weight, importance, **extra))
        return stacks


def _scheme(each: Any, shape: tuple[int, int]) -> Any:
    if isinstance(each, Dense):
        return DenseScheme(*shape, each.dtype)
    if isinstance(each, GroupAffine):
        return each.scheme(*shape)
    if isinstance(each, AnyPrecision):
        rows = min(each.rows_per_lut or shape[0], shape[0])
        return AnyPrecisionScheme(*shape, rows, rows > 1)
    raise CheckpointError(f"format {type(each).__name__} cannot be served")


def payload_of(stacks: list[EncodedStack]) -> BlockPayload:
    """One block, all experts, at all its widths."""
    if len(stacks) == 1:
        return BlockPayload.of_stack(stacks[0])
    return BlockPayload.of_versions({stack.widths[0]: stack for stack in stacks})


@dataclass(frozen=True)
class Source:
    """Where the encoded experts of a model come from."""

    layers: tuple[ExpertsLayer, ...]
    recipe: Recipe | None
    checkpoint: Checkpoint | None = None
    importance: Importance | None = None
    device: torch.device | None = None  # where to encode; by default where the weights are

    @property
    def format_name(self) -> str:
        """As in records."""
        if self.recipe is not None:
            return self.recipe.name
        return str(self.schemes(0, Block.GATE_UP)[0].name)

    def shape(self, row: int, block: Block) -> tuple[int, int]:
        """``(N, K)`` of a block of the ``row``-th layer."""
        if self.checkpoint is not None:
            scheme = self.checkpoint.scheme(self.layers[row].layer_index, BLOCK_NAMES[block])
            return scheme.shape  # type: ignore[no-any-return]
        _, n_rows, n_columns = expert_weights(self.layers[row], block).shape
        return int(n_rows), int(n_columns)

    def schemes(self, row: int, block: Block) -> tuple[Any, ...]:
        """Schemes of a block, known before it is encoded."""
        if self.checkpoint is not None:
            layer = self.layers[row].layer_index
            return (self.checkpoint.scheme(layer, BLOCK_NAMES[block]),)
        assert self.recipe is not None
        return self.recipe.schemes(self.shape(row, block))

    def stacks(self, row: int, block: Block) -> list[EncodedStack]:
        """Encode, or read, one block of one layer.

        Raises:
            CheckpointError: weights that cannot be stored so; named.
        """
        layer = self.layers[row]
        if self.checkpoint is not None:
            return [self.checkpoint.stack(layer.layer_index, BLOCK_NAMES[block])]
        assert self.recipe is not None
        weight = expert_weights(layer, block).detach()
        if self.device is not None:
            weight = weight.to(self.device)
        known = {} if self.importance is None else self.importance(layer.layer_index)
        name = BLOCK_NAMES[block]
        try:
            stacks = self.recipe.encode(weight, known.get(name), known.get(f"{name}_hessian"))
        except CheckpointError as error:
            raise CheckpointError(f"{name} of {layer.name!r}: {error}") from error
        if weight.dtype is torch.float64 and self.recipe.name == "fp32":
            if not torch.equal(stacks[0].tensors["matrix"].double(), weight):
                raise CheckpointError(
                    f"{name} of {layer.name!r} holds float64 weights that float32 cannot hold: "
                    "load the model with dtype='float32'"
                )
        planned = self.schemes(row, block)
        if tuple(stack.scheme for stack in stacks) != planned:
            raise CheckpointError(
                f"{name} of {layer.name!r} needs row scales beside its tables: "
                "choose a format with tables shared by rows (any-precision)"
            )
        return stacks


def weight_errors(weight: Tensor, stacks: list[EncodedStack]) -> npt.NDArray[np.float64]:
    """Squared error of each expert at each width, relative to its weights: ``[E, W]``.

    What a planner goes by if nothing was calibrated: it knows neither inputs nor usage.
    """
    columns = []
    for n_bits, stack in sorted(((w, s) for s in stacks for w in s.widths), key=lambda c: c[0]):
        found = []
        for first in range(0, len(weight), _step(weight)):
            some = slice(first, first + _step(weight))
            exact = weight[some].to(torch.float32)
            power = exact.square().sum(dim=(1, 2)).clamp_min(torch.finfo(torch.float32).tiny)
            part = EncodedStack(stack.scheme, {n: t[some] for n, t in stack.tensors.items()})
            error = part.decode(n_bits).to(exact.device).sub_(exact)
            found.append((error.square_().sum(dim=(1, 2)) / power).cpu())
        columns.append(torch.cat(found).numpy())
    return np.stack(columns, axis=1).astype(np.float64)


def _step(weight: Tensor) -> int:
    """Experts whose decoded copies stay small against a layer."""
    return max(1, _VALUES_AT_ONCE // weight[0].numel())


def fill(
    source: Source, put: Callable[[int, Block, BlockPayload], None], *, errors: bool
) -> npt.NDArray[np.float64] | None:
    """Encode all layers into a store, freeing the originals of each as it is done.

    Args:
        source: where the experts come from.
        put: called with (row, block, payload); copies the bytes.
        errors: also compute :func:`weight_errors`, ``[L, E, B, W]``.
    """
    found = []
    for row, layer in enumerate(source.layers):
        blocks = []
        for block in Block:
            stacks = source.stacks(row, block)
            put(row, block, payload_of(stacks))
            if errors and not any(weight.is_meta for weight in original_weights(layer)):
                blocks.append(weight_errors(expert_weights(layer, block).detach(), stacks))
            del stacks
        release_originals(layer)
        if blocks:
            found.append(np.stack(blocks, axis=1))
    return np.stack(found) if found else None
