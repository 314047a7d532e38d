"""Checks of the claims on skew and on hot sets: Observation 2, Figure 2.

Ten of 16 experts are not a small set, and two such sets must share four.  So skew is asked
of a fraction of the experts, and overlap is held against what unrelated sets would share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from repro.reporting.checks import Case, case_name
from repro.reporting.grouping import SeriesId, group_series, number, panels, select
from repro.reporting.heavy_tail_figures import (
    TOP,
    chance_overlap,
    layer_records,
    mean_curve,
    n_experts,
    pair_of,
)
from repro.reporting.records import Record
from repro.reporting.tables import fixed

FIFTH = 0.2
FIFTH_FACTOR = 1.5  # the busiest fifth carries this many times its even share
MANY_PERCENT = 50.0
ORDERS = 100.0  # "several orders of magnitude" needs at least two


def _curves(records: Sequence[Record]) -> dict[SeriesId, list[Record]]:
    chosen = select(records, claim="DynaExq Figure 2", metric="cumulative_share")
    return group_series([record for record in layer_records(chosen) if record.series])


def share_of_busiest(curve: np.ndarray, fraction: float) -> float:
    """Share of the traffic that the busiest ``fraction`` of experts carries (interpolated)."""
    ranks = np.arange(len(curve) + 1) / len(curve)
    return float(np.interp(fraction, ranks, np.concatenate([[0.0], curve])))


def top_above_even(records: Sequence[Record]) -> Iterator[Case]:
    """In every layer the ten busiest carry more than ten even shares, interval included."""
    curves = _curves(records)
    chosen = select(records, claim="DynaExq Figure 2", metric="top10_share")
    for identity, series in group_series(layer_records(chosen)).items():
        if identity not in curves:
            continue
        experts = len(curves[identity][0].series or ())
        even = min(TOP, experts) / experts
        for record in series:
            low = record.ci_low if record.ci_low is not None else number(record)
            yield Case(
                case_name(identity, f"layer {record.config['layer']}"),
                low > even,
                f"top 10 of {experts} carry {100 * number(record):.1f} % (interval from "
                f"{100 * low:.1f} %), even use gives {100 * even:.1f} %",
                low / even - 1.0,
            )


def fifth_above_even(records: Sequence[Record]) -> Iterator[Case]:
    """The busiest fifth of experts carries clearly more than a fifth of the traffic."""
    for identity, series in _curves(records).items():
        mean, _, _ = mean_curve(series)
        share = share_of_busiest(mean, FIFTH)
        yield Case(
            case_name(identity),
            share >= FIFTH_FACTOR * FIFTH,
            f"busiest fifth carries {100 * share:.1f} %",
            share - FIFTH_FACTOR * FIFTH,
        )


def few_dominate(records: Sequence[Record]) -> Iterator[Case]:
    """Literal: a fifth of the experts carries more than half of the traffic."""
    for identity, series in _curves(records).items():
        mean, _, _ = mean_curve(series)
        share = 100 * share_of_busiest(mean, FIFTH)
        found = f"busiest fifth carries {share:.3f} %"
        yield Case(case_name(identity), share > MANY_PERCENT, found, share - MANY_PERCENT)


def orders_of_magnitude(records: Sequence[Record]) -> Iterator[Case]:
    """Literal: the least used expert is used orders of magnitude less than the busiest."""
    for identity, series in _curves(records).items():
        ratios = []
        for record in series:
            shares = np.diff(np.concatenate([[0.0], np.array(record.series)]))
            ratios.append(shares[0] / shares[-1] if shares[-1] > 0 else math.inf)
        median = float(np.median(ratios))
        found = f"busiest / least used, median layer: {median:,.1f}"
        yield Case(case_name(identity), median >= ORDERS, found, median - ORDERS)


def hot_sets_shift(records: Sequence[Record]) -> Iterator[Case]:
    """Top-10 sets of two workloads are nearer to unrelated than to equal."""
    for title, chosen in panels(select(records, claim="DynaExq Figure 2")):
        overlaps = layer_records(select(chosen, metric="top10_overlap"))
        if not overlaps:
            continue
        chance = chance_overlap(n_experts(chosen))
        limit = (chance + TOP) / 2
        mean = float(np.mean([number(record) for record in overlaps]))
        yield Case(
            title,
            mean <= limit,
            f"{fixed(mean, 1)} of {TOP} shared on average; {fixed(chance, 1)} by chance, at most "
            f"{fixed(limit, 1)} allowed",
            limit - mean,
        )


def hot_sets_disjoint(records: Sequence[Record]) -> Iterator[Case]:
    """Literal: in some layer the top-10 sets of the three workloads are disjoint."""
    for title, chosen in panels(select(records, claim="DynaExq Figure 2")):
        overlaps = layer_records(select(chosen, metric="top10_overlap"))
        workloads = {name for record in overlaps for name in pair_of(record)}
        if not overlaps or len(workloads) * TOP > n_experts(chosen):
            continue  # so many experts do not exist: the sentence has no meaning here
        totals: dict[int, float] = {}
        for record in overlaps:
            layer = int(record.config["layer"])
            totals[layer] = totals.get(layer, 0.0) + number(record)
        layer = min(totals, key=lambda number: totals[number])
        found = f"fewest shared in layer {layer}: {totals[layer]:.0f} over all pairs"
        yield Case(title, totals[layer] == 0, found, -totals[layer])
