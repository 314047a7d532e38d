"""What the records of serving hold, by name: transitions, KV pressure, serving while changing.

One idea: figures, tables, sentences and checks ask for the same numbers, so the names of
claims and metrics stand here once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from repro.reporting.grouping import number, select
from repro.reporting.records import Record

TRANSITIONS, PRESSURE, SERVING = "transitions", "kv-pressure", "serving"
PROMOTION = "DynaExq 4: the forward path does not wait"
ENGINE = "DynaExq Figure 4"
LENDING = "PagedWeight: weights give memory to the KV cache"
CHANGING = "DynaExq C1-C3: serving while experts change"
LAYOUTS = {"versions": "two versions", "planes": "bit-planes"}
"""Layouts of payloads, DynaExq's first, and what they are called."""
GIVES, KEEPS = "pagedweight", "static"
"""Policies of the pressure experiment: weights give way, weights do not."""

Point = dict[str, Record]  # by metric


def points(records: Sequence[Record], claim: str, *names: str) -> dict[tuple[str, ...], Point]:
    """Records of a claim by device, source and these configuration values, then by metric."""
    found: dict[tuple[str, ...], Point] = {}
    for record in select(records, claim=claim):
        config = record.config
        place = (record.device, *(str(config.get(name, "")) for name in ("source", *names)))
        metric = record.metric
        if "transitions" in record.config:
            metric = f"{metric} {record.config['transitions']}"
        found.setdefault(place, {})[metric] = record
    return dict(sorted(found.items()))


def promotions(records: Sequence[Record]) -> Iterator[tuple[str, str, Point]]:
    """Device, layout and numbers of each watched promotion, two versions first."""
    found = points(records, PROMOTION, "layout")
    for (device, _, layout), point in sorted(found.items(), key=lambda kv: (kv[0][0], _order(kv))):
        yield device, layout, point


def pressures(records: Sequence[Record]) -> Iterator[tuple[str, str, Point]]:
    """Device, policy and numbers of each run under KV pressure."""
    for (device, _, policy), point in points(records, LENDING, "policy").items():
        yield device, policy, point


def servings(records: Sequence[Record]) -> Iterator[tuple[str, str, str, Point]]:
    """Device, model, layout and numbers of each served point, two versions first."""
    found = points(records, CHANGING, "model", "layout")
    for (device, _, model, layout), point in sorted(
        found.items(), key=lambda kv: (kv[0][0], kv[0][2], _order(kv))
    ):
        yield device, model, layout, point


def _order(item: tuple[tuple[str, ...], Point]) -> int:
    layout = item[0][-1]
    return list(LAYOUTS).index(layout) if layout in LAYOUTS else len(LAYOUTS)


def value(point: Point, metric: str) -> float:
    """The number of one metric."""
    return number(point[metric])


def copy_span(point: Point) -> tuple[float, float]:
    """When the copy began and ended; older records say only what it lies between."""
    if "copy_began_s" in point:
        return value(point, "copy_began_s"), value(point, "copy_ended_s")
    return value(point, "submitted_s"), value(point, "published_s")


def series(point: Point, metric: str) -> list[float]:
    """The series of one metric."""
    return [float(x) for x in point[metric].series or ()]


def label(point: Point, metric: str, name: str) -> Any:
    """A label of one metric, such as ``p99``."""
    return point[metric].config[name]
