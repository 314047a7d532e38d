"""Tables of the formats: nesting, quality against bytes, bytes at published dimensions, pages.

One idea: everything is in bits per weight with tables and scales counted, so that a column
can be read down: which format loses least at the size one can pay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from repro.reporting.checks_formats import TABLE_WIDTHS, UNUSED
from repro.reporting.format_records import (
    BEST,
    BYTES,
    CURVE,
    DEFAULT_FORMAT,
    DEFAULT_TABLES,
    FAMILIES,
    JOINED,
    NESTING,
    PAGES,
    PER_MATRIX,
    PER_ROW,
    SPEED,
    Interval,
    bits_per_weight,
    by_point,
    data_name,
    family,
    grid,
    largest_page,
    penalties,
)
from repro.reporting.grouping import DOMAINS, number, panels, select
from repro.reporting.records import Record
from repro.reporting.tables import Column, Row, Table, fixed

BYTES_WIDTHS = (2, 3, 4, 6, 8)


def _keys(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(sorted({record.key for record in records}))


def nesting(records: Sequence[Record]) -> Table:
    """Error over that of an exact code of the same width."""
    chosen = select(records, claim=NESTING)
    rows = []
    for record in select(chosen, metric="penalty_pooled"):
        ratios = penalties(record)
        widths = range(2, 7)
        for length in sorted({length for length, _ in ratios}):
            cells = [fixed(ratios.get((length, b)), 3, absent="-") for b in widths]
            rows_per_lut = record.config["rows_per_lut"]
            shared = {0: "all rows", 1: "one row"}.get(rows_per_lut, f"{rows_per_lut} rows")
            rows.append(Row("ours", (data_name(record), str(length), shared, *cells)))
    return Table(
        "Squared error of nested codes over that of exact codes of the same width",
        (
            Column("rows", numeric=False),
            Column("values of a row"),
            Column("a table for", numeric=False),
            *(Column(f"{b} bits", "x") for b in range(2, 7)),
        ),
        tuple(rows),
        "Ratios of errors summed over rows. Exact: dynamic programming over all cuts in float64. "
        "A dash: fewer than four values for each level. Blocks of the models are joined to rows "
        f"of {JOINED} and weighted by the mean square of each input channel; shared tables are "
        "held against an exact table per row and so include what sharing costs.",
        _keys(chosen),
    )


def quality(records: Sequence[Record]) -> Table:
    """Rise of the loss of every format, by domain."""
    chosen = select(records, claim=CURVE)
    rows = []
    for title, of_panel in panels(select(chosen, metric="loss_increase")):
        by_domain = {str(r.config["domain"]): by_point(r) for r in of_panel}
        bits = bits_per_weight(chosen, of_panel[0])
        for point in sorted(bits, key=lambda name: (bits[name], name)):
            cells = [_rise(by_domain.get(domain, {}).get(point)) for domain in DOMAINS]
            kind = FAMILIES[family(point)]
            rows.append(Row("ours", (title, kind, point, fixed(bits[point], 2), *cells)))
    return Table(
        "Rise of the loss against bytes of all experts",
        (
            Column("model", numeric=False),
            Column("kind", numeric=False),
            Column("format", numeric=False),
            Column("size", "bits per weight"),
            *(Column(domain, "nats") for domain in DOMAINS),
        ),
        tuple(rows),
        "Planes, codes, tables and scales are counted. In brackets the half width of the interval "
        "over windows. A rise of x nats multiplies the perplexity by exp(x).",
        _keys(chosen),
    )


def _rise(found: Interval | None) -> str:
    if found is None:
        return "-"
    return f"{found.value:+.4f} ({(found.high - found.low) / 2:.4f})"


def equal_bytes(records: Sequence[Record]) -> Table:
    """What the curves lose more or less than integer formats of the same size."""
    chosen = select(records, claim=CURVE, metric="curve_difference")
    rows = []
    for title, of_panel in panels(chosen):
        curves = {
            (str(record.config["curve"]), str(record.config["domain"])): by_point(record)
            for record in of_panel
        }
        bits = bits_per_weight(records, of_panel[0])
        points = {point for found in curves.values() for point in found}
        for point in sorted(points, key=lambda name: (bits.get(name, 0.0), name)):
            cells = [_perplexity(curves.get((DEFAULT_FORMAT, d), {}).get(point)) for d in DOMAINS]
            best = [_perplexity(curves.get((BEST, d), {}).get(point)) for d in DOMAINS]
            size = fixed(bits.get(point), 2)
            rows.append(Row("ours", (title, point, size, *cells, *best)))
    return Table(
        "Any-precision against integer formats at equal bytes",
        (
            Column("model", numeric=False),
            Column("integer format", numeric=False),
            Column("size", "bits per weight"),
            *(Column(f"default, {domain}", "% perplexity") for domain in DOMAINS),
            *(Column(f"best tables, {domain}", "% perplexity") for domain in DOMAINS),
        ),
        tuple(rows),
        "Perplexity of the any-precision curve over that of the integer format at its bytes, less "
        "one; negative: any-precision loses less. Interpolated in bytes between neighbouring "
        "widths. 'worse' and 'better' mark differences whose interval leaves out zero.",
        _keys(chosen),
    )


def _perplexity(found: Interval | None) -> str:
    if found is None:
        return "-"
    word = " worse" if found.low > 0 else " better" if found.high < 0 else ""
    return f"{100 * math.expm1(found.value):+.2f}{word}"


def published_bytes(records: Sequence[Record]) -> Table:
    """Bits per weight at published dimensions, tables in use and all tables."""
    chosen = select(records, claim=BYTES, metric="bits_per_weight")
    tables = {
        record.config["format"]: record
        for record in select(records, claim=BYTES, metric="table_bits_per_weight")
    }
    rows = []
    for record in chosen:
        kind = str(record.config["format"])
        if kind not in tables:
            continue
        widths = list(record.config["widths"])
        all_tables = grid(tables[kind])
        for name, bits in grid(record).items():
            by_width = dict(zip(widths, bits, strict=True))
            table = dict(zip(widths, all_tables[name], strict=True))
            kept = sum(table[b] for b in TABLE_WIDTHS)
            sizes = [fixed(by_width[b], 2) for b in BYTES_WIDTHS]
            resident = fixed(by_width[4] - table[4] + kept, 2)
            rows.append(Row("ours", (name, kind, *sizes, fixed(kept, 2), resident)))
    return Table(
        "Bits per weight of any-precision at the dimensions of the models",
        (
            Column("model", numeric=False),
            Column("format", numeric=False),
            *(Column(f"{b} bits") for b in BYTES_WIDTHS),
            Column("six tables of 3 to 8 bits", "bits"),
            Column("4 bits, all six tables"),
        ),
        tuple(rows),
        "With the table of the width in use in memory, unless said otherwise. Computed from "
        "shapes; no weights are needed.",
        _keys(chosen),
    )


def published_integers(records: Sequence[Record]) -> Table:
    """Bits per weight of the integer formats at the same dimensions."""
    chosen = [
        record
        for record in select(records, claim=BYTES, metric="bits_per_weight")
        if "points" in record.config
    ]
    points: list[str] = list(chosen[0].config["points"]) if chosen else []
    rows = [
        Row("ours", (name, *(fixed(value, 2) for value in bits)))
        for record in chosen[:1]
        for name, bits in grid(record).items()
    ]
    return Table(
        "Bits per weight of symmetric integer formats at the same dimensions",
        (Column("model", numeric=False), *(Column(point) for point in points)),
        tuple(rows),
        "An asymmetric format stores a zero beside every scale: twice as many bits beyond its "
        "width.",
        _keys(chosen[:1]),
    )


def pages(records: Sequence[Record]) -> Table:
    """The largest page size that leaves little unused."""
    chosen = {
        str(record.config["format"]): record
        for record in select(records, claim=PAGES, metric="unused_share")
    }
    formats = [name for name in (PER_ROW, DEFAULT_TABLES, PER_MATRIX) if name in chosen]
    found = {name: largest_page(chosen[name], UNUSED) for name in formats}
    names = list(chosen[formats[0]].config["dimensions"]) if formats else []
    rows = [
        Row("ours", (name, *(str(found[kind][name] or "none") for kind in formats)))
        for name in names
    ]
    return Table(
        f"Largest page of which at most {100 * UNUSED:.0f} % stay unused",
        (Column("model", numeric=False), *(Column(kind, "bytes") for kind in formats)),
        tuple(rows),
        "At every width from 2 to 8 bits. Every part (plane, scales, table) begins on a page of "
        "its own; sizes tried are powers of two from 256 bytes to 16 KiB.",
        _keys(chosen.values()),
    )


def speed(records: Sequence[Record]) -> Table:
    """How long encoding takes."""
    rows = []
    chosen = select(records, claim=SPEED)
    for record in chosen:
        config = record.config
        if record.metric == "encode_rate":
            size = " x ".join(map(str, config["shape"]))
            what, result = f"{config['block']} of {config['model']}", f"{number(record):.2f} GB/s"
        else:
            size = f"{config['n_weights']:,} weights"
            what, result = f"all experts of {config['model']}", f"{number(record):.1f} s"
        rows.append(Row("ours", (what, size, record.device, result)))
    return Table(
        "Speed of encoding in the default any-precision format",
        (
            Column("encoded", numeric=False),
            Column("size", numeric=False),
            Column("device", numeric=False),
            Column("result", numeric=False),
        ),
        tuple(rows),
        "GB per second count bfloat16 weights read; random weights, median of five after one to "
        "warm up.",
        _keys(chosen),
    )
