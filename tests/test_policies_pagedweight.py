"""Byte target, factors, floors, watermarks, exchange: what a plan must and must not do."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.contract import PolicyState
from repro.policies import (
    HeadCoefficients,
    PolicyBudgetError,
    PolicyInputError,
    ResidualHeads,
    make_policy,
)
from repro.policies import pagedweight as module
from repro.policies.buckets import Buckets, mass_ratio
from repro.policies.exchange import exchange
from repro.policies.merge import merge_features, merge_mass

WIDTHS = (2, 3, 4, 5)
SIZES = np.array([[80, 116, 160, 220], [40, 60, 84, 116]])  # planes and growing tables
SHAPE = (2, 8)
KV = 64
SEEDS = st.integers(0, 2**32 - 1)


def table(seed=0, shape=SHAPE):
    """Damage that falls by four with each bit, blocks a few times apart."""
    rng = np.random.default_rng(seed)
    return rng.lognormal(0, 1, (*shape, 2, 1)) * 4.0 ** -np.array(WIDTHS)


def build(seed=0, **options):
    known = {"shape": SHAPE, "widths": WIDTHS, "block_bytes": SIZES, "sensitivity": table(seed)}
    return make_policy("pagedweight", **{**known, **options})


def used(n_bits):
    column = np.searchsorted(WIDTHS, n_bits)
    return int(sum(SIZES[b][column[..., b]].sum() for b in range(2)))


def state(n_bits, free=1000, needed=0, **more):
    known = {
        "now": 0.0,
        "counts": np.ones(SHAPE, dtype=np.int64),
        "mass": np.ones(SHAPE),
        "n_bits": n_bits,
        "in_transition": np.zeros(SHAPE, dtype=bool),
        "widths": WIDTHS,
        "block_bytes": SIZES,
        "sensitivity": np.zeros((*SHAPE, 2, 4)),
        "budget_bytes": 10**9,
        "kv_free_blocks": free,
        "kv_needed_blocks": needed,
        "kv_block_bytes": KV,
    }
    return PolicyState(**{**known, **more})


def full(n_bits=5):
    return np.full((*SHAPE, 2), n_bits, dtype=np.int8)


def after(n_bits, actions):
    result = n_bits.copy()
    for action in actions:
        result[action.layer, action.expert] = action.n_bits
    return result


# The byte target ----------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.integers(0, 12), st.integers(0, 40))
def test_the_target_is_met_or_the_shortfall_reported(seed, free, needed):
    policy, rng = build(seed, low_watermark=4, high_watermark=9), np.random.default_rng(seed)
    n_bits = rng.choice(WIDTHS, (*SHAPE, 2)).astype(np.int8)
    mass = rng.lognormal(0, 2, SHAPE) * (rng.random(SHAPE) < 0.8)
    actions = policy.decide(state(n_bits, free, needed, mass=mass))
    target = max(0, 4 + 1 + needed - free) * KV
    released = used(n_bits) - used(after(n_bits, actions))
    report = policy.report()
    assert report["last_target_bytes"] == target
    if target:
        assert report["last_plan"] == "down" and released == report["last_released_bytes"]
        assert (after(n_bits, actions) <= n_bits).all()
        assert report["last_shortfall_bytes"] == max(0, target - released)
        if released < target:
            hot = mass / np.maximum(mass.sum(axis=1, keepdims=True), 1e-300) * SHAPE[1] >= 3
            floor = np.where(hot, 3, 2)[..., None]
            assert (after(n_bits, actions) == np.minimum(n_bits, floor)).all()
    assert len({(a.layer, a.expert) for a in actions}) == len(actions), "one wish per expert"


def test_nothing_happens_between_the_watermarks():
    policy = build(low_watermark=4, high_watermark=9, exchange_margin=None)
    n_bits = full(4)
    assert policy.decide(state(n_bits, 5)) == []
    assert policy.decide(state(n_bits, 9)) == []
    down = policy.decide(state(n_bits, 4))
    assert down and all(min(a.n_bits) < 4 for a in down)
    up = policy.decide(state(n_bits, 11))
    assert up and 0 < used(after(n_bits, up)) - used(n_bits) <= 2 * KV, "no more than is spare"


def test_bytes_on_their_way_are_not_asked_for_again():
    policy = build(low_watermark=4, high_watermark=9)
    n_bits = full()
    first = policy.decide(state(n_bits, 0))
    moving = np.zeros(SHAPE, dtype=bool)
    for action in first:
        moving[action.layer, action.expert] = True
    coming = after(n_bits, first)
    now = state(n_bits, 0, in_transition=moving, target_bits=coming)
    again = build(low_watermark=4, high_watermark=9, exchange_margin=None)
    assert again.decide(now) == []
    assert again.report()["last_on_its_way_bytes"] >= 5 * KV
    # and if more is missing than that, somebody else gives it
    more = again.decide(replace(now, kv_needed_blocks=3))
    assert more and not any(moving[a.layer, a.expert] for a in more)
    assert again.decide(replace(now, in_transition=np.ones(SHAPE, bool), kv_needed_blocks=9)) == []
    assert again.report()["last_shortfall_bytes"] > 0


def test_pages_that_steps_still_read_are_on_their_way():
    policy = build(low_watermark=4, high_watermark=9, exchange_margin=None)
    assert policy.decide(state(full(), 2, reclaiming_bytes=3 * KV)) == []
    assert policy.decide(state(full(), 2, reclaiming_bytes=3 * KV - 1)) != []


GUARDS = {
    "bytes on their way": (
        "byte_target",
        lambda free, low, size, on_its_way: max(0, low + 1 - free) * size,
        test_bytes_on_their_way_are_not_asked_for_again,
    ),
    "the one above the watermark": (
        "byte_target",
        lambda free, low, size, on_its_way: max(0, low - free) * size,
        lambda: test_nothing_happens_between_the_watermarks(),
    ),
    "exchange has a margin": (
        "exchange",
        lambda *given, **more: exchange(*given, **{**more, "margin": 1.0}),
        lambda: test_exchange_leaves_noise_alone(),
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_is_needed(guard, monkeypatch):
    name, without, check = GUARDS[guard]
    monkeypatch.setattr(module, name, without)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("guard", ["floor", "held"])
def test_floors_and_changes_under_way_are_guarded(guard, monkeypatch):
    real = module.PagedWeightPolicy._floor
    zero = lambda self, shares, column, held: np.where(held, column, 0)  # noqa: E731
    free = lambda self, shares, column, held: real(self, shares, column, held & False)  # noqa: E731
    monkeypatch.setattr(module.PagedWeightPolicy, "_floor", zero if guard == "floor" else free)
    with pytest.raises(AssertionError):
        if guard == "floor":
            test_floors_hold_unless_they_may_yield()
        else:
            test_bytes_on_their_way_are_not_asked_for_again()


def test_refused_wishes_are_wished_again():
    policy = build(low_watermark=4, high_watermark=9)
    assert policy.decide(state(full(), 0)) == policy.decide(state(full(), 0)) != []


def test_a_smaller_budget_is_a_target_too():
    policy = build(exchange_margin=None)
    n_bits = full()
    budget = used(n_bits) - 500
    actions = policy.decide(state(n_bits, budget_bytes=budget))
    assert budget - 220 <= used(after(n_bits, actions)) <= budget
    # without shared pages the room is what the budget leaves
    low = full(2)
    up = policy.decide(state(low, kv_block_bytes=0, budget_bytes=used(low) + 300))
    assert 0 < used(after(low, up)) - used(low) <= 300


def test_due_is_every_interval_and_at_once_under_pressure():
    policy = build(low_watermark=4, high_watermark=9, interval=16.0)
    assert not policy.due(15.0, 5) and policy.due(16.0, 5)
    assert policy.due(1.0, 4) and policy.due(1.0, 9, 5) and not policy.due(1.0, 10, 5)
    # Nothing left to give: not asked at every step for the same nothing, but for more.
    policy.decide(state(full(2), 3, now=16.0))
    assert not policy.due(17.0, 3) and policy.due(17.0, 2) and policy.due(32.0, 3)


# The factors --------------------------------------------------------------------------------


def demoted(policy, **more):
    """Which blocks a small target takes first."""
    actions = policy.decide(state(full(), 0, **more))
    return {(a.layer, a.expert) for a in actions}


def test_hot_experts_are_protected_only_with_routing():
    mass = np.full(SHAPE, 1.0)
    mass[:, 0] = 50.0
    same = np.ones((*SHAPE, 2, 1)) * 4.0 ** -np.array(WIDTHS)
    options = {"low_watermark": 60, "high_watermark": 90, "sensitivity": same}
    with_it = after(full(), build(**options).decide(state(full(), 0, mass=mass)))
    without = after(full(), build(use_routing=False, **options).decide(state(full(), 0, mass=mass)))
    assert with_it[:, 0].min() > with_it[:, 1:].max()
    assert without[:, 0].min() <= without[:, 1:].max()


def test_sensitive_blocks_are_protected_only_with_sensitivity():
    s = np.ones((*SHAPE, 2, 1)) * 4.0 ** -np.array(WIDTHS)
    s[0] *= 1000
    options = {"low_watermark": 20, "high_watermark": 90, "sensitivity": s}
    assert {layer for layer, _ in demoted(build(**options))} == {1}
    assert 0 in {layer for layer, _ in demoted(build(use_sensitivity=False, **options))}


def heads(weight=1.0):
    head = HeadCoefficients((0.0,) * 3, (1.0,) * 3, (weight, 0.0, 0.0), 0.0, (-9.0, 9.0), 1.0)
    pairs = zip(WIDTHS[1:], WIDTHS, strict=False)
    return ResidualHeads({(b, i, j): head for i, j in pairs for b in range(2)})


def test_prompts_protect_what_they_drive_hard_only_with_residuals():
    same = np.ones((*SHAPE, 2, 1)) * 4.0 ** -np.array(WIDTHS)
    features = np.ones((*SHAPE, 2, 3))
    features[0] = 100.0
    options = {"low_watermark": 20, "high_watermark": 90, "sensitivity": same, "heads": heads()}
    assert {layer for layer, _ in demoted(build(**options), features=features)} == {1}
    for off in ({"use_residual": False}, {"heads": None}):
        assert 0 in {layer for layer, _ in demoted(build(**{**options, **off}), features=features)}
    assert 0 in {layer for layer, _ in demoted(build(**options))}, "no features: eta is 1"


def test_residual_heads_say_what_their_formula_says():
    head = HeadCoefficients((0.5, 0.1, 0.0), (2.0, 1.0, 4.0), (0.7, -0.2, 0.3), 0.4, (-1, 0.6), 0.5)
    found = ResidualHeads({(0, 5, 4): head, (1, 4, 3): replace(head, confidence=0.0)})
    x = np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [9.0, 1e-9, 0.0], [1e6, 1.0, 1e6]])
    z = np.where(x > 0, (np.log(np.where(x > 0, x, 1)) - head.center) / np.array(head.scale), 0)
    expected = 0.5 * np.clip(z @ np.array(head.weights) + 0.4, -1, 0.6)
    log_eta = found.log_eta(0, [(5, 4), (4, 3)], x)
    np.testing.assert_allclose(log_eta, [expected, expected])  # no head for 4 -> 3: the nearest
    assert not found.log_eta(1, [(5, 4)], x).any()
    assert not found.log_eta(2, [(5, 4)], x).any(), "a block without heads"
    extended = replace(head, center=(0.0,) * 4, scale=(1.0,) * 4, weights=(0.0, 0.0, 0.0, 1.0))
    assert ResidualHeads({(0, 5, 4): extended}).n_features == 4


def test_trained_heads_are_taken_over():
    from repro.calibration.heads import Head, Heads
    from repro.calibration.ridge import Fit
    from repro.contract import Block

    fit = Fit((0.1, 0.2, 0.3), (1.0, 2.0, 3.0), (0.5, -0.5, 0.1), 0.2, (-2.0, 2.0), 0.8, 1.0)
    trained = Heads({(Block.DOWN, 5, 4): Head(Block.DOWN, 5, 4, fit, 9)})
    x = np.random.default_rng(0).lognormal(0, 1, (7, 3))
    np.testing.assert_allclose(
        np.exp(ResidualHeads.of(trained).log_eta(1, [(5, 4)], x))[0],
        trained.eta(Block.DOWN, 5, 4, x),
    )


def test_extended_heads_see_the_mass_ratio():
    head = HeadCoefficients((0.0,) * 4, (1.0,) * 4, (0.0, 0.0, 0.0, 2.0), 0.0, (-9.0, 9.0), 1.0)
    pairs = list(zip(WIDTHS[1:], WIDTHS, strict=False))
    four = ResidualHeads({(b, i, j): head for i, j in pairs for b in range(2)})
    same = np.ones((*SHAPE, 2, 1)) * 4.0 ** -np.array(WIDTHS)
    mass = np.full(SHAPE, 10.0)
    mass[:, 0] = 12.0  # in the same bucket as the others, so that mu does not tell
    policy = build(sensitivity=same, heads=four, low_watermark=40, high_watermark=90)
    features = np.ones((*SHAPE, 2, 3))
    n_bits = after(full(), policy.decide(state(full(), 0, mass=mass, features=features)))
    assert n_bits[:, 0].sum() >= n_bits[:, 1:].sum(axis=(0, 2)).max()


def test_buckets_grow_with_traffic_and_know_silence():
    buckets = Buckets()
    ratio = np.array([0.0, 0.05, 0.2, 0.5, 2.0, 10.0])
    assert (np.diff(buckets.multiplier(ratio)) >= 0).all() and buckets.multiplier(ratio)[0] > 0
    assert buckets.floor(np.array([0.0, 2.9, 3.0, 9.0]), 4).tolist() == [0, 0, 1, 1]
    assert buckets.floor(np.array([9.0]), 1).tolist() == [0]
    n = np.array([4, 4])
    shares = np.array([[0.5, 0.5, 0.0, 0.0], [0.0] * 4])
    np.testing.assert_allclose(mass_ratio(shares, None, n), [[2, 2, 0, 0], [1] * 4])
    before = np.array([[4.0, 1.0, 1.0, 2.0]] * 2)
    np.testing.assert_allclose(mass_ratio(shares, before, n)[0], [1, 4, 0, 0])
    for bad in (
        {"multipliers": (1.0,)},
        {"edges": (1.0, 0.5, 2.0, 3.0)},
        {"multipliers": (5.0, 4.0, 3.0, 2.0, 1.0)},
        {"floor_steps": (1, 0)},
    ):
        with pytest.raises(PolicyInputError):
            Buckets(**bad)


def test_floors_hold_unless_they_may_yield():
    mass = np.ones(SHAPE)
    mass[:, 0] = 50.0
    now = state(full(), 0, 500, mass=mass)
    strict = after(full(), build().decide(now))
    assert (strict[:, 0] == 3).all() and (strict[:, 1:] == 2).all()
    assert (after(full(), build(yield_floors=True).decide(now)) == 2).all()


# Up, exchange, start --------------------------------------------------------------------------


def test_down_and_up_again_is_where_it_was():
    policy = build(low_watermark=4, high_watermark=9, exchange_margin=None)
    down = after(full(), policy.decide(state(full(), 0, 20)))
    assert used(down) < used(full())
    assert (after(down, policy.decide(state(down, 10**6))) == full()).all()


def test_bits_follow_the_traffic_without_pressure():
    policy = build(half_life=10.0)
    budget = (used(full(2)) + used(full())) // 2
    mass = np.where(np.arange(8) < 3, 20.0, 0.5) * np.ones(SHAPE)
    n_bits = policy.initial_bits(budget)
    for traffic in (mass, mass[:, ::-1].copy()):
        for _ in range(12):
            now = state(n_bits, 5, mass=traffic, budget_bytes=budget, kv_block_bytes=0)
            n_bits = after(n_bits, policy.decide(now))
            assert used(n_bits) <= budget
        hot, cold = n_bits[traffic > 1].mean(), n_bits[traffic < 1].mean()
        assert hot > cold + 0.9
    assert policy.decide(replace(now, n_bits=n_bits)) == [], "and then it rests"


def test_exchange_leaves_noise_alone():
    """Traffic that wiggles by a fifth around the same means moves next to nothing."""
    policy = build(half_life=10.0)
    budget = (used(full(2)) + used(full())) // 2
    n_bits, moved = policy.initial_bits(budget), []
    for i in range(40):
        mass = 10 * np.random.default_rng(i).lognormal(0, 0.2, SHAPE)
        actions = policy.decide(state(n_bits, mass=mass, budget_bytes=budget, kv_block_bytes=0))
        moved.append(len(actions))
        n_bits = after(n_bits, actions)
    eager = build(half_life=10.0, exchange_margin=1.0)
    n_bits, flapped = eager.initial_bits(budget), 0
    for i in range(40):
        mass = 10 * np.random.default_rng(i).lognormal(0, 0.2, SHAPE)
        actions = eager.decide(state(n_bits, mass=mass, budget_bytes=budget, kv_block_bytes=0))
        flapped += len(actions) * (i >= 10)
        n_bits = after(n_bits, actions)
    assert sum(moved[10:]) <= max(6, flapped // 3), (moved, flapped)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999, 1.0, 2.0])
def test_the_start_fits_the_budget(share):
    low, high = used(full(2)), used(full())
    budget = low + int(share * (high - low))
    n_bits = build().initial_bits(budget)
    assert low <= used(n_bits) <= budget and used(n_bits) >= min(budget, high) - 64
    with pytest.raises(PolicyBudgetError, match="1 bytes less"):
        build().initial_bits(low - 1)


def test_silence_and_single_widths():
    policy = build()
    n_bits = after(full(), policy.decide(state(full(), 0, mass=np.zeros(SHAPE))))
    assert used(full()) - used(n_bits) >= 9 * KV
    one = make_policy("pagedweight", shape=SHAPE, widths=(4,), block_bytes=SIZES[:, 2:3])
    four = state(full(4), 0, widths=(4,), sensitivity=np.zeros((*SHAPE, 2, 1)))
    assert (one.initial_bits(10**6) == 4).all() and one.decide(four) == []


def test_plans_repeat():
    rng = np.random.default_rng(0)
    states = [
        state(rng.choice(WIDTHS, (*SHAPE, 2)).astype(np.int8), int(f), mass=rng.random(SHAPE))
        for f in rng.integers(0, 60, 12)
    ]
    one, two = build(), build()
    assert [one.decide(s) for s in states] == [two.decide(s) for s in states]


def test_bad_options_are_named():
    for options, text in (
        ({"low_watermark": 9, "high_watermark": 9}, "watermarks"),
        ({"half_life": 0.0}, "half_life"),
        ({"exchange_margin": 0.5}, "exchange_margin"),
        ({"interval": -1.0}, "negative"),
        ({"sensitivity": table()[:1]}, "sensitivity"),
        ({"block_bytes": SIZES[:, ::-1]}, "fall with the width"),
    ):
        with pytest.raises(PolicyInputError, match=text):
            build(**options)
    bad = table()
    bad[0, 0, 0, 0] = np.nan
    with pytest.raises(PolicyInputError, match="not finite"):
        build(sensitivity=bad).initial_bits(10**6)
    with pytest.raises(PolicyInputError, match="not finite"):
        build().decide(state(full(), mass=np.full(SHAPE, np.inf)))


# Several requests -------------------------------------------------------------------------------


def test_requests_merge_by_their_kv_blocks():
    features = np.zeros((3, 1, 2, 1, 3))
    features[0, 0, :, 0] = (1.0, 2.0, 5.0)
    features[1, 0, :, 0] = (4.0, 4.0, 9.0)
    mass = np.array([[[1.0, 1.0]], [[1.0, 0.0]], [[0.0, 0.0]]])
    merged = merge_features(features, mass, np.array([1, 3, 8]))
    np.testing.assert_allclose(merged[0, 0, 0], [3.25, np.sqrt((4 + 48) / 4), 9.0])
    np.testing.assert_allclose(merged[0, 1, 0], [1.0, 2.0, 5.0])  # the second never chose it
    assert not merge_features(features[2:], mass[2:], np.array([8])).any()
    assert merge_features(features[:0], mass[:0], np.zeros(0)).shape == (1, 2, 1, 3)
    per_token = merge_mass(np.array([[[8.0]], [[2.0]]]), np.array([4, 2]), np.array([1, 3]))
    assert per_token.tolist() == [[0.25 * 2 + 0.75 * 1]]
    assert not merge_mass(np.ones((1, 1, 1)), np.array([0]), np.array([1])).any()
    with pytest.raises(PolicyInputError, match="kv_blocks"):
        merge_features(features, mass, np.array([1, -3, 8]))
    with pytest.raises(PolicyInputError, match="features"):
        merge_features(features, mass[:2], np.array([1, 3, 8]))


# Time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "needed"), [(5, 0), (5, 500), (100, 0), (20, 0)])
def test_a_plan_is_quick(free, needed):
    """Quiet machine: 3 to 5 ms for 12,288 blocks of seven widths with heads, at most 5 ms."""
    shape, widths = (48, 128), (2, 3, 4, 5, 6, 7, 8)
    rng = np.random.default_rng(0)
    page = 16384
    bits = np.array(widths)
    sizes = np.stack([393_216 * bits + 3072 * 2**bits, 196_608 * bits + 4096 * 2**bits])
    sizes = -(-sizes // page) * page
    s = rng.lognormal(0, 1, (*shape, 2, 1)) * 4.0**-bits * rng.lognormal(0, 0.1, (*shape, 2, 7))
    head = HeadCoefficients((0.0,) * 3, (1.0,) * 3, (0.1, 0.2, -0.1), 0.3, (-1.0, 1.0), 0.5)
    pairs = list(zip(widths[1:], widths, strict=False))
    policy = make_policy(
        "pagedweight",
        shape=shape,
        widths=widths,
        block_bytes=sizes,
        sensitivity=s,
        calibration_mass=rng.lognormal(0, 1, shape),
        heads=ResidualHeads({(b, i, j): head for i, j in pairs for b in range(2)}),
    )
    budget = int(sizes[:, -1].sum() * shape[0] * shape[1] * 0.6)
    n_bits, times = policy.initial_bits(budget), []
    for i in range(6):
        rng = np.random.default_rng(i)
        now = PolicyState(
            now=float(i),
            counts=np.ones(shape, dtype=np.int64),
            mass=rng.lognormal(0, 1, shape),
            n_bits=n_bits,
            in_transition=np.zeros(shape, dtype=bool),
            widths=widths,
            block_bytes=sizes,
            sensitivity=s,
            budget_bytes=budget,
            kv_free_blocks=free,
            kv_needed_blocks=needed,
            kv_block_bytes=3 * 2**20,
            features=rng.lognormal(0, 1, (*shape, 2, 3)),
        )
        start = time.perf_counter()
        policy.decide(now)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.050, f"{1e3 * min(times):.1f} ms"
