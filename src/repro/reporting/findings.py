"""One finding about the published numbers: what is compared, computed, concluded.

One idea: a finding is a calculation anybody can repeat.  It reads its numbers from
``data/paper``, computes, and lets the result decide the verdict; correct a table and the
verdict changes.  The findings themselves stand in the modules ``findings_*``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from repro.reporting import paper

Verdict = Literal["contradiction", "differs", "consistent"]


@dataclass(frozen=True)
class Item:
    """One check: what was compared, the computed evidence, the verdict it leads to.

    ``contradiction``: the numbers cannot all be right as they are labelled.
    ``differs``: several published values for one thing; which is right is not decided.
    ``consistent``: the check found nothing wrong.
    """

    code: str
    title: str
    evidence: str
    verdict: Verdict
    conclusion: str
    tables: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


def cell(table: str, column: str, **where: Any) -> Any:
    """The one value of ``column`` in the row that matches ``where``.

    Raises:
        LookupError: no row matches, or several do.
    """
    found = [
        row
        for row in paper.load_table(table)
        if all(row.get(name) == value for name, value in where.items())
    ]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of {table!r} match {where}")
    return found[0][column]


def decide(condition: bool, verdict: Verdict) -> Verdict:
    """``verdict`` when the computed ``condition`` holds, else ``consistent``."""
    return verdict if condition else "consistent"
