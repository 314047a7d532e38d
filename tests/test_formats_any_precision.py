"""The any-precision format: nested codes, tables, scales, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import repro.formats.any_precision as module
from repro.errors import CheckpointError
from repro.formats import AnyPrecision
from repro.formats.any_precision import PARENT_BITS, WIDTHS, AnyPrecisionScheme
from repro.formats.encoded import all_tensors, scheme_from_json, scheme_to_json
from repro.formats.kmeans import Problems, nested_seed, split
from repro.formats.layout import fragmentation, row_words


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(decoded: torch.Tensor, weight: torch.Tensor) -> float:
    return float((decoded - weight).square().sum() / weight.square().sum())


@given(
    n_experts=st.integers(1, 3),
    n_rows=st.integers(1, 40),
    n_columns=st.one_of(st.integers(1, 100), st.sampled_from([127, 128, 129, 1024, 4097])),
    rows_per_lut=st.sampled_from([0, 1, 3, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    number=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_codes_are_nested_and_the_parts_give_the_matrix(
    n_experts: int, n_rows: int, n_columns: int, rows_per_lut: int, dtype: torch.dtype, number: int
) -> None:
    weight = normal(n_experts, n_rows, n_columns, seed=number).to(dtype)
    stack = AnyPrecision(rows_per_lut).encode_stack(weight)
    scheme = stack.scheme
    parent = scheme.codes(stack.tensors, PARENT_BITS)
    assert parent.shape == weight.shape
    for n_bits in WIDTHS:
        codes = scheme.codes(stack.tensors, n_bits)
        assert torch.equal(codes, parent >> (PARENT_BITS - n_bits))
        decoded = stack.decode(n_bits)
        assert decoded.shape == weight.shape and bool(torch.isfinite(decoded).all())
        # By hand, weight by weight, for one row.
        expert, row = n_experts - 1, n_rows - 1
        table = stack.tensors[f"lut{n_bits}"][expert, row // scheme.rows_per_lut].float()
        scale = stack.tensors["scales"][expert, row].float() if scheme.has_scales else 1.0
        by_hand = table[codes[expert, row].long()] * scale
        assert torch.equal(by_hand, decoded[expert, row])
        one = stack[expert]
        parts = {part: one.read(part) for part in one.slices(n_bits)}
        assert torch.equal(one.decode(n_bits, parts), decoded[expert])
        assert sum(map(len, parts.values())) == stack.nbytes(n_bits) == one.nbytes(n_bits)
    # Unused bits of the last word are zero: nothing reads them as weights.
    tail = n_columns % 32
    if tail:
        last = stack.tensors["plane0"][..., -1]
        assert not bool((last.to(torch.int64) & 0xFFFFFFFF).bitwise_right_shift(tail).any())


@given(
    n_columns=st.integers(8, 300),
    rows_per_lut=st.sampled_from([0, 1, 8]),
    number=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_error_falls_with_every_bit(n_columns: int, rows_per_lut: int, number: int) -> None:
    weight = normal(2, 16, n_columns, seed=number)
    stack = AnyPrecision(rows_per_lut).encode_stack(weight)
    errors = [relative_error(stack.decode(n_bits), weight) for n_bits in WIDTHS]
    assert all(b < a or a < 1e-6 for a, b in zip(errors, errors[1:], strict=False)), errors
    assert errors[-1] < 2e-4


def exact_code(values: np.ndarray, weights: np.ndarray, n_clusters: int) -> float:
    """Smallest weighted squared error of one row with that many levels (dynamic programming)."""
    order = np.argsort(values)
    x, w = values[order].astype(float), weights[order].astype(float)
    mass, first, second = (
        np.concatenate([[0.0], np.cumsum(term)]) for term in (w, w * x, w * x * x)
    )
    span = mass[None, :] - mass[:, None]
    sums = first[None, :] - first[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = second[None, :] - second[:, None] - np.where(span > 0, sums**2 / span, 0.0)
    cost[np.tril_indices(len(mass), -1)] = np.inf
    best = cost[0]
    for _ in range(n_clusters - 1):
        best = (best[:, None] + cost).min(axis=0)
    return float(best[-1])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("heavy", [False, True])
def test_rows_of_1024_are_near_an_exact_code(heavy: bool, weighted: bool) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_t(5, (6, 1024)) if heavy else rng.normal(size=(6, 1024))
    importance = rng.random((6, 1024)) ** 3 if weighted else np.ones((6, 1024))
    weight = torch.from_numpy(rows).float()
    encoded = AnyPrecision(rows_per_lut=1).encode(weight, torch.from_numpy(importance).float())
    for n_bits, limit in ((3, 1.03), (4, 1.12)):
        exact = sum(exact_code(r, w, 1 << n_bits) for r, w in zip(rows, importance, strict=True))
        squared = (encoded.decode(n_bits).double().numpy() - rows) ** 2
        assert float((squared * importance).sum()) <= limit * exact


def test_shared_tables_cost_less_and_lose_little() -> None:
    weight = normal(4, 128, 256) * torch.rand(4, 128, 1)
    own, shared = (AnyPrecision(rows).encode_stack(weight) for rows in (1, 64))
    assert own.nbytes(4) > 1.2 * shared.nbytes(4)
    assert relative_error(shared.decode(4), weight) < 0.0095  # Gaussian, 16 levels: 0.0095
    assert own.scheme.has_scales is False and shared.scheme.has_scales is True


def test_importance_moves_error_to_where_it_matters_less() -> None:
    weight, importance = normal(2, 64, 128), torch.rand(2, 1, 128) ** 4 + 1e-3
    plain, weighted = (
        AnyPrecision().encode_stack(weight, matters) for matters in (None, importance)
    )
    error = [((s.decode(3) - weight).square() * importance).sum() for s in (plain, weighted)]
    assert error[1] < 0.97 * error[0]


def test_importance_of_zero_means_all_alike() -> None:
    weight = normal(2, 8, 32)
    plain = AnyPrecision().encode_stack(weight)
    zero = AnyPrecision().encode_stack(weight, torch.zeros(2, 1, 32))
    for n_bits in WIDTHS:
        assert bool(torch.isfinite(zero.decode(n_bits)).all())
        assert torch.equal(zero.decode(n_bits), plain.decode(n_bits))


def test_same_input_same_bytes_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, importance = normal(3, 40, 64), torch.rand(3, 1, 64)
    whole = AnyPrecision(8).encode_stack(weight, importance)
    again = AnyPrecision(8).encode_stack(weight, importance)
    for limit in (8 * 64, 16 * 64 + 5, 40 * 64):  # groups of rows, some of them, one expert
        monkeypatch.setattr(module, "_CHUNK_VALUES", limit)
        pieces = AnyPrecision(8).encode_stack(weight, importance)
        for name, tensor in whole.tensors.items():
            assert torch.equal(tensor, pieces.tensors[name]), (limit, name)
            assert torch.equal(tensor, again.tensors[name])


@pytest.mark.parametrize("scale", [1e30, 1e-30, 3e38, 1e-38])
@pytest.mark.parametrize("rows_per_lut", [1, 4, 0])
def test_weights_beyond_float16_stay_numbers(scale: float, rows_per_lut: int) -> None:
    unit = normal(1, 8, 64)
    weight = unit / unit.abs().max() * scale
    stack = AnyPrecision(rows_per_lut).encode_stack(weight)
    decoded = stack.decode(8).double()
    assert bool(torch.isfinite(decoded).all())
    assert relative_error(decoded / scale, weight.double() / scale) < 1e-3
    assert stack.notes.get("rescaled_rows", 0) == (8 if rows_per_lut == 1 else 0)
    assert stack.scheme.has_scales


def test_constant_rows_and_zero_experts_are_kept_and_counted() -> None:
    weight = normal(3, 6, 40)
    weight[0, 2] = 0.75
    weight[1] = 0.0
    for rows_per_lut in (1, 2, 64):
        stack = AnyPrecision(rows_per_lut).encode_stack(weight)
        assert stack.notes["zero_experts"] == 1 and stack.notes["constant_rows"] == 7
        for n_bits in WIDTHS:
            decoded = stack.decode(n_bits)
            assert bool((decoded[1] == 0).all())
        assert torch.allclose(stack.decode(8)[0, 2], weight[0, 2], rtol=0.01)


def test_repeated_values_have_one_code() -> None:
    weight = torch.tensor([[0.5, -1.0, 0.5, 2.0, 0.5, -1.0, 2.0, 0.25]])
    stack = AnyPrecision(1).encode_stack(weight[None])
    codes = stack.scheme.codes(stack.tensors, 8)[0, 0]
    assert len({int(c) for c, w in zip(codes, weight[0], strict=True) if w == 0.5}) == 1
    assert torch.equal(stack.decode(8)[0], weight)  # four values, exactly


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(bad: float) -> None:
    weight = normal(3, 5, 8)
    weight[1, 3, 2] = bad
    with pytest.raises(CheckpointError, match="expert 1, row 3"):
        AnyPrecision().encode_stack(weight)
    with pytest.raises(CheckpointError, match="row 3"):
        AnyPrecision().encode(weight[1])


def test_codes_and_bad_importance_are_refused() -> None:
    with pytest.raises(CheckpointError, match="int8"):
        AnyPrecision().encode_stack(torch.zeros(1, 2, 3, dtype=torch.int8))
    with pytest.raises(CheckpointError, match="cannot be encoded"):
        AnyPrecision().encode_stack(torch.zeros(1, 0, 3))
    with pytest.raises(CheckpointError, match="does not fit"):
        AnyPrecision().encode_stack(normal(1, 2, 3), torch.ones(1, 1, 4))
    with pytest.raises(CheckpointError, match="negative"):
        AnyPrecision().encode_stack(normal(1, 2, 3), -torch.ones(1, 1, 3))
    with pytest.raises(ValueError, match="rows_per_lut=-1"):
        AnyPrecision(-1)


def test_bytes_of_a_published_expert_with_a_table_per_row() -> None:
    """Any-Precision LLM's cost on Qwen3-30B: all tables of 3 to 8 bits, about 6.1 bits a weight."""
    shapes = ((1536, 2048), (2048, 768))
    table_bytes = weights = 0
    for n_rows, n_columns in shapes:
        scheme = AnyPrecisionScheme(n_rows, n_columns, 1, has_scales=False)
        table_bytes += sum(
            spec.n_bytes for spec in all_tensors(scheme) if spec.kind == "lut" and spec.index >= 3
        )
        weights += n_rows * n_columns
    assert 8 * table_bytes / weights == pytest.approx(6.1, abs=0.05)
    gate_up = AnyPrecisionScheme(1536, 2048, 1, has_scales=False)
    planes = [spec.n_bytes for spec in gate_up.tensors(4) if spec.kind == "plane"]
    assert planes == [393_216] * 4 and gate_up.tensors(4)[-1].n_bytes == 49_152


def test_pages_of_published_dimensions_waste_little() -> None:
    for shape in ((1536, 2048), (2048, 768)):
        scheme = AnyPrecisionScheme(*shape, 64, has_scales=True)
        for n_bits in WIDTHS:
            parts = [spec.part for spec in scheme.tensors(n_bits)]
            assert fragmentation(parts, 8_192) <= 0.05
    assert row_words(2048) * 4 * 32 == 8_192  # a page holds 32 rows of a plane


def test_scheme_survives_json() -> None:
    scheme = AnyPrecisionScheme(12, 34, 5, has_scales=True)
    assert scheme_from_json(scheme_to_json(scheme)) == scheme


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_splits_only_lower_the_error(values: list[float], number: int) -> None:
    rng = np.random.default_rng(number)
    x = torch.tensor([values], dtype=torch.float32)
    w = torch.from_numpy(rng.random((1, len(values))) * rng.integers(0, 2, (1, len(values))))
    problems = Problems.build(x, w)
    edges = nested_seed(problems, 8)

    def error(edges: torch.Tensor) -> float:
        mass = problems.weight.gather(-1, edges).diff(dim=-1)
        sums = problems.weighted.gather(-1, edges).diff(dim=-1)
        return -float(torch.where(mass > 0, sums**2 / mass.clamp_min(1e-300), 0.0).sum())

    for _ in range(3):
        assert bool((edges.diff(dim=-1) >= 0).all())
        assert edges[0, 0] == 0 and edges[0, -1] == len(values)
        finer = split(problems, edges)
        assert torch.equal(finer[:, ::2], edges)
        assert error(finer) <= error(edges) + 1e-6 * (1 + abs(error(edges)))
        edges = finer


@pytest.mark.gpu
def test_cuda_gives_the_same_quality_and_is_repeatable() -> None:
    weight, importance = normal(8, 96, 160), torch.rand(8, 1, 160)
    here = AnyPrecision().encode_stack(weight, importance)
    there = AnyPrecision().encode_stack(weight.cuda(), importance.cuda())
    again = AnyPrecision().encode_stack(weight.cuda(), importance.cuda())
    for name, tensor in there.tensors.items():
        assert torch.equal(tensor, again.tensors[name]), name
    for n_bits in WIDTHS:
        a, b = (relative_error(s.decode(n_bits).cpu(), weight) for s in (here, there))
        assert b == pytest.approx(a, rel=0.02)
    moved = there.to("cpu")
    assert torch.equal(moved.decode(5), there.decode(5).cpu())


@pytest.mark.parametrize("rows_per_lut", [1, 3, 0])
@pytest.mark.parametrize("value", [3.4028e38, 1e-40, 1e-44])
def test_the_ends_of_float32_stay_finite_and_are_counted(value: float, rows_per_lut: int) -> None:
    signs = torch.tensor([1.0, -1.0]).repeat(20)
    stack = AnyPrecision(rows_per_lut=rows_per_lut).encode_stack(signs.expand(2, 8, 40) * value)
    for n_bits in stack.widths:
        decoded = stack.decode(n_bits)
        assert bool(torch.isfinite(decoded).all())
        assert bool(torch.isfinite(decoded.bfloat16()).all())
    assert stack.notes.get("vanishing_rows", 0) == (16 if value < 1 else 0)
    if value > 1:
        assert float((stack.decode(8) / value - signs).abs().max()) < 0.011


def test_importance_counts_at_every_size_of_weights_and_importance() -> None:
    """Squares of 1e25 leave float32; neither may that lose the importance or make it NaN."""
    weight = normal(2, 16, 64)
    importance = torch.logspace(-3, 0, 64).expand(2, 1, 64)
    near = AnyPrecision().encode_stack(weight, importance)
    for size, matters in ((2.0**84, 1.0), (2.0**-84, 1.0), (1.0, 2.0**126), (2.0**84, 2.0**-120)):
        far = AnyPrecision().encode_stack(weight * size, importance * matters)
        for n_bits in (2, 4, 8):
            torch.testing.assert_close(far.decode(n_bits) / size, near.decode(n_bits))
