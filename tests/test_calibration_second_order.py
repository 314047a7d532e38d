"""Fisher information and the quadratic form, against autograd on single tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from repro.calibration.blocks import block_weights
from repro.calibration.fisher import collect_fisher
from repro.calibration.passes import backward_passes, frozen, scored_tokens
from repro.calibration.second_order import second_order
from repro.contract import Block
from repro.errors import UnknownNameError
from repro.integration.experts import experts_layers, use_experts
from repro.models.tiny import ARCHITECTURES, tiny_model


def _prompts(n: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(2, 64, (n, length), generator=torch.Generator().manual_seed(7))


def _token_gradients(model, ids, layer):
    """Gradients of the loss by every weight, one routed token at a time.

    The experts' matrices are applied token by token with a copy for each, so autograd gives
    what a token adds to the gradient: nothing of the outer-product rule is used.
    """
    copies = []

    def forward(hidden, index, weights):
        out = torch.zeros_like(hidden)
        gate_up, down = block_weights(module)
        for t in range(len(hidden)):
            for rank in range(index.shape[1]):
                e = int(index[t, rank])
                mine = [w[e].clone().requires_grad_() for w in (gate_up, down)]
                copies.append((e, *mine))
                pre = F.linear(hidden[t], mine[0])
                inner = module._apply_gate(pre[None])[0]
                out[t] = out[t] + weights[t, rank] * F.linear(inner, mine[1])
        return out

    module = layer.module
    module.forward = forward
    try:
        with frozen(model), torch.enable_grad():
            logits = model(ids, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="sum")
            loss.backward()
    finally:
        del module.forward
    return copies


@pytest.mark.parametrize("layer_index", [0, 1])
def test_fisher_is_the_sum_of_squared_token_gradients(layer_index):
    model, ids = tiny_model("qwen3_moe"), _prompts()
    layer = experts_layers(model)[layer_index]
    with use_experts(model, "eager"):
        copies = _token_gradients(model, ids, layer)
    gate_up, down = (torch.zeros(w.shape) for w in block_weights(layer.module))
    for e, first, second in copies:
        gate_up[e] += first.grad.square()
        down[e] += second.grad.square()
    found = collect_fisher(model, ids, labels="data", micro_batch=2)[layer_index]
    assert gate_up.sum() > 0
    for ours, expected in zip(found, (gate_up, down), strict=True):
        torch.testing.assert_close(ours, expected / 8, rtol=1e-3, atol=1e-7)


def test_quadratic_and_linear_form_equal_the_token_gradients():
    model, ids = tiny_model("qwen3_moe"), _prompts()
    layer = experts_layers(model)[0]
    generator = torch.Generator().manual_seed(1)
    errors = {
        (0, block): torch.randn(2, *w.shape, generator=generator)
        for block, w in zip(Block, block_weights(layer.module), strict=True)
    }
    with use_experts(model, "eager"):
        copies = _token_gradients(model, ids, layer)
    quadratic, linear = np.zeros((8, 2, 2)), np.zeros((8, 2, 2))
    for e, *mine in copies:
        for block in Block:
            for w in range(2):
                slope = float((mine[block].grad * errors[0, block][w, e]).sum())
                quadratic[e, block, w] += 0.5 * slope**2 / 8
                linear[e, block, w] += slope / 8
    found = second_order(model, ids, errors, labels="data")
    assert found.layer_ids == (0, 1)
    np.testing.assert_allclose(found.quadratic[0], quadratic, rtol=2e-3, atol=1e-9)
    np.testing.assert_allclose(found.linear[0], linear, rtol=2e-3, atol=1e-6)
    assert not found.quadratic[1].any()


def test_the_slope_is_that_of_the_loss():
    """Finite differences in the weights, as large as float32 norms inside ask for."""
    model, ids = tiny_model("qwen2_moe").double(), _prompts(3, 8)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :3] = False
    layer = experts_layers(model)[-1]
    weight = block_weights(layer.module)[Block.DOWN]
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)).double()
    expert = int(collect_fisher(model, ids, mask)[layer.layer_index][1].sum((1, 2)).argmax())
    found = second_order(
        model, ids, {(layer.layer_index, Block.DOWN): direction[None].float()}, mask, labels="data"
    )

    def loss() -> float:
        with torch.no_grad(), use_experts(model, "eager"):
            logits = model(ids, attention_mask=mask.long()).logits[:, :-1]
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return float(losses[scored_tokens(mask)].mean())

    step, original = 3e-3, weight[expert].clone()
    values = []
    for sign in (1, -1):
        weight[expert] = original + sign * step * direction[expert]
        values.append(loss())
    weight[expert] = original
    slope = (values[0] - values[1]) / (2 * step)
    row = found.layer_ids.index(layer.layer_index)
    assert abs(slope) > 1e-4
    assert found.linear[row, expert, Block.DOWN, 0] == pytest.approx(slope, rel=3e-3)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_can_be_differentiated(arch):
    model, ids = tiny_model(arch), _prompts()
    before = [(p.requires_grad, p.clone()) for p in model.parameters()]
    found = collect_fisher(model, ids)
    for layer in experts_layers(model):
        for values, weight in zip(
            found[layer.layer_index], block_weights(layer.module), strict=True
        ):
            assert values.shape == weight.shape
            assert torch.isfinite(values).all() and values.sum() > 0
    after = list(model.parameters())
    for parameter, (needed, value) in zip(after, before, strict=True):
        assert parameter.requires_grad == needed and parameter.grad is None
        assert torch.equal(parameter, value)


def test_labels_are_drawn_from_the_model_and_do_not_depend_on_micro_batches():
    model, ids = tiny_model("qwen3_moe"), _prompts(4, 6)
    one = collect_fisher(model, ids, seed=3, micro_batch=1)[1][0]
    four = collect_fisher(model, ids, seed=3, micro_batch=4)[1][0]
    torch.testing.assert_close(one, four, rtol=1e-3, atol=1e-7)
    assert not torch.allclose(one, collect_fisher(model, ids, seed=4)[1][0], rtol=1e-2)
    # labels of the text are others than those of a random model
    assert not torch.allclose(one, collect_fisher(model, ids, labels="data")[1][0], rtol=1e-2)


def test_sampled_labels_follow_the_predictions():
    from repro.calibration.passes import _sample

    logits = torch.tensor([0.0, 2.0, -1.0, -torch.inf]).expand(1, 20_000, 4)
    draws = torch.rand(1, 20_000, generator=torch.Generator().manual_seed(0))
    shares = torch.bincount(_sample(logits, draws)[0], minlength=4) / 20_000
    torch.testing.assert_close(shares, logits[0, 0].softmax(0), rtol=0, atol=0.01)
    assert shares[3] == 0


def test_padding_has_no_share():
    model, ids = tiny_model("qwen3_moe"), _prompts(1, 7)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, :3] = False
    padded = collect_fisher(model, ids, mask, labels="data")[1]
    alone = collect_fisher(model, ids[:, 3:], labels="data")[1]
    for a, b in zip(padded, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_unknown_labels_are_named():
    model, ids = tiny_model("qwen3_moe"), _prompts()
    mask = torch.ones_like(ids, dtype=torch.bool)
    with pytest.raises(UnknownNameError, match="labels 'sample'.*sampled"):
        backward_passes(model, ids, mask, labels="sample", seed=0, micro_batch=1)
