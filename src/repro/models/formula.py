"""Parameters of the published models by arithmetic, from their dimensions alone.

The second opinion beside the count of :mod:`repro.models.parameters`: every part is a
product of dimensions that a reader can check by hand.  Where the two agree, both the
table of dimensions and the instantiated architecture are right; a test demands equality
to the parameter.

``mtp_layer_params`` is the one part that only arithmetic can give: Qwen3-Next's
checkpoint carries a layer for multi-token prediction that Transformers does not build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from repro.errors import ReproError
from repro.models.dimensions import Dimensions
from repro.models.published import PublishedModel

# Legend: H hidden, A heads, G key-value heads, D head dimension; weights are out x in.
Parts = tuple[int, int]  # (matrices and biases, norms and scalars)


def _grouped_query(d: Dimensions, *, qkv_bias: bool = False, out_bias: bool = False) -> Parts:
    head_dim = d.head_dim or d.hidden_size // d.attention_heads
    queries, keys = d.attention_heads * head_dim, d.kv_heads * head_dim
    weights = 2 * queries * d.hidden_size + 2 * keys * d.hidden_size
    biases = (queries + 2 * keys if qkv_bias else 0) + (d.hidden_size if out_bias else 0)
    return weights + biases, 0


def _qwen3_attention(d: Dimensions, extra: Mapping[str, Any], layer: int) -> Parts:
    weights, _ = _grouped_query(d)
    return weights, 2 * (d.head_dim or 0)  # one norm over a head's queries, one over its keys


def _qwen3_next_full_attention(d: Dimensions) -> Parts:
    weights, _ = _grouped_query(d)
    gate = d.attention_heads * (d.head_dim or 0) * d.hidden_size  # doubles the query projection
    return weights + gate, 2 * (d.head_dim or 0)


def _qwen3_next_attention(d: Dimensions, extra: Mapping[str, Any], layer: int) -> Parts:
    if (layer + 1) % extra["full_attention_interval"] == 0:
        return _qwen3_next_full_attention(d)
    keys = extra["linear_num_key_heads"] * extra["linear_key_head_dim"]
    value_heads = extra["linear_num_value_heads"]
    values = value_heads * extra["linear_value_head_dim"]
    projections = d.hidden_size * (2 * keys + 2 * values + 2 * value_heads) + values * d.hidden_size
    convolution = (2 * keys + values) * extra["linear_conv_kernel_dim"]
    return projections + convolution, 2 * value_heads + extra["linear_value_head_dim"]


def _phi_attention(d: Dimensions, extra: Mapping[str, Any], layer: int) -> Parts:
    return _grouped_query(d, qkv_bias=True, out_bias=True)


def _qwen2_attention(d: Dimensions, extra: Mapping[str, Any], layer: int) -> Parts:
    return _grouped_query(d, qkv_bias=True)


def _mixtral_attention(d: Dimensions, extra: Mapping[str, Any], layer: int) -> Parts:
    return _grouped_query(d)


def _olmoe_attention(d: Dimensions, extra: Mapping[str, Any], layer: int) -> Parts:
    weights, _ = _grouped_query(d)
    return weights, (d.attention_heads + d.kv_heads) * (d.head_dim or 0)  # norms over all heads


def _latent_attention(d: Dimensions, extra: Mapping[str, Any], layer: int) -> Parts:
    rank, rope, nope = extra["kv_lora_rank"], extra["qk_rope_head_dim"], extra["qk_nope_head_dim"]
    value = extra["v_head_dim"]
    queries = d.attention_heads * (nope + rope) * d.hidden_size
    compress = (rank + rope) * d.hidden_size
    expand = d.attention_heads * (nope + value) * rank
    return queries + compress + expand + d.attention_heads * value * d.hidden_size, rank


def _is_global_gemma(layer: int) -> bool:
    return (layer + 1) % 6 == 0  # five sliding layers, then a full one


def _gemma_attention(d: Dimensions, extra: Mapping[str, Any], layer: int) -> Parts:
    if not _is_global_gemma(layer):
        weights, _ = _grouped_query(d)
        return weights, 2 * (d.head_dim or 0)
    head_dim = d.head_dim_global or 0
    queries, keys = d.attention_heads * head_dim, d.kv_heads_global * head_dim
    # Values are the keys here (attention_k_eq_v), so there is no third projection.
    return 2 * queries * d.hidden_size + keys * d.hidden_size, 2 * head_dim


_ATTENTION: dict[str, Callable[[Dimensions, Mapping[str, Any], int], Parts]] = {
    "qwen3_moe": _qwen3_attention,
    "qwen3_next": _qwen3_next_attention,
    "phimoe": _phi_attention,
    "deepseek_v2": _latent_attention,
    "qwen2_moe": _qwen2_attention,
    "mixtral": _mixtral_attention,
    "gemma4_text": _gemma_attention,
    "olmoe": _olmoe_attention,
}


def formula_parts(model: PublishedModel) -> dict[str, int]:
    """Parameters by part; their sum is the model.

    ``norms`` holds norms and the scalars that scale a layer or its router: in Gemma 4 the
    published total leaves exactly this part out.
    """
    d, extra, kind = model.dimensions, model.extra, model.model_type
    attention = [_ATTENTION[kind](d, extra, layer) for layer in range(d.layers)]
    vocabulary = d.vocab_size * d.hidden_size
    norms_per_layer = {"phimoe": 4, "gemma4_text": 7}.get(kind, 2)  # LayerNorm has a bias each
    norms = d.hidden_size * (norms_per_layer * d.layers + norms_per_layer // 2)
    shared_gate = 0
    if kind == "gemma4_text":
        norms = d.hidden_size * (norms_per_layer * d.layers + 1)
        norms += d.layers * (d.hidden_size + d.routed_experts)  # scales of the router
    elif kind in ("qwen2_moe", "qwen3_next"):
        shared_gate = d.moe_layers * d.hidden_size
    n_dense_layers = d.layers - d.moe_layers
    head_bias = d.vocab_size if extra.get("lm_head_bias") else 0
    return {
        "embedding": vocabulary,
        "head": 0 if d.tied_embeddings else vocabulary + head_bias,
        "attention": sum(weights for weights, _ in attention),
        "norms": norms + sum(scales for _, scales in attention),
        "router": d.moe_layers * d.routed_experts * d.hidden_size,
        "routed": d.moe_layers * d.routed_experts * model.params_per_expert,
        "shared": 3 * d.moe_layers * d.hidden_size * d.shared_intermediate_total,
        "shared_gate": shared_gate,
        "dense": 3 * n_dense_layers * d.hidden_size * (d.dense_intermediate_size or 0),
    }


def mtp_layer_params(model: PublishedModel) -> tuple[int, int]:
    """Parameters of the multi-token-prediction layer of Qwen3-Next: (all, routed experts).

    One full-attention layer with experts, a matrix that joins the hidden state and the
    embedding of the next token, and a norm for each of those two and for the output.

    Raises:
        ReproError: another model; none of the others carries such a layer.
    """
    if model.model_type != "qwen3_next":
        raise ReproError(
            f"{model.name} has no multi-token-prediction layer: ask for Qwen3-Next-80B-A3B"
        )
    d = model.dimensions
    weights, scales = _qwen3_next_full_attention(d)
    routed = d.routed_experts * model.params_per_expert
    block = (
        routed
        + 3 * d.hidden_size * d.shared_intermediate_total
        + d.hidden_size  # gate of the shared expert
        + d.routed_experts * d.hidden_size
        + weights
        + scales
        + 2 * d.hidden_size
    )
    return block + 2 * d.hidden_size**2 + 3 * d.hidden_size, routed
