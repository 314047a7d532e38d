"""Static maps, widths per step, offloading, and the registry that builds them all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.contract import PolicyState
from repro.errors import UnknownNameError
from repro.policies import (
    POLICIES,
    PolicyBudgetError,
    PolicyInputError,
    make_policy,
    policy_options,
    traits,
)
from repro.policies.offload import (
    MAX_LOOKAHEAD,
    Cache,
    Fetch,
    choose_victims,
    lookahead_of,
)

SHAPE, WIDTHS = (2, 6), (2, 4, 8)
SIZES = np.array([[20, 40, 80], [10, 20, 40]])
SEEDS = st.integers(0, 2**32 - 1)


def sensitivity(seed=0):
    rng = np.random.default_rng(seed)
    return rng.lognormal(0, 1.5, (*SHAPE, 2, 1)) * 4.0 ** -np.array(WIDTHS)


def build(name, **options):
    known = {
        "shape": SHAPE,
        "widths": WIDTHS,
        "block_bytes": SIZES,
        "sensitivity": sensitivity(),
    }
    return make_policy(name, **{**known, **options})


def used(n_bits):
    column = np.searchsorted(WIDTHS, n_bits)
    return int(sum(SIZES[b][column[..., b]].sum() for b in range(2)))


def state(n_bits, mass, budget, **more):
    known = {
        "now": 0.0,
        "counts": np.ones(SHAPE, dtype=np.int64),
        "mass": mass,
        "n_bits": n_bits,
        "in_transition": np.zeros(SHAPE, dtype=bool),
        "widths": WIDTHS,
        "block_bytes": SIZES,
        "sensitivity": sensitivity(),
        "budget_bytes": budget,
        "kv_free_blocks": 5,
    }
    return PolicyState(**{**known, **more})


LOW, HIGH = 12 * 30, 12 * 120

# The registry -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_answers_what_the_engine_asks(name):
    policy = build(name)
    assert policy.name == name
    n_bits = policy.initial_bits(HIGH)
    assert n_bits.shape == (*SHAPE, 2) and n_bits.dtype == np.int8 and used(n_bits) <= HIGH
    assert isinstance(policy.due(0.0, 5), bool)
    actions = policy.decide(state(n_bits, np.ones(SHAPE), HIGH))
    assert actions == [] or traits(name).changes
    assert policy.report()["policy"] == name
    assert traits(name).layout in ("planes", "versions", "any")


def test_unknown_names_and_options_are_named():
    with pytest.raises(UnknownNameError, match="did you mean 'dynaexq'"):
        make_policy("dynaex", shape=SHAPE, widths=WIDTHS, block_bytes=SIZES)
    with pytest.raises(UnknownNameError, match="high_watermark"):
        build("pagedweight", hi_watermark=3)
    with pytest.raises(UnknownNameError, match="dense"):
        build("dense", n_bits=3)
    with pytest.raises(UnknownNameError):
        traits("none")
    assert "alpha" in policy_options("dynaexq") and policy_options("dense") == ()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"widths": (4, 2, 8)}, "ascend"),
        ({"widths": (2, 4)}, "2 widths"),
        ({"block_bytes": SIZES[None].repeat(3, axis=0)}, "3 layers"),
        ({"calibration_mass": np.ones(3)}, "calibration_mass"),
        ({"exists": np.ones((1, 6), dtype=bool)}, "exists"),
    ],
)
def test_arrays_must_belong_together(change, text):
    with pytest.raises(PolicyInputError, match=text):
        build("static", **change)


# Static -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "n_bits"), [(0.0, 2), (0.32, 2), (0.34, 4), (0.99, 4), (1, 8)])
def test_static_takes_the_widest_that_fits(share, n_bits):
    budget = LOW + int(share * (HIGH - LOW))
    assert (build("static").initial_bits(budget) == n_bits).all()
    assert build("static_mixed").initial_bits(budget).mean() >= n_bits


def test_static_and_dense_refuse_what_does_not_fit():
    with pytest.raises(PolicyBudgetError, match="1 more than the budget"):
        build("dense").initial_bits(HIGH - 1)
    with pytest.raises(PolicyBudgetError, match="1 bytes less"):
        build("static").initial_bits(LOW - 1)
    with pytest.raises(UnknownNameError, match="3"):
        build("static", n_bits=3)
    assert (build("static", n_bits=4).initial_bits(HIGH) == 4).all()


def test_static_mixed_is_at_least_as_good_as_uniform_and_says_its_gap():
    s = sensitivity()
    for share in np.linspace(0, 1, 9):
        budget = LOW + int(share * (HIGH - LOW))
        for method in ("exact", "greedy"):
            policy = build("static_mixed", method=method)
            n_bits = policy.initial_bits(budget)
            column = np.searchsorted(WIDTHS, n_bits)
            damage = np.take_along_axis(s, column[..., None], axis=3).sum()
            uniform = np.searchsorted(WIDTHS, build("static").initial_bits(budget))
            assert used(n_bits) <= budget
            assert damage <= np.take_along_axis(s, uniform[..., None], axis=3).sum() + 1e-12
            report = policy.report()
            assert report["lower_bound"] <= damage + 1e-12
            assert report["predicted_damage"] == pytest.approx(damage)
    with pytest.raises(PolicyInputError, match="calibrate"):
        build("static_mixed", sensitivity=None)


# Static widths with moving caps ------------------------------------------------------------------


def test_caps_follow_the_traffic_at_no_more_bytes():
    policy = build("pagedweight_caps", alpha=0.0)
    budget = (LOW + HIGH) // 2
    base = policy.initial_bits(budget)
    mass = np.ones(SHAPE)
    assert policy.decide(state(base, mass, budget)) == [], "traffic as calibrated"
    mass[0, 0], mass[0, 1] = 40.0, 0.001
    n_bits = base.copy()
    for action in policy.decide(state(base, mass, budget)):
        n_bits[action.layer, action.expert] = action.n_bits
    assert used(n_bits) <= budget
    assert (n_bits[0, 1] <= base[0, 1]).all() and (n_bits[0, 0] >= base[0, 0]).all()
    back = policy.decide(state(n_bits, np.ones(SHAPE), budget))
    for action in back:
        n_bits[action.layer, action.expert] = action.n_bits
    assert (n_bits == base).all(), "the map itself never changes"
    held = state(base, mass, budget, in_transition=np.ones(SHAPE, dtype=bool))
    assert policy.decide(held) == []
    with pytest.raises(PolicyInputError, match="cold"):
        build("pagedweight_caps", cold=2.0)


# Widths per step ---------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.floats(2, 8))
def test_dpllm_reads_the_average_asked_for(seed, average):
    rng = np.random.default_rng(seed)
    norms = rng.lognormal(0, 1, (200, *SHAPE, 2))
    policy = build("dpllm", average_bits=average, norms=norms)
    cap = policy.initial_bits(HIGH)
    assert (cap == 8).all()
    read = np.stack([policy.step_bits(x) for x in norms])
    assert (read <= cap).all()
    # 200 prompts per block: a quantile is exact to one prompt
    assert abs(read.mean() - average) <= 4 / 200 + 1e-9
    assert policy.report()["average_bits_read"] == pytest.approx(read.mean())
    by_norm = read[np.argsort(norms[:, 1, 2, 0]), 1, 2, 0]
    assert (np.diff(by_norm) >= 0).all(), "harder inputs are never read narrower"


def test_dpllm_reads_no_more_than_is_resident():
    norms = np.random.default_rng(0).lognormal(0, 1, (50, *SHAPE, 2))
    policy = build("dpllm", norms=norms, average_bits=8.0)
    cap = policy.initial_bits((LOW + HIGH) // 2)
    assert cap.min() < 8 and (policy.step_bits(norms[0]) == cap).all()
    # The table of the low width is resident, too: fewer bytes are left for planes.
    tables = np.array([[1, 4, 16], [1, 4, 16]])
    counted = build("dpllm", norms=norms, table_bytes=tables)
    column = np.searchsorted(WIDTHS, counted.initial_bits((LOW + HIGH) // 2))
    second = sum(np.r_[0, tables[b][:-1]][column[..., b]].sum() for b in range(2))
    assert used(np.array(WIDTHS)[column]) + second <= (LOW + HIGH) // 2


def test_dpllm_fits_its_estimate_and_survives_blocks_without_input():
    rng = np.random.default_rng(1)
    norms = rng.lognormal(0, 1, (80, *SHAPE, 2))
    norms[:, 0, 0] = 0.0
    errors = 3 * norms + 2
    policy = build("dpllm", average_bits=6.0, norms=norms, errors=errors)
    policy.initial_bits(HIGH)
    selector = policy.selector
    np.testing.assert_allclose(selector.slope[1], 3.0)
    np.testing.assert_allclose(selector.offset[1], 2.0, atol=1e-9)
    assert (policy.step_bits(norms[0])[0, 0] == 4).all(), "no input, no estimate: low"
    falling = build("dpllm", average_bits=6.0, norms=norms, errors=-norms)
    falling.initial_bits(HIGH)
    assert (falling.selector.slope == 0).all()
    with pytest.raises(PolicyInputError, match="thresholds"):
        build("dpllm").step_bits(norms[0])
    with pytest.raises(PolicyInputError, match="norms of shape"):
        build("dpllm", norms=norms[0]).initial_bits(HIGH)
    with pytest.raises(PolicyInputError, match="table_bytes"):
        build("dpllm", table_bytes=np.ones(3))


# Offloading ---------------------------------------------------------------------------------------


def cache_of(*keys):
    resident = np.zeros(SHAPE, dtype=bool)
    for key in keys:
        resident[key] = True
    return Cache(resident)


def test_offload_starts_with_the_busiest_and_zero_means_absent():
    mass = np.tile(np.arange(6.0), (2, 1))
    policy = build("offload", calibration_mass=mass)
    n_bits = policy.initial_bits(120 * 5)
    assert (n_bits[..., 0] > 0).sum() == 5 and set(np.unique(n_bits)) == {0, 8}
    assert (n_bits[:, 4:] == 8).all() and n_bits[0, 3, 0] == 8
    assert (build("offload").initial_bits(10**9) == 8).all()
    with pytest.raises(PolicyBudgetError, match="no expert"):
        policy.initial_bits(119)


def test_victims_by_recency_and_by_frequency():
    cache = cache_of((0, 0), (0, 1), (1, 2))
    for layer, expert in ((0, 0), (0, 0), (1, 2), (0, 1)):
        assert len(cache.touch(layer, np.array([expert]))) == 0
    nobody = np.zeros(SHAPE, dtype=bool)
    assert choose_victims(cache, 2, nobody, "lru") == ((0, 0), (1, 2))
    assert choose_victims(cache, 2, nobody, "lfu") == ((1, 2), (0, 1))
    assert choose_victims(cache, 9, cache.resident, "lru") == ()
    assert choose_victims(cache, -1, nobody, "lru") == ()
    with pytest.raises(UnknownNameError, match="fifo"):
        choose_victims(cache, 1, nobody, "fifo")


def test_a_miss_replaces_nobody_in_use_now():
    policy, cache = build("offload"), cache_of((0, 0), (0, 1), (1, 2))
    missing = cache.touch(0, np.array([0, 3, 4, 5, 3]))
    assert missing.tolist() == [3, 4, 5] and cache.n_hits == 1 and cache.n_misses == 3
    fetch = policy.demand(cache, 0, missing, 0)
    assert fetch.victims == ((0, 1), (1, 2)) and fetch.wanted == ((0, 3), (0, 4))
    cache.place(fetch)
    assert cache.resident[0, [0, 3, 4]].all() and not cache.resident[0, 1]
    assert policy.demand(cache, 0, np.array([5]), 1) == Fetch(((0, 5),), (), False)


def test_prefetch_takes_what_is_likely_and_replaces_nobody_likely():
    policy, cache = build("offload", lookahead=1), cache_of((1, 0), (1, 1), (0, 4))
    cache.touch(0, np.array([4]))
    likely = np.array([[0.9, 0.1, 0.8, 0.6, 0.2, 0.0]])
    fetch = policy.prefetch(cache, 0, likely, 0, 9)
    assert fetch == Fetch(((1, 2),), ((1, 1),), True), "one victim only: the rest is wanted"
    assert policy.prefetch(cache, 0, likely, 1, 1).wanted == ((1, 2),)
    assert policy.prefetch(cache, 0, likely, 5, 0).wanted == ()
    assert policy.prefetch(cache, 1, likely, 5, 9).wanted == (), "the last layer has no next one"
    cache.place(fetch)
    cache.touch(1, np.array([0]))
    cache.place(Fetch(((0, 0),), ((1, 2),), False))
    assert cache.n_ahead == 1 and cache.n_wasted == 1


def test_the_lookahead_follows_the_link():
    assert lookahead_of(2, 10**6, 1e9, 2e-3) == 1
    assert lookahead_of(6, 10**6, 1e9, 2e-3) == 3
    assert lookahead_of(99, 10**6, 1e9, 2e-3) == MAX_LOOKAHEAD
    assert lookahead_of(0, 10**6, 1e9, 2e-3) == 1
    assert lookahead_of(1, 10**6, 0.0, 2e-3) == MAX_LOOKAHEAD
    policy, cache = build("offload"), cache_of((0, 0))
    assert policy.adapt(cache, 3.0, 120 / 1e-3, 1e-3) == 3
    cache.n_ahead, cache.n_wasted = 10, 9
    assert policy.adapt(cache, 3.0, 120 / 1e-3, 1e-3) == 2
    assert build("offload", adaptive=False).adapt(cache, 3.0, 1.0, 1.0) == 1
    for bad in ({"lookahead": 9}, {"likely": 2.0}):
        with pytest.raises(PolicyInputError):
            build("offload", **bad)
    with pytest.raises(UnknownNameError):
        build("offload", rule="fifo")


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from(["lru", "lfu"]), st.integers(3, 12))
def test_an_offloaded_run_computes_every_expert_it_needs(seed, rule, n_slots):
    """Whatever is asked and predicted: never more residents than slots, nothing used absent."""
    rng = np.random.default_rng(seed)
    policy = build("offload", rule=rule, lookahead=1)
    cache = Cache(policy.initial_bits(120 * n_slots)[..., 0] > 0)
    for _ in range(8):
        for layer in range(2):
            needed = rng.choice(6, 3, replace=False)
            missing = cache.touch(layer, needed)
            while len(missing):
                fetch = policy.demand(cache, layer, missing, n_slots - cache.resident.sum())
                assert len(fetch.wanted) == len(missing), "three fit"
                cache.place(fetch)
                missing = missing[len(fetch.wanted) :]
            assert cache.resident[layer, needed].all()
            free = n_slots - int(cache.resident.sum())
            cache.place(policy.prefetch(cache, layer, rng.random((1, 6)), free, 2))
            assert cache.resident.sum() <= n_slots and cache.resident[layer, needed].all()
