"""Checks of what residency and serving must keep (codes C and K).

C1 to C3 are DynaExq's constraints: the budget is never exceeded, the forward pass never waits
for a transition, transitions stay bounded under fluctuation.  K are targets of ours for
PagedWeight's exchange of weights and KV cache.

One idea: counts, bytes and bits are exact and decide; times are those of a machine that may
be doing something else, so they are judged against the spread of the steps around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from repro.reporting.checks import Case
from repro.reporting.records import Record
from repro.reporting.serving_records import (
    GIVES,
    KEEPS,
    LAYOUTS,
    Point,
    copy_span,
    pressures,
    promotions,
    series,
    servings,
    value,
)

STEPS_ON_OLD = 5  # steps that one copy spans at least
STOOD_STILL = 0.8  # of a copy inside one step: a step that waits holds nearly all of it
SLOWER = 1.25  # median step with experts changing at every step, over none changing
DEVICE_SHARE = 0.05  # of the arena, that the driver may count beyond the ledger
GROWTH = 4  # KV blocks at the peak over those at the start
LENT = 0.40  # of the bytes of the experts, at the peak
N_WIDTHS = 7  # 2 to 8 bits: six steps down and six up are one way there and back


def within_budget(records: Sequence[Record]) -> Iterator[Case]:
    """Peak bytes of the arena by its own ledger, and of the device by the driver's figure."""
    for device, policy, point in pressures(records):
        yield _cap(f"KV pressure, {policy} on {device}", point)
    for device, model, layout, point in servings(records):
        name = f"{model}, {LAYOUTS[layout]} on {device}"
        yield _cap(name, point)
        if "device_peak_bytes" in point:
            peak, ledger = value(point, "device_peak_bytes"), value(point, "device_ledger_bytes")
            most = ledger + value(point, "device_workspace_bytes")
            most += DEVICE_SHARE * value(point, "budget_bytes")
            yield Case(
                f"{name}, whole device",
                peak <= most,
                f"{peak:,.0f} bytes allocated at the peak, {most:,.0f} allowed",
                1 - peak / most,
            )


def _cap(name: str, point: Point) -> Case:
    peak, budget = value(point, "peak_used_bytes"), value(point, "budget_bytes")
    found = f"{peak:,.0f} of {budget:,.0f} bytes at the peak"
    return Case(name, peak <= budget, found, 1 - peak / budget)


def never_waits(records: Sequence[Record]) -> Iterator[Case]:
    """Seconds that the engine booked as waiting, and whether a step held a copy.

    The books count copies that are made between steps; a wait in a lock or on a stream would
    not be in them.  It is in the times: a step that waits lasts as long as what it waits for.
    """
    waits: list[tuple[str, float]] = []
    for device, layout, point in promotions(records):
        waits.append((f"one promotion, {LAYOUTS[layout]} on {device}", _waited(point)))
    for device, model, layout, point in servings(records):
        waited = _waited(point) + value(point, "policy_weight_wait_s")
        waits.append((f"{model}, {LAYOUTS[layout]} on {device}", waited))
    for name, waited in waits:
        yield Case(name, waited == 0, f"{waited:g} s waited for weights", -waited)
    for device, layout, point in promotions(records):
        held = _held(point)
        yield Case(
            f"longest step of a copy, {LAYOUTS[layout]} on {device}",
            held <= STOOD_STILL,
            f"one step holds at most {100 * held:.0f} % of the copy",
            STOOD_STILL - held,
        )


def _held(point: Point) -> float:
    """Largest share of a copy that fell into one step."""
    first, last = copy_span(point)
    began = np.maximum(series(point, "step_began_s"), first)
    ended = np.minimum(series(point, "step_ended_s"), last)
    return float((ended - began).max() / (last - first))


def _waited(point: Point) -> float:
    return value(point, "weight_wait_s")


def steps_on_old_version(records: Sequence[Record]) -> Iterator[Case]:
    """Steps that began and ended while one copy was under way."""
    for device, layout, point in promotions(records):
        n = value(point, "steps_on_old_version")
        yield Case(
            f"{LAYOUTS[layout]} on {device}",
            n >= STEPS_ON_OLD,
            f"{n:.0f} steps finished on the old version, at least {STEPS_ON_OLD} wanted",
            n - STEPS_ON_OLD,
        )


def steps_keep_pace(records: Sequence[Record]) -> Iterator[Case]:
    """The median step during a copy against the slow end of steps before and after it."""
    for device, layout, point in promotions(records):
        during = point["step_s_during"].p50 or 0.0
        around = [point[f"step_s_{when}"] for when in ("before", "after")]
        slow = max(float(record.p90 or 0.0) for record in around)
        usual = " and ".join(f"{1000 * float(record.p50 or 0.0):.1f}" for record in around)
        yield Case(
            f"{LAYOUTS[layout]} on {device}",
            during <= slow,
            f"median step {1000 * during:.1f} ms during the copy, {usual} ms before and after",
            1 - during / slow,
        )


def changes_are_bounded(records: Sequence[Record]) -> Iterator[Case]:
    """Every accepted change ends once; one swing of memory takes the widths there and back.

    An alternating trace, which hysteresis must bound, is not in these records.
    """
    for device, model, layout, point in servings(records):
        accepted, published = value(point, "changes_accepted"), value(point, "changes_published")
        yield Case(
            f"{model}, {LAYOUTS[layout]} on {device}",
            0 < published <= accepted,
            f"{published:.0f} published of {accepted:.0f} accepted",
            accepted - published,
        )
    for device, policy, point in pressures(records):
        if policy != GIVES:
            continue
        moved = value(point, "promotions") + value(point, "demotions")
        most = 2.0 * (N_WIDTHS - 1) * _experts(point)
        turns = _turns(series(point, "mean_bits"))
        yield Case(
            f"KV pressure on {device}",
            moved <= most and turns <= 1,
            f"{moved:.0f} changes, at most {most:.0f} if every width is passed once each way; "
            f"the mean width turned {turns} times",
            1 - moved / most,
        )


def _turns(levels: Sequence[float]) -> int:
    """How often a series that fell rose, or one that rose fell."""
    moves = np.sign(np.diff(levels))
    return int((np.diff(moves[moves != 0]) != 0).sum())


def _experts(point: Point) -> int:
    """Experts of the model: half of its blocks."""
    return int(point["block_bits"].n or 0) // 2


def pace_while_changing(records: Sequence[Record]) -> Iterator[Case]:
    """The median step with changes forced at every step over that without."""
    for device, model, layout, point in servings(records):
        ratio = value(point, "step_ratio_on_off")
        yield Case(
            f"{model}, {LAYOUTS[layout]} on {device}",
            ratio <= SLOWER,
            f"{ratio:.3f} times the step without changes, at most {SLOWER} wanted",
            SLOWER - ratio,
        )


def comes_back(records: Sequence[Record]) -> Iterator[Case]:
    """Likelihoods of fresh texts after all changes, against those before, to the last bit."""
    for device, model, layout, point in servings(records):
        yield _same(f"{model}, {LAYOUTS[layout]} on {device}", point)
    for device, policy, point in pressures(records):
        if policy == GIVES:
            yield _same(f"KV pressure on {device}", point)


def _same(name: str, point: Point) -> Case:
    same = bool(point["restored_bit_for_bit"].value)
    return Case(name, same, "equal to the last bit" if same else "not equal", float(same) - 1)


def pressure_is_met(records: Sequence[Record]) -> Iterator[Case]:
    """All finish at once, nobody is sent back, at four times the KV memory of the start."""
    for device, policy, point in pressures(records):
        if policy != GIVES:
            continue
        n = int(point["requests_finished"].n or 0)
        done, together = value(point, "requests_finished"), value(point, "concurrent_throughout")
        grown = value(point, "peak_kv_blocks") / value(point, "kv_blocks_at_start")
        sent_back = value(point, "preemptions")
        yield Case(
            f"{policy} on {device}",
            done == n and together == n and grown >= GROWTH and sent_back == 0,
            f"{done:.0f} of {n} requests finished, {together:.0f} together throughout, KV cache "
            f"grown {grown:.2f} times, {sent_back:.0f} preemptions",
            -sent_back,
        )


def weights_are_lent(records: Sequence[Record]) -> Iterator[Case]:
    """Share of the experts' bytes that were KV memory at the peak, and whether bits came back."""
    for device, policy, point in pressures(records):
        if policy != GIVES:
            continue
        lent, last = value(point, "lent_share_at_peak"), value(point, "final_mean_bits")
        first = value(point, "first_mean_bits")
        yield Case(
            f"{policy} on {device}",
            lent >= LENT and last == first,
            f"{100 * lent:.0f} % lent, down to {value(point, 'lowest_mean_bits'):.2f} bits; "
            f"{last:g} of {first:g} bits afterwards",
            lent - LENT,
        )


def others_cannot(records: Sequence[Record]) -> Iterator[Case]:
    """The same requests and bytes with weights that keep their width: somebody must wait."""
    for device, policy, point in pressures(records):
        if policy != KEEPS:
            continue
        sent_back, stalls = value(point, "preemptions"), value(point, "kv_stalls")
        yield Case(
            f"{policy} on {device}",
            sent_back > 0,
            f"{sent_back:.0f} preemptions and {stalls:.0f} stalled request steps in "
            f"{len(series(point, 'step_s')) - 1} steps",
            sent_back,
        )
