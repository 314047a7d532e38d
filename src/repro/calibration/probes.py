"""An experts function that shows what every expert computes on.

The one idea: the arithmetic of one expert is cut where its two matrices begin and end, and a
*probe* is shown the pieces, expert by expert: the tokens routed to it with their routing
weights, the inputs and outputs of ``gate_up`` and of ``down``.  Everything else in this room
that looks into a running model is a probe: moments, Fisher information, prompt features.

The function is registered as ``repro-calibrate`` and equals the package's reference bit for
bit, on all architectures (biases, transposed and interleaved storage).  With gradients asked
for, the pre-activations of the first layer become the leaves of the graph, so parameters stay
frozen and nothing above the experts is differentiated in vain.

Left out: expert parallelism (experts on another device are skipped, as in the reference) and
fused kernels, which never hold the pieces.

Letters: T tokens of one call, k experts per token, E experts, n tokens of one expert, H hidden,
N rows (outputs) of ``gate_up``, I inputs of ``down``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from repro.integration.experts import (
    ExpertMatrices,
    ExpertsLayer,
    expert_matrices,
    reference_experts,
    use_experts,
)

CALIBRATE_NAME = "repro-calibrate"


@dataclass(frozen=True)
class ExpertCall:
    """One expert on its tokens in one call of its layer."""

    module: nn.Module
    layer_index: int
    expert: int
    token: Tensor  # [n] which of the call's tokens
    weight: Tensor  # [n] routing weights
    inputs: Tensor  # [n, H] of gate_up
    pre: Tensor  # [n, N] output of gate_up, bias included, before the activation
    inner: Tensor  # [n, I] inputs of down
    out: Tensor  # [n, H] output of down, bias included, before norm and routing weight
    matrices: ExpertMatrices


class Probe(Protocol):
    """What looks on."""

    gradients: bool  # pre and out must be part of a graph, so that hooks can be set on them

    def wants(self, layer_index: int) -> bool:
        """Whether this layer is to be shown at all."""
        ...

    def begin(self, layer_index: int, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        """A layer was called with the routing ``[T, k]`` of T more tokens."""
        ...

    def expert(self, call: ExpertCall) -> None:
        """One of the experts that were hit, in ascending order."""
        ...

    def end(self, layer_index: int) -> None:
        """The call is over."""
        ...


# Kept over importlib.reload, or a pass under way would lose its probe.
_PROBES: WeakKeyDictionary[nn.Module, tuple[int, Probe]] = globals().get(
    "_PROBES", WeakKeyDictionary()
)


def activate(module: nn.Module, pre: Tensor) -> Tensor:
    """Outputs of ``gate_up`` to inputs of ``down``: ``[n, N] -> [n, I]``."""
    flags: Any = module
    result: Tensor = flags._apply_gate(pre) if flags.has_gate else flags.act_fn(pre)
    return result


def _pre_activation(matrices: ExpertMatrices, tokens: Tensor) -> Tensor:
    pre = F.linear(tokens, matrices.gate_up)
    return pre if matrices.gate_up_bias is None else pre + matrices.gate_up_bias


def _output(matrices: ExpertMatrices, inner: Tensor) -> Tensor:
    out = F.linear(inner, matrices.down)
    return out if matrices.down_bias is None else out + matrices.down_bias


def _probed_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    layer_index, probe = _PROBES.get(self, (-1, None))
    if probe is None or not probe.wants(layer_index):
        return reference_experts(self, hidden_states, top_k_index, top_k_weights)
    flags: Any = self
    n_experts, n_tokens = int(flags.num_experts), top_k_index.shape[0]
    probe.begin(layer_index, top_k_index, top_k_weights)
    result = torch.zeros_like(hidden_states)
    chosen = top_k_index.T.reshape(-1)  # rank by rank, as the reference walks through them
    order = torch.argsort(chosen, stable=True)
    sizes = torch.bincount(chosen, minlength=n_experts + 1).tolist()
    groups = order.split(sizes)
    for expert, group in enumerate(groups[:n_experts]):
        if not sizes[expert]:
            continue
        rank, token = group // n_tokens, group % n_tokens
        weight = top_k_weights[token, rank]
        matrices = expert_matrices(self, expert)
        inputs = hidden_states[token]
        pre = _pre_activation(matrices, inputs)
        if probe.gradients and not pre.requires_grad:
            pre = pre.detach().requires_grad_()
        inner = activate(self, pre)
        out = _output(matrices, inner)
        probe.expert(
            ExpertCall(self, layer_index, expert, token, weight, inputs, pre, inner, out, matrices)
        )
        if getattr(flags, "has_post_expert_norm", False):
            out = flags.post_expert_norm(out)
        result.index_add_(0, token, (out * weight[:, None]).to(result.dtype))
    probe.end(layer_index)
    return result


def register() -> str:
    """Make ``repro-calibrate`` known to Transformers (again, if need be); return the name."""
    ALL_EXPERTS_FUNCTIONS.register(CALIBRATE_NAME, _probed_forward)
    return CALIBRATE_NAME


@contextmanager
def probing(model: nn.Module, probe: Probe) -> Iterator[tuple[ExpertsLayer, ...]]:
    """Show ``probe`` every forward pass of ``model`` inside; yields the experts layers.

    Raises:
        CheckpointError: no experts, or of an unsupported layout.
    """
    with use_experts(model, register()) as layers:
        for layer in layers:
            _PROBES[layer.module] = (layer.layer_index, probe)
        try:
            yield layers
        finally:
            for layer in layers:
                _PROBES.pop(layer.module, None)


register()
