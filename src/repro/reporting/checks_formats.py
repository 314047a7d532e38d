"""Checks of what the formats must reach: targets of our own (codes F).

The bounds on nesting are against the least error that any code of the width can have.  The
comparison at equal bytes is judged with the interval of the paired difference: worse means
that the whole interval lies above zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from repro.reporting.checks import Case, case_name
from repro.reporting.format_records import (
    BYTES,
    CURVE,
    DEFAULT_FORMAT,
    DEFAULT_TABLES,
    JOINED,
    NESTING,
    PAGES,
    PER_ROW,
    SPEED,
    bits_per_weight,
    by_point,
    data_name,
    family,
    grid,
    largest_page,
    penalties,
)
from repro.reporting.grouping import group_series, number, select
from repro.reporting.records import Record

BOUNDS = {3: 1.03, 4: 1.12}  # times the error of an exact code, by width
TABLE_MODEL, TABLE_BITS = "Qwen3-30B-A3B", 6.1
TABLE_WIDTHS = range(3, 9)  # the widths whose tables the published count keeps
UNUSED = 0.05
RATE_GB = 2.0  # of bfloat16 weights per second on a GPU
ENCODE_S = 30.0  # all experts of both small models on a CPU
RTN = ("symmetric", "asymmetric")  # rounded to nearest, with clipping


def nesting_of_rows(records: Sequence[Record]) -> Iterator[Case]:
    """Random rows, unweighted."""
    yield from _nesting(records, weighted=False)


def nesting_of_blocks(records: Sequence[Record]) -> Iterator[Case]:
    """The models' own blocks, weighted."""
    yield from _nesting(records, weighted=True)


def _nesting(records: Sequence[Record], *, weighted: bool) -> Iterator[Case]:
    chosen = select(records, claim=NESTING, rows_per_lut=1, weighted=weighted)
    means = {
        (data_name(record), record.device): penalties(record)
        for record in select(chosen, metric="penalty_mean")
    }
    for record in select(chosen, metric="penalty_pooled"):
        ratios = penalties(record)
        mean = means.get((data_name(record), record.device), {})
        for n_bits, bound in BOUNDS.items():
            place = (JOINED, n_bits)
            if place in ratios:
                beside = f", mean of rows {mean[place]:.3f} x" if place in mean else ""
                yield Case(
                    f"{data_name(record)} {n_bits} bits",
                    ratios[place] <= bound,
                    f"{ratios[place]:.3f} x the error of an exact code, at most {bound} x"
                    f" allowed{beside}",
                    bound - ratios[place],
                )


def not_worse_at_equal_bytes(records: Sequence[Record]) -> Iterator[Case]:
    """The default any-precision curve against every integer point rounded to nearest."""
    chosen = select(records, claim=CURVE, metric="curve_difference", curve=DEFAULT_FORMAT)
    for identity, series in group_series(chosen).items():
        for record in series:
            bits = bits_per_weight(records, record)
            for point, difference in by_point(record).items():
                if family(point) not in RTN:
                    continue
                percent = 100 * math.expm1(difference.value)
                yield Case(
                    case_name(identity, point),
                    difference.low <= 0,
                    f"{difference.value:+.4f} nats ({percent:+.2f} % perplexity; interval "
                    f"{difference.low:+.4f} to {difference.high:+.4f}) at "
                    f"{bits.get(point, math.nan):.2f} bits per weight",
                    -difference.low,
                )


def error_falls(records: Sequence[Record]) -> Iterator[Case]:
    """Each further bit lowers the error of every look-up table, and of all together."""
    for record in select(records, claim=CURVE, metric="tables_not_falling"):
        errors = [float(value) for value in record.series or ()]
        together = all(b < a for a, b in zip(errors[:-1], errors[1:], strict=True))
        n_wrong = int(number(record))
        yield Case(
            f"{record.config['model']} {record.config['format']}",
            n_wrong == 0 and together,
            f"{n_wrong} of {record.n} tables have a width at which the error does not fall",
            -float(n_wrong),
        )


def tables_cost_as_published(records: Sequence[Record]) -> Iterator[Case]:
    """All tables of 3 to 8 bits, one per row, at the published dimensions."""
    chosen = select(records, claim=BYTES, metric="table_bits_per_weight", format=PER_ROW)
    for record in chosen:
        row = dict(zip(record.config["widths"], grid(record)[TABLE_MODEL], strict=True))
        total = sum(row[n_bits] for n_bits in TABLE_WIDTHS)
        wrong = abs(round(total, 1) - TABLE_BITS)
        yield Case(
            TABLE_MODEL,
            wrong == 0,
            f"{total:.3f} bits per weight, stated {TABLE_BITS}",
            -wrong,
        )


def pages_are_used(records: Sequence[Record]) -> Iterator[Case]:
    """Some page size leaves little unused at every width, for every model."""
    for record in select(records, claim=PAGES, metric="unused_share", format=DEFAULT_TABLES):
        for name, page in largest_page(record, UNUSED).items():
            found = f"largest such page: {page} bytes" if page else "no page size is small enough"
            yield Case(name, page > 0, found, float(page))


def encoding_is_fast(records: Sequence[Record]) -> Iterator[Case]:
    """GB per second on a GPU; seconds of all small models together on a CPU."""
    chosen = select(records, claim=SPEED)
    for record in select(chosen, metric="encode_rate"):
        rate = number(record)
        yield Case(
            f"{record.config['model']} {record.config['block']} on {record.device}",
            rate >= RATE_GB,
            f"{rate:.2f} GB of bfloat16 per second, at least {RATE_GB} wanted",
            rate / RATE_GB - 1,
        )
    by_device: dict[str, list[Record]] = {}
    for record in select(chosen, metric="encode_seconds"):
        by_device.setdefault(record.device, []).append(record)
    for device, series in by_device.items():
        names = sorted(str(record.config["model"]) for record in series)
        took = sum(map(number, series))
        yield Case(
            f"{' and '.join(names)} on {device}",
            took <= ENCODE_S,
            f"{took:.0f} s with {series[0].config['threads']} threads, at most {ENCODE_S:.0f} s"
            " wanted",
            1 - took / ENCODE_S,
        )
