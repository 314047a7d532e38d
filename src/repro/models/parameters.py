"""Parameters of a model, counted on tensors that take no memory.

``count_parameters`` builds the real Transformers model of a configuration on the meta
device (80 billion parameters take a tenth of a second and no memory) and adds up what
is there, split into routed experts, shared experts and the rest.  Nothing is assumed
about the architecture beyond where its experts are, which :mod:`repro.models.layout`
checks first.  Tied weights count once.

What Transformers does not build cannot be counted here: the multi-token-prediction
layer that the Qwen3-Next checkpoint carries, and the vision part of Gemma 4 when only
its text configuration is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from repro.models.layout import MoeLayout, check_model, find_experts

# Blocks beside the routed experts of a layer that every token passes.  In Gemma 4 that
# is the layer's own ``mlp``; elsewhere the experts lie inside ``mlp``, one level deeper.
_SHARED_BLOCKS = ("shared_expert", "shared_experts", "mlp")


@dataclass(frozen=True)
class ParameterCount:
    """How many parameters a model has, and where."""

    layout: MoeLayout
    total: int
    routed: int
    shared: int
    embedding: int  # the input table, and the output matrix where it is a separate one

    @property
    def n_routed_experts(self) -> int:
        """Routed experts of all layers together."""
        return self.layout.n_moe_layers * self.layout.n_experts

    @property
    def per_expert(self) -> int:
        """Parameters of one routed expert of one layer."""
        return self.routed // self.n_routed_experts

    @property
    def active(self) -> int:
        """Parameters one token can touch: everything but the experts it is not routed to."""
        idle = self.layout.n_experts - self.layout.top_k
        return self.total - self.layout.n_moe_layers * idle * self.per_expert

    @property
    def routed_share(self) -> float:
        """Routed experts over everything."""
        return self.routed / self.total

    @property
    def routed_and_shared_share(self) -> float:
        """Routed and shared experts over everything."""
        return (self.routed + self.shared) / self.total


def build_on_meta(config: Any) -> Any:
    """The causal language model of ``config`` with every tensor on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def count_model(model: Any) -> ParameterCount:
    """Count an instantiated model, on any device.

    Raises:
        CheckpointError: its configuration or its experts are of an unsupported layout.
    """
    layout = check_model(model)
    modules = dict(model.named_modules())
    experts = find_experts(model)
    routed = shared = 0
    for name, module in experts.values():
        routed += sum(p.numel() for p in module.parameters())
        parent = modules[name.rpartition(".")[0]]
        for block, child in parent.named_children():
            if block in _SHARED_BLOCKS:
                shared += sum(p.numel() for p in child.parameters())
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    unique = {id(p): p.numel() for table in tables if table for p in table.parameters()}
    return ParameterCount(
        layout=layout,
        total=sum(p.numel() for p in model.parameters()),
        routed=routed,
        shared=shared,
        embedding=sum(unique.values()),
    )


def count_parameters(config: Any) -> ParameterCount:
    """Count the model of a configuration without allocating it."""
    return count_model(build_on_meta(config))
