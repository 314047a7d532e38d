"""What Figure 3 shows in words, computed from the curves and from the authors' series."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repro.reporting.checks_demotion import COLD_PERCENT, MANY_TOKENS, n_tokens
from repro.reporting.demotion_curves import (
    CLAIM,
    COLDEST,
    HOTTEST,
    Curve,
    curves,
    published,
)
from repro.reporting.grouping import panels, select
from repro.reporting.records import Record
from repro.reporting.sentences import NOTHING, span
from repro.reporting.tables import fixed

SHARE = 60  # percent demoted, as the sentence compares orders


def figure3(records: Sequence[Record]) -> str:
    """Cost of demoting everything, and how much of it cold and hot experts reach."""
    parts = []
    for title, chosen in panels(select(records, claim=CLAIM)):
        to_int2 = curves(chosen, pair="fp16/int2", order=COLDEST)
        hottest = curves(chosen, pair="fp16/int2", order=HOTTEST)
        if not to_int2 or not hottest:
            continue
        parts.append(
            f"in {title} by {span([_percent(c) for c in to_int2])} over the workloads (with "
            f"{SHARE} % demoted, the coldest first reach {span([_reached(c) for c in to_int2])} "
            f"of that increase, the hottest first {span([_reached(c) for c in hottest])})"
        )
    if not parts:
        return NOTHING
    raised = "Demoting every expert from FP16 to INT2 raises perplexity"
    return f"{raised} {', '.join(parts)}. {_int4(records)}"


def _int4(records: Sequence[Record]) -> str:
    found = curves(records, pair="fp16/int4", order=COLDEST)
    if not found:
        return "FP16 to INT4 was not measured."
    above = [curve for curve in found if curve.rises]
    tokens = min(n_tokens(curve) for curve in found)
    text = (
        f"FP16 to INT4 changes perplexity by {_signed(found)}; in {len(above)} of {len(found)} "
        "cases the interval is above zero"
    )
    if tokens < MANY_TOKENS:
        text += f" ({tokens:,} tokens a point are too few for a verdict)"
    return f"{text}."


def _signed(found: Sequence[Curve]) -> str:
    percents = [_percent(curve) for curve in found]
    return f"{fixed(min(percents), 1)} to {fixed(max(percents), 1)} %"


def _percent(curve: Curve) -> float:
    return float(100 * np.expm1(curve["increase"][-1]))


def _reached(curve: Curve) -> float:
    return float(100 * curve.reached[curve.at(SHARE)])


def figure3_paper() -> str:
    """What the authors' series say, and how far they can be trusted."""
    series = published()
    estimated = sum(item.estimated for item in series)
    reached = "; ".join(
        f"{item.model} ({item.origin}) "
        f"{100 * item.reached[item.shares_percent.index(COLD_PERCENT)]:.0f} %"
        for item in series
    )
    return (
        f"The authors' repository holds {len(series)} series for Figure 3, of which {estimated} "
        f"are labelled as estimates and two, of the 80B model, differ. In them the first "
        f"{COLD_PERCENT} % of the experts reach this part of the whole increase: {reached}. Where "
        f"cold experts matter less than hot ones it is below {COLD_PERCENT} %."
    )
