"""Checks of the claims on demotion: Observation 3, Figure 3.

"Smooth and controlled when cold experts come first" is taken apart: demoting all costs
something, no step makes the model better by more than noise, cold experts cost less than
their share and less than hot ones, and keeping the hottest saves most of it.

Noise is told by paired differences over windows.  A pair that ends in INT2 stands out of it in
every set of records; FP16 to INT4 costs so little that a verdict needs many tokens, so it
has a row of its own that answers only where there are as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from repro.reporting.checks import Case, case_name
from repro.reporting.demotion_curves import COLDEST, HOTTEST, Curve, curves
from repro.reporting.records import Record

STEP_ERRORS = 4.0  # so many standard errors, because every set of records holds 84 such steps
STEP_PART = 0.05  # of the whole increase
ERRORS = 2.0
COLD_PERCENT = 30
MIDDLE_PERCENT = (30, 45, 60)
KEPT_FROM_PERCENT = 75
MOST = 0.5
MANY_TOKENS = 100_000
TO_INT2 = ("fp16/int2", "int4/int2")
PAIR_LABEL = {
    "fp16/int4": "FP16 to INT4",
    "fp16/int2": "FP16 to INT2",
    "int4/int2": "INT4 to INT2",
}


def _to_int2(records: Sequence[Record]) -> list[Curve]:
    return [curve for curve in curves(records, order=COLDEST) if curve.pair in TO_INT2]


def _name(curve: Curve, *more: object) -> str:
    return case_name(curve.identity, PAIR_LABEL[curve.pair], *more)


def whole_increase(curve: Curve) -> str:
    """The cost of demoting everything, with its interval."""
    low, value, high = (curve[name][-1] for name in ("increase_low", "increase", "increase_high"))
    return f"{value:+.4f} nats [{low:+.4f}, {high:+.4f}]"


def int2_costs(records: Sequence[Record]) -> Iterator[Case]:
    """Demoting every expert to INT2 raises the loss, interval included."""
    for curve in _to_int2(records):
        low = float(curve["increase_low"][-1])
        yield Case(_name(curve), curve.rises, whole_increase(curve), low)


def no_step_down(records: Sequence[Record]) -> Iterator[Case]:
    """No further demotion makes the model better by more than noise."""
    for curve in _to_int2(records):
        increase, error = curve["increase"], curve["step_error"]
        whole = abs(float(increase[-1]))
        for place in range(1, len(increase)):
            step = float(increase[place] - increase[place - 1])
            allowed = max(STEP_ERRORS * float(error[place]), STEP_PART * whole)
            shares = curve.shares_percent[place - 1 : place + 1]
            yield Case(
                _name(curve, f"{shares[0]} to {shares[1]} %"),
                step >= -allowed,
                f"{step:+.4f} nats, {allowed:.4f} down allowed",
                (step + allowed) / whole if whole else step,
            )


def cold_below_line(records: Sequence[Record]) -> Iterator[Case]:
    """The coldest experts cost less than their share of the whole increase."""
    for curve in _to_int2(records):
        place = curve.at(COLD_PERCENT)
        part = curve.n_demoted[place] / curve.n_experts
        above = float(curve["increase"][place] - part * curve["increase"][-1])
        error = float(curve["line_error"][place])
        yield Case(
            _name(curve),
            above < -ERRORS * error,
            f"the coldest {100 * part:.0f} % of the experts cost "
            f"{100 * curve.reached[place]:.1f} % of the whole",
            -above - ERRORS * error,
        )


def cold_below_hot(records: Sequence[Record]) -> Iterator[Case]:
    """Demoting the coldest costs less than demoting as many of the hottest."""
    hottest = {(c.identity, c.pair): c for c in curves(records, order=HOTTEST)}
    for curve in _to_int2(records):
        control = hottest.get((curve.identity, curve.pair))
        if control is None:
            continue
        for share in MIDDLE_PERCENT:
            place = curve.at(share)
            cold, hot = float(curve["increase"][place]), float(control["increase"][place])
            error = float(control["coldest_error"][place])
            yield Case(
                _name(curve, f"{share} %"),
                hot - cold > ERRORS * error,
                f"coldest {cold:+.4f}, hottest {hot:+.4f} nats; difference +-{error:.4f}",
                hot - cold - ERRORS * error,
            )


def hottest_save_most(records: Sequence[Record]) -> Iterator[Case]:
    """Keeping the hottest experts in the high tier saves most of the increase."""
    for curve in _to_int2(records):
        reached = float(curve.reached[curve.at(KEPT_FROM_PERCENT)])
        found = f"{100 * reached:.1f} % of the whole with {KEPT_FROM_PERCENT} % demoted"
        yield Case(_name(curve), reached < MOST, found, MOST - reached)


def int2_above_int4(records: Sequence[Record]) -> Iterator[Case]:
    """From FP16, INT2 costs more than INT4; the intervals are apart."""
    int4 = {c.identity: c for c in curves(records, pair="fp16/int4", order=COLDEST)}
    for curve in curves(records, pair="fp16/int2", order=COLDEST):
        if curve.identity not in int4:
            continue
        other = int4[curve.identity]
        gap = float(curve["increase_low"][-1] - other["increase_high"][-1])
        found = f"INT2 {whole_increase(curve)}, INT4 {whole_increase(other)}"
        yield Case(case_name(curve.identity), gap > 0, found, gap)


def no_jump(records: Sequence[Record]) -> Iterator[Case]:
    """Literal: the rise is spread, no step of the shares carries most of it."""
    for curve in _to_int2(records):
        steps = np.diff(curve["increase"])
        place = int(np.argmax(steps))
        part = float(steps[place] / curve["increase"][-1])
        shares = curve.shares_percent[place : place + 2]
        found = f"from {shares[0]} to {shares[1]} %: {100 * part:.0f} % of the whole"
        yield Case(_name(curve), part <= MOST, found, MOST - part)


def int4_costs(records: Sequence[Record]) -> Iterator[Case]:
    """FP16 to INT4 raises the loss; only where enough tokens were read to tell."""
    for curve in curves(records, pair="fp16/int4", order=COLDEST):
        if n_tokens(curve) < MANY_TOKENS:
            continue
        said = "" if curve.rises else ": below the noise"
        low = float(curve["increase_low"][-1])
        yield Case(case_name(curve.identity), curve.rises, whole_increase(curve) + said, low)


def n_tokens(curve: Curve) -> int:
    """Tokens that were read for every point."""
    return curve.n_prompts * curve.prompt_tokens


_NEEDS = "needs the demotion experiment (Figure 3)"
_TO_INT2_ERRORS = f"to INT2, by more than {ERRORS:.0f} standard errors"
ROWS: tuple[
    tuple[str, str, str, str, Callable[[Sequence[Record]], Iterator[Case]], bool, str], ...
] = (
    (
        "O3.1",
        "Observation 3, Figure 3",
        "Demoting every expert to INT2 raises the perplexity.",
        "lower end of the interval of the paired increase above 0",
        int2_costs,
        True,
        _NEEDS,
    ),
    (
        "O3.2",
        "Observation 3, Figure 3",
        "Perplexity rises as more cold experts are demoted to INT2.",
        f"no step down by more than {STEP_ERRORS:.0f} standard errors or {100 * STEP_PART:.0f} % "
        "of the whole increase, whichever is larger",
        no_step_down,
        True,
        _NEEDS,
    ),
    (
        "O3.3",
        "Observation 3, Figure 3",
        f"The coldest {COLD_PERCENT} % of the experts cost less than their share.",
        f"below the straight line, {_TO_INT2_ERRORS}",
        cold_below_line,
        True,
        _NEEDS,
    ),
    (
        "O3.4",
        "Observation 3, Figure 3",
        "Demoting the coldest experts costs less than demoting as many of the hottest.",
        f"at {', '.join(map(str, MIDDLE_PERCENT))} % {_TO_INT2_ERRORS}",
        cold_below_hot,
        True,
        _NEEDS,
    ),
    (
        "O3.5",
        "Observation 3",
        "Protecting the hottest experts captures most of the quality gain.",
        f"with {KEPT_FROM_PERCENT} % demoted to INT2 less than {100 * MOST:.0f} % of the whole "
        "increase",
        hottest_save_most,
        False,  # a model of few experts per layer has no small hot set to protect
        _NEEDS,
    ),
    (
        "O3.6",
        "Figure 3",
        "From FP16, demotion to INT2 costs more than demotion to INT4.",
        "all experts demoted: intervals apart",
        int2_above_int4,
        True,
        _NEEDS,
    ),
    (
        "O3.7",
        "Observation 3, literally",
        "The rise is smooth: no step of the shares carries most of it.",
        f"no step to INT2 above {100 * MOST:.0f} % of the whole increase",
        no_jump,
        False,
        _NEEDS,
    ),
    (
        "O3.8",
        "Figure 3",
        "Demoting every expert from FP16 to INT4 raises the perplexity.",
        f"interval above 0, asked of points of at least {MANY_TOKENS:,} tokens; with fewer the "
        "increase is below the noise",
        int4_costs,
        False,
        f"needs points of at least {MANY_TOKENS:,} tokens, as a GPU reads them",
    ),
)
"""The fields of a claim: code, source, sentence, tolerance, check, required, what it needs."""
