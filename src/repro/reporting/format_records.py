"""Reading the records of formats: many numbers in one record, taken apart again.

One idea: one record holds a whole curve or table, with labels that say what each number of
its series is, so that the files stay small.  Everything that shows them asks here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from repro.reporting.grouping import select, series_id
from repro.reporting.records import Record

NESTING = "Nested codes against exact codes"
CURVE = "Formats: quality against bytes"
BYTES = "Formats: bytes at published dimensions"
PAGES = "Formats: unused bytes of pages"
SPEED = "Formats: speed of encoding"
DEFAULT_FORMAT, BEST = "any-precision", "best of all tables"
JOINED = 1024  # row length at which bounds are stated
PER_ROW, DEFAULT_TABLES, PER_MATRIX = (
    "any-precision, a table per row",
    "any-precision, a table per 64 rows",
    "any-precision, one table per matrix",
)
FAMILIES: dict[str, str] = {
    "any-precision": "nested, table per 64 rows",
    "any-precision-r1": "nested, table per row",
    "any-precision-r16": "nested, table per 16 rows",
    "any-precision-r0": "nested, table per matrix",
    "symmetric": "integers, symmetric",
    "asymmetric": "integers, asymmetric",
    "gptq": "integers, GPTQ",
    "dense": "16-bit floating point",
}
"""Kinds of formats as pictures and tables call them."""


@dataclass(frozen=True)
class Interval:
    """A value and its interval."""

    value: float
    low: float
    high: float


def by_point(record: Record) -> dict[str, Interval]:
    """Values with intervals, by the name of the point (``any-precision@3``, ``int4-g128``)."""
    names = record.config["points"]
    series = [float(number) for number in record.series or ()]
    values, lows, highs = (series[i * len(names) : (i + 1) * len(names)] for i in range(3))
    return {
        name: Interval(value, low, high)
        for name, value, low, high in zip(names, values, lows, highs, strict=True)
    }


def family(point: str) -> str:
    """The kind of format a point belongs to, a key of :data:`FAMILIES`."""
    name = point.partition("@")[0]
    if name in FAMILIES:
        return name
    if not name.startswith("int"):
        return "dense"
    if name.endswith("-gptq"):
        return "gptq"
    return "asymmetric" if name.endswith("-asym") else "symmetric"


def bits_per_weight(records: Sequence[Record], beside: Record) -> dict[str, float]:
    """Bits of every point, from the bytes of the model that ``beside`` is of."""
    identity = series_id(beside)
    for record in select(records, claim=CURVE, metric="expert_bytes"):
        other = series_id(record)
        if (other.model, other.source, other.device) == (
            identity.model, identity.source, identity.device,
        ):  # fmt: skip
            n_weights = record.config["n_weights"]
            return {
                name: 8 * float(n_bytes) / n_weights
                for name, n_bytes in zip(record.config["points"], record.series or (), strict=True)
            }
    return {}


def grid(record: Record) -> dict[str, list[float]]:
    """The row of each model in a record of dimensions."""
    names = record.config["dimensions"]
    series = [float(number) for number in record.series or ()]
    width = len(series) // len(names)
    return {name: series[i * width : (i + 1) * width] for i, name in enumerate(names)}


def unused(record: Record) -> Iterator[tuple[str, int, int, float]]:
    """Model, width, page bytes and the share of pages that holds nothing."""
    widths, pages = record.config["widths"], record.config["page_bytes"]
    places = [(n_bits, page) for n_bits in widths for page in pages]
    for name, row in grid(record).items():
        for (n_bits, page), share in zip(places, row, strict=True):
            yield name, n_bits, page, share


def largest_page(record: Record, limit: float) -> dict[str, int]:
    """The largest page size at which no width leaves more than ``limit`` unused (0: none)."""
    worst: dict[tuple[str, int], float] = {}
    for name, _, page, share in unused(record):
        worst[name, page] = max(share, worst.get((name, page), 0.0))
    return {
        name: max((page for (n, page), share in worst.items() if n == name and share <= limit),
                  default=0)
        for name in record.config["dimensions"]
    }  # fmt: skip


def penalties(record: Record) -> dict[tuple[int, int], float]:
    """Ratios by row length and width."""
    return {
        (length, n_bits): float(value)
        for (length, n_bits), value in zip(
            record.config["places"], record.series or (), strict=True
        )
    }


def data_name(record: Record) -> str:
    """What the rows were: ``gaussian``, ``student-t5``, ``moe-fine down``."""
    config = record.config
    return f"{config['model']} {config['block']}" if config.get("block") else str(config["data"])
