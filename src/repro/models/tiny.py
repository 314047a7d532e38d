"""Random models of a few thousand weights, one for each supported architecture.

The one idea: a test that runs on every architecture the papers and the design name
must cost milliseconds, so each gets the smallest configuration that still has what
makes it different: a shared expert, a dense first layer, biased interleaved weights,
linear attention in three layers of four, a per-expert scale in the router.

The weights are random (seeded); nothing said by these models means anything.  The
trained small models are elsewhere (:func:`repro.load_model`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from repro.errors import unknown_name

# What all of them share: four heads of 8, 64 tokens, 8 experts of width 24, top-2.
_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}

_SPECIFIC: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        # the fourth layer is the first one with full attention, and a model without one
        # cannot be built
        "num_hidden_layers": 4,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "num_experts": 8,
        "mlp_only_layers": [1],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "qwen2_moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "norm_topk_prob": False,
    },
    "mixtral": {"intermediate_size": 24, "num_local_experts": 8, "sliding_window": None},
    "phimoe": {"intermediate_size": 24, "num_local_experts": 8},
    "deepseek_v2": {
        # layer 0 is dense, as in the published model; a scaling other than 1 shows
        # whether somebody applies it twice
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "routed_scaling_factor": 2.5,
    },
    "olmoe": {"intermediate_size": 24, "num_experts": 8, "num_key_value_heads": 4},
    "gpt_oss": {
        "head_dim": 8,
        "intermediate_size": 24,
        "num_local_experts": 8,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gemma4": {
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "top_k_experts": 2,
        "enable_moe_block": True,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
}

_MODEL_TYPE = {"gemma4": "gemma4_text"}  # the text half of a model that also sees and hears
_DROPPED = {"gemma4": ("num_experts_per_tok",)}

ARCHITECTURES: tuple[str, ...] = tuple(_SPECIFIC)
"""The nine architectures that one experts function has to serve."""


def tiny_config(arch: str, **overrides: Any) -> PreTrainedConfig:
    """A configuration of ``arch`` small enough to run in milliseconds.

    Args:
        arch: one of :data:`ARCHITECTURES`.
        overrides: any field of the configuration class.

    Raises:
        UnknownNameError: ``arch`` is none of them.
    """
    if arch not in _SPECIFIC:
        raise unknown_name("architecture", arch, ARCHITECTURES)
    fields = {**_COMMON, **_SPECIFIC[arch]}
    for name in _DROPPED.get(arch, ()):
        del fields[name]
    return AutoConfig.for_model(_MODEL_TYPE.get(arch, arch), **{**fields, **overrides})


def tiny_model(arch: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random causal language model of ``arch`` in float32 and eval mode.

    Matrices are drawn with a standard deviation of ``fan_in ** -0.5``: the library's 0.02
    would leave the routers of so narrow a model close to ties, where two correct
    implementations may pick different experts.  The caller's random state is untouched.
    """
    config = tiny_config(arch, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                else:  # norms, biases: near the value they start with, yet not equal to it
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()
