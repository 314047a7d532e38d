"""Sentences on the formats, computed from the records they comment on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from repro.reporting import checks_formats as checks
from repro.reporting.format_records import (
    BYTES,
    CURVE,
    DEFAULT_FORMAT,
    DEFAULT_TABLES,
    JOINED,
    NESTING,
    PAGES,
    PER_ROW,
    bits_per_weight,
    by_point,
    data_name,
    family,
    grid,
    largest_page,
    penalties,
)
from repro.reporting.grouping import panels, select
from repro.reporting.records import Record
from repro.reporting.sentences import NOTHING

SEED_BITS = 3
SHOWN_BITS = 4.5  # sizes at which table sharings are compared


def nesting(records: Sequence[Record]) -> str:
    """What a split costs at 4 bits, and what the seed costs."""
    chosen = select(records, claim=NESTING, metric="penalty_pooled", rows_per_lut=1)
    found = {data_name(record): penalties(record) for record in chosen}
    at_four = {name: r[JOINED, 4] for name, r in found.items() if (JOINED, 4) in r}
    at_seed = [r[JOINED, SEED_BITS] for r in found.values() if (JOINED, SEED_BITS) in r]
    if not at_four:
        return NOTHING
    most = max(at_four, key=lambda name: at_four[name])
    least = min(at_four, key=lambda name: at_four[name])
    return (
        f"With a table per row the error at {SEED_BITS} bits, where codes begin, is at most "
        f"{max(at_seed):.3f} times that of an exact code; nesting shows at 4 bits: "
        f"{at_four[least]:.3f} ({least}) to {at_four[most]:.3f} ({most}) times. A cluster that was "
        "cut for 3 bits can only be split, so the penalty grows with every further bit."
    )


def quality(records: Sequence[Record]) -> str:
    """Where the default curve is worse at equal bytes, and where GPTQ wins."""
    cases = list(checks.not_worse_at_equal_bytes(records))
    if not cases:
        return NOTHING
    worse = [case for case in cases if not case.holds]
    text = (
        f"At equal bytes the default any-precision curve is not worse in "
        f"{len(cases) - len(worse)} of {len(cases)} comparisons with integers rounded to nearest"
    )
    if worse:
        most = min(worse, key=lambda case: case.margin)
        text += f"; clearest exception: {most.name}, {most.found}"
    return f"{text}. {_gptq(records)}{default_tables(records)}"


def _gptq(records: Sequence[Record]) -> str:
    """Where codes chosen under the Hessian of the inputs beat the curve, by model."""
    said: list[str] = []
    chosen = select(records, claim=CURVE, metric="curve_difference", curve=DEFAULT_FORMAT)
    for title, of_panel in panels(chosen):
        differences = [
            difference.low > 0
            for record in of_panel
            for point, difference in by_point(record).items()
            if family(point) == "gptq"
        ]
        if differences:
            said.append(f"{sum(differences)} of {len(differences)} in {title}")
    if not said:
        return ""
    return f"The GPTQ-style encoder wins in {' and '.join(said)} comparisons. "


def default_tables(records: Sequence[Record]) -> str:
    """What the curve says about the number of rows per table, and what it leaves open."""
    chosen = select(records, claim=CURVE, metric="loss_increase")
    parts: list[str] = []
    margins: dict[str, list[float]] = {}  # how much more than the default the others lose
    for title, of_panel in panels(chosen):
        widest = _widest(of_panel, bits_per_weight(records, of_panel[0]))
        if widest:
            parts.append(f"in {title} " + ", ".join(text for text, _ in widest.values()))
        for name in widest.keys() - {DEFAULT_FORMAT}:
            if DEFAULT_FORMAT in widest:
                more = widest[name][1] - widest[DEFAULT_FORMAT][1]
                margins.setdefault(name, []).append(more)
    if not parts:
        return ""
    text = (
        f"The widest width that {SHOWN_BITS} bits per weight pay for raises the perplexity (mean "
        f"of domains) {'; '.join(parts)}."
    )
    per_row = margins.pop("any-precision-r1", [])
    if per_row and min(per_row) > 0:
        text += " So the curve rules out a table per row for experts as narrow as these"
        if margins:
            largest = max(abs(more) for found in margins.values() for more in found)
            text += (
                f". The ways of sharing differ by at most {largest:.2f} points; among them 64 "
                "rows, those of a page of a plane (16 KiB at 2,048 columns), are the default"
            )
        text += "."
    return text


def _widest(of_panel: Sequence[Record], bits: dict[str, float]) -> dict[str, tuple[str, float]]:
    """By kind of table: the widest affordable point in words, and its rise in percent."""
    rises = [by_point(record) for record in of_panel]
    found: dict[str, tuple[str, float]] = {}
    for name in ("any-precision-r1", "any-precision-r16", DEFAULT_FORMAT, "any-precision-r0"):
        points = [p for p in bits if family(p) == name and bits[p] <= SHOWN_BITS]
        if points:
            widest = max(points, key=lambda point: bits[point])
            mean = sum(rise[widest].value for rise in rises) / len(rises)
            percent = 100 * math.expm1(mean)
            found[name] = (f"by {percent:.2f} % ({widest}, {bits[widest]:.2f} bits)", percent)
    return found


def sizes(records: Sequence[Record]) -> str:
    """What tables cost at published dimensions, and the page that fits."""
    tables = select(records, claim=BYTES, metric="table_bits_per_weight")
    by_format = {str(record.config["format"]): record for record in tables}
    pages = select(records, claim=PAGES, metric="unused_share", format=DEFAULT_TABLES)
    if PER_ROW not in by_format or DEFAULT_TABLES not in by_format or not pages:
        return NOTHING
    costs = []
    for kind in (PER_ROW, DEFAULT_TABLES):
        record = by_format[kind]
        row = dict(zip(record.config["widths"], grid(record)[checks.TABLE_MODEL], strict=True))
        costs.append(sum(row[n_bits] for n_bits in checks.TABLE_WIDTHS))
    largest = largest_page(pages[0], checks.UNUSED)
    smallest = min(largest, key=lambda name: largest[name])
    measured = pages[0].config["models"]
    published = {name: page for name, page in largest.items() if name not in measured}
    text = (
        f"At the dimensions of {checks.TABLE_MODEL} the six tables of 3 to 8 bits cost "
        f"{costs[0]:.2f} bits per weight when each row has its own and {costs[1]:.2f} when 64 rows "
        f"share. Pages of {largest[smallest]} bytes leave at most {100 * checks.UNUSED:.0f} % "
        f"unused everywhere (the limit is {smallest})"
    )
    if published:
        text += f"; for the published models {min(published.values())} bytes do"
    return f"{text}."
