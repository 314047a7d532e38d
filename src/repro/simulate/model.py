"""A model as the simulator sees it: sizes of its layers, experts and keys and values.

The one idea: time follows from dimensions alone, so a model is its published configuration; no
weight exists.  Dense parts (attention, router, shared experts, output head) are read at 16 bits
once in every pass, whatever the policy.

Letters: L decoder layers, M of them with experts, E experts, B blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from repro.formats import AnyPrecision, Dense, GroupAffine, make_format
from repro.formats.any_precision import AnyPrecisionScheme
from repro.formats.dense import DenseScheme
from repro.formats.tiers import PAIRS, expert_shapes
from repro.models.formula import formula_parts
from repro.models.published import get_published
from repro.serving.kv_sizes import KVLayout, LayerLayout
from repro.simulate.errors import SimulationError

BYTES = 2  # of a dense parameter


@dataclass(frozen=True)
class SimulatedModel:
    """Dimensions.

    Args:
        name: of the model.
        n_layers: M, layers with experts.
        n_experts: E.
        top_k: experts of a token.
        hidden_size: of the model.
        intermediate_size: of one expert.
        dense_params: read in every pass: attention, norms, routers, shared experts, dense layers.
        head_params: of the output head, read in every pass.
        embedding_params: resident, hardly read; 0 where the head is the embedding.
        kv: sizes of keys and values.
        query_width: heads times head size, for the arithmetic of attention.
    """

    name: str
    n_layers: int
    n_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dense_params: int
    head_params: int
    embedding_params: int
    kv: KVLayout
    query_width: int

    @property
    def expert_shapes(self) -> tuple[tuple[int, int], ...]:
        """``[N, K]`` of the blocks of an expert."""
        return expert_shapes(self.hidden_size, self.intermediate_size)

    @property
    def block_params(self) -> tuple[int, ...]:
        """Weights of each block."""
        return tuple(rows * columns for rows, columns in self.expert_shapes)

    @property
    def fixed_bytes(self) -> int:
        """Dense weights that are resident beside the arena."""
        return BYTES * (self.dense_params + self.head_params + self.embedding_params)

    def schemes(self, format_name: str) -> list[list[Any]]:
        """How experts are stored: a format's name, or a pair of tiers (``fp16/int4``).

        Raises:
            UnknownNameError: no such format.
        """
        if format_name in PAIRS:
            formats: list[Any] = [PAIRS[format_name].high, PAIRS[format_name].low]
        else:
            formats = [make_format(format_name)]
        return [[_scheme(each, shape) for each in formats] for shape in self.expert_shapes]


def _scheme(each: Any, shape: tuple[int, int]) -> Any:
    if isinstance(each, Dense):
        return DenseScheme(*shape, each.dtype)
    if isinstance(each, GroupAffine):
        return each.scheme(*shape)
    assert isinstance(each, AnyPrecision)
    rows = min(each.rows_per_lut or shape[0], shape[0])
    return AnyPrecisionScheme(*shape, rows, rows > 1)


def published_model(name: str) -> SimulatedModel:
    """A published model by its name in :mod:`repro.models.published`.

    Recurrent states of Qwen3-Next are left out: they are small and the same for all policies.

    Raises:
        UnknownNameError: no such model.
    """
    model = get_published(name)
    d, parts = model.dimensions, formula_parts(model)
    heads, size = d.kv_heads, d.head_dim or d.hidden_size // d.attention_heads
    dtype = torch.bfloat16
    full = LayerLayout("full", (heads, size), (heads, size), dtype)
    layers = [full] * d.layers
    if model.model_type == "deepseek_v2":  # one compressed vector and one rotary key per token
        rank = model.extra["kv_lora_rank"] + model.extra["qk_rope_head_dim"]
        layers = [LayerLayout("full", (1, rank), (0, 0), dtype)] * d.layers
    elif model.model_type == "qwen3_next":
        every = model.extra["full_attention_interval"]
        none = LayerLayout("none")
        layers = [full if (i + 1) % every == 0 else none for i in range(d.layers)]
    elif model.model_type == "gemma4_text":
        window = model.extra["sliding_window"]
        wide = (d.kv_heads_global, d.head_dim_global or size)
        near = LayerLayout("sliding", (heads, size), (heads, size), dtype, window)
        far = LayerLayout("full", wide, wide, dtype)
        layers = [far if (i + 1) % 6 == 0 else near for i in range(d.layers)]
    dense = ("attention", "norms", "router", "shared", "shared_gate", "dense")
    return SimulatedModel(
        name=name,
        n_layers=d.moe_layers,
        n_experts=d.routed_experts,
        top_k=d.top_k,
        hidden_size=d.hidden_size,
        intermediate_size=d.moe_intermediate_size,
        dense_params=sum(parts[part] for part in dense),
        head_params=parts["head"] or parts["embedding"],
        embedding_params=parts["embedding"] if parts["head"] else 0,
        kv=KVLayout(tuple(layers)),
        query_width=d.attention_heads * size,
    )


def toy_model(
    n_layers: int = 2,
    n_experts: int = 4,
    top_k: int = 1,
    hidden_size: int = 64,
    intermediate_size: int = 64,
    dense_params: int = 0,
    heads: Sequence[int] = (1, 8),
) -> SimulatedModel:
    """A model small enough to compute by hand.

    Raises:
        SimulationError: more experts per token than there are.
    """
    if not 1 <= top_k <= n_experts:
        raise SimulationError(f"top_k={top_k} of {n_experts} experts: give 1 to {n_experts}")
    layer = LayerLayout("full", (heads[0], heads[1]), (heads[0], heads[1]), torch.bfloat16)
    return SimulatedModel(
        "toy", n_layers, n_experts, top_k, hidden_size, intermediate_size,
        dense_params, 0, 0, KVLayout((layer,) * n_layers), heads[0] * heads[1],
    )  # fmt: skip
