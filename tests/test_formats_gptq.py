"""Codes that make up for each other's errors, against a plain column-by-column reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro.errors import CheckpointError, ReproError
from repro.formats import gptq
from repro.formats.clipping import fit_rows, quantise
from repro.formats.encoded import EncodedStack
from repro.formats.gptq import DAMPING, inverse_factor
from repro.formats.group_affine import WIDTHS, GroupAffine

BOTH = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
GPTQ = GroupAffine(3, 32, encoder="gptq")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def correlated_inputs(n_experts: int, n_tokens: int, n_columns: int, seed: int) -> Tensor:
    """Inputs ``[E, T, K]`` whose channels differ in size and hang together."""
    g = generator(seed)
    mix = torch.randn(n_experts, n_columns, n_columns, generator=g) / n_columns**0.5
    size = torch.exp(0.5 * torch.randn(n_experts, 1, n_columns, generator=g))
    noise = torch.randn(n_experts, n_tokens, n_columns, generator=g)
    return noise @ (0.5 * torch.eye(n_columns) + mix) * size


def moments(x: Tensor) -> Tensor:
    return x.mT @ x / x.shape[1]


def random_weight(n_experts: int, n_rows: int, n_columns: int, seed: int = 0) -> Tensor:
    return 0.03 * torch.randn(n_experts, n_rows, n_columns, generator=generator(seed))


def output_error(stack: EncodedStack, weight: Tensor, x: Tensor) -> Tensor:
    """Mean squared error of the outputs by expert."""
    (n_bits,) = stack.widths
    return (x @ (stack.decode(n_bits) - weight).mT).square().mean(dim=(1, 2))


def same(a: EncodedStack, b: EncodedStack, expert: int | None = None) -> bool:
    at = slice(None) if expert is None else expert
    return all(torch.equal(a.tensors[name][at], b.tensors[name][at]) for name in a.tensors)


@BOTH
@pytest.mark.parametrize("group_size", [32, 64, 150])
@pytest.mark.parametrize("n_bits", WIDTHS)
def test_outputs_err_less_than_after_rounding(
    n_bits: int, group_size: int, symmetric: bool
) -> None:
    weight = random_weight(3, 40, 150)
    x = correlated_inputs(3, 1200, 150, seed=1)
    seen, unseen = x[:, :900], x[:, 900:]
    hessian = moments(seen)
    plain = GroupAffine(n_bits, group_size, symmetric)
    rounded = plain.encode_stack(weight)
    weighted = plain.encode_stack(weight, hessian.diagonal(dim1=1, dim2=2)[:, None])
    compensated = replace(plain, encoder="gptq").encode_stack(weight, hessian=hessian)
    assert compensated.nbytes(n_bits) == rounded.nbytes(n_bits)
    for inputs in (seen, unseen):
        error = output_error(compensated, weight, inputs)
        assert (error < 0.85 * output_error(weighted, weight, inputs)).all()
        assert (error < 0.75 * output_error(rounded, weight, inputs)).all()


@BOTH
@pytest.mark.parametrize("clip", ["none", "mse"])
@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e20])
def test_without_correlations_it_is_rounding_to_nearest(
    symmetric: bool, clip: str, factor: float
) -> None:
    weight = random_weight(2, 12, 100)
    plain = GroupAffine(3, 32, symmetric, clip=clip)  # type: ignore[arg-type]
    fmt = replace(plain, encoder="gptq")
    identity = fmt.encode_stack(weight, hessian=factor * torch.eye(100))
    assert same(identity, plain.encode_stack(weight))
    # Inputs of different sizes that do not hang together: errors are weighed, nothing moves.
    sizes = torch.rand(2, 100, generator=generator(3)) + 0.1
    diagonal = fmt.encode_stack(weight, hessian=torch.diag_embed(factor * sizes))
    assert same(diagonal, plain.encode_stack(weight, factor * sizes[:, None]))


def column_by_column(weight: Tensor, hessian: Tensor, fmt: GroupAffine) -> Tensor:
    """The definition, in float64: every column moves all that follow, one expert at a time."""
    decoded = torch.empty_like(weight)
    for expert, h in enumerate(hessian.double()):
        damped = h + DAMPING[0] * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
        inverse, rest = torch.linalg.inv(damped), weight[expert].double().clone()
        importance = h.diagonal().float().expand(rest.shape)
        for column in range(rest.shape[1]):
            if column % fmt.group_size == 0:
                group = slice(column, column + fmt.group_size)
                scale, zero = fit_rows(
                    rest[:, group].float(),
                    importance[:, group],
                    fmt.group_size,
                    fmt.n_bits,
                    fmt.symmetric,
                    fmt.clip,
                )
            code = quantise(rest[:, column].float(), scale[:, 0], zero[:, 0], fmt.n_bits)
            decoded[expert, :, column] = scale[:, 0] * (code - zero[:, 0])
            # `inverse` is that of the Hessian of this column and all that follow.
            error = rest[:, column] - decoded[expert, :, column].double()
            rest[:, column:] -= error[:, None] * inverse[0] / inverse[0, 0]
            inverse = (inverse - torch.outer(inverse[0], inverse[0]) / inverse[0, 0])[1:, 1:]
    return decoded


@pytest.mark.parametrize(
    ("n_columns", "group_size"), [(1, 4), (40, 1), (70, 32), (150, 50), (300, 128), (290, 140)]
)
@BOTH
def test_the_blocks_give_what_single_columns_give(
    n_columns: int, group_size: int, symmetric: bool
) -> None:
    weight = random_weight(2, 6, n_columns, seed=n_columns)
    hessian = moments(correlated_inputs(2, 2 * n_columns + 3, n_columns, seed=group_size))
    fmt = GroupAffine(4, group_size, symmetric, clip="none", encoder="gptq")
    decoded = fmt.encode_stack(weight, hessian=hessian).decode(4)
    reference = column_by_column(weight, hessian, fmt)
    # A rare tie may fall the other way in float32, and then moves what follows.
    close = torch.isclose(decoded, reference, rtol=2**-7, atol=1e-5)
    assert float(close.float().mean()) > 0.97
    assert float((decoded - reference).square().mean()) < 1e-3 * float(weight.square().mean())


def test_the_factor_is_that_of_the_inverse() -> None:
    hessian = moments(correlated_inputs(3, 200, 30, seed=0)).double()
    factor, failed = inverse_factor(hessian)
    mean = hessian.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
    inverse = torch.linalg.inv(hessian / mean + DAMPING[0] * torch.eye(30, dtype=torch.float64))
    assert not failed.any()
    assert torch.equal(factor, factor.triu())
    torch.testing.assert_close((factor.mT @ factor).double(), inverse, rtol=1e-4, atol=1e-4)


def test_experts_without_a_hessian_are_rounded_and_counted() -> None:
    weight = random_weight(4, 8, 64)
    hessian = moments(correlated_inputs(4, 300, 64, seed=2))
    whole = GPTQ.encode_stack(weight, hessian=hessian)
    hessian[1] = 0  # never routed
    hessian[2, 3, 3] = -100 * hessian[2].diagonal().mean()  # no matrix of moments
    stack = GPTQ.encode_stack(weight, hessian=hessian)
    plain = replace(GPTQ, encoder="rtn").encode_stack(weight)
    assert stack.notes == {"hessian_fallbacks": 2} and whole.notes == {}
    for expert in range(4):
        assert same(stack, plain if expert in (1, 2) else whole, expert)


def test_a_hessian_a_little_off_is_damped_more() -> None:
    hessian = torch.eye(16)[None].clone()
    hessian[0, 0, 1] = hessian[0, 1, 0] = 1.05  # smallest eigenvalue -0.05
    stack = GPTQ.encode_stack(random_weight(1, 4, 16), hessian=hessian)
    assert "hessian_fallbacks" not in stack.notes
    assert torch.isfinite(stack.decode(3)).all()


@BOTH
def test_one_token_is_enough(symmetric: bool) -> None:
    """A Hessian of rank one, as of an expert that saw a single token."""
    weight = random_weight(2, 8, 64)
    x = correlated_inputs(2, 1, 64, seed=5)
    fmt = replace(GPTQ, symmetric=symmetric)
    stack = fmt.encode_stack(weight, hessian=moments(x))
    assert stack.notes == {} and torch.isfinite(stack.decode(3)).all()
    plain = replace(fmt, encoder="rtn").encode_stack(weight)
    assert (output_error(stack, weight, x) < 0.2 * output_error(plain, weight, x)).all()


def test_a_channel_that_was_always_zero_moves_nothing() -> None:
    weight = random_weight(1, 8, 32)
    x = correlated_inputs(1, 200, 32, seed=6)
    x[..., [4, 20]] = 0
    stack = GPTQ.encode_stack(weight, hessian=moments(x))
    other = weight.clone()
    other[..., [4, 20]] *= -0.5
    again = GPTQ.encode_stack(other, hessian=moments(x))
    alive = [column for column in range(32) if column not in (4, 20)]
    assert torch.equal(stack.decode(3)[..., alive], again.decode(3)[..., alive])
    # The channel itself is rounded like any other weight of its group.
    scale = stack.tensors["scales"].float()[0, :, 0, None]
    dead = weight[0][:, [4, 20]]
    low, high = torch.minimum(-4 * scale, 3 * scale), torch.maximum(-4 * scale, 3 * scale)
    wrong = (stack.decode(3)[0][:, [4, 20]] - dead.clamp(low, high)).abs()
    assert (wrong <= 0.501 * scale.abs()).all()


@BOTH
@settings(max_examples=10)
@given(exponent=st.integers(-60, 100))
def test_the_size_of_the_weights_does_not_matter(symmetric: bool, exponent: int) -> None:
    weight = random_weight(2, 3, 40)
    weight[1] *= 1000
    hessian = moments(correlated_inputs(2, 80, 40, seed=7))
    fmt = replace(GPTQ, symmetric=symmetric)
    decoded = fmt.encode_stack(weight * 2.0**exponent, hessian=hessian * 1e10).decode(3)
    reference = fmt.encode_stack(weight, hessian=hessian * 1e10).decode(3)
    assert torch.equal(decoded, reference * 2.0**exponent)


def test_experts_do_not_depend_on_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(5, 8, 96)
    hessian = moments(correlated_inputs(5, 200, 96, seed=8))
    stack = GPTQ.encode_stack(weight, hessian=hessian)
    monkeypatch.setattr(gptq, "_CHUNK_BYTES", (700_000, 0))  # two experts at once
    assert same(GPTQ.encode_stack(weight, hessian=hessian), stack)
    shared = GPTQ.encode_stack(weight, hessian=hessian[0])
    assert same(shared, stack, 0) and not same(shared, stack)
    alone = GPTQ.encode(weight[3], hessian=hessian[3])
    assert torch.equal(alone.decode(3), stack.decode(3, 3))


def test_importance_of_ones_own_is_used() -> None:
    weight = random_weight(1, 8, 64)
    hessian = moments(correlated_inputs(1, 200, 64, seed=9))
    diagonal = hessian.diagonal(dim1=1, dim2=2)[:, None]
    stack = GPTQ.encode_stack(weight, hessian=hessian)
    assert same(GPTQ.encode_stack(weight, diagonal, hessian), stack)
    assert not same(GPTQ.encode_stack(weight, torch.ones(1, 1, 64), hessian), stack)


@given(st.integers(1, 1000), st.integers(1, 400))
def test_blocks_cover_the_row_and_respect_groups(n_columns: int, group_size: int) -> None:
    blocks = gptq._blocks(n_columns, group_size)
    assert [c for block in blocks for c in range(*block)] == list(range(n_columns))
    assert all(0 < last - first <= 128 for first, last in blocks)
    for start in range(0, n_columns, group_size):
        last_column = min(start + group_size, n_columns) - 1
        (home,) = [block for block in blocks if block[0] <= start < block[1]]
        # Either the group lies in its block, or it begins with it.
        assert last_column < home[1] or home[0] == start


def test_a_hessian_that_cannot_be_used_is_refused() -> None:
    weight = random_weight(2, 4, 8)
    with pytest.raises(ReproError, match=r"encoder 'gptq' needs hessian \[E, K, K\]"):
        GPTQ.encode_stack(weight)
    for shape in ((2, 8), (3, 8, 8), (2, 9, 9), (8,), (1, 2, 8, 8)):
        with pytest.raises(CheckpointError, match=r"give one \[8, 8\] per expert"):
            GPTQ.encode_stack(weight, hessian=torch.zeros(shape))
    hessian = torch.eye(8).expand(2, 8, 8).clone()
    hessian[1, 2, 3] = torch.nan
    with pytest.raises(CheckpointError, match="hessian has NaN"):
        GPTQ.encode_stack(weight, hessian=hessian)


def test_int2_from_int4_compensates_both_times() -> None:
    weight = random_weight(2, 8, 128)
    x = correlated_inputs(2, 400, 128, seed=10)
    fmt = GroupAffine(2, 64, encoder="gptq", from_bits=4)
    stack = fmt.encode_stack(weight, hessian=moments(x))
    first = GroupAffine(4, 128, encoder="gptq").encode_stack(weight, hessian=moments(x))
    second = replace(fmt, from_bits=None).encode_stack(first.decode(4), hessian=moments(x))
    assert same(stack, second)


@pytest.mark.gpu
@BOTH
def test_a_gpu_does_as_well(symmetric: bool) -> None:
    weight = random_weight(3, 32, 200)
    x = correlated_inputs(3, 600, 200, seed=11)
    fmt = replace(GPTQ, symmetric=symmetric)
    cpu = fmt.encode_stack(weight, hessian=moments(x))
    gpu = fmt.encode_stack(weight.cuda(), hessian=moments(x).cuda())
    assert gpu.tensors["codes"].is_cuda
    ratio = output_error(gpu.to("cpu"), weight, x) / output_error(cpu, weight, x)
    assert ((ratio > 0.9) & (ratio < 1.1)).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [3.4028e38, 1e-44])
def test_the_ends_of_float32_stay_finite_and_are_counted(value: float, symmetric: bool) -> None:
    fmt = GroupAffine(4, 16, symmetric=symmetric, encoder="gptq")
    weight = torch.full((2, 8, 40), value)
    inputs = torch.randn(2, 100, 40, generator=torch.Generator().manual_seed(0))
    stack = fmt.encode_stack(weight, None, inputs.mT @ inputs / 100)
    assert bool(torch.isfinite(stack.decode(4)).all())
    assert stack.notes.get("vanished_groups", 0) == (48 if value < 1 else 0)
