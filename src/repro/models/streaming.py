"""A model that runs with one decoder layer in memory.

The one idea: ``streamed_model`` is the ordinary Transformers model whose decoder layers
fetch their weights when they are called and drop them when they are done.  A forward pass
over a whole calibration set, cut into micro-batches inside each layer, loads every layer
once, and a model of any size runs in the memory of its largest layer.

Left out: a KV cache (each layer would need its own for all micro-batches) and training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.errors import CheckpointError
from repro.models.checkpoint_reader import CheckpointReader
from repro.models.expert_tensors import BLOCKS
from repro.models.layout import find_experts
from repro.models.loading import load_local_tokenizer, resolve_device, resolve_dtype
from repro.models.skeleton import (
    build_skeleton,
    check_filled,
    fused_name,
    place,
    target_name,
    tie_missing,
)
from repro.models.tensor_files import StoredTensor

OnLayer = Callable[[int], None]
_UNDIVIDED = 1 << 62


@contextmanager
def streamed_model(
    folder: Path | str,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    micro_batch: int = 4,
    on_layer: OnLayer | None = None,
) -> Iterator[tuple[Any, Any]]:
    """The model of a local checkpoint, its decoder layers in memory one at a time.

    Args:
        folder: checkpoint folder or bundled name.
        device: where it computes, as for :func:`repro.load_model`.
        dtype: as for :func:`repro.load_model`.
        micro_batch: sequences that a layer computes at once; the caller's batch may be as
            large as its hidden states fit.
        on_layer: called with the index of a layer that has seen the whole batch, while its
            weights are still there.

    Yields ``(model, tokenizer)``; the tokenizer is None where the folder has none.  Logits
    are those of the ordinary model, up to the rounding of another batch size.

    Raises:
        CheckpointError: as :class:`CheckpointReader`; a tensor that is missing or belongs to
            no parameter.
    """
    if micro_batch < 1:
        raise ValueError(f"micro_batch is {micro_batch}: give at least 1")
    target = resolve_device(device)
    reader = CheckpointReader(folder)
    model = build_skeleton(reader.config, _compute_dtype(reader, dtype, target), target)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.use_cache = False
        if getattr(config, "num_kv_shared_layers", 0):
            micro_batch = _UNDIVIDED  # later layers read the keys of the whole batch
    known = set(model.state_dict())
    names = _decoder_layers(model)
    layers = [_Layer(reader, model, known, i, name, target) for i, name in names.items()]
    inside = tuple(f"{name}." for name in names.values())
    outside = [name for name in known if not name.startswith(inside)]
    fill_dense(model, reader, reader.dense_tensors(None), known, target)
    tie_missing(model, outside)
    check_filled(reader.label, model, outside)
    tokenizer = load_local_tokenizer(reader.label, reader.folder, model)
    try:
        for layer in layers:
            layer.attach(micro_batch, on_layer)
        yield model, tokenizer
    finally:
        for layer in layers:
            layer.detach()


def _compute_dtype(
    reader: CheckpointReader, dtype: str | torch.dtype, device: torch.device
) -> torch.dtype:
    """The type asked for, else float32 on a CPU, the checkpoint's own on a GPU."""
    chosen = resolve_dtype(dtype, device)
    if isinstance(chosen, torch.dtype):
        return chosen
    own = getattr(reader.config.get_text_config(decoder=True), "dtype", None)
    if isinstance(own, torch.dtype):
        return own
    return reader.experts(reader.layout.moe_layer_ids[0]).dtype("gate_up")


def fill_dense(
    model: Any,
    reader: CheckpointReader,
    tensors: Mapping[str, StoredTensor],
    known: set[str],
    device: torch.device,
) -> None:
    """Place tensors that are no experts."""
    for name, tensor in tensors.items():
        goal = target_name(reader.layout.architecture, name, known)
        if goal is not None:
            place(model, goal, reader.read(tensor), device)


def _decoder_layers(model: Any) -> dict[int, str]:
    """Names of all decoder layers, dense ones included."""
    first = next(iter(find_experts(model).values()))[0]
    stack = first[: first.index("layers.")] + "layers"
    return {index: f"{stack}.{index}" for index in range(len(model.get_submodule(stack)))}


class _Layer:
    """One decoder layer: where its weights lie, and their way in and out."""

    def __init__(
        self,
        reader: CheckpointReader,
        model: Any,
        known: set[str],
        index: int,
        name: str,
        device: torch.device,
    ) -> None:
        self.reader, self.model, self.index, self.device = reader, model, index, device
        self.known = known
        self.module: Any = model.get_submodule(name)
        self.dense = reader.dense_tensors(index)
        self.experts_name = find_experts(model).get(index, ("", None))[0]
        self.held = {
            goal: model.get_submodule(goal.rpartition(".")[0])
            for goal in known
            if goal.startswith(f"{name}.")
        }
        self._check_names()

    def _check_names(self) -> None:
        """Refuse before the first forward what would be random or has no place."""
        architecture = self.reader.layout.architecture
        goals = {target_name(architecture, stored, self.known) for stored in self.dense}
        if self.experts_name:
            goals |= {goal for goal in self.held if goal.startswith(f"{self.experts_name}.")}
        lacking = sorted(set(self.held) - goals)
        if lacking:
            raise CheckpointError(
                f"checkpoint {self.reader.label!r} lacks {lacking[0]!r}, which would be random: "
                "copy the checkpoint again"
            )

    def attach(self, micro_batch: int, on_layer: OnLayer | None) -> None:
        """From now on the layer fetches its weights when it is called."""
        compute = self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            for cache in ("cache", "past_key_values"):
                if kwargs.get(cache) is not None:
                    raise ValueError("a streamed model keeps no KV cache: pass use_cache=False")
            hidden = args[0] if args else kwargs["hidden_states"]
            empty = self._fetch()
            try:
                result = _in_pieces(compute, args, kwargs, hidden.shape[0], micro_batch)
                if on_layer is not None:
                    on_layer(self.index)
            finally:
                self._drop(empty)
            return result

        self.module.forward = forward

    def detach(self) -> None:
        """Give the class's own forward back."""
        self.module.__dict__.pop("forward", None)

    def _fetch(self) -> dict[str, Tensor]:
        """Read the weights; returns the empty tensors they replace."""
        empty = {goal: getattr(owner, goal.rpartition(".")[2]) for goal, owner in self.held.items()}
        fill_dense(self.model, self.reader, self.dense, self.known, self.device)
        if self.experts_name:
            experts = self.reader.experts(self.index)
            for block in BLOCKS:
                weight = experts.read(block).to(self.device)
                if self.reader.layout.is_transposed:
                    weight = weight.transpose(1, 2).contiguous()
                place(self.model, fused_name(self.experts_name, block), weight, self.device)
                bias = experts.read_bias(block)
                if bias is not None:
                    goal = fused_name(self.experts_name, block, bias=True)
                    place(self.model, goal, bias, self.device)
        return empty

    def _drop(self, empty: Mapping[str, Tensor]) -> None:
        for goal, tensor in empty.items():
            owner, leaf = self.held[goal], goal.rpartition(".")[2]
            held = owner._parameters if leaf in owner._parameters else owner._buffers
            held[leaf] = tensor  # type: ignore[assignment]


def _in_pieces(
    compute: Callable[..., Any], args: Any, kwargs: Any, n_rows: int, micro_batch: int
) -> Any:
    """``compute`` on pieces of the batch, its results put together again."""
    if n_rows <= micro_batch:
        return compute(*args, **kwargs)
    pieces = []
    for first in range(0, n_rows, micro_batch):
        rows = slice(first, first + micro_batch)
        pieces.append(compute(*_cut(args, rows, n_rows), **_cut(kwargs, rows, n_rows)))
    return _join(pieces)


def _cut(value: Any, rows: slice, n_rows: int) -> Any:
    """Tensors that hold one entry per sequence, cut; what all sequences share as it is."""
    if isinstance(value, Tensor):
        # One dimension counts positions: of as many tokens as there are sequences, even.
        return value[rows] if value.dim() > 1 and value.shape[0] == n_rows else value
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(item, rows, n_rows) for item in value)
    if type(value) is dict:
        return {key: _cut(item, rows, n_rows) for key, item in value.items()}
    return value


def _join(pieces: list[Any]) -> Any:
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces)
    if isinstance(pieces[0], (tuple, list)):
        return type(pieces[0])(_join(list(items)) for items in zip(*pieces, strict=True))
    return pieces[0]


__all__ = ["CheckpointReader", "OnLayer", "streamed_model"]
