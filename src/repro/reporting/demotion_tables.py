"""Figure 3 in numbers: perplexities, controls, and parts of the increase, the paper's beside.

One idea: the authors' series are of other models and labelled as estimates in part, so they
stand in a block of their own under the same shares, and only parts of an increase are meant
to be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from repro.reporting.checks_demotion import MIDDLE_PERCENT, PAIR_LABEL, TO_INT2
from repro.reporting.demotion_curves import (
    CLAIM,
    COLDEST,
    ORDERS,
    Curve,
    Published,
    curves,
    published,
)
from repro.reporting.grouping import select, workload_label
from repro.reporting.records import Record
from repro.reporting.tables import Column, Row, Table, fixed

_HEAD = (
    Column("model", numeric=False),
    Column("workload or origin", numeric=False),
    Column("tiers", numeric=False),
)
_ESTIMATED = "labelled as estimated in the authors' notes"
_TWO = "two series exist for this model, and they differ"


def perplexity(records: Sequence[Record]) -> Table:
    """Perplexity at every share, coldest first, and what demoting everything costs."""
    shares = _shares(records)
    columns = (
        *_HEAD,
        *(Column(f"{share} %") for share in shares),
        Column("cost of all", "nats"),
        Column("of the last tokens", "nats"),
    )
    rows = [
        Row(
            "ours",
            (
                *_head(curve, records),
                *(fixed(float(value), _digits(value)) for value in curve["perplexity"]),
                _cost(curve, "increase", "increase_low", "increase_high"),
                _cost(curve, "last_increase", "last_low", "last_high"),
            ),
        )
        for curve in curves(records, order=COLDEST)
    ]
    for series in published():
        cells = _at(series, shares, [fixed(float(value), 3) for value in series.perplexity])
        rows.append(_paper_row(series, (*cells, "-", "-")))
    return Table(
        "Figure 3: perplexity by share of experts demoted per layer, coldest first",
        columns,
        tuple(rows),
        f"{_protocol(records)} Costs are increases of the loss from none to all experts demoted, "
        "with the 95 % interval of paired differences over windows; the last tokens are scored "
        "given the rest of their window.",
        _keys(records),
        "Perplexities of the authors' models on WikiText-2. '-': no published value.",
    )


def controls(records: Sequence[Record]) -> Table:
    """What the order decides: the increase at middle shares."""
    columns = (
        *_HEAD,
        *(Column(f"{share} % {order}") for share in MIDDLE_PERCENT for order in ORDERS),
    )
    found = {(c.identity, c.pair, c.order): c for c in curves(records)}
    rows = [
        Row(
            "ours",
            (
                *_head(curve, records),
                *(
                    _one(1000 * found[curve.identity, curve.pair, order][name][place])
                    for share in MIDDLE_PERCENT
                    for order in ORDERS
                    for name, place in [("increase", curve.at(share))]
                ),
            ),
        )
        for curve in curves(records, order=COLDEST)
        if all((curve.identity, curve.pair, order) in found for order in ORDERS)
    ]
    if rows:
        head = ("every published model", "no published value", "-")
        rows.append(Row("paper", (*head, *("-" for _ in columns[len(_HEAD) :]))))
    return Table(
        "Figure 3, controls: increase of the loss (nats / 1000) with the coldest, the hottest, or "
        "random experts demoted first",
        columns,
        tuple(rows),
        "Experts are ranked by how often calibration windows of the same domain chose them; no "
        "such window is scored.",
        _keys(records),
    )


def reached(records: Sequence[Record]) -> Table:
    """Part of the whole increase that is reached at every share."""
    shares = _shares(records)
    columns = (*_HEAD, *(Column(f"{share} %") for share in shares))
    rows = []
    for curve in curves(records, order=COLDEST):
        known = curve.rises
        cells = [_one(100 * part) if known else "-" for part in curve.reached]
        note = "" if known else "'-': the whole increase is not above the noise"
        if known or curve.pair in TO_INT2:
            rows.append(Row("ours", (*_head(curve, records), *cells), note=note))
    for series in published():
        cells = [_one(100 * part) for part in series.reached]
        rows.append(_paper_row(series, _at(series, shares, cells)))
    return Table(
        "Figure 3, normalised: part of the whole increase of the log perplexity (%), by share "
        "demoted, coldest first",
        columns,
        tuple(rows),
        "If all experts cost the same, the part would equal the share. FP16 to INT4 is left out "
        "where its whole increase is not above the noise.",
        _keys(records),
        "Parts are computed here from the authors' perplexities.",
    )


def _head(curve: Curve, records: Sequence[Record]) -> tuple[str, str, str]:
    chosen = select(records, claim=CLAIM)
    label = workload_label(curve.identity, chosen)
    return curve.identity.model, label, PAIR_LABEL[curve.pair]


def _paper_row(series: Published, cells: tuple[str, ...]) -> Row:
    several = sum(other.model == series.model for other in published()) > 1
    notes = [_ESTIMATED] if series.estimated else []
    notes += [_TWO] if several else []
    tiers = series.series.replace("->", " to ")
    head = (series.model, f"{series.origin}, {series.status}", tiers)
    return Row("paper", (*head, *cells), note="; ".join(notes))


def _at(series: Published, shares: Sequence[int], cells: Sequence[str]) -> tuple[str, ...]:
    by_share = dict(zip(series.shares_percent, cells, strict=True))
    return tuple(by_share.get(share, "-") for share in shares)


def _shares(records: Sequence[Record]) -> list[int]:
    found = {share for curve in curves(records) for share in curve.shares_percent}
    return sorted(found or {share for series in published() for share in series.shares_percent})


def _one(value: float) -> str:
    """One decimal, and no minus before a zero."""
    return fixed(round(float(value), 1) + 0.0, 1)


def _digits(perplexity: float) -> int:
    return 2 if perplexity >= 10 else 4


def _cost(curve: Curve, value: str, low: str, high: str) -> str:
    numbers = (f"{float(curve[name][-1]):.4f}" for name in (value, low, high))
    return "{} [{}, {}]".format(*numbers)


def _protocol(records: Sequence[Record]) -> str:
    found = curves(records, order=COLDEST)
    if not found:
        return ""
    windows = {(curve.n_prompts, curve.prompt_tokens) for curve in found}
    said = ", ".join(f"{n} windows of {tokens:,} tokens" for n, tokens in sorted(windows))
    return f"Ours: {said} for every point."


def _keys(records: Sequence[Record]) -> tuple[str, ...]:
    return tuple(sorted({record.key for record in select(records, claim=CLAIM)}))
