"""The planner against brute force, and what must hold of every plan."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.errors import UnknownNameError
from repro.policies import planner
from repro.policies.allocation import allocate
from repro.policies.exchange import exchange
from repro.policies.inventory import PolicyBudgetError
from repro.policies.planner import plan_down, plan_up, segments

SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=60, deadline=None)


def curves(seed: int, *, convex: bool, equal: bool, n: int = 4, n_steps: int = 3):
    """Damage and bytes of steps ``[S, n]``; step 0 is the narrowest, and dear in convex curves."""
    rng = np.random.default_rng(seed)
    n_bytes = np.full((n_steps, n), 8.0) if equal else rng.integers(1, 20, (n_steps, n)) * 1.0
    slope = rng.lognormal(0, 1.5, (n_steps, n))
    if convex:
        slope = -np.sort(-slope, axis=0)
    return slope * n_bytes, n_bytes


def cost_of(damage, n_bytes, column, after):
    """(damage, bytes released) of going from ``column`` down to ``after``."""
    steps = np.arange(len(damage))[:, None]
    gone = (steps >= after) & (steps < column)
    return float((damage * gone).sum()), float((n_bytes * gone).sum())


def best_down(damage, n_bytes, column, floor, target):
    """Brute force: least damage that releases the target, None if nothing does."""
    ranges = [range(f, c + 1) for f, c in zip(floor, column, strict=True)]
    found = (cost_of(damage, n_bytes, column, np.array(a)) for a in itertools.product(*ranges))
    return min((cost for cost, released in found if released >= target), default=None)


def best_up(damage, n_bytes, column, ceiling, room):
    ranges = [range(c, t + 1) for c, t in zip(column, ceiling, strict=True)]
    found = (cost_of(damage, n_bytes, np.array(a), column) for a in itertools.product(*ranges))
    return max(gain for gain, taken in found if taken <= room)


@FEW
@given(SEEDS, st.booleans(), st.booleans(), st.integers(1, 120))
def test_down_meets_the_target_within_one_segment_of_the_best(seed, convex, equal, target):
    damage, n_bytes = curves(seed, convex=convex, equal=equal)
    rng = np.random.default_rng(seed)
    column = rng.integers(0, 4, 4)
    floor = np.minimum(rng.integers(0, 2, 4), column)
    plan = plan_down(damage, n_bytes, column, floor, target)
    cost, released = cost_of(damage, n_bytes, column, plan.columns)
    assert plan.n_bytes == released and plan.damage == pytest.approx(cost)
    assert (plan.columns <= column).all() and (plan.columns >= floor).all()
    best = best_down(damage, n_bytes, column, floor, target)
    if best is None:
        assert (plan.columns == floor).all(), "a target out of reach gives what there is"
    else:
        assert released >= target
        assert best - 1e-9 <= cost <= best + plan.worst_segment + 1e-9
        if convex and equal:
            assert cost == pytest.approx(best), "equal segments: greedy is exact"


@FEW
@given(SEEDS, st.booleans(), st.booleans(), st.integers(1, 120))
def test_up_spends_no_more_than_there_is_within_one_segment_of_the_best(seed, convex, equal, room):
    damage, n_bytes = curves(seed, convex=convex, equal=equal)
    rng = np.random.default_rng(seed)
    column = rng.integers(0, 4, 4)
    ceiling = np.maximum(column, rng.integers(2, 4, 4))
    plan = plan_up(damage, n_bytes, column, ceiling, room)
    gain, taken = cost_of(damage, n_bytes, plan.columns, column)
    assert taken == plan.n_bytes <= room and -plan.damage == pytest.approx(gain)
    assert (plan.columns >= column).all() and (plan.columns <= ceiling).all()
    best = best_up(damage, n_bytes, column, ceiling, room)
    assert best - plan.worst_segment - 1e-9 <= gain <= best + 1e-9
    if convex and equal:
        assert gain == pytest.approx(best)


@FEW
@given(SEEDS)
def test_up_undoes_down(seed):
    damage, n_bytes = curves(seed, convex=True, equal=True, n=9)
    top = np.full(9, 3)
    down = plan_down(damage, n_bytes, top, np.zeros(9, dtype=np.intp), 80)
    up = plan_up(damage, n_bytes, down.columns, top, down.n_bytes)
    assert (up.columns == top).all() and up.damage == pytest.approx(-down.damage)


def test_a_block_jumps_over_a_width_that_is_a_bad_bargain():
    # 3 -> 2 costs much and 2 -> 1 nearly nothing: both together are the better bargain.
    damage, n_bytes = np.array([[50.0, 9.0], [0.1, 9.0], [2.0, 9.0]]), np.full((3, 2), 8.0)
    plan = plan_down(damage, n_bytes, np.array([3, 3]), np.zeros(2, dtype=np.intp), 16)
    assert plan.columns.tolist() == [1, 3] and plan.damage == pytest.approx(2.1)
    # A step that releases nothing, its table eats the plane, is never the end of a plan.
    n_bytes[2, 0] = 0.0
    plan = plan_down(damage, n_bytes, np.array([3, 3]), np.zeros(2, dtype=np.intp), 1)
    assert plan.columns.tolist() == [1, 3] and plan.n_bytes == 8


def test_the_hull_is_needed(monkeypatch):
    """Without it segments would be taken before those they stand on."""
    monkeypatch.setattr(planner, "_hull", lambda cost, size, valid: (cost, size, valid))
    with pytest.raises(AssertionError):
        test_a_block_jumps_over_a_width_that_is_a_bad_bargain()


def test_what_overshoots_is_undone():
    damage, n_bytes = np.array([[1.0, 20.0]]), np.array([[4.0, 40.0]])
    plan = plan_down(damage, n_bytes, np.array([1, 1]), np.zeros(2, dtype=np.intp), 40)
    assert plan.columns.tolist() == [1, 0] and plan.n_bytes == 40


def test_trimming_is_needed(monkeypatch):
    monkeypatch.setattr(planner, "MAX_TRIM", 0)
    with pytest.raises(AssertionError):
        test_what_overshoots_is_undone()


def test_ties_go_to_the_lower_number_and_widest_first():
    damage, n_bytes = np.ones((2, 6)), np.ones((2, 6))
    column, floor = np.full(6, 2), np.zeros(6, dtype=np.intp)
    assert plan_down(damage, n_bytes, column, floor, 3).columns.tolist() == [1, 1, 1, 2, 2, 2]
    assert plan_down(damage, n_bytes, column, floor, 7).columns.tolist() == [0, 1, 1, 1, 1, 1]
    assert plan_up(damage, n_bytes, floor, column, 2).columns.tolist() == [1, 1, 0, 0, 0, 0]
    nothing = np.zeros((2, 6))
    assert plan_down(nothing, n_bytes, column, floor, 1).columns.tolist() == [1, 2, 2, 2, 2, 2]
    assert plan_up(nothing, n_bytes, floor, column, 9).n_bytes == 0, "recovers nothing: not taken"


def test_segments_are_sorted_and_in_the_order_of_the_walk():
    damage, n_bytes = curves(3, convex=False, equal=False, n=50, n_steps=6)
    found = segments(damage, n_bytes, np.full(50, 6), np.zeros(50, dtype=np.intp))
    slope = found.damage / found.n_bytes
    assert (np.diff(slope) > -1e-7 * slope[:-1]).all()
    block, to = found.block(slice(None)), found.to(slice(None))
    for number in range(50):
        assert (np.diff(to[block == number]) < 0).all()
        assert found.n_bytes[block == number].sum() == n_bytes[:, number].sum()


@pytest.mark.parametrize("target", [0, -5])
def test_no_target_no_plan(target):
    damage, n_bytes = curves(1, convex=True, equal=True)
    column = np.full(4, 3)
    for plan in (
        plan_down(damage, n_bytes, column, np.zeros(4, dtype=np.intp), target),
        plan_up(damage, n_bytes, column, column, target),
        plan_down(damage[:0], n_bytes[:0], column * 0, column * 0, 5),
    ):
        assert plan.n_bytes == 0 and len(plan.order) == 0


# Exchange ---------------------------------------------------------------------------------


@FEW
@given(SEEDS, st.integers(0, 20), st.sampled_from([1.0, 2.0, 5.0]))
def test_exchange_pays_for_itself(seed, room, margin):
    damage, n_bytes = curves(seed, convex=True, equal=False, n=12)
    rng = np.random.default_rng(seed)
    column = rng.integers(0, 4, 12)
    top, floor = np.full(12, 3), np.zeros(12, dtype=np.intp)
    up = segments(damage, n_bytes, column, top, up=True)
    plan = exchange(up, damage, n_bytes, column, floor, margin=margin, room=room, limit=64)
    fell, rose = plan.columns < column, plan.columns > column
    lost, income = cost_of(damage, n_bytes, np.where(fell, column, 0), plan.columns * fell)
    gain, spent = cost_of(damage, n_bytes, np.where(rose, plan.columns, 0), column * rose)
    assert spent - income <= room
    assert plan.damage == pytest.approx(lost - gain)
    assert gain >= margin * lost
    if not len(plan.order):
        assert (plan.columns == column).all()


def test_exchange_stops_of_itself():
    damage, n_bytes = curves(5, convex=True, equal=True, n=30)
    column = np.random.default_rng(5).integers(0, 4, 30)
    top, floor = np.full(30, 3), np.zeros(30, dtype=np.intp)
    for _ in range(10):
        up = segments(damage, n_bytes, column, top, up=True)
        plan = exchange(up, damage, n_bytes, column, floor, margin=1.5, room=0, limit=4)
        column = plan.columns
    assert len(plan.order) == 0


# Allocation -------------------------------------------------------------------------------


def brute(damage, sizes, budget):
    n, n_widths = damage.shape
    best = np.inf
    for columns in itertools.product(range(n_widths), repeat=n):
        at = (np.arange(n), list(columns))
        if sizes[at].sum() <= budget:
            best = min(best, damage[at].sum())
    return best


@FEW
@given(SEEDS, st.floats(0, 1), st.booleans())
def test_allocation_is_exact_or_says_how_far_it_may_be_off(seed, share, monotone):
    rng = np.random.default_rng(seed)
    damage = rng.lognormal(0, 1, (5, 4))
    if monotone:
        damage = -np.sort(-damage, axis=1)
    sizes = np.cumsum(rng.integers(1, 9, (5, 4)) * 4, axis=1)
    low, high = int(sizes[:, 0].sum()), int(sizes[:, -1].sum())
    budget = low + int(share * (high - low))
    best = brute(damage, sizes, budget)
    exact, greedy = allocate(damage, sizes, budget), allocate(damage, sizes, budget, "greedy")
    assert exact.exact and exact.damage == pytest.approx(best) and exact.gap == 0
    assert not greedy.exact
    assert greedy.lower_bound <= best + 1e-9 and greedy.damage >= best - 1e-9
    assert greedy.gap <= damage.max() + 1e-9, "at most one segment"
    for found in (exact, greedy):
        at = (np.arange(5), found.columns)
        assert found.n_bytes == sizes[at].sum() <= budget
        assert found.damage == pytest.approx(damage[at].sum())


def test_allocation_refuses_what_cannot_be():
    damage, sizes = np.ones((3, 2)), np.array([[4, 8]] * 3)
    with pytest.raises(PolicyBudgetError, match="4 bytes more"):
        allocate(damage, sizes, 8)
    with pytest.raises(UnknownNameError, match="gredy"):
        allocate(damage, sizes, 99, "gredy")
    assert allocate(damage, sizes, 12).columns.tolist() == [0, 0, 0]
    assert allocate(np.array([[2.0, 1.0]] * 3), sizes, 10**9).columns.tolist() == [1, 1, 1]
    many = np.ones((40_000, 2))
    sizes = np.random.default_rng(0).integers(1, 10**6, (40_000, 2)).cumsum(axis=1)
    with pytest.raises(PolicyBudgetError, match="too many"):
        allocate(many, sizes, int(sizes.sum()), "exact")
