"""Integer codes per group: bytes, the search for scale and zero, and what is out of the ordinary.

The search is held against the exact optimum of small groups, found by enumeration: codes of
the best asymmetric grid rise with the weights, so every way to cut the sorted weights into
runs of equal codes is tried with its least-squares scale and zero; the best symmetric grid has
one number, and between two scales at which a code changes least squares finds it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro.errors import CheckpointError, ReproError, UnknownNameError
from repro.formats import group_affine
from repro.formats.clipping import fit_groups, implicit_zero, power_of_two, quantise
from repro.formats.encoded import scheme_from_json, scheme_to_json
from repro.formats.group_affine import WIDTHS, GroupAffine

BOTH = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])


def random_weight(shape: tuple[int, ...], seed: int = 0, law: str = "gauss") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    gauss = torch.randn(shape, generator=generator)
    if law == "gauss":
        return gauss
    chi2 = sum(torch.randn(shape, generator=generator).square() for _ in range(5))
    return gauss / (chi2 / 5).sqrt()  # Student-t with 5 degrees of freedom


def random_importance(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).square() + 0.01


def error_of(weight: Tensor, fmt: GroupAffine, importance: Tensor | None = None) -> float:
    decoded = fmt.encode_stack(weight, importance).decode(fmt.n_bits)
    squares = (decoded - weight).double().square()
    return float((squares if importance is None else squares * importance).sum())


# Bytes ---------------------------------------------------------------------------------------


@given(
    st.sampled_from(WIDTHS),
    st.integers(1, 3),
    st.integers(1, 4097),
    st.integers(1, 300),
    st.booleans(),
    st.integers(0, 2**31),
)
@example(3, 2, 4097, 128, False, 0)
@example(2, 1, 1, 64, True, 0)
def test_the_parts_alone_give_the_matrix_back(
    n_bits: int, n_rows: int, n_columns: int, group_size: int, symmetric: bool, seed: int
) -> None:
    weight = random_weight((n_rows, n_columns), seed)
    matrix = GroupAffine(n_bits, group_size, symmetric, clip="none").encode(weight)
    assert matrix.shape == (n_rows, n_columns) and matrix.widths == (n_bits,)
    parts = {part: matrix.read(part) for part in matrix.slices(n_bits)}
    assert [part.kind for part in parts] == ["codes", "scales"]
    decoded = matrix.decode(n_bits)
    assert torch.equal(matrix.decode(n_bits, parts), decoded)
    assert torch.isfinite(decoded).all()

    n_groups = -(-n_columns // group_size)
    pieces = {8: [8], 6: [4, 2], 5: [4, 1], 4: [4], 3: [2, 1], 2: [2]}[n_bits]
    code_bytes = sum(4 * n_rows * -(-n_columns * size // 32) for size in pieces)
    assert matrix.nbytes(n_bits) == code_bytes + n_rows * n_groups * (2 if symmetric else 4)

    # No worse than the plainest grid, which spans the group and zero.
    largest_code = 2**n_bits - 1
    for start in range(0, n_columns, group_size):
        group = weight[:, start : start + group_size]
        wrong = (decoded[:, start : start + group_size] - group).square().sum(dim=1).sqrt()
        if symmetric:
            step = group.abs().amax(dim=1) / (2 ** (n_bits - 1) - 1)
        else:
            step = (group.amax(1).clamp(min=0) - group.amin(1).clamp(max=0)) / largest_code
        rounding = 0.5 + (largest_code + 1) * 2**-8  # of scale and zero
        assert (wrong <= 1.01 * step * rounding * group.shape[1] ** 0.5).all()


@given(st.sampled_from(WIDTHS), st.integers(1, 4), st.integers(1, 200), st.integers(0, 2**31))
def test_codes_come_back(n_bits: int, n_rows: int, n_columns: int, seed: int) -> None:
    scheme = GroupAffine(n_bits).scheme(n_rows, n_columns)
    generator = torch.Generator().manual_seed(seed)
    shape = (2, n_rows, n_columns)
    codes = torch.randint(0, 2**n_bits, shape, generator=generator, dtype=torch.uint8)
    words = scheme.pack(codes)
    (spec, _) = scheme.tensors(n_bits)
    assert words.shape == (2, *spec.shape) and words.dtype == spec.dtype
    assert torch.equal(scheme.unpack(words), codes)


def test_a_matrix_by_hand() -> None:
    """5 bits are a piece of 4 and a piece of 1; scale 0.5 and zero 3 in the first group."""
    scheme = GroupAffine(5, group_size=2, symmetric=False).scheme(1, 3)
    codes = torch.tensor([[31, 2, 17]], dtype=torch.uint8)
    words = scheme.pack(codes)
    assert words.tolist() == [0xF | 1 << 4 | 8 << 8, 0b101]
    scales = torch.tensor([[[0.5, -2.0]], [[3.0, 16.5]]], dtype=torch.bfloat16)
    decoded = scheme.decode({"codes": words, "scales": scales}, 5)
    assert decoded.tolist() == [[14.0, -0.5, -1.0]]


@BOTH
def test_the_scheme_survives_json(symmetric: bool) -> None:
    scheme = GroupAffine(3, 32, symmetric).scheme(5, 7)
    assert scheme_from_json(scheme_to_json(scheme)) == scheme


@BOTH
def test_a_stack_is_its_matrices(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight((5, 6, 100)).bfloat16()
    importance = random_importance((5, 1, 100))
    fmt = GroupAffine(3, 32, symmetric)
    stack = fmt.encode_stack(weight, importance)
    for expert in range(5):
        alone = fmt.encode(weight[expert], importance[expert])
        for name, tensor in alone.tensors.items():
            assert torch.equal(stack.tensors[name][expert], tensor)
        assert torch.equal(stack.decode(3, expert), stack.decode(3)[expert])
    monkeypatch.setattr(group_affine, "_CHUNK_WEIGHTS", (1200, 1200))
    monkeypatch.setattr(group_affine, "_FITTED_WEIGHTS", (300, 300))
    again = fmt.encode_stack(weight, importance)
    assert all(torch.equal(again.tensors[name], stack.tensors[name]) for name in stack.tensors)
    assert again.notes == stack.notes == {"short_groups": 30}


@BOTH
def test_what_precision_the_weights_have_does_not_matter(symmetric: bool) -> None:
    weight = random_weight((1, 4, 64)).half()
    fmt = GroupAffine(4, 32, symmetric)
    reference = fmt.encode_stack(weight).decode(4)
    assert torch.equal(fmt.encode_stack(weight.float()).decode(4), reference)
    assert torch.equal(fmt.encode_stack(weight.double()).decode(4), reference)


@BOTH
def test_columns_of_a_short_group_stand_alone(symmetric: bool) -> None:
    """What is not there influences nothing: both column ranges encode as they do alone."""
    weight, importance = random_weight((2, 4, 100)), random_importance((2, 4, 100))
    fmt = GroupAffine(4, 64, symmetric)
    whole = fmt.encode_stack(weight, importance)
    for columns in (slice(0, 64), slice(64, 100)):
        alone = fmt.encode_stack(weight[..., columns], importance[..., columns])
        assert torch.equal(whole.decode(4)[..., columns], alone.decode(4))
    assert whole.notes == {"short_groups": 8}
    assert fmt.encode_stack(weight[..., :5]).notes == {"short_groups": 8}


# The search ----------------------------------------------------------------------------------


@cache
def rising_codes(n_weights: int, n_bits: int) -> np.ndarray:
    """All ways to give sorted weights codes that never fall, one a row."""
    cuts = itertools.combinations(range(n_weights + 2**n_bits - 1), 2**n_bits - 1)
    firsts = np.array(list(cuts)) - np.arange(2**n_bits - 1)  # where each next code begins
    return (np.arange(n_weights)[None, :, None] >= firsts[:, None, :]).sum(axis=2)


def exact_asymmetric(group: np.ndarray, weights: np.ndarray, n_bits: int) -> float:
    """Least weighted squared error of any grid ``scale * (code - zero)``, unrounded."""
    order = np.argsort(group)
    x, w = group[order], weights[order]
    codes = rising_codes(len(x), n_bits)
    mean = (w * x).sum() / w.sum()
    c_mean = codes @ w / w.sum()
    variance = codes**2 @ w - c_mean**2 * w.sum()
    covariance = codes @ (w * x) - c_mean * mean * w.sum()
    gain = np.where(variance > 1e-9, covariance**2 / np.maximum(variance, 1e-9), 0.0)
    return float((w * (x - mean) ** 2).sum() - gain.max())


def exact_symmetric(x: np.ndarray, w: np.ndarray, n_bits: int) -> float:
    """Least weighted squared error of any scale of either sign, unrounded."""
    zero = 2 ** (n_bits - 1)
    changes = np.abs(x)[:, None] / (np.arange(zero) + 0.5)
    edges = np.concatenate([[0.0], np.sort(changes.ravel()), [4 * np.abs(x).max()]])
    middles = (edges[1:] + edges[:-1]) / 2
    best = float((w * x**2).sum())
    for scales in (middles[middles > 0], -middles[middles > 0]):
        levels = np.clip(np.rint(x / scales[:, None]), -zero, zero - 1)
        power = levels**2 @ w
        gain = (levels @ (w * x)) ** 2 / np.maximum(power, 1e-30)
        best = min(best, float((w * x**2).sum() - gain.max()))
    return best


@pytest.mark.parametrize("law", ["gauss", "student"])
@pytest.mark.parametrize("weighted", [False, True], ids=["even", "weighted"])
@pytest.mark.parametrize(
    ("n_bits", "group_size", "symmetric", "bound"),
    [
        (2, 24, False, 1.04),
        (3, 11, False, 1.05),
        (2, 64, True, 1.005),
        (3, 64, True, 1.005),
        (4, 64, True, 1.01),
    ],
)
def test_the_search_comes_close_to_the_exact_optimum(
    law: str, weighted: bool, n_bits: int, group_size: int, symmetric: bool, bound: float
) -> None:
    x = random_weight((24, group_size), 5, law)
    w = random_importance((24, group_size)) if weighted else torch.ones(24, group_size)
    scale, zero = fit_groups(x, w, n_bits, symmetric, "mse")
    codes = quantise(x, scale[:, None], zero[:, None], n_bits)
    found = ((scale[:, None] * (codes - zero[:, None]) - x).square() * w).double().sum(dim=1)
    exact = exact_symmetric if symmetric else exact_asymmetric
    pairs = zip(x.double().numpy(), w.double().numpy(), strict=True)
    best = torch.tensor([exact(*pair, n_bits) for pair in pairs], dtype=torch.float64)
    assert (found >= best * (1 - 1e-5)).all(), "no optimum: the reference is wrong"
    assert float(found.sum() / best.sum()) <= bound


def test_the_exact_reference_against_all_codes() -> None:
    """The enumeration of runs misses nothing: all codes of four weights, tried one by one."""
    x, w = random_weight((4,), 2).double().numpy(), random_importance((4,)).double().numpy()
    best = np.inf
    for codes in itertools.product(range(4), repeat=4):
        design = np.stack([np.array(codes, float), np.ones(4)], axis=1)
        fit = np.linalg.lstsq(design * np.sqrt(w)[:, None], x * np.sqrt(w), rcond=None)[0]
        best = min(best, float((w * (design @ fit - x) ** 2).sum()))
    assert exact_asymmetric(x, w, 2) == pytest.approx(best, abs=1e-12)


@BOTH
@settings(max_examples=30)
@given(
    n_bits=st.sampled_from(WIDTHS),
    group_size=st.integers(1, 70),
    seed=st.integers(0, 2**31),
    weighted=st.booleans(),
    law=st.sampled_from(["gauss", "student"]),
    shift=st.sampled_from([0.0, 3.0, -100.0]),
)
def test_searching_never_makes_it_worse(
    symmetric: bool,
    n_bits: int,
    group_size: int,
    seed: int,
    weighted: bool,
    law: str,
    shift: float,
) -> None:
    weight = random_weight((2, 3, 130), seed, law) + shift
    importance = random_importance((2, 3, 130), seed + 1) if weighted else None
    fmt = GroupAffine(n_bits, group_size, symmetric)
    plain = error_of(weight, replace(fmt, clip="none"), importance)
    assert error_of(weight, fmt, importance) <= plain * (1 + 1e-3) + 1e-9


@BOTH
@pytest.mark.parametrize("law", ["gauss", "student"])
def test_more_bits_and_smaller_groups_err_less(symmetric: bool, law: str) -> None:
    weight = random_weight((2, 16, 256), 3, law)
    errors = [error_of(weight, GroupAffine(n_bits, 64, symmetric)) for n_bits in WIDTHS]
    assert all(a > 1.9 * b for a, b in itertools.pairwise(errors)), errors
    errors = [error_of(weight, GroupAffine(3, size, symmetric)) for size in (256, 128, 64, 32)]
    assert all(a > b for a, b in itertools.pairwise(errors)), errors


def test_the_sign_of_the_scale_follows_the_longer_side() -> None:
    levels = torch.arange(-8.0, 8.0)
    for values in (levels, -levels):
        matrix = GroupAffine(4, 16).encode(0.25 * values[None])
        assert torch.equal(matrix.decode(4), 0.25 * values[None])
    assert float(matrix.tensors["scales"]) == -0.25


def test_what_does_not_matter_does_not_cost() -> None:
    """A huge weight on a dead channel leaves the others their grid."""
    weight, importance = random_weight((1, 8, 64)), torch.ones(1, 1, 64)
    weight[..., 7], importance[..., 7] = 1e9, 0.0
    for symmetric in (True, False):
        fmt = GroupAffine(4, 64, symmetric)
        stack = fmt.encode_stack(weight, importance)
        wrong = ((stack.decode(4) - weight).square() * importance).mean()
        assert wrong < 0.02
        assert error_of(weight, fmt) > 100


@BOTH
def test_importance_that_is_zero_means_that_all_errors_matter_alike(symmetric: bool) -> None:
    weight = random_weight((3, 4, 96))
    importance = random_importance((3, 1, 96))
    importance[1] = 0
    importance[2, :, :32] = 0  # one group of an expert
    fmt = GroupAffine(2, 32, symmetric)
    stack, even = fmt.encode_stack(weight, importance), fmt.encode_stack(weight)
    assert torch.equal(stack.decode(2, 1), even.decode(2, 1))
    assert torch.equal(stack.decode(2, 2)[:, :32], even.decode(2, 2)[:, :32])
    assert not torch.equal(stack.decode(2, 2)[:, 32:], even.decode(2, 2)[:, 32:])
    assert stack.notes == {"unweighted_experts": 1}


@BOTH
@given(exponent=st.integers(-80, 100), seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_the_size_of_the_weights_does_not_matter(symmetric: bool, exponent: int, seed: int) -> None:
    weight = random_weight((1, 2, 40), seed)
    fmt = GroupAffine(3, 16, symmetric)
    decoded = fmt.encode_stack(weight * 2.0**exponent).decode(3)
    assert torch.equal(decoded, fmt.encode_stack(weight).decode(3) * 2.0**exponent)


# Out of the ordinary -------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("clip", ["none", "mse"])
@pytest.mark.parametrize("n_bits", WIDTHS)
def test_constant_rows_and_empty_experts(symmetric: bool, clip: str, n_bits: int) -> None:
    weight = random_weight((3, 4, 48)).bfloat16().float()
    weight[0, 1], weight[0, 2], weight[2] = 0.3, -1e-3, 0.0
    weight = weight.bfloat16()
    fmt = GroupAffine(n_bits, 32, symmetric, clip=clip)  # type: ignore[arg-type]
    stack = fmt.encode_stack(weight)
    decoded = stack.decode(n_bits)
    assert stack.notes == {"constant_rows": 2, "zero_experts": 1, "short_groups": 12}
    assert torch.equal(decoded[0, 1:3], weight[0, 1:3].float())
    assert not decoded[2].any()


@pytest.mark.parametrize("n_bits", WIDTHS)
def test_constant_rows_that_bfloat16_cannot_hold(n_bits: int) -> None:
    weight = (0.1 + torch.rand(64, 1, generator=torch.Generator().manual_seed(0))).expand(64, 8)
    decoded = GroupAffine(n_bits, 8, symmetric=False).encode(weight).decode(n_bits)
    assert ((decoded - weight).abs() <= weight * 2**-17).all()
    halves = weight.half().float()
    decoded = GroupAffine(n_bits, 8, symmetric=False).encode(halves).decode(n_bits)
    assert torch.equal(decoded, halves) or n_bits == 2


@BOTH
@pytest.mark.parametrize("clip", ["none", "mse"])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-8, 1e8, 1e30, 8e37])
def test_weights_of_any_size_stay_finite(symmetric: bool, clip: str, size: float) -> None:
    unit = random_weight((1, 4, 64)).clamp(-4, 4)
    importance = 1e30 * random_importance((1, 1, 64))
    for n_bits in WIDTHS:
        fmt = GroupAffine(n_bits, 32, symmetric, clip=clip)  # type: ignore[arg-type]
        stack = fmt.encode_stack(unit * size, importance)
        decoded = stack.decode(n_bits)
        assert torch.isfinite(decoded).all()
        if size == 1e-38:
            assert stack.notes == {"vanished_groups": 8} and not decoded.any()
        else:
            assert stack.notes == {}
            wrong = (decoded.double() / size - unit).square().mean()
            assert wrong < {2: 1.0, 3: 0.3, 4: 0.05}.get(n_bits, 0.01)


@BOTH
@pytest.mark.parametrize("clip", ["none", "mse"])
@pytest.mark.parametrize("n_bits", WIDTHS)
def test_the_largest_numbers_there_are_stay_finite(symmetric: bool, clip: str, n_bits: int) -> None:
    largest = torch.finfo(torch.float32).max
    weight = random_weight((4, 64)).clamp(-1, 1) * largest
    weight[1], weight[2], weight[3] = largest, -largest, weight[3].abs()
    fmt = GroupAffine(n_bits, 16, symmetric, clip=clip)  # type: ignore[arg-type]
    decoded = fmt.encode(weight).decode(n_bits)
    assert torch.isfinite(decoded).all()
    assert (decoded.double() / largest - weight.double() / largest).abs().max() < 0.7


def test_a_weight_that_hardly_matters_is_clipped() -> None:
    weight, importance = random_weight((1, 8, 64)), torch.ones(1, 1, 64)
    weight[..., 7], importance[..., 7] = 100.0, 1e-6
    for symmetric in (True, False):
        decoded = GroupAffine(4, 64, symmetric).encode_stack(weight, importance).decode(4)
        others = [column for column in range(64) if column != 7]
        assert (decoded - weight)[..., others].square().mean() < 0.05


def test_one_huge_weight_beside_tiny_ones() -> None:
    weight = torch.full((1, 1, 64), 1e-30)
    weight[0, 0, 0] = -3e38
    for symmetric in (True, False):
        decoded = GroupAffine(4, 64, symmetric).encode_stack(weight).decode(4)
        assert torch.isfinite(decoded).all()
        assert decoded[0, 0, 0] == pytest.approx(-3e38, rel=0.02)
        assert not decoded[0, 0, 1:].any()


def test_a_group_far_from_zero_is_not_lost_to_the_rounding_of_its_zero() -> None:
    weight = 100 + random_weight((1, 16, 64)) * 0.1
    decoded = GroupAffine(4, 64, symmetric=False).encode_stack(weight).decode(4)
    assert (decoded - weight).abs().max() < 1.0


@BOTH
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_named(symmetric: bool, value: float) -> None:
    weight = random_weight((2, 3, 8))
    weight[1, 2, 3] = value
    with pytest.raises(CheckpointError, match="expert 1, row 2"):
        GroupAffine(4, 4, symmetric).encode_stack(weight)


def test_what_cannot_be_encoded_is_refused() -> None:
    weight = random_weight((1, 2, 8))
    with pytest.raises(CheckpointError, match="not codes of a quantised checkpoint"):
        GroupAffine().encode_stack(weight.to(torch.int8))
    with pytest.raises(CheckpointError, match="1e\\+300 overflows float32"):
        GroupAffine().encode_stack(torch.full((1, 1, 2), 1e300, dtype=torch.float64))
    with pytest.raises(CheckpointError, match="importance of shape"):
        GroupAffine().encode_stack(weight, torch.ones(1, 1, 9))
    with pytest.raises(CheckpointError, match="negative, NaN or infinite"):
        GroupAffine().encode_stack(weight, -torch.ones(1, 1, 8))


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown integer width '7'"):
        GroupAffine(7)
    with pytest.raises(UnknownNameError, match="unknown integer width '1'"):
        GroupAffine(2, from_bits=1)
    with pytest.raises(ReproError, match="a group of 0 columns"):
        GroupAffine(4, 0)
    with pytest.raises(UnknownNameError, match="choose one of mse, none"):
        GroupAffine(clip="max")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="choose one of gptq, rtn"):
        GroupAffine(encoder="awq")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unknown width '3'"):
        GroupAffine(4).encode(random_weight((2, 8))).decode(3)


@BOTH
def test_made_from_a_quantised_version(symmetric: bool) -> None:
    weight = random_weight((2, 8, 128), 4)
    compounded = GroupAffine(2, 64, symmetric, from_bits=4, from_group_size=128)
    first = GroupAffine(4, 128, symmetric).encode_stack(weight)
    by_hand = GroupAffine(2, 64, symmetric).encode_stack(first.decode(4))
    stack = compounded.encode_stack(weight)
    assert all(torch.equal(stack.tensors[n], by_hand.tensors[n]) for n in stack.tensors)
    assert stack.nbytes(2) == by_hand.nbytes(2)
    assert error_of(weight, compounded) > error_of(weight, GroupAffine(2, 64, symmetric))
    short = replace(compounded, from_group_size=100).encode_stack(weight)
    assert short.notes == {"source_short_groups": 16}


@pytest.mark.gpu
@BOTH
def test_a_gpu_finds_the_same(symmetric: bool) -> None:
    weight, importance = random_weight((4, 64, 200)), random_importance((4, 1, 200))
    for n_bits in WIDTHS:
        fmt = GroupAffine(n_bits, 64, symmetric)
        cpu = fmt.encode_stack(weight, importance)
        gpu = fmt.encode_stack(weight.cuda(), importance.cuda())
        assert gpu.tensors["codes"].is_cuda and gpu.notes == cpu.notes
        moved = gpu.to("cpu").decode(n_bits)
        assert torch.equal(moved, gpu.decode(n_bits).cpu())
        errors = [((d - weight).square() * importance).sum() for d in (moved, cpu.decode(n_bits))]
        assert float(errors[0]) == pytest.approx(float(errors[1]), rel=1e-3)


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    assert power_of_two(exponents).tolist() == [2.0**e for e in range(-126, 128)]


def test_implicit_zeros() -> None:
    assert [implicit_zero(n_bits) for n_bits in (2, 4, 8)] == [2, 8, 128]


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_far_wider_than_the_matrix_costs_no_memory(symmetric: bool) -> None:
    weight = torch.randn(4, 33, generator=torch.Generator().manual_seed(1))
    far = GroupAffine(4, 10**12, symmetric=symmetric).encode(weight)
    near = GroupAffine(4, 33, symmetric=symmetric).encode(weight)
    assert torch.equal(far.decode(4), near.decode(4))
