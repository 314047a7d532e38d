"""What the checks of claims share: one checked place, its name, its number."""

from __future__ import annotations

from dataclasses import dataclass

from repro.reporting.grouping import SeriesId


@dataclass(frozen=True)
class Case:
    """One place where a claim was checked: whether it holds, and a number for the reader."""

    name: str
    holds: bool
    found: str
    margin: float  # how far inside (positive) or outside the tolerance, for picking the worst


def case_name(identity: SeriesId, *more: object) -> str:
    """Model, workload, protocol and what else tells the place apart."""
    parts = [identity.model, identity.workload, identity.protocol, *map(str, more)]
    return " ".join(part for part in parts if part)
