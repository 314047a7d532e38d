"""Choosing and grouping records: the few lines every table, figure and claim shares.

One idea: a series is what differs only in the quantity on its axis.  Device and workload
source are part of a series' identity, so measurements of two machines never melt into one
line; a label names the device as soon as there is more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from repro.reporting.records import Record

DOMAINS = ("text", "math", "code")


class SeriesId(NamedTuple):
    """What all records of one series share."""

    model: str
    workload: str
    domain: str
    protocol: str
    source: str
    device: str


def select(
    records: Iterable[Record],
    *,
    claim: str | None = None,
    metric: str | None = None,
    kind: str | None = None,
    **config: Any,
) -> list[Record]:
    """Records with this claim, metric, kind and these configuration values."""
    return [
        record
        for record in records
        if (claim is None or record.claim == claim)
        and (metric is None or record.metric == metric)
        and (kind is None or record.kind == kind)
        and all(record.config.get(name) == value for name, value in config.items())
    ]


def series_id(record: Record) -> SeriesId:
    """The series a record belongs to."""
    config = record.config
    return SeriesId(
        model=str(config.get("model", "")),
        workload=str(config.get("workload", "")),
        domain=str(config.get("domain", "")),
        protocol=str(config.get("protocol", "")),
        source=str(config.get("source", "")),
        device=record.device,
    )


def _series_order(identity: SeriesId) -> tuple[Any, ...]:
    known = identity.domain in DOMAINS
    domain = DOMAINS.index(identity.domain) if known else len(DOMAINS)
    return (identity.model, domain, identity.workload, *identity[2:])


def group_series(records: Iterable[Record]) -> dict[SeriesId, list[Record]]:
    """Records by series, in a fixed order: model, then text, math, code."""
    groups: dict[SeriesId, list[Record]] = {}
    for record in records:
        groups.setdefault(series_id(record), []).append(record)
    return {identity: groups[identity] for identity in sorted(groups, key=_series_order)}


def values(records: Iterable[Record], axis: str) -> dict[int, Record]:
    """Records of one series by their value of ``axis``, ascending.

    Raises:
        ValueError: two records stand at one place, so the axis does not tell them apart.
    """
    found: dict[int, Record] = {}
    for record in records:
        place = record.config[axis]
        if place in found:
            raise ValueError(
                f"two records of {record.metric!r} at {axis}={place} in one series: "
                f"{found[place].config} and {record.config}"
            )
        found[place] = record
    return dict(sorted(found.items()))


def number(record: Record) -> float:
    """The value of a record that must have one."""
    return float(record.value)  # type: ignore[arg-type]


def distinct(records: Iterable[Record], name: str) -> list[Any]:
    """Distinct configuration values of ``name``, in order of first appearance."""
    return list(dict.fromkeys(r.config[name] for r in records if name in r.config))


def devices(records: Iterable[Record]) -> list[str]:
    """Distinct devices, sorted."""
    return sorted({record.device for record in records if record.kind != "paper"})


def device_suffix(records: Sequence[Record], identity: SeriesId) -> str:
    """``" on <device>"`` when ``records`` come from more than one device, else nothing."""
    return f" on {identity.device}" if len(devices(records)) > 1 else ""


def workload_label(identity: SeriesId, records: Sequence[Record]) -> str:
    """Name of a series' workload, with what else is needed to tell it apart."""
    several_sources = len({series_id(record).source for record in records}) > 1
    source = f" ({identity.source})" if several_sources else ""
    return f"{identity.workload}{source}{device_suffix(records, identity)}"


def panels(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Records by model, workload source and device, with a title that says what differs."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        identity = series_id(record)
        place = (identity.model, identity.source, identity.device)
        groups.setdefault(place, []).append(record)
    several_sources = len({source for _, source, _ in groups}) > 1
    several_devices = len({device for _, _, device in groups}) > 1
    titled: list[tuple[str, list[Record]]] = []
    for model, source, device in sorted(groups):
        title = f"{model} ({source})" if several_sources else model
        if several_devices:
            title = f"{title} on {device}"
        titled.append((title, groups[model, source, device]))
    return titled
