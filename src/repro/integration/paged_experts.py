"""The experts function that reads its weights from pages, and the model without originals.

The one idea: once residency holds the experts, a layer keeps no weight of its own.  Its
stacked parameters move to the meta device, and the function registered here as
``repro-paged`` decodes what a step needs from the arena, under the table that the step began
with.  Experts are added in ascending order as in ``repro.integration.experts``, so that at
full width the sums are those of the library's own loop.

Padding is left out before the arithmetic: it costs nothing, hits no expert and counts nowhere.

Biases of experts (GPT-OSS) stay on the device as they are; they are small and no policy
changes them.

Letters: T tokens, H hidden, k experts per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from repro.contract import Block, Statistics, Step
from repro.errors import CheckpointError
from repro.integration.experts import (
    ExpertMatrices,
    ExpertsLayer,
)
from repro.integration.page_reader import PageReader
from repro.integration.prompt_signals import PromptSignals

PAGED_NAME = "repro-paged"


@dataclass
class StepContext:
    """What the experts functions of a forward pass have in common."""

    step: Step | None = None
    token_mask: Tensor | None = None  # bool, one value per token; None: all are real
    statistics: Statistics | None = None
    signals: PromptSignals | None = None  # only if the policy reads them
    n_decoded: int = 0  # matrices read from pages, of all steps
    experts_read: int = 0  # experts a step used, summed over layers and steps
    weight_wait_s: float = 0.0  # the step stood still for weights, since it was last taken
    _routed: list[tuple[int, Tensor, Tensor, Tensor | None]] = field(default_factory=list)

    def routed(self, layer_index: int, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        """One layer of the pass under way, counted when :meth:`commit` says it is over."""
        self._routed.append((layer_index, top_k_index, top_k_weights, self.token_mask))

    def commit(self) -> None:
        """The pass is over: its routing counts."""
        routed, self._routed = self._routed, []
        if self.statistics is not None:
            for layer_index, index, weights, mask in routed:
                # Not a number: a token that is lost in any case, and no mass.
                mass = torch.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0)
                self.statistics.add(layer_index, index, mass, mask)

    def rollback(self) -> None:
        """The pass raised: it will be computed again, and counted then."""
        self._routed = []

    def take_wait(self) -> float:
        """Seconds waited for weights since the last call."""
        waited, self.weight_wait_s = self.weight_wait_s, 0.0
        return waited


@dataclass
class _Binding:
    row: int  # of the table
    layer_index: int
    readers: tuple[PageReader, ...]  # [B]
    context: StepContext = field(repr=False)


# Kept over importlib.reload: an engine that serves must not lose its pages.
_BINDINGS: WeakKeyDictionary[nn.Module, _Binding] = globals().get("_BINDINGS", WeakKeyDictionary())


def _weight_names(module: Any) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def original_weights(layer: ExpertsLayer) -> tuple[nn.Parameter, ...]:
    """The stacked parameters of a layer, as the model stores them; biases are not among them."""
    return tuple(getattr(layer.module, name) for name in _weight_names(layer.module))


def expert_weights(layer: ExpertsLayer, block: Block) -> Tensor:
    """The original matrices ``[E, N, K]`` of a layer, a view.

    Raises:
        CheckpointError: they have been taken by an engine already.
    """
    module: Any = layer.module
    weight: Tensor = getattr(module, _weight_names(module)[int(block)])
    if weight.is_meta:
        raise CheckpointError(
            f"the experts of {layer.name!r} belong to another engine already: "
            "load the model again for a second one"
        )
    return weight.transpose(1, 2) if module.is_transposed else weight


def release_originals(layer: ExpertsLayer) -> int:
    """Move the stacked weights of a layer to the meta device; returns the bytes given back."""
    module: Any = layer.module
    freed = 0
    for name in _weight_names(module):
        weight = getattr(module, name)
        if not weight.is_meta:
            freed += weight.numel() * weight.element_size()
            empty = torch.empty_like(weight, device="meta")
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
    return freed


def bind(
    layer: ExpertsLayer, row: int, readers: tuple[PageReader, ...], context: StepContext
) -> None:
    """Let ``layer`` read its weights from pages, as row ``row`` of the table."""
    _BINDINGS[layer.module] = _Binding(row, layer.layer_index, readers, context)


def unbind(layer: ExpertsLayer) -> None:
    """Forget the pages of ``layer``; the model then says that its engine is closed."""
    _BINDINGS.pop(layer.module, None)


def read_from_pages(model: nn.Module, layers: tuple[ExpertsLayer, ...]) -> None:
    """Let ``model`` use ``repro-paged`` from now on: it has no other weights any more."""
    register()
    if isinstance(model, PreTrainedModel):
        model.set_experts_implementation(PAGED_NAME)
    for layer in layers:  # copies of the configuration that the model's own method missed
        config: Any = layer.module.config
        config._experts_implementation = PAGED_NAME


def paged_experts(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Apply the chosen experts at the widths of the step's table: ``[T, H] -> [T, H]``."""
    binding = _BINDINGS.get(self)
    if binding is None or binding.context.step is None:
        raise CheckpointError(
            "the experts of this model live in an engine that is closed or not running: "
            "call the engine, or load the model again"
        )
    context = binding.context
    context.routed(binding.layer_index, top_k_index, top_k_weights)
    mask = context.token_mask
    if mask is None:
        return _apply(self, binding, hidden_states, top_k_index, top_k_weights)
    real = mask.reshape(-1).nonzero().squeeze(1)
    out = torch.zeros_like(hidden_states)
    out[real] = _apply(self, binding, hidden_states[real], top_k_index[real], top_k_weights[real])
    return out


def _apply(
    module: Any, binding: _Binding, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    out = torch.zeros_like(hidden)
    assert binding.context.step is not None
    table = binding.context.step.table[binding.row]  # [E, B, words]
    chosen = top_k_index.T.contiguous()  # [k, T]
    hit = [e for e in torch.unique(chosen).tolist() if e < module.num_experts]
    binding.context.experts_read += len(hit)
    signals = binding.context.signals
    if signals is not None and not signals.active:
        signals = None
    results: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for experts, matrices in _decoded(module, binding, table, hit, hidden.dtype):
        for place, expert in enumerate(experts):
            rank, token = torch.where(chosen == expert)
            x = hidden.index_select(0, token)
            inner, result = _expert(module, matrices(place, expert), x)
            results[expert] = (result, token, rank)
            if signals is not None:
                r = top_k_weights[token, rank]
                signals.add(binding.row, expert, token, r, x, inner)
    for expert in sorted(results):  # the order of the library's loop, whatever the widths
        result, token, rank = results[expert]
        weighted = (result * top_k_weights[token, rank, None]).to(out.dtype)
        # No token twice in one expert, so both add alike; index_add_ wakes all threads of a
        # CPU, which takes longer than the whole expert, index_put_ sorts on a GPU.
        if out.is_cuda:
            out.index_add_(0, token, weighted)
        else:
            out.index_put_((token,), weighted, accumulate=True)
    return out


def _expert(module: Any, matrices: ExpertMatrices, x: Tensor) -> tuple[Tensor, Tensor]:
    """Input of down and output of one expert; as :func:`repro.integration.experts.apply_expert`."""
    inner = F.linear(x, matrices.gate_up)
    if matrices.gate_up_bias is not None:
        inner = inner + matrices.gate_up_bias
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = F.linear(inner, matrices.down)
    if matrices.down_bias is not None:
        out = out + matrices.down_bias
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    return inner, out


def _decoded(
    module: Any, binding: _Binding, table: np.ndarray[Any, Any], hit: list[int], dtype: torch.dtype
) -> Any:
    """Batches of experts with their matrices; a batch lives only while it is used."""
    up, down = binding.readers
    widths = table[:, :, 1]
    # Pairs of widths in one key: experts decoded together agree in both blocks.
    both = widths[:, 0].astype(np.int64) * 64 + widths[:, 1]
    for experts in up.batches(hit, both):
        rows = table[experts]
        first = up.read(rows[:, Block.GATE_UP], dtype)
        second = down.read(rows[:, Block.DOWN], dtype)
        if module.is_transposed:  # the library multiplies by the transposed storage: round alike
            first, second = (w.mT.contiguous().mT for w in (first, second))
        binding.context.n_decoded += 2 * len(experts)

        def matrices(place: int, expert: int) -> ExpertMatrices:
            biases = (None, None)
            if module.has_bias:
                name = _weight_names(module)[0]
                biases = (
                    getattr(module, f"{name}_bias")[expert],
                    module.down_proj_bias[expert],
                )
            return ExpertMatrices(first[place], second[place], *biases)  # noqa: B023

        yield experts, matrices


def register() -> str:
    """Make ``repro-paged`` known to Transformers (again, if need be) and return the name."""
    ALL_EXPERTS_FUNCTIONS.register(PAGED_NAME, paged_experts)
    return PAGED_NAME


register()

__all__ = [
    "PAGED_NAME",
    "StepContext",
    "bind",
    "expert_weights",
    "original_weights",
    "paged_experts",
    "read_from_pages",
    "register",
    "release_originals",
    "unbind",
]
