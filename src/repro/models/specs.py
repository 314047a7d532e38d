"""The two bundled models, to their specification.

Two families, so that what is measured is not an accident of one architecture:
``moe-fine`` has many narrow experts and no shared one (Qwen3-30B-A3B's layout),
``moe-shared`` few wide experts beside a gated shared expert (Qwen1.5-MoE-A2.7B's).
Both share one tokenizer and a trained context of 4,096 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from repro.errors import unknown_name

VOCAB_SIZE = 8192
CONTEXT_TOKENS = 4096
EOS_TOKEN, EOS_ID = "<|endoftext|>", 0
PAD_TOKEN, PAD_ID = "<|pad|>", 1

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.001,
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


@dataclass(frozen=True)
class ModelSpec:
    """A bundled model: its Transformers configuration and one sentence about it."""

    name: str
    model_type: str
    settings: Mapping[str, Any]
    summary: str

    def config(self) -> Any:
        """A fresh Transformers configuration."""
        from transformers import AutoConfig  # here: listing the models must not cost its import

        return AutoConfig.for_model(self.model_type, **_COMMON, **self.settings)


SPECS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            "moe-fine",
            "qwen3_moe",
            {
                "num_hidden_layers": 6,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "intermediate_size": 512,  # of dense layers; there are none
                "moe_intermediate_size": 64,
                "num_experts": 48,
                "num_experts_per_tok": 4,
                "norm_topk_prob": True,
            },
            "Qwen3-MoE layout: 6 layers of 48 experts of width 64, top-4, no shared expert",
        ),
        ModelSpec(
            "moe-shared",
            "qwen2_moe",
            {
                "num_hidden_layers": 4,
                "num_key_value_heads": 4,
                "intermediate_size": 512,  # of dense layers; there are none
                "moe_intermediate_size": 128,
                "shared_expert_intermediate_size": 256,
                "num_experts": 16,
                "num_experts_per_tok": 2,
                "norm_topk_prob": False,
            },
            "Qwen2-MoE layout: 4 layers of 16 experts of width 128, top-2, one gated shared expert",
        ),
    )
}


def get_spec(name: str) -> ModelSpec:
    """The specification called ``name``.

    Raises:
        UnknownNameError: it is not one of the bundled models.
    """
    if name not in SPECS:
        raise unknown_name("bundled model", name, SPECS)
    return SPECS[name]
