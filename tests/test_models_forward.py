"""The forward pass that training compiles computes what the Transformers model computes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_training import small_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from repro.models.training_forward import (
    TrainingForward,
    _Dispatch,
    _Undo,
    grouped_linear,
    make_layer_forward,
)

FAMILIES = ("moe-fine", "moe-shared")


def small_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """Random weights large enough for logits, routing and norms to matter."""
    torch.manual_seed(seed)
    config = small_config(name, **changes)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name_, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name_))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.set_experts_implementation("eager")
    return model.train()


def tokens(shape: tuple[int, int], seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, small_config("moe-fine").vocab_size, shape, generator=generator)


def reference_losses(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(
        ids[:, 1:]
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 12), (2, 34), (5, 8)], ids=str)
def test_losses_and_every_gradient_equal_the_model(name: str, shape: tuple[int, int]) -> None:
    model, ids = small_model(name), tokens(shape)
    expected = reference_losses(model, ids)
    expected.mean().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    losses, balance, counts = TrainingForward(model, torch.float32, compiled=False)(ids)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    losses.mean().backward()
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            gradients[parameter_name],
            rtol=2e-4,
            atol=2e-5,
            msg=lambda text, n=parameter_name: f"gradient of {n}: {text}",
        )
    assert torch.equal(
        counts.sum(-1), torch.full((2,), float(2 * shape[0] * (shape[1] - 1)))
    )  # top-2 of every token in both layers
    assert balance.shape == (2,)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_the_model_at_every_token(name: str) -> None:
    model, ids = small_model(name), tokens((3, 14))
    forward = TrainingForward(model, torch.float32, compiled=False)
    seen: list[Tensor] = []

    def keep(hidden: Tensor, head: Tensor, norm: Tensor, target: Tensor, eps: float) -> Tensor:
        seen.append(model.lm_head(model.model.norm(hidden)))
        return target.float()

    forward._loss = keep
    with torch.no_grad():
        forward(ids)
        expected = model(input_ids=ids[:, :-1], use_cache=False).logits
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_and_balance_are_those_of_the_router(name: str) -> None:
    model, ids = small_model(name), tokens((2, 16))
    logits: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda module, args, _: logits.append(
                F.linear(args[0].flatten(0, -2), module.weight).detach()
            )
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=ids[:, :-1], use_cache=False)
        _, balance, counts = TrainingForward(model, torch.float32, compiled=False)(ids)
    for hook in hooks:
        hook.remove()
    for layer, raw in enumerate(logits):
        probability = raw.softmax(-1)
        chosen = probability.topk(2, dim=-1).indices
        expected = torch.bincount(chosen.flatten(), minlength=6).float()
        assert torch.equal(counts[layer], expected)
        share = expected / expected.sum()
        torch.testing.assert_close(
            balance[layer], 6 * (share * probability.mean(0)).sum(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_all_tokens_to_the_same_experts(name: str) -> None:
    """Groups without a single token: their experts get a gradient of exactly zero."""
    model, ids = small_model(name), tokens((2, 10))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # all equal: top-k takes the same two every time
    expected = reference_losses(model, ids)
    losses, _, counts = TrainingForward(model, torch.float32, compiled=False)(ids)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    losses.mean().backward()
    assert ((counts > 0).sum(-1) == 2).all()
    for layer, row in zip(model.model.layers, counts, strict=True):
        idle = row == 0
        assert not layer.mlp.experts.gate_up_proj.grad[idle].any()
        assert layer.mlp.experts.down_proj.grad[~idle].any()


def test_biases_of_attention_are_used_where_a_configuration_has_them() -> None:
    model, ids = small_model("moe-fine", attention_bias=True), tokens((2, 9))
    assert model.model.layers[0].self_attn.o_proj.bias is not None
    losses, _, _ = TrainingForward(model, torch.float32, compiled=False)(ids)
    torch.testing.assert_close(losses, reference_losses(model, ids), rtol=1e-5, atol=1e-5)


def test_more_experts_than_the_sort_can_number_are_refused() -> None:
    with pytest.raises(AssertionError, match="uint8"):
        make_layer_forward(small_config("moe-fine", num_experts=257), torch.float32)


# --- the parts


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    inner=st.integers(1, 9),
    outer=st.integers(1, 9),
)
def test_grouped_product_is_one_product_per_expert(
    sizes: list[int], inner: int, outer: int
) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    x = torch.randn(sum(sizes), inner, generator=generator)
    weight = torch.randn(len(sizes), outer, inner, generator=generator)
    ends = torch.tensor(sizes).cumsum(0).int()
    out = grouped_linear(x, weight, ends)
    assert out.shape == (sum(sizes), outer)
    row = 0
    for expert, size in enumerate(sizes):
        for _ in range(size):
            torch.testing.assert_close(out[row], weight[expert] @ x[row])
            row += 1


def test_the_grouped_kernel_has_the_same_convention_as_the_loop() -> None:
    """The call a GPU makes, on the CPU path that torch has for it."""
    sizes = [0, 5, 0, 11]
    x, weight = torch.randn(16, 16), torch.randn(4, 8, 16)
    ends = torch.tensor(sizes).cumsum(0).int()
    out = F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    torch.testing.assert_close(out, grouped_linear(x, weight, ends))


@pytest.mark.gpu
def test_grouped_product_on_a_gpu_equals_the_loop() -> None:
    sizes = [0, 16, 3, 0, 45]
    x = torch.randn(sum(sizes), 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(len(sizes), 32, 64, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    expected = grouped_linear(x.float().cpu(), weight.float().cpu(), ends.cpu())
    torch.testing.assert_close(
        grouped_linear(x, weight, ends).float().cpu(), expected, rtol=2e-2, atol=2e-1
    )


@given(n_tokens=st.integers(1, 9), top_k=st.integers(1, 4), data=st.data())
def test_dispatch_and_undo_have_the_gradients_of_plain_indexing(
    n_tokens: int, top_k: int, data: st.DataObject
) -> None:
    order = torch.tensor(data.draw(st.permutations(range(n_tokens * top_k))))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    generator = torch.Generator().manual_seed(n_tokens)
    x = torch.randn(n_tokens, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.randn(
        n_tokens * top_k, 3, generator=generator, dtype=torch.float64, requires_grad=True
    )
    upstream = torch.randn(n_tokens * top_k, 3, generator=generator, dtype=torch.float64)
    for ours, plain, leaf in (
        (_Dispatch.apply(x, order, inverse, top_k), x[order // top_k], x),
        (_Undo.apply(y, order, inverse), y[inverse], y),
    ):
        assert torch.equal(ours, plain)
        (gradient,) = torch.autograd.grad(ours, leaf, upstream)
        (expected,) = torch.autograd.grad(plain, leaf, upstream)
        torch.testing.assert_close(gradient, expected)
