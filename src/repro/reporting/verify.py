"""``repro verify``: every claim with its verdict, and an exit status that says it all.

Each claim is asked of every set of records that the profile's page shows, one by one: a
claim that holds on one machine or one text need not hold on another.

Exit status 0: no required claim fails in any set.  1: a required claim fails in some set, or
nothing has been measured in the profile itself, so that nothing was verified.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from repro.reporting.claims import CLAIMS, Claim, Result, evaluate
from repro.reporting.record_sets import RecordSet, record_sets
from repro.reporting.records import is_current

_WIDTH = 100
_COLUMN = 10
_SHORT = {"not measured": "-", "does not hold here": "not here"}


@dataclass(frozen=True)
class Verdicts:
    """One claim with its result on each set of records, by the set's name."""

    claim: Claim
    results: dict[str, Result]

    @property
    def measured(self) -> dict[str, Result]:
        """Results of the sets that can answer."""
        return {k: r for k, r in self.results.items() if r.verdict != "not measured"}

    @property
    def decides(self) -> bool:
        """Whether this claim makes ``verify`` fail."""
        return any(result.decides for result in self.results.values())


def verdicts(sets: Sequence[RecordSet]) -> list[Verdicts]:
    """Every claim, asked of every set."""
    return [
        Verdicts(claim, {item.name: evaluate(claim, item.records) for item in sets})
        for claim in CLAIMS
    ]


def verdict_word(result: Result) -> str:
    """The word of the verdict; a claim that does not decide says so."""
    if result.claim.required or result.verdict == "not measured":
        return result.verdict
    return "holds" if result.verdict == "pass" else "does not hold here"


def exit_status(found: Sequence[Verdicts], own: str) -> int:
    """0 unless a required claim fails, or none could be checked in the set called ``own``."""
    checked = any(row.claim.required and own in row.measured for row in found)
    return int(not checked or any(row.decides for row in found))


def render(sets: Sequence[RecordSet], found: Sequence[Verdicts], *, brief: bool = False) -> str:
    """The verdict table as text; ``brief`` gives details of what fails only."""
    lines = ["Claims, each asked of every set of records by itself", ""]
    lines += [f"{item.name:<{_COLUMN}}{item.label}" for item in sets]
    head = "".join(f"{item.name:<{_COLUMN}}" for item in sets)
    lines += ["", f"{head}claim"]
    for row in found:
        words = [_short(row.results[item.name]) for item in sets]
        start = "".join(f"{word:<{_COLUMN}}" for word in words)
        lines.append(f"{start}{row.claim.code:<5} {row.claim.sentence}")
        if not brief or row.decides:
            lines += _details(row, " " * (len(head) + 6))
    lines += ["", *_summary(sets, found)]
    return "\n".join(lines)


def _short(result: Result) -> str:
    word = verdict_word(result)
    return _SHORT.get(word, word)


def _details(row: Verdicts, indent: str) -> list[str]:
    texts = [f"needs: {row.claim.tolerance}"]
    texts += [f"{name}: {result.found}" for name, result in row.measured.items()]
    if not row.measured:
        texts.append(next(iter(row.results.values())).found)
    more = indent + "  "
    wrapped = [
        textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=more) for text in texts
    ]
    return [line for lines in wrapped for line in lines]


def _summary(sets: Sequence[RecordSet], found: Sequence[Verdicts]) -> list[str]:
    lines: list[str] = []
    for item in sets:
        counts = Counter(
            verdict_word(row.measured[item.name]) for row in found if item.name in row.measured
        )
        said = ", ".join(f"{word}: {count}" for word, count in counts.items())
        lines.append(f"{item.name:<{_COLUMN}}{said or 'nothing measured'}")
    lines.append(
        '"pass" and "fail" decide; "holds" and "not here" are of statements that other models '
        'need not share, and decide nothing; "-": not measured in this set'
    )
    own = sets[0]
    if not any(row.claim.required and own.name in row.measured for row in found):
        lines.append(
            f"nothing of this is measured in profile {own.name!r} yet: run `make reproduce` first"
        )
    for item in sets:
        older = sum(is_current(record) is False for record in item.records)
        if older:
            lines.append(
                f"{item.name}: {older} of {len(item.records)} records were measured by an older "
                "state of the code"
            )
    return lines


def verify(profile: str, *, brief: bool = False) -> int:
    """Print the verdicts on every set that the page of ``profile`` shows; the exit status."""
    sets = record_sets(profile)
    found = verdicts(sets)
    print(render(sets, found, brief=brief), flush=True)
    return exit_status(found, profile)
