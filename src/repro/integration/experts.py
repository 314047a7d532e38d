"""The experts function of this package, and the place where routing can be watched.

Transformers stores the experts of a layer as stacked matrices and looks the function
that applies them up by name at every call:

    fn(module, hidden_states[T, H], top_k_index[T, k], top_k_weights[T, k]) -> [T, H]

The one idea: what is registered there sees the indices and weights of every token in
every layer as plain arguments.  Forward hooks on linear layers do not (grouped kernels
have no linear layers), and router outputs mean something else in each architecture.

``repro`` is a plain PyTorch loop over the experts that were hit, equal to the library's
``eager`` bit for bit.  ``repro-observed-NAME`` tells the observers and lets NAME do the
work, so routing can be recorded under any kernel.

Left out: quantised experts of the library (FP8) and models that keep one module per
expert; both are refused by name.

Letters: T tokens, H hidden, I expert width, E experts, k experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from repro.errors import CheckpointError, unknown_name

EXPERTS_NAME = "repro"
_OBSERVED = "repro-observed-"

Observer = Callable[[nn.Module, int, Tensor, Tensor], None]
"""Called as ``observer(module, layer_index, top_k_index[T, k], top_k_weights[T, k])``."""

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ExpertsLayer:
    """One stack of experts inside a model."""

    name: str  # where it hangs, e.g. "model.layers.3.mlp.experts"
    layer_index: int  # of the decoder layer, dense layers counted
    module: nn.Module
    n_experts: int


@dataclass(frozen=True)
class ExpertMatrices:
    """The weights of one expert as [out, in], however the checkpoint stores them."""

    gate_up: Tensor  # [2I, H], or [I, H] without a gate; interleaved if the module says so
    down: Tensor  # [H, I]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass
class _Watch:
    layer_index: int
    observers: tuple[Observer, ...]


# Kept over importlib.reload: a capture that is under way must not lose its observers
# because a notebook cell was run again.
_WATCHES: WeakKeyDictionary[nn.Module, _Watch] = globals().get("_WATCHES", WeakKeyDictionary())


def expert_matrices(module: nn.Module, expert: int) -> ExpertMatrices:
    """Weights of ``expert`` in one orientation; views, nothing is copied."""
    flags: Any = module
    gate_up = (flags.gate_up_proj if flags.has_gate else flags.up_proj)[expert]
    down = flags.down_proj[expert]
    if flags.is_transposed:
        gate_up, down = gate_up.T, down.T
    if not flags.has_bias:
        return ExpertMatrices(gate_up, down, None, None)
    bias = (flags.gate_up_proj_bias if flags.has_gate else flags.up_proj_bias)[expert]
    return ExpertMatrices(gate_up, down, bias, flags.down_proj_bias[expert])


def apply_expert(module: nn.Module, matrices: ExpertMatrices, tokens: Tensor) -> Tensor:
    """One expert on its tokens: ``[n, H] -> [n, H]``, before the routing weight."""
    flags: Any = module
    inner = F.linear(tokens, matrices.gate_up)
    if matrices.gate_up_bias is not None:
        inner = inner + matrices.gate_up_bias  # a fused bias would round differently
    inner = flags._apply_gate(inner) if flags.has_gate else flags.act_fn(inner)
    out = F.linear(inner, matrices.down)
    if matrices.down_bias is not None:
        out = out + matrices.down_bias
    if getattr(flags, "has_post_expert_norm", False):
        out = flags.post_expert_norm(out)
    return out


def reference_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Apply the chosen experts in plain PyTorch: the specification of every kernel.

    Experts are added in ascending order as in the library's loop, so the sums round
    alike.  An index equal to the number of experts marks an expert that lives on another
    device (expert parallelism); it carries weight 0 and is skipped.
    """
    out = torch.zeros_like(hidden_states)
    chosen = top_k_index.T  # [k, T]
    for expert in torch.unique(chosen).tolist():
        if expert == module.num_experts:
            continue
        rank, token = torch.where(chosen == expert)
        result = apply_expert(module, expert_matrices(module, expert), hidden_states[token])
        weighted = result * top_k_weights[token, rank, None]
        out.index_add_(0, token, weighted.to(out.dtype))
    return out


def _notify(module: nn.Module, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    watch = _WATCHES.get(module)
    if watch is not None:
        for observer in watch.observers:
            observer(module, watch.layer_index, top_k_index, top_k_weights)


def _repro_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    _notify(self, top_k_index, top_k_weights)
    return reference_experts(self, hidden_states, top_k_index, top_k_weights)


def _implementation(module: nn.Module, name: str) -> Callable[..., Tensor]:
    if name != "eager":
        return ALL_EXPERTS_FUNCTIONS[name]
    # The decorator replaced the class's forward and kept the loop it came with.
    loop: Any = type(module).forward
    return loop.__wrapped__


def _observed_forward(base: str) -> Callable[..., Tensor]:
    def forward(
        self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        _notify(self, top_k_index, top_k_weights)
        return _implementation(self, base)(self, hidden_states, top_k_index, top_k_weights)

    return forward


def register() -> str:
    """Make ``repro`` known to Transformers (again, if need be) and return the name."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _repro_forward)
    return EXPERTS_NAME


def observed(base: str) -> str:
    """Name of the implementation that tells observers and then runs ``base``.

    Raises:
        UnknownNameError: Transformers knows no such implementation.
    """
    register()
    if base == EXPERTS_NAME or base.startswith(_OBSERVED):
        return base
    if base != "eager" and base not in ALL_EXPERTS_FUNCTIONS:
        known = {n for n in ALL_EXPERTS_FUNCTIONS.valid_keys() if not n.startswith(_OBSERVED)}
        raise unknown_name("experts implementation", base, {"eager"} | known)
    name = _OBSERVED + base
    ALL_EXPERTS_FUNCTIONS.register(name, _observed_forward(base))
    return name


def base_implementation(name: str | None) -> str:
    """What does the arithmetic under ``name``: the inverse of :func:`observed`."""
    return (name or "eager").removeprefix(_OBSERVED)


def _refuse(name: str, module: nn.Module, reason: str) -> CheckpointError:
    return CheckpointError(
        f"experts {name!r} ({type(module).__name__}) are of an unsupported layout: {reason}; "
        "use a model whose experts Transformers dispatches by name, in floating point"
    )


def _check_layout(name: str, module: nn.Module) -> None:
    """Refuse what the reference would compute wrongly, or not at all."""
    flags: Any = module
    first = "gate_up_proj" if flags.has_gate else "up_proj"
    names = [first, "down_proj"]
    if flags.has_bias:
        names += [f"{first}_bias", "down_proj_bias"]
    for weight_name in names:
        weight = getattr(module, weight_name, None)
        if not isinstance(weight, Tensor):
            raise _refuse(name, module, f"no tensor {weight_name!r}")
        if weight.dtype not in _FLOATS:
            raise _refuse(name, module, f"{weight_name!r} is stored as {weight.dtype}")
    up, down = getattr(module, first), flags.down_proj
    # as [E, out, in] whatever the storage
    up_shape, down_shape = (
        (w.shape[0], w.shape[2], w.shape[1]) if flags.is_transposed else tuple(w.shape)
        for w in (up, down)
    )
    halves = 2 if flags.has_gate else 1
    expected = (up_shape[0], halves * down_shape[2], down_shape[1])
    if up_shape != expected or up_shape[0] != flags.num_experts:
        raise _refuse(
            name,
            module,
            f"{first!r} of shape {tuple(up.shape)} does not fit 'down_proj' of shape "
            f"{tuple(down.shape)} and num_experts={flags.num_experts}",
        )
    if flags.has_gate and not flags.is_concatenated:
        if flags._apply_gate.__name__ == "_default_apply_gate":
            raise _refuse(name, module, "interleaved gate and up rows without their own gate")
    if not hasattr(type(module).forward, "__wrapped__"):
        raise _refuse(name, module, "its forward is not dispatched")


def _layer_index(name: str, module: nn.Module) -> int:
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if not numbers:
        raise _refuse(name, module, "no layer number in its name")
    return int(numbers[-1])


def experts_layers(model: nn.Module) -> tuple[ExpertsLayer, ...]:
    """All stacks of experts of ``model``, in order of their decoder layer.

    Raises:
        CheckpointError: there are none, or one is stored in a way that is not supported.
    """
    layers = []
    for name, module in model.named_modules():
        if all(hasattr(module, flag) for flag in _FLAGS) and hasattr(module, "num_experts"):
            _check_layout(name, module)
            index = _layer_index(name, module)
            n_experts: Any = module.num_experts
            layers.append(ExpertsLayer(name, index, module, int(n_experts)))
        elif name.rpartition(".")[2] == "experts" and _holds_experts(module):
            raise _refuse(name, module, "Transformers does not dispatch them by name")
    if not layers:
        raise CheckpointError(
            f"{type(model).__name__} has no experts: choose a Mixture-of-Experts model"
        )
    layers.sort(key=lambda layer: layer.layer_index)
    for first, second in zip(layers, layers[1:], strict=False):
        if first.layer_index == second.layer_index:
            raise _refuse(second.name, second.module, f"same layer number as {first.name!r}")
    return tuple(layers)


def _holds_experts(module: nn.Module) -> bool:
    """Whether a module called "experts" holds weights (a list of experts, or stacks)."""
    return next(module.parameters(), None) is not None


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration in the model once; outer ones first, for they set their parts."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())


@contextmanager
def use_experts(model: nn.Module, name: str) -> Iterator[tuple[ExpertsLayer, ...]]:
    """Run ``model`` with the experts implementation ``name``; restore the previous one after.

    Yields the experts layers.  Models whose layers carry their own copy of the
    configuration (heterogeneous layers, classes defined in a notebook) are reached too.
    """
    layers = experts_layers(model)
    if name != "eager" and name not in ALL_EXPERTS_FUNCTIONS:
        raise unknown_name("experts implementation", name, ALL_EXPERTS_FUNCTIONS.valid_keys())
    before = [(config, config._experts_implementation) for config in _configs(model)]
    try:
        if isinstance(model, PreTrainedModel):
            model.set_experts_implementation(name)
        for layer in layers:
            config: Any = layer.module.config
            if config._experts_implementation != name:
                config._experts_implementation = name
        yield layers
    finally:
        for config, previous in before:
            if config._experts_implementation != previous:
                config._experts_implementation = previous


@contextmanager
def observe(
    model: nn.Module, observer: Observer, implementation: str | None = None
) -> Iterator[tuple[ExpertsLayer, ...]]:
    """Let ``observer`` see the routing of every experts layer of ``model``.

    Args:
        model: a Transformers model with experts.
        observer: see :data:`Observer`.  It runs before the arithmetic, under graph capture
            too; it must not change what it is given.
        implementation: what does the arithmetic ("eager", "grouped_mm", "batched_mm",
            "repro", ...); by default what the model uses now.

    Yields the experts layers.
    """
    first: Any = experts_layers(model)[0].module
    if implementation is None:
        implementation = first.config._experts_implementation or "eager"
    with use_experts(model, observed(implementation)) as layers:
        for layer in layers:
            watch = _WATCHES.setdefault(layer.module, _Watch(layer.layer_index, ()))
            watch.observers = (*watch.observers, observer)
        try:
            yield layers
        finally:
            for layer in layers:
                watch = _WATCHES[layer.module]
                watch.observers = tuple(o for o in watch.observers if o is not observer)
                if not watch.observers:
                    del _WATCHES[layer.module]


register()

__all__ = [
    "EXPERTS_NAME",
    "ExpertMatrices",
    "ExpertsLayer",
    "Observer",
    "apply_expert",
    "base_implementation",
    "expert_matrices",
    "experts_layers",
    "observe",
    "observed",
    "reference_experts",
    "register",
    "use_experts",
]
