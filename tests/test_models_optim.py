"""Muon on stacks of matrices: what it makes of singular values, and of one step by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_training import small_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from repro.models.optim import Muon, orthogonalise, split_parameters


def known_svd(
    n: int, rows: int, columns: int, smallest: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """U, V and a stack of matrices whose singular values fall from 1 to ``smallest``."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(rows, columns)
    u = torch.linalg.qr(torch.randn(n, rows, rank, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(n, columns, rank, generator=generator, dtype=torch.float64)).Q
    values = torch.logspace(0, torch.log10(torch.tensor(smallest)).item(), rank).double()
    return u, v, u * values @ v.mT


@given(
    n=st.integers(1, 3),
    rows=st.integers(2, 24),
    columns=st.integers(2, 24),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_singular_values_come_near_one_and_directions_stay(
    n: int, rows: int, columns: int, scale: float, seed: int
) -> None:
    u, v, matrices = known_svd(n, rows, columns, 0.1, seed)
    out = orthogonalise((matrices * scale).float()).double()
    core = u.mT @ out @ v  # diagonal if the singular vectors are still those
    values = core.diagonal(dim1=-2, dim2=-1)
    low, high = 0.68, 1.15
    assert low - 0.01 < values.min()
    assert values.max() < high
    off = core - torch.diag_embed(values)
    assert off.abs().max() < 0.02


def test_zero_matrices_stay_zero() -> None:
    assert torch.equal(orthogonalise(torch.zeros(2, 4, 3)), torch.zeros(2, 4, 3))


def test_the_type_of_the_input_is_kept() -> None:
    assert orthogonalise(torch.randn(3, 4, dtype=torch.float64)).dtype is torch.float64


def naive_muon(
    weights: Tensor, gradients: list[Tensor], lr: float, momentum: float, decay: float, parts: int
) -> Tensor:
    """The update of one parameter, matrix by matrix with an exact SVD."""
    weights = weights.clone()
    buffer = torch.zeros_like(weights)
    for gradient in gradients:
        buffer = momentum * buffer + (1 - momentum) * gradient
        update = (1 - momentum) * gradient + momentum * buffer
        rows = weights.shape[-2] // parts
        flat = update.reshape(-1, rows, weights.shape[-1])
        scale = 0.2 * max(rows, weights.shape[-1]) ** 0.5
        directions = torch.stack([orthogonalise(matrix) for matrix in flat]).view_as(weights)
        weights = weights * (1 - lr * decay) - lr * scale * directions
    return weights


@pytest.mark.parametrize(
    ("shape", "parts"), [((5, 7), 1), ((3, 6, 4), 1), ((3, 6, 4), 2), ((2, 8, 3), 2)], ids=str
)
def test_a_step_equals_the_rule_written_out(shape: tuple[int, ...], parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    gradients = [torch.randn(shape, generator=generator) for _ in range(3)]
    parameter = nn.Parameter(start.clone())
    optimizer = Muon([{"params": [parameter], "parts": parts}], lr=0.05, weight_decay=0.2)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = naive_muon(start, gradients, 0.05, 0.95, 0.2, parts)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-5)
    # Taken as one matrix, the two halves would be another update.
    if parts == 2:
        whole = naive_muon(start, gradients, 0.05, 0.95, 0.2, 1)
        assert (whole - expected).abs().max() > 1e-3


def test_one_matrix_moves_as_with_the_muon_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(12, 20, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    settings = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.95}
    optimizers = (
        Muon([{"params": [ours]}], **settings),
        torch.optim.Muon([theirs], nesterov=True, adjust_lr_fn="match_rms_adamw", **settings),
    )
    for _ in range(3):
        gradient = torch.randn(12, 20, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    # torch computes the direction in bf16.
    moved = (ours - start).flatten(), (theirs - start).flatten()
    assert torch.cosine_similarity(*moved, dim=0) > 0.999
    torch.testing.assert_close(moved[0].norm(), moved[1].norm(), rtol=0.02, atol=0)


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    used, unused = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    optimizer = Muon([{"params": [used, unused]}], lr=0.1)
    used.grad = torch.ones(2, 3)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2, 3))
    assert not torch.equal(used, torch.ones(2, 3))
    optimizer.zero_grad(set_to_none=True)
    before = used.detach().clone()
    optimizer.step()  # nothing at all has a gradient
    assert torch.equal(used, before)


@pytest.mark.parametrize("name", ["moe-fine", "moe-shared"])
def test_every_parameter_has_exactly_one_optimizer(name: str) -> None:
    model = AutoModelForCausalLM.from_config(small_config(name))
    groups, rest = split_parameters(model)
    names = {id(p): n for n, p in model.named_parameters()}
    single, double = ({names[id(p)] for p in group["params"]} for group in groups)
    others = {names[id(p)] for p in rest}
    assert len(single) + len(double) + len(others) == len(names)
    assert single | double | others == set(names.values())
    assert [group["parts"] for group in groups] == [1, 2]
    assert double == {f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(2)}
    assert "model.layers.0.self_attn.q_proj.weight" in single
    assert "model.layers.1.mlp.experts.down_proj" in single
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"} <= others
    assert all(p.ndim >= 2 and min(p.shape[-2:]) > 1 for g in groups for p in g["params"])
    if name == "moe-shared":
        assert "model.layers.0.mlp.shared_expert.down_proj.weight" in single
        assert "model.layers.0.mlp.shared_expert_gate.weight" in others  # one row: no matrix
        assert "model.layers.0.self_attn.q_proj.bias" in others
