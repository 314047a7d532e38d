"""Statistics of skew on counts with a known answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from repro.experiments import statistics as stats

UNIFORM = np.full(48, 7)
ONE = np.eye(48, dtype=np.int64)[5] * 100


def zipf(n: int, exponent: float) -> np.ndarray:
    """Counts that fall with the rank, shuffled: no function may rely on their order."""
    counts = 1e9 * np.arange(1, n + 1, dtype=float) ** -exponent
    return np.random.default_rng(n).permutation(counts)


COUNTS = hnp.arrays(np.int64, (12,), elements=st.integers(0, 50)).filter(lambda c: c.sum() > 0)


def test_uniform():
    np.testing.assert_allclose(stats.cumulative_share(UNIFORM), np.arange(1, 49) / 48)
    assert stats.gini(UNIFORM) == pytest.approx(0)
    assert stats.effective_experts(UNIFORM) == pytest.approx(48)
    assert stats.top_share(UNIFORM) == pytest.approx(10 / 48)
    assert math.isnan(stats.hill_index(UNIFORM))  # no tail: nothing is busier than the next
    assert stats.top_experts(UNIFORM).tolist() == list(range(10))


def test_one_expert_takes_everything():
    assert (stats.cumulative_share(ONE) == 1).all()
    assert stats.gini(ONE) == pytest.approx(1 - 1 / 48)
    assert stats.effective_experts(ONE) == pytest.approx(1)
    assert math.isnan(stats.hill_index(ONE))  # the compared expert was never chosen
    assert stats.top_experts(ONE)[0] == 5


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.7])
def test_zipf(exponent):
    counts = zipf(48, exponent)
    share = np.sort(counts)[::-1] / counts.sum()
    ranks = np.arange(1, 49)
    # the mean of log((k + 1) / i) over i up to k = 12 is known exactly
    bias = math.log(13) - math.lgamma(13) / 12
    assert stats.hill_index(counts) == pytest.approx(1 / (exponent * bias))
    many = zipf(4000, exponent)
    assert stats.hill_index(many, n_top=1000) == pytest.approx(1 / exponent, rel=0.01)
    assert stats.effective_experts(counts) == pytest.approx(np.exp(-(share * np.log(share)).sum()))
    expected = (48 + 1 - 2 * (share * ranks).sum()) / 48  # twice the area above the curve
    assert stats.gini(counts) == pytest.approx(expected)
    np.testing.assert_allclose(stats.cumulative_share(counts), np.cumsum(share))


def test_hill_recovers_the_index_of_a_pareto_sample():
    sample = np.random.default_rng(0).pareto(1.5, size=(20, 4000)) + 1
    assert stats.hill_index(sample, n_top=400).mean() == pytest.approx(1.5, rel=0.03)


def test_ordering_of_skew():
    worlds = [zipf(48, s) for s in (0.2, 0.6, 1.2)]
    assert np.all(np.diff([float(stats.gini(w)) for w in worlds]) > 0)
    assert np.all(np.diff([float(stats.hill_index(w)) for w in worlds]) < 0)
    assert np.all(np.diff([float(stats.effective_experts(w)) for w in worlds]) < 0)


@given(counts=COUNTS, scale=st.integers(1, 9))
def test_properties(counts, scale):
    for function in (stats.gini, stats.effective_experts, stats.top_share):
        value = function(counts)
        assert function(counts * scale) == pytest.approx(value)  # shares matter, not totals
        assert function(counts[::-1]) == pytest.approx(value)  # which expert does not matter
    assert 0 <= stats.gini(counts) <= 1 - 1 / 12 + 1e-12
    assert 1 - 1e-9 <= stats.effective_experts(counts) <= 12 + 1e-9
    curve = stats.cumulative_share(counts)
    assert curve[-1] == pytest.approx(1)
    steps = np.diff(np.concatenate([[0.0], curve]))
    assert (np.diff(steps) <= 1e-12).all()  # concave: the busiest come first
    assert stats.top_overlap(counts, counts, 4) == 4


def test_leading_axes():
    stack = np.stack([UNIFORM, ONE, zipf(48, 1.0)]).reshape(3, 1, 48)
    for function in (stats.gini, stats.effective_experts, stats.hill_index, stats.top_share):
        values = function(stack)
        assert values.shape == (3, 1)
        np.testing.assert_allclose(values[2, 0], function(stack[2, 0]))
    assert stats.top_overlap(stack, stack).tolist() == [[10], [10], [10]]


def test_overlap():
    first, second = np.arange(30), np.arange(30)[::-1]
    assert stats.top_overlap(first, first) == 10
    assert stats.top_overlap(first, second) == 0
    assert stats.top_overlap(first, np.roll(first, 4)) == 6


def test_counts_of_nothing():
    with pytest.raises(ValueError, match="all zero"):
        stats.gini(np.zeros(4))
    with pytest.raises(ValueError, match="n_top=4 of 4"):
        stats.hill_index(np.ones(4), n_top=4)


def test_blocks_are_disjoint_until_used_up():
    rows = stats.blocks(10, 3, 7, np.random.default_rng(0))
    assert rows.shape == (7, 3)
    assert all(len(set(row)) == 3 for row in rows.tolist())
    assert len(set(rows[:3].ravel().tolist())) == 9  # three disjoint ones, then a new shuffle
    assert np.array_equal(rows, stats.blocks(10, 3, 7, np.random.default_rng(0)))
    with pytest.raises(ValueError, match="11 out of 10"):
        stats.blocks(10, 11, 1, np.random.default_rng(0))


def test_bootstrap_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        low, high = stats.mean_interval(rng.normal(5, 2, size=40), 300, rng)
        hits += low <= 5 <= high
    assert 0.88 <= hits / 300 <= 0.98
    assert stats.mean_interval(np.full(9, 2.5), 100, rng) == (2.5, 2.5)


def test_resampling_prompts_adds_whole_prompts():
    per_prompt = np.array([[[1, 0]], [[0, 10]]])  # 2 prompts, 1 layer, 2 experts
    weights = stats.resample(2, 500, np.random.default_rng(0))
    assert weights.shape == (500, 2) and (weights.sum(axis=1) == 2).all()
    totals = stats.resampled_counts(per_prompt, weights)
    assert totals.shape == (500, 1, 2)
    assert {tuple(row) for row in totals[:, 0].tolist()} == {(2, 0), (1, 10), (0, 20)}


def test_interval_sits_at_the_value():
    samples = np.arange(1001.0)
    assert stats.interval(500.0, samples) == pytest.approx((25.0, 975.0))
    assert stats.interval(100.0, samples) == pytest.approx((-375.0, 575.0))
    assert stats.interval(100.0, samples, bounds=(0, 500)) == (0.0, 500.0)
    assert stats.interval(1.0, np.array([1.0, np.nan])) is None
    assert stats.interval(math.nan, samples) is None


def test_resampled_prompts_look_more_skewed_than_they_are():
    """Why the interval is shifted: the plain quantiles lie above the truth."""
    rng = np.random.default_rng(3)
    per_prompt = rng.multinomial(40, np.full(16, 1 / 16), size=20)  # evenly used experts
    samples = stats.gini(stats.resampled_counts(per_prompt, stats.resample(20, 400, rng)))
    value = float(stats.gini(per_prompt.sum(axis=0)))
    assert samples.mean() > 1.2 * value
    low, high = stats.interval(value, samples, bounds=(0, 1))
    assert low < value < high and low < 0.7 * value
