"""The share of the traffic that a placement serves, on counts with a known answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from repro.experiments.placement import captured_matrix, captured_share
from repro.experiments.statistics import top_experts, top_share

COUNTS = arrays(np.int64, (3, 8), elements=st.integers(0, 50)).filter(
    lambda counts: (counts.sum(axis=-1) > 0).all()
)


def test_by_hand() -> None:
    counts = np.array([[6, 3, 1], [0, 0, 5]])
    assert captured_share(counts, np.array([[0], [0]])).tolist() == [0.6, 0.0]
    assert captured_share(counts, np.array([[2, 0], [2, 1]])).tolist() == [0.7, 1.0]


@given(COUNTS, st.integers(1, 8))
def test_no_set_serves_more_than_the_busiest(counts: np.ndarray, n: int) -> None:
    best = captured_share(counts, top_experts(counts, n))
    other = captured_share(counts, np.tile(np.arange(n), (3, 1)))
    assert (other <= best + 1e-12).all()
    assert np.allclose(best, top_share(counts, n))


@given(COUNTS)
def test_all_experts_serve_everything_and_parts_add_up(counts: np.ndarray) -> None:
    halves = [np.tile(np.arange(4) + start, (3, 1)) for start in (0, 4)]
    assert np.allclose(sum(captured_share(counts, half) for half in halves), 1.0)


def test_leading_axes_are_kept() -> None:
    counts = np.arange(1, 25).reshape(2, 3, 4)
    found = captured_share(counts, np.array([[3], [0], [1]]))
    one_by_one = [captured_share(part, np.array([[3], [0], [1]])) for part in counts]
    assert found.shape == (2, 3)
    assert np.allclose(found, one_by_one)


def test_a_placement_is_worth_most_where_it_was_chosen() -> None:
    traffic = {"a": np.array([[6, 3, 1], [1, 0, 9]]), "b": np.array([[0, 1, 9], [8, 1, 1]])}
    found = captured_matrix(traffic, traffic, 1)
    assert np.allclose(found, [[0.75, 0.05], [0.1, 0.85]])  # chosen on, serving
    one_row = captured_matrix({"a": traffic["a"]}, traffic, 3)
    assert one_row.tolist() == [[1.0, 1.0]]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        captured_share(np.ones((1, 4)), np.array([[2, 2]]))
    with pytest.raises(ValueError, match="all zero"):
        captured_share(np.zeros((1, 4)), np.array([[2]]))
