"""Where a checkpoint keeps the experts of a layer, and reading them into one stack.

The nine architectures are published in three spellings.  Most store every expert's
matrices by themselves (``mlp.experts.5.up_proj.weight``, or ``w1``, ``w3``, ``w2`` for
gate, up and down under ``block_sparse_moe``); newer files hold one stacked tensor
(``experts.gate_up_proj``), GPT-OSS transposed and with biases.  In all of them the result
here is what the fused module of Transformers holds, turned to ``[E, out, in]``.

The one idea: a layer is *located* once from names and shapes, which finds what is missing
or of another shape before any weight is read, and then read a few experts at a time.

Letters: E experts, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from repro.errors import CheckpointError
from repro.models.layout import MoeLayout
from repro.models.tensor_files import StoredTensor

BlockName = Literal["gate_up", "down"]
BLOCKS: tuple[BlockName, BlockName] = ("gate_up", "down")

# Only the decoder's own layers: a multi-token-prediction layer has experts of its own.
_LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.(?P<layer>\d+)\.(?P<rest>.+)$")
_SINGLE = re.compile(
    r"^(?:mlp\.|block_sparse_moe\.)?experts\.(?P<expert>\d+)\.(?P<part>\w+)\.weight$"
)
_STACKED = re.compile(
    r"^(?:mlp\.|block_sparse_moe\.)?experts\.(?P<part>gate_up_proj|down_proj)(?P<bias>_bias)?$"
)
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up"}
_PARTS |= {"down_proj": "down", "w2": "down"}


@dataclass(frozen=True)
class ExpertStack:
    """The weights of all experts of a layer, as stored, ``[E, out, in]``."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True)
class LayerExperts:
    """Where the experts of one layer lie.

    ``pieces`` holds for each block either one stacked tensor, or per expert the tensors
    whose rows follow each other (gate, then up).
    """

    label: str  # of the checkpoint, for messages
    layer: int
    layout: MoeLayout
    pieces: Mapping[BlockName, StoredTensor | tuple[tuple[StoredTensor, ...], ...]]
    biases: Mapping[BlockName, StoredTensor]

    def shape(self, block: BlockName) -> tuple[int, int]:
        """``(N, K)`` of one expert's matrix."""
        return self.layout.expert_shapes[BLOCKS.index(block)]

    def dtype(self, block: BlockName) -> torch.dtype:
        """What the weights are stored in; if they differ, a type that holds all of them."""
        piece = self.pieces[block]
        if isinstance(piece, StoredTensor):
            return piece.dtype
        return reduce(torch.promote_types, {part.dtype for parts in piece for part in parts})

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """Every tensor that belongs to the layer's experts, biases included."""
        found: list[StoredTensor] = list(self.biases.values())
        for piece in self.pieces.values():
            if isinstance(piece, StoredTensor):
                found.append(piece)
            else:
                found += [part for parts in piece for part in parts]
        return tuple(found)

    @property
    def n_bytes(self) -> int:
        """Bytes of the layer's experts, biases included."""
        return sum(tensor.n_bytes for tensor in self.stored)

    def read(self, block: BlockName, first: int = 0, last: int | None = None) -> Tensor:
        """Experts ``first`` to ``last`` (not included) of a block, checked to be finite.

        Raises:
            CheckpointError: NaN or infinite values, by tensor and row; a truncated file.
        """
        piece = self.pieces[block]
        last = self.layout.n_experts if last is None else last
        stack = torch.empty((last - first, *self.shape(block)), dtype=self.dtype(block))
        if isinstance(piece, StoredTensor):
            self._read_stacked(piece, stack, first)
        else:
            for expert, parts in enumerate(piece[first:last]):
                row = 0
                for part in parts:
                    rows = stack[expert, row : row + part.shape[0]]
                    if part.dtype == stack.dtype:
                        part.read_into(rows)
                    else:
                        rows.copy_(part.read())
                    row += part.shape[0]
        self._check_finite(block, stack, first)
        return stack

    def read_bias(self, block: BlockName) -> Tensor | None:
        """Biases ``[E, N]`` of a block, or None.

        Raises:
            CheckpointError: NaN or infinite values.
        """
        if block not in self.biases:
            return None
        bias = self.biases[block].read()
        check_rows(self.label, self.biases[block].name, bias)
        return bias

    def _read_stacked(self, piece: StoredTensor, stack: Tensor, first: int) -> None:
        if not self.layout.is_transposed:
            piece.read_into(stack, first)
            return
        matrix = torch.empty(piece.shape[1:], dtype=piece.dtype)
        for expert in range(stack.shape[0]):
            piece.read_into(matrix, first + expert)
            stack[expert] = matrix.T

    def _check_finite(self, block: BlockName, stack: Tensor, first: int) -> None:
        for expert in range(stack.shape[0]):
            # NaN and infinity survive in the sum of zeros; no mask of the matrix is made.
            if not bool(torch.isnan((stack[expert] * 0).sum())):
                continue
            bad = (~torch.isfinite(stack[expert])).any(dim=1)
            row = int(bad.nonzero()[0])
            piece = self.pieces[block]
            if isinstance(piece, StoredTensor):
                name = piece.name
                where = (
                    f"expert {first + expert}, {'column' if self.layout.is_transposed else 'row'}"
                )
            else:
                parts = list(piece[first + expert])
                while row >= parts[0].shape[0]:
                    row -= parts.pop(0).shape[0]
                name, where = parts[0].name, "row"
            raise CheckpointError(
                f"checkpoint {self.label!r}: {name!r} has NaN or infinite values in "
                f"{int(bad.sum())} row(s), first in {where} {row}: copy it again or convert it "
                "anew from its source"
            )


def check_rows(label: str, name: str, tensor: Tensor) -> None:
    """Refuse NaN or infinite values.

    Raises:
        CheckpointError: names the tensor and the first row.
    """
    if not tensor.is_floating_point() or not bool(torch.isnan((tensor * 0).sum())):
        return
    rows = (~torch.isfinite(tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1))).any(dim=1)
    raise CheckpointError(
        f"checkpoint {label!r}: {name!r} has NaN or infinite values in {int(rows.sum())} row(s), "
        f"first in row {int(rows.nonzero()[0])}: copy it again or convert it anew from its source"
    )


def layer_of(name: str) -> int | None:
    """The decoder layer a tensor belongs to, or None."""
    found = _LAYER.match(name)
    return int(found["layer"]) if found else None


def is_expert(name: str) -> bool:
    """Whether a tensor holds weights or biases of routed experts of a decoder layer."""
    found = _LAYER.match(name)
    return bool(found and (_SINGLE.match(found["rest"]) or _STACKED.match(found["rest"])))


def locate_experts(
    label: str, tensors: Mapping[str, StoredTensor], layout: MoeLayout
) -> dict[int, LayerExperts]:
    """Find the experts of every Mixture-of-Experts layer.

    Raises:
        CheckpointError: names the first tensor that is missing or of another shape or type.
    """
    singles: dict[int, dict[tuple[int, str], StoredTensor]] = defaultdict(dict)
    stacked: dict[int, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        found = _LAYER.match(name)
        if found is None or int(found["layer"]) not in layout.moe_layer_ids:
            continue
        layer, rest = int(found["layer"]), found["rest"]
        if single := _SINGLE.match(rest):
            part = _PARTS.get(single["part"])
            if part is None:
                raise CheckpointError(
                    f"checkpoint {label!r} stores {name!r}, which is no matrix of a gated expert: "
                    "use the bf16 or FP16 checkpoint as its authors published it"
                )
            singles[layer][int(single["expert"]), part] = tensor
        elif whole := _STACKED.match(rest):
            stacked[layer][whole["part"] + (whole["bias"] or "")] = tensor
    return {
        layer: _locate(label, layer, layout, singles[layer], stacked[layer])
        for layer in layout.moe_layer_ids
    }


def _locate(
    label: str,
    layer: int,
    layout: MoeLayout,
    singles: Mapping[tuple[int, str], StoredTensor],
    stacked: Mapping[str, StoredTensor],
) -> LayerExperts:
    experts = range(layout.n_experts)
    width, hidden = layout.intermediate, layout.hidden
    biases: dict[BlockName, StoredTensor] = {}
    if singles:
        for key in ((e, part) for e in experts for part in ("gate", "up", "down")):
            if key not in singles:
                raise _missing(label, layer, f"the {key[1]} matrix of expert {key[0]}")
            expected = (hidden, width) if key[1] == "down" else (width, hidden)
            _check(label, singles[key], expected)
        return LayerExperts(
            label,
            layer,
            layout,
            {
                "gate_up": tuple((singles[e, "gate"], singles[e, "up"]) for e in experts),
                "down": tuple((singles[e, "down"],) for e in experts),
            },
            biases,
        )
    pieces: dict[BlockName, StoredTensor] = {}
    for block, (rows, columns) in zip(BLOCKS, layout.expert_shapes, strict=True):
        name = f"{block}_proj"
        if name not in stacked:
            raise _missing(label, layer, f"{name!r} of its experts")
        tail = (columns, rows) if layout.is_transposed else (rows, columns)
        pieces[block] = _check(label, stacked[name], (layout.n_experts, *tail))
        if layout.has_bias:
            if f"{name}_bias" not in stacked:
                raise _missing(label, layer, f"'{name}_bias' of its experts")
            biases[block] = _check(label, stacked[f"{name}_bias"], (layout.n_experts, rows))
    return LayerExperts(label, layer, layout, pieces, biases)


def _missing(label: str, layer: int, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {label!r} lacks {what} in layer {layer}: copy the checkpoint again, or use "
        "the config.json that belongs to it"
    )


def _check(label: str, tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    if tensor.shape != shape:
        raise CheckpointError(
            f"checkpoint {label!r} stores {tensor.name!r} as {list(tensor.shape)}, its "
            f"configuration asks for {list(shape)}: use the checkpoint's own config.json, or copy "
            "the checkpoint again"
        )
    if not tensor.dtype.is_floating_point:
        raise CheckpointError(
            f"checkpoint {label!r} stores {tensor.name!r} as {tensor.dtype}: "
            "use the bf16 or FP16 checkpoint, precision is changed here"
        )
    return tensor
