"""Routing of simulations: the mapping keeps skew and drift; synthetic traces are what they say."""

from pathlib import Path

import numpy as np
import pytest

from repro.errors import UnknownNameError
from repro.integration.traces import RoutingTrace
from repro.simulate import (
    SimulationError,
    SyntheticRouting,
    activation,
    expand_trace,
    published_model,
    recorded_routing,
)
from repro.simulate.routing import Place, counts_of


@pytest.fixture(scope="module")
def trace(root: Path) -> RoutingTrace:
    return RoutingTrace.load(root / "data" / "traces" / "moe-fine" / "python.npz")


def test_groups_get_exactly_the_traffic_of_their_source_expert(trace: RoutingTrace) -> None:
    found = expand_trace(trace, 12, 128, 8, seed=1)
    assert found.shape == (64, 288, 12, 8)
    owner = np.arange(128) * 48 // 128
    rng = np.random.default_rng([1, 12, 128, 8])
    for layer in range(12):
        names = rng.permutation(128)
        rng.integers(0, 1 << 16, size=(64, 288, 4))
        back = np.empty(128, dtype=int)
        back[names] = owner
        source = np.roll(trace.top_k_index[:, :, layer % 6], layer // 6 * 8, axis=0)
        # two target choices for each of the four source choices, token by token
        groups = np.sort(back[found[:, :, layer]], axis=-1)
        assert (groups == np.sort(np.repeat(source, 2, axis=-1), axis=-1)).all()


def test_choices_of_a_token_differ_and_the_seed_decides(trace: RoutingTrace) -> None:
    part = trace.select(range(4))
    found = expand_trace(part, 3, 512, 10, seed=5)
    ordered = np.sort(found, axis=-1)
    assert (np.diff(ordered, axis=-1) > 0).all()
    assert found.dtype == np.uint16
    assert (found == expand_trace(part, 3, 512, 10, seed=5)).all()
    assert (found != expand_trace(part, 3, 512, 10, seed=6)).any()


def test_skew_is_that_of_the_trace(trace: RoutingTrace) -> None:
    found = expand_trace(trace, 6, 144, 4, seed=0)  # groups of three, one choice each
    counts = counts_of(found.reshape(-1, 6, 4), 144)
    before, after = (np.sort(c, axis=1)[:, ::-1] for c in (trace.counts(), counts))
    for share in (0.1, 0.25, 0.5):
        old = before[:, : int(48 * share)].sum(axis=1) / before.sum(axis=1)
        new = after[:, : 3 * int(48 * share)].sum(axis=1) / after.sum(axis=1)
        assert np.abs(old - new).max() < 0.01


def test_a_trace_that_cannot_stand_for_the_model_is_refused(trace: RoutingTrace) -> None:
    with pytest.raises(SimulationError, match="48 experts with 4 choices cannot stand for 60"):
        expand_trace(trace, 2, 60, 8)
    with pytest.raises(SimulationError, match="cannot stand for 16"):
        expand_trace(trace, 2, 16, 2)


def test_the_same_tokens_have_the_same_routing_in_any_batch() -> None:
    model = published_model("Qwen3-30B-A3B")
    routing = recorded_routing(model, workloads=("prose",))
    places = [Place(3, 300, 250, 100, "prose"), Place(4, 10, 0, 5, "prose")]
    together = routing.choices(places, 0)
    alone = [routing.choices([Place(3, 300, 250 + i, 1, "prose")], 9) for i in range(100)]
    assert (together[:100] == np.concatenate(alone)).all()
    assert together.shape == (105, 48, 8)
    with pytest.raises(UnknownNameError, match="prose"):
        routing.choices([Place(0, 1, 0, 1, "poems")], 0)


def test_activation_at_published_size_is_near_the_papers() -> None:
    """DynaExq's Table 1 has 62.0 % for Qwen3-30B at batch 32; uniform routing has 87 %."""
    model = published_model("Qwen3-30B-A3B")
    routing = recorded_routing(model, workloads=("prose",))
    assert activation(routing, 1, "prose") == pytest.approx(8 / 128)
    assert 0.4 < activation(routing, 32, "prose") < 0.75


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_uniform_routing_activates_what_independence_says(batch: int) -> None:
    routing = SyntheticRouting(4, 64, 4, "uniform", seed=2)
    theory = 1 - (1 - 4 / 64) ** batch
    assert activation(routing, batch, n_passes=64) == pytest.approx(theory, rel=0.03)


def test_zipf_first_choices_follow_the_law() -> None:
    routing = SyntheticRouting(3, 32, 1, "zipf", exponent=1.2, seed=1)
    choices = routing.choices([Place(0, 20000, 0, 20000)], 0)
    order = routing.experts_of_rank(0)
    shares = np.take_along_axis(counts_of(choices, 32) / 20000, order, axis=1)
    assert np.abs(shares - routing.popularity).max() < 0.03  # four sigma of a pool of 4096


def test_drifting_and_alternating_move_when_they_should() -> None:
    drifting = SyntheticRouting(2, 16, 2, "drifting", period=10)
    assert (drifting.experts_of_rank(9) == drifting.experts_of_rank(0)).all()
    assert (drifting.experts_of_rank(10)[:, 1:] == drifting.experts_of_rank(0)[:, :-1]).all()
    alternating = SyntheticRouting(2, 16, 2, "alternating", period=10)
    a, b = alternating.experts_of_rank(0), alternating.experts_of_rank(10)
    assert (a != b).any() and (alternating.experts_of_rank(20) == a).all()
    with pytest.raises(UnknownNameError, match="zipf"):
        SyntheticRouting(1, 4, 1, "zip")
    with pytest.raises(SimulationError, match="period"):
        SyntheticRouting(1, 4, 1, "drifting", period=0)
