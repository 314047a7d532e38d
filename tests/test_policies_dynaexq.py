"""Top n with hysteresis: budget, stability, adaptation, silence, ties, time."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.contract import PolicyState
from repro.errors import UnknownNameError
from repro.policies import PolicyBudgetError, PolicyInputError, make_policy
from repro.policies import dynaexq as module
from repro.policies.selection import NOBODY, select, top_n

SIZES = np.array([[200, 400], [100, 200]])
LOW, HIGH = (int(b) for b in SIZES.sum(axis=0))
SEEDS = st.integers(0, 2**32 - 1)


def build(shape=(3, 16), **options):
    known = {"shape": shape, "widths": (4, 16), "block_bytes": SIZES}
    return make_policy("dynaexq", **known, **options)


def budget(n_high, shape=(3, 16)):
    return shape[0] * (shape[1] * LOW + n_high * (HIGH - LOW))


def state(counts, n_bits, n_high, now=0.0, **more):
    counts = np.asarray(counts)
    s = np.zeros((*counts.shape, 2, 2))
    s[..., 0] = 1.0
    known = {
        "now": now,
        "counts": counts,
        "mass": counts * 0.5,
        "n_bits": n_bits,
        "in_transition": np.zeros(counts.shape, dtype=bool),
        "widths": (4, 16),
        "block_bytes": SIZES,
        "sensitivity": s,
        "budget_bytes": budget(n_high, counts.shape),
        "kv_free_blocks": 10,
    }
    return PolicyState(**{**known, **more})


def grant(n_bits, actions):
    for action in actions:
        n_bits[action.layer, action.expert] = action.n_bits
    return n_bits


def drive(policy, trace, n_high, n_bits=None):
    """Every wish granted; the number of actions per decision and the final widths."""
    n_bits = np.full((*trace[0].shape, 2), 4, dtype=np.int8) if n_bits is None else n_bits
    numbers = []
    for now, counts in enumerate(trace):
        actions = policy.decide(state(counts, n_bits.copy(), n_high, float(now)))
        numbers.append(len(actions))
        grant(n_bits, actions)
        assert ((n_bits == 16).all(axis=2).sum(axis=1) <= n_high).all()
        assert ((n_bits == 16).any(axis=2) == (n_bits == 16).all(axis=2)).all()
    return numbers, n_bits


# Selection ----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(0, 8), st.floats(0, 0.3), st.none() | st.integers(0, 3))
def test_selection_keeps_the_budget_and_the_margin(seed, n_high, margin, rank_slack):
    rng = np.random.default_rng(seed)
    score = rng.integers(0, 6, (3, 8)) / 20
    inside = rng.random((3, 8)) < rng.random()
    movable = rng.random((3, 8)) < 0.8
    found = select(score, inside, movable, n_high, margin=margin, rank_slack=rank_slack)
    after = inside.copy()
    for layer, leaves, enters in zip(found.layer, found.leaves, found.enters, strict=True):
        if leaves != NOBODY:
            assert inside[layer, leaves] and movable[layer, leaves]
            after[layer, leaves] = False
        if enters != NOBODY:
            assert not inside[layer, enters] and movable[layer, enters]
            assert score[layer, enters] > 0
            after[layer, enters] = True
        if leaves != NOBODY and enters != NOBODY:
            lead = score[layer, enters] - score[layer, leaves]
            assert lead > (margin if rank_slack is None else 0)
    stuck = (inside & ~movable).sum(axis=1)
    assert (after.sum(axis=1) <= np.maximum(n_high, stuck)).all()
    if margin == 0 and rank_slack is None and movable.all():
        # nothing left to gain: the worst inside is no worse than the best outside
        for layer in range(3):
            if after[layer].any() and not after[layer].all():
                assert score[layer][after[layer]].min() >= score[layer][~after[layer]].max()
    # deciding again changes nothing
    again = select(score, after, movable, n_high, margin=margin, rank_slack=rank_slack)
    assert rank_slack is not None or len(again.layer) == 0


def test_ties_stay_and_go_to_the_lower_number():
    score = np.full((1, 4), 0.25)
    inside = np.array([[False, False, True, True]])
    everyone = np.ones((1, 4), dtype=bool)
    assert len(select(score, inside, everyone, 2).layer) == 0
    assert len(select(score, inside, everyone, 2, rank_slack=0).layer) == 0
    assert select(score, np.zeros_like(inside), everyone, 2).enters.tolist() == [0, 1]
    assert select(score, inside, everyone, 1).leaves.tolist() == [2]
    assert top_n(score, 2, everyone).tolist() == [[True, True, False, False]]


def test_rank_slack_keeps_whoever_is_nearly_among_the_first():
    inside = np.array([[True, True, False, False, False]])
    everyone = np.ones((1, 5), dtype=bool)
    close = np.array([[0.3, 0.2, 0.25, 0.15, 0.1]])  # expert 1 is third
    assert len(select(close, inside, everyone, 2, rank_slack=1).layer) == 0
    assert select(close, inside, everyone, 2, rank_slack=0).enters.tolist() == [2]
    far = np.array([[0.3, 0.1, 0.25, 0.2, 0.15]])  # expert 1 is last
    assert select(far, inside, everyone, 2, rank_slack=1).leaves.tolist() == [1]


# The policy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n_high", [0, 1, 5, 16, 30])
def test_the_budget_says_how_many_are_high(n_high):
    policy = build()
    assert policy.n_high(budget(n_high)) == min(16, n_high)
    assert policy.n_high(budget(n_high) + HIGH - LOW - 1) == min(16, n_high)
    trace = [np.random.default_rng(i).poisson(50, (3, 16)) + 1 for i in range(4)]
    _, n_bits = drive(policy, trace, n_high)
    assert ((n_bits == 16).all(axis=2).sum(axis=1) == min(16, n_high)).all()


def test_silence_changes_nothing():
    policy, silent = build(), np.zeros((3, 16), dtype=np.int64)
    assert drive(policy, [silent] * 3, 4)[0] == [0, 0, 0]
    hot = silent.copy()
    hot[:, :4] = 100
    numbers, before = drive(policy, [hot] * 3, 4)
    assert numbers[0] == 12
    after, n_bits = drive(policy, [silent] * 20, 4, before.copy())
    assert sum(after) == 0 and (n_bits == before).all()


def test_one_silent_layer_does_not_disturb_the_others():
    counts = np.random.default_rng(1).poisson(50, (3, 16))
    counts[1] = 0
    _, n_bits = drive(build(), [counts], 4)
    assert (n_bits == 16).all(axis=2).sum(axis=1).tolist() == [4, 0, 4]


def test_hysteresis_stops_flapping_and_follows_a_shift():
    base = np.arange(160, 0, -10)[None].repeat(3, axis=0)
    noisy = [np.random.default_rng(i).poisson(base) for i in range(40)]
    with_margin, _ = drive(build(alpha=0.5), noisy, 5)
    without, _ = drive(build(alpha=0.5, margin=0.0), noisy, 5)
    assert sum(without[5:]) >= 5 * max(1, sum(with_margin[5:]))
    policy = build()
    _, n_bits = drive(policy, noisy[:5], 5)
    _, n_bits = drive(policy, [c[:, ::-1].copy() for c in noisy[:10]], 5, n_bits)
    assert (n_bits[:, 11:] == 16).all() and (n_bits[:, :5] == 4).all()


def test_it_decides_from_the_state_and_not_from_its_wishes():
    """Nothing granted: the same wishes again, and never more than there is room for."""
    counts = np.random.default_rng(2).poisson(50, (3, 16))
    policy, n_bits = build(), np.full((3, 16, 2), 4, dtype=np.int8)
    first = policy.decide(state(counts, n_bits, 5))
    assert first == policy.decide(state(counts, n_bits, 5)) and len(first) == 15


def test_what_is_changing_is_left_alone_and_counts_where_it_goes():
    counts = np.tile(np.arange(16, 0, -1), (3, 1)) * 10
    n_bits = np.full((3, 16, 2), 4, dtype=np.int8)
    moving = np.zeros((3, 16), dtype=bool)
    moving[:, 14:] = True  # two cold ones are on their way up
    target = n_bits.copy()
    target[:, 14:] = 16
    actions = build().decide(state(counts, n_bits, 5, in_transition=moving, target_bits=target))
    assert {a.expert for a in actions} == {0, 1, 2} and len(actions) == 9
    everything = np.ones((3, 16), dtype=bool)
    assert build().decide(state(counts, n_bits, 5, in_transition=everything)) == []


def test_changes_under_way_are_guarded(monkeypatch):
    everyone = np.ones((3, 16), dtype=bool)
    monkeypatch.setattr(
        module,
        "select",
        lambda score, inside, movable, n, **o: select(score, inside, everyone, n, **o),
    )
    with pytest.raises(AssertionError):
        test_what_is_changing_is_left_alone_and_counts_where_it_goes()


def test_a_smaller_budget_demotes_the_coldest_first():
    counts = np.tile(np.arange(16, 0, -1), (3, 1)) * 10
    n_bits = np.full((3, 16, 2), 4, dtype=np.int8)
    n_bits[:, :6] = 16
    actions = build().decide(state(counts, n_bits, 4))
    assert all(a.n_bits == (4, 4) and a.expert in (4, 5) for a in actions) and len(actions) == 6


def test_pairs_come_demotion_first_largest_lead_first_and_limited():
    counts = np.tile(np.arange(1, 17), (3, 1)) * 10
    counts[1] *= np.arange(1, 17)
    n_bits = np.full((3, 16, 2), 4, dtype=np.int8)
    n_bits[:, :3] = 16
    actions = build(max_changes=2).decide(state(counts, n_bits, 3))
    assert [(a.layer, a.expert, a.n_bits[0]) for a in actions] == [
        (1, 0, 4), (1, 15, 16), (1, 1, 4), (1, 14, 16),
    ]  # fmt: skip


def test_due_is_once_per_interval_and_asking_changes_nothing():
    policy = build()
    assert not policy.due(199.0, 0, 999) and policy.due(200.0, 5) and policy.due(200.0, 5)
    policy.decide(state(np.ones((3, 16)), np.full((3, 16, 2), 4, np.int8), 1, now=200.0))
    assert not policy.due(399.0, 5) and policy.due(400.0, 5)
    assert build(clock_unit="s").due(module.INTERVAL_S, 5)
    assert build(interval=3.0).due(3.0, 5)


def test_sensitivity_weighs_hotness():
    s = np.zeros((3, 16, 2, 2))
    s[..., 0] = 1.0
    s[:, 8:, :, 0] = 5.0  # rarely used, but they suffer
    counts = np.tile(np.r_[np.full(8, 20), np.full(8, 10)], (3, 1))
    plain, weighted = build(), build(sensitivity=s, sensitivity_weighted=True)
    n_bits = np.full((3, 16, 2), 4, dtype=np.int8)
    assert {a.expert for a in plain.decide(state(counts, n_bits, 4))} == {0, 1, 2, 3}
    assert {a.expert for a in weighted.decide(state(counts, n_bits, 4))} == {8, 9, 10, 11}
    # The sensitivity holds calibration's usage; divided out, what is left is per use.
    used = np.where(np.arange(16) < 8, 1.0, 5.0)[None].repeat(3, axis=0)
    fair = build(sensitivity=s, sensitivity_weighted=True, calibration_mass=used)
    assert {a.expert for a in fair.decide(state(counts, n_bits, 4))} == {0, 1, 2, 3}
    # A table without information leaves hotness as it is.
    blank = build(sensitivity=np.ones_like(s), sensitivity_weighted=True)
    assert {a.expert for a in blank.decide(state(counts, n_bits, 4))} == {0, 1, 2, 3}


def test_it_starts_with_as_many_high_as_may_be_as_calibrated_if_it_is():
    start = build().initial_bits(budget(5))
    assert (start[:, :5] == 16).all() and (start[:, 5:] == 4).all()
    mass = np.tile(np.arange(16.0), (3, 1))
    start = build(calibration_mass=mass).initial_bits(budget(5))
    assert (start[:, 11:] == 16).all() and (start[:, :11] == 4).all()
    with pytest.raises(PolicyBudgetError, match="1 bytes less"):
        build().initial_bits(budget(0) - 1)


def test_layers_of_different_size_and_number_of_experts():
    sizes = np.stack([SIZES, 2 * SIZES, SIZES])
    exists = np.ones((3, 16), dtype=bool)
    exists[2, 4:] = False
    policy = make_policy("dynaexq", shape=(3, 16), widths=(4, 16), block_bytes=sizes, exists=exists)
    low = 16 * LOW + 16 * 2 * LOW + 4 * LOW
    assert policy.n_high(low + 3 * 4 * (HIGH - LOW)) == 3
    assert policy.n_high(10**9) == 4, "no more than the smallest layer has"
    counts = np.random.default_rng(3).poisson(50, (3, 16))
    n_bits = np.full((3, 16, 2), 4, dtype=np.int8)
    actions = policy.decide(state(counts, n_bits, 0, budget_bytes=low + 3 * 4 * (HIGH - LOW)))
    assert len(actions) == 9 and all(exists[a.layer, a.expert] for a in actions)


def test_bad_options_are_named():
    for options, error, text in (
        ({"signal": "votes"}, UnknownNameError, "votes"),
        ({"clock_unit": "ms"}, UnknownNameError, "ms"),
        ({"margin": "some"}, UnknownNameError, "some"),
        ({"alpha": 1.0}, PolicyInputError, "alpha"),
        ({"margin": -1.0}, PolicyInputError, "margin"),
        ({"interval": -1.0}, PolicyInputError, "interval"),
        ({"max_changes": 0}, PolicyInputError, "max_changes"),
        ({"rank_slack": -1}, PolicyInputError, "rank_slack"),
        ({"pair": (16, 4)}, PolicyInputError, "low one first"),
        ({"pair": (4, 8)}, UnknownNameError, "8"),
    ):
        with pytest.raises(error, match=text):
            build(**options)
    with pytest.raises(PolicyInputError, match="not finite"):
        bad = np.full((3, 16), np.nan)
        build().decide(state(bad, np.full((3, 16, 2), 4, np.int8), 1))


def test_an_update_is_quick():
    """Quiet machine: 0.6 ms for 48 x 128 experts, at most 1 ms; here with room for neighbours."""
    shape = (48, 128)
    mass = np.random.default_rng(0).lognormal(0, 1, shape)
    policy = build(shape, calibration_mass=mass, margin="mean")
    n_bits = policy.initial_bits(budget(43, shape))
    times = []
    for i in range(12):
        noise = np.random.default_rng(i).lognormal(0, 0.2, shape)
        now = state((mass * noise * 1e4).astype(np.int64), n_bits, 43)
        start = time.perf_counter()
        actions = policy.decide(now)
        times.append(time.perf_counter() - start)
        grant(n_bits, actions)
    assert min(times) < 0.010, f"{1e3 * min(times):.1f} ms"
