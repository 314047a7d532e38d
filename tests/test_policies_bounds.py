"""Bounds that are bounds: no allocation, no cache and no top n does better."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.policies import Inventory, PolicyBudgetError, PolicyInputError, make_policy
from repro.policies.bounds import best_uniform, clairvoyant_cache, damage_oracle, frequency_oracle
from repro.policies.offload import Cache

SHAPE = (2, 6)
SIZES = np.array([[20, 40], [10, 20]])
PAIR = Inventory(SHAPE, (4, 8), SIZES)
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("n_high", [0, 1, 4, 6, 9])
def test_the_frequency_oracle_serves_the_most_traffic_a_top_n_can(n_high):
    counts = np.random.default_rng(0).integers(0, 100, SHAPE)
    budget = 12 * 30 + 2 * n_high * 30
    bits = frequency_oracle(PAIR, counts, budget)
    assert PAIR.used_bytes(bits) <= budget
    served = counts[bits[..., 0] == 8].sum()
    n = min(n_high, 6)
    best = sum(max(c.sum() for c in map(np.array, itertools.combinations(row, n))) if n else 0
               for row in counts)  # fmt: skip
    assert served == best
    with pytest.raises(PolicyBudgetError):
        frequency_oracle(PAIR, counts, 359)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.floats(0, 1))
def test_the_damage_oracle_is_no_worse_than_any_policy(seed, share):
    rng = np.random.default_rng(seed)
    s = -np.sort(-rng.lognormal(0, 1, (*SHAPE, 2, 2)), axis=3)
    budget = 360 + int(share * 360)
    oracle = damage_oracle(PAIR, s, budget)
    assert oracle.exact and oracle.n_bytes <= budget
    for name in ("static", "dynaexq", "pagedweight", "static_mixed"):
        policy = make_policy(name, shape=SHAPE, widths=(4, 8), block_bytes=SIZES, sensitivity=s)
        bits = policy.initial_bits(budget)
        damage = np.take_along_axis(s, (bits == 8).astype(int)[..., None], axis=3).sum()
        assert oracle.damage <= damage + 1e-9
    assert best_uniform(PAIR, budget).n_bits == (8 if budget >= 720 else 4)
    assert best_uniform(PAIR, budget).n_bytes <= budget


def fewest_misses(trace, n_slots):
    """Every choice of victims, by memory of states."""
    states = {frozenset(): 0}
    for layer, experts in trace:
        keys = frozenset((layer, e) for e in experts)
        found = {}
        for held, misses in states.items():
            missing = len(keys - held)
            together = held | keys
            drop = max(0, len(together) - n_slots)
            for gone in itertools.combinations(sorted(together - keys), drop):
                new = together - set(gone)
                found[new] = min(found.get(new, 10**9), misses + missing)
        states = found
    return min(states.values())


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 5))
def test_the_clairvoyant_cache_misses_as_rarely_as_possible(seed, n_slots):
    rng = np.random.default_rng(seed)
    trace = [
        (i % 2, rng.choice(4, int(rng.integers(1, 3)), replace=False).tolist()) for i in range(10)
    ]
    bound = clairvoyant_cache(trace, n_slots)
    assert bound.n_misses == fewest_misses(trace, n_slots)
    assert bound.n_hits + bound.n_misses == sum(len(e) for _, e in trace)
    assert bound.stall_s == 0


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(3, 8), st.floats(0.1, 3.0))
def test_no_cache_beats_the_clairvoyant_one(seed, n_slots, link):
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, 7)
    trace = [(i % 2, rng.choice(6, 3, replace=False, p=share / share.sum())) for i in range(60)]
    bound = clairvoyant_cache(trace, n_slots, expert_bytes=1, link_bytes_per_s=link, access_s=1.0)
    policy = make_policy("offload", shape=SHAPE, widths=(8,), block_bytes=SIZES[:, 1:])
    cache = Cache(np.zeros(SHAPE, dtype=bool))
    wait = 0.0
    for layer, experts in trace:
        missing = cache.touch(layer, experts)
        cache.place(policy.demand(cache, layer, missing, n_slots - int(cache.resident.sum())))
        wait += len(missing) / link
    assert bound.n_misses <= cache.n_misses and bound.stall_s <= wait + 1e-9
    assert bound.n_bytes == bound.n_misses
    # The link cannot have carried them in less time than the run took.
    assert bound.compute_s + bound.stall_s >= bound.n_bytes / link - 1e-9


def test_a_faster_link_and_a_warm_cache_stall_less():
    trace = [(0, [i % 5, (i + 1) % 5]) for i in range(30)]
    stalls = [
        clairvoyant_cache(trace, 3, expert_bytes=1, link_bytes_per_s=r, access_s=1.0).stall_s
        for r in (0.2, 0.5, 1.0, 5.0, 1e9)
    ]
    assert stalls == sorted(stalls, reverse=True) and stalls[-1] < 1e-6 < stalls[0]
    resident = np.zeros((1, 5), dtype=bool)
    resident[0, :3] = True
    warm = clairvoyant_cache(trace, 3, resident=resident)
    assert warm.n_misses == clairvoyant_cache(trace, 3).n_misses - 3
    assert clairvoyant_cache([], 3).hit_rate == 1.0
    with pytest.raises(PolicyInputError, match="uses 2 experts and 1 fit"):
        clairvoyant_cache(trace, 1)
