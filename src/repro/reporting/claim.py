"""What a claim is: a question to the records with the answer fixed beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from repro.reporting.checks import Case
from repro.reporting.records import Record


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper in our words, the tolerance in words, and its check."""

    code: str
    source: str
    sentence: str
    tolerance: str
    check: Callable[[Sequence[Record]], Iterable[Case]]
    required: bool = True
    needs: str = ""  # what would have to be measured first, when nothing is
