"""The forward pass that training compiles: the Transformers model's own weights, less overhead.

Transformers' modules stay the model; this module only computes the same function from
their parameters (a test compares losses and gradients for both families) in a form that
``torch.compile`` fuses well: one function for every layer, tokens sorted by expert once,
grouped matrix products, and gathers whose backward passes are gathers too.

Left out, because neither bundled model has them: dense layers between the sparse ones,
sliding windows, scaled rotary positions, dropout.

Legend: B sequences, S tokens each, T = B*S, D hidden, E experts, I expert width, k experts
per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerOutput(NamedTuple):
    """Hidden state [B, S, D], balance loss (1.0 when uniform) and routed counts [E]."""

    hidden: Tensor
    balance: Tensor
    counts: Tensor


class _Dispatch(torch.autograd.Function):
    """Rows of ``x`` [T, D] in expert order [T*k, D]; backward gathers instead of scattering."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Undo(torch.autograd.Function):
    """Expert-ordered rows back to token order; the permutation's inverse is its backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y[inverse]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def rotary_tables(config: Any, n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [S, head_dim] of the default rotary embedding, float32."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base = config.rope_parameters["rope_theta"]
    inv = 1.0 / base ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.outer(torch.arange(n_tokens, device=device).float(), inv)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``x`` [R, D] sorted by expert times ``weight`` [E, N, D]; ``ends`` [E] are row ends."""
    if x.is_cuda:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    starts = [0, *ends.tolist()]
    parts = [x[a:b] @ w.T for a, b, w in zip(starts[:-1], starts[1:], weight, strict=True)]
    return torch.cat(parts)


def layer_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The parameters of one decoder layer by name."""
    return dict(layer.named_parameters())


def make_layer_forward(config: Any, compute_dtype: torch.dtype) -> Callable[..., LayerOutput]:
    """The function every decoder layer of ``config`` computes."""
    n_heads, n_kv = config.num_attention_heads, config.num_key_value_heads
    top_k, n_experts, eps = config.num_experts_per_tok, config.num_experts, config.rms_norm_eps
    normalise = config.norm_topk_prob
    assert n_experts <= 256, "expert numbers are sorted as uint8"

    def attention(x: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        n, s, _ = x.shape

        def project(name: str, heads: int) -> Tensor:
            bias = w.get(f"self_attn.{name}_proj.bias")
            out = F.linear(x, w[f"self_attn.{name}_proj.weight"], bias).view(n, s, heads, -1)
            norm = w.get(f"self_attn.{name}_norm.weight")
            out = out if norm is None else _rms_norm(out, norm, eps)
            return out.transpose(1, 2)

        q, k, v = project("q", n_heads), project("k", n_kv), project("v", n_kv)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if n_kv != n_heads:
            k = k.repeat_interleave(n_heads // n_kv, dim=1)
            v = v.repeat_interleave(n_heads // n_kv, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(n, s, -1)
        return F.linear(out, w["self_attn.o_proj.weight"], w.get("self_attn.o_proj.bias"))

    def experts(x: Tensor, w: dict[str, Tensor]) -> LayerOutput:
        logits = F.linear(x, w["mlp.gate.weight"])  # [T, E]
        probs = logits.float().softmax(-1)
        with torch.no_grad():
            index = probs.topk(top_k, dim=-1).indices  # [T, k]
            expert, order = index.flatten().to(torch.uint8).sort(stable=True)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.numel(), device=order.device)
            edges = torch.arange(n_experts, device=order.device)
            ends = torch.searchsorted(expert.int(), edges.int(), right=True)
            counts = ends.diff(prepend=ends.new_zeros(1)).float()
        weight = probs.gather(1, index)
        if normalise:
            weight = weight / weight.sum(-1, keepdim=True)
        rows = _Dispatch.apply(x, order, inverse, top_k)
        ends32 = ends.int()
        gate, up = grouped_linear(rows, w["mlp.experts.gate_up_proj"], ends32).chunk(2, dim=-1)
        rows = grouped_linear(F.silu(gate) * up, w["mlp.experts.down_proj"], ends32)
        parts = _Undo.apply(rows, order, inverse).unflatten(0, (-1, top_k))  # [T, k, D]
        out = (parts * weight.to(parts.dtype)[..., None]).sum(1)
        if "mlp.shared_expert_gate.weight" in w:
            inner = F.silu(F.linear(x, w["mlp.shared_expert.gate_proj.weight"]))
            inner = inner * F.linear(x, w["mlp.shared_expert.up_proj.weight"])
            shared = F.linear(inner, w["mlp.shared_expert.down_proj.weight"])
            out = out + torch.sigmoid(F.linear(x, w["mlp.shared_expert_gate.weight"])) * shared
        share = counts / counts.sum()
        balance = n_experts * (share * probs.mean(0)).sum()
        return LayerOutput(out, balance, counts)

    def layer(x: Tensor, weights: dict[str, Tensor], cos: Tensor, sin: Tensor) -> LayerOutput:
        w = {name: p.to(compute_dtype) for name, p in weights.items()}
        cos, sin = cos.to(compute_dtype), sin.to(compute_dtype)
        x = x + attention(_rms_norm(x, w["input_layernorm.weight"], eps), w, cos, sin)
        flat = _rms_norm(x, w["post_attention_layernorm.weight"], eps).flatten(0, 1)
        moe = experts(flat, w)
        return LayerOutput(x + moe.hidden.view_as(x), moe.balance, moe.counts)

    return layer


def token_losses(hidden: Tensor, head: Tensor, norm: Tensor, target: Tensor, eps: float) -> Tensor:
    """Cross entropy in nats of each target token; hidden [B, S, D], target [B, S] -> [B, S]."""
    x = _rms_norm(hidden, norm.to(hidden.dtype), eps)
    logits = F.linear(x, head.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)


class TrainingForward:
    """``losses, balance, counts = forward(ids)`` over a Transformers MoE model's parameters."""

    def __init__(self, model: Any, compute_dtype: torch.dtype, compiled: bool) -> None:
        self.model, self.config, self.dtype = model, model.config, compute_dtype
        self.layers = [layer_weights(layer) for layer in model.model.layers]
        self._layer = make_layer_forward(model.config, compute_dtype)
        self._loss = token_losses
        if compiled:
            self._layer = torch.compile(self._layer, dynamic=False)
            self._loss = torch.compile(self._loss, dynamic=False)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids [B, S+1] -> losses [B, S], balance [layers], counts [layers, E]."""
        n_tokens = ids.shape[1] - 1
        if n_tokens not in self._tables:
            self._tables[n_tokens] = rotary_tables(self.config, n_tokens, ids.device)
        cos, sin = self._tables[n_tokens]
        embedding = self.model.model.embed_tokens.weight
        x = F.embedding(ids[:, :-1], embedding).to(self.dtype)
        balances, counts = [], []
        for weights in self.layers:
            x, balance, count = self._layer(x, weights, cos, sin)
            balances.append(balance)
            counts.append(count)
        losses = self._loss(
            x,
            self.model.lm_head.weight,
            self.model.model.norm.weight,
            ids[:, 1:].contiguous(),
            self.config.rms_norm_eps,
        )
        return losses, torch.stack(balances), torch.stack(counts)
