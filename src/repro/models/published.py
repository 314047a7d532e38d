"""The eight published Mixture-of-Experts configurations of both papers.

DynaExq evaluates Qwen3-30B-A3B, Qwen3-Next-80B-A3B and Phi-3.5-MoE (its Table 3) and
motivates with DeepSeek-V2-Lite; PagedWeight evaluates Qwen1.5-MoE, Mixtral-8x7B and
Gemma-4-26B-A4B; OLMoE is the fully open one.  Their dimensions are read from
``data/paper/model_configs.csv``.  Beside them stands only what that table has no column
for, once, as keyword arguments of the Transformers configuration.

``to_transformers_config`` builds the real configuration, so that the model it describes
can be instantiated (on the meta device to count it, on a GPU with random weights to time
it).  Left out: scaling of rotary positions (YaRN, LongRoPE), which has no parameters and
no meaning under random weights; the vision part of Gemma 4; the multi-token-prediction
layer of Qwen3-Next, which Transformers does not build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from repro.errors import unknown_name
from repro.models.dimensions import Dimensions, load_dimensions, missing_row, read_paper_table
from repro.models.parameters import ParameterCount, count_parameters

_BYTES_TABLE = "model_bytes_computed.csv"


@dataclass(frozen=True)
class PublishedModel:
    """A model of the papers: what it is called, where it comes from, how large it is."""

    name: str
    hub_id: str
    licence: str
    model_type: str
    config_row: str  # its name in model_configs.csv
    bytes_row: str  # its name in model_bytes_computed.csv
    evaluated_by: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def dimensions(self) -> Dimensions:
        """The model's row of ``model_configs.csv``."""
        return load_dimensions(self.config_row)

    @property
    def n_moe_layers(self) -> int:
        """Layers that have routed experts."""
        return self.dimensions.moe_layers

    @property
    def n_experts(self) -> int:
        """Routed experts of one layer."""
        return self.dimensions.routed_experts

    @property
    def params_per_expert(self) -> int:
        """Three gated matrices of hidden x width (counted in :meth:`count`, equal)."""
        return 3 * self.dimensions.hidden_size * self.dimensions.moe_intermediate_size

    def to_transformers_config(self) -> Any:
        """The Transformers configuration of this architecture at published dimensions."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.model_type, **_config_arguments(self))

    def count(self) -> ParameterCount:
        """Parameters of the real model, counted on the meta device (once a process)."""
        return _count(self.name)


# ``extra``: fields without a column in the table.  Those of Qwen3-Next, DeepSeek and Gemma
# that shape a parameter are stated in its "other" column; biases follow from the exact
# totals; context lengths, rotary bases and the window are the checkpoints' own and shape
# nothing.
PUBLISHED: dict[str, PublishedModel] = {
    model.name: model
    for model in (
        PublishedModel(
            name="Qwen3-30B-A3B",
            hub_id="Qwen/Qwen3-30B-A3B-Instruct-2507",
            licence="Apache-2.0",
            model_type="qwen3_moe",
            config_row="Qwen3-30B-A3B",
            bytes_row="Qwen3-30B-A3B",
            evaluated_by="DynaExq",
            extra={
                "norm_topk_prob": True,
                "max_position_embeddings": 262144,
                "rope_theta": 10000000,
            },
        ),
        PublishedModel(
            name="Qwen3-Next-80B-A3B",
            hub_id="Qwen/Qwen3-Next-80B-A3B-Instruct",
            licence="Apache-2.0",
            model_type="qwen3_next",
            config_row="Qwen3-Next-80B-A3B-Instruct",
            bytes_row="Qwen3-Next-80B-A3B (without MTP layer)",
            evaluated_by="DynaExq",
            extra={
                "norm_topk_prob": True,
                "full_attention_interval": 4,
                "linear_num_key_heads": 16,
                "linear_key_head_dim": 128,
                "linear_num_value_heads": 32,
                "linear_value_head_dim": 128,
                "linear_conv_kernel_dim": 4,
                "partial_rotary_factor": 0.25,
                "max_position_embeddings": 262144,
                "rope_theta": 10000000,
            },
        ),
        PublishedModel(
            name="Phi-3.5-MoE",
            hub_id="microsoft/Phi-3.5-MoE-instruct",
            licence="MIT",
            model_type="phimoe",
            config_row="Phi-3.5-MoE-instruct",
            bytes_row="Phi-3.5-MoE-instruct",
            evaluated_by="DynaExq",
            extra={
                "attention_bias": True,
                "lm_head_bias": True,
                "max_position_embeddings": 131072,
            },
        ),
        PublishedModel(
            name="DeepSeek-V2-Lite",
            hub_id="deepseek-ai/DeepSeek-V2-Lite",
            licence="DeepSeek model licence",
            model_type="deepseek_v2",
            config_row="DeepSeek-V2-Lite",
            bytes_row="DeepSeek-V2-Lite",
            evaluated_by="DynaExq (motivation only)",
            extra={
                "norm_topk_prob": False,
                "kv_lora_rank": 512,
                "q_lora_rank": None,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "max_position_embeddings": 163840,
            },
        ),
        PublishedModel(
            name="Qwen1.5-MoE-A2.7B",
            hub_id="Qwen/Qwen1.5-MoE-A2.7B",
            licence="Tongyi Qianwen licence",
            model_type="qwen2_moe",
            config_row="Qwen1.5-MoE-A2.7B",
            bytes_row="Qwen1.5-MoE-A2.7B",
            evaluated_by="PagedWeight",
            extra={
                "norm_topk_prob": False,
                "qkv_bias": True,
                "max_position_embeddings": 8192,
                "rope_theta": 1000000,
            },
        ),
        PublishedModel(
            name="Mixtral-8x7B",
            hub_id="mistralai/Mixtral-8x7B-v0.1",
            licence="Apache-2.0",
            model_type="mixtral",
            config_row="Mixtral-8x7B-v0.1",
            bytes_row="Mixtral-8x7B",
            evaluated_by="PagedWeight",
            extra={"max_position_embeddings": 32768},
        ),
        PublishedModel(
            name="Gemma-4-26B-A4B",
            hub_id="google/gemma-4-26B-A4B",
            licence="Apache-2.0",
            model_type="gemma4_text",
            config_row="Gemma-4-26B-A4B (text)",
            bytes_row="Gemma-4-26B-A4B (text, norms and scalars left out)",
            evaluated_by="PagedWeight",
            extra={
                "enable_moe_block": True,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
                "sliding_window": 1024,
                "max_position_embeddings": 262144,
            },
        ),
        PublishedModel(
            name="OLMoE-1B-7B",
            hub_id="allenai/OLMoE-1B-7B-0924",
            licence="Apache-2.0",
            model_type="olmoe",
            config_row="OLMoE-1B-7B-0924",
            bytes_row="OLMoE-1B-7B",
            evaluated_by="neither paper",
            extra={"max_position_embeddings": 4096},
        ),
    )
}


def get_published(name: str) -> PublishedModel:
    """The published model called ``name``.

    Raises:
        UnknownNameError: no such model.
    """
    try:
        return PUBLISHED[name]
    except KeyError:
        raise unknown_name("published model", name, PUBLISHED) from None


def bytes_row(model: PublishedModel) -> dict[str, str]:
    """The model's row of ``model_bytes_computed.csv``: what the count is checked against.

    Raises:
        DataUnavailableError: the table or the row is missing.
    """
    row = read_paper_table(_BYTES_TABLE).get(model.bytes_row)
    if row is None:
        raise missing_row(_BYTES_TABLE, model.bytes_row)
    return row


@cache
def _count(name: str) -> ParameterCount:
    return count_parameters(get_published(name).to_transformers_config())


def _config_arguments(model: PublishedModel) -> dict[str, Any]:
    """Keyword arguments of the configuration class: the table's row under its field names."""
    d = model.dimensions
    arguments: dict[str, Any] = {
        "hidden_size": d.hidden_size,
        "num_hidden_layers": d.layers,
        "vocab_size": d.vocab_size,
        "num_attention_heads": d.attention_heads,
        "num_key_value_heads": d.kv_heads,
        "tie_word_embeddings": d.tied_embeddings,
    }
    if d.head_dim is not None and d.head_dim * d.attention_heads != d.hidden_size:
        # Elsewhere the class divides hidden by heads itself, and Phi has no such field.
        arguments["head_dim"] = d.head_dim
    top_k_field = "top_k_experts" if model.model_type == "gemma4_text" else "num_experts_per_tok"
    arguments[top_k_field] = d.top_k
    if model.model_type in ("mixtral", "phimoe", "olmoe"):
        # No dense layer: the one width these classes know is the expert's.
        arguments["intermediate_size"] = d.moe_intermediate_size
        arguments["num_local_experts"] = d.routed_experts
    else:
        arguments["intermediate_size"] = d.dense_intermediate_size
        arguments["moe_intermediate_size"] = d.moe_intermediate_size
        arguments["num_experts"] = d.routed_experts
    if model.model_type in ("qwen2_moe", "qwen3_next"):
        arguments["shared_expert_intermediate_size"] = d.shared_intermediate_total
    elif model.model_type == "deepseek_v2":
        arguments["n_shared_experts"] = d.shared_experts
        arguments["first_k_dense_replace"] = d.layers - d.moe_layers
    elif model.model_type == "gemma4_text":
        arguments["num_global_key_value_heads"] = d.kv_heads_global
        arguments["global_head_dim"] = d.head_dim_global
    return arguments | dict(model.extra)
