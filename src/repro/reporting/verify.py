"""``repro verify``: every claim with its verdict, and an exit status that says it all.

Exit status 0: no required claim fails.  1: a required claim fails, or nothing at all has
been measured, so that nothing was verified.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from repro.reporting.claims import Result, evaluate_all
from repro.reporting.records import Record, RecordStore, is_current

_WIDTH = 96


def results(profile: str) -> list[Result]:
    """Verdicts of all claims on the records of ``profile``."""
    return evaluate_all(RecordStore(profile).read())


def verdict_word(result: Result) -> str:
    """The word of the verdict column; a claim that does not decide says so."""
    if result.claim.required or result.verdict == "not measured":
        return result.verdict
    return "holds" if result.verdict == "pass" else "does not hold here"


def exit_status(found: Sequence[Result]) -> int:
    """0 unless a required claim fails or not one required claim could be checked."""
    checked = [r for r in found if r.claim.required and r.verdict != "not measured"]
    return int(not checked or any(result.decides for result in found))


def render(
    profile: str, found: Sequence[Result], records: Sequence[Record], *, brief: bool = False
) -> str:
    """The verdict table as text; ``brief`` gives details of what fails only."""
    lines = [f"Claims of DynaExq against the records of profile {profile!r}", ""]
    for result in found:
        claim = result.claim
        head = f"{verdict_word(result):<18}  {claim.code:<5} {claim.sentence}"
        lines.append(head)
        if brief and not result.decides:
            continue
        for label, text in (("needs", claim.tolerance), ("found", result.found)):
            lines += textwrap.wrap(
                f"{label}: {text}", _WIDTH, initial_indent=" " * 26, subsequent_indent=" " * 33
            )
    counts = Counter(verdict_word(result) for result in found)
    lines += ["", ", ".join(f"{word}: {count}" for word, count in counts.items())]
    if not any(r.claim.required and r.verdict != "not measured" for r in found):
        lines.append(
            f"nothing of this is measured in profile {profile!r} yet: run `make reproduce` first"
        )
    older = sum(is_current(record) is False for record in records)
    if older:
        lines.append(
            f"{older} of {len(records)} records were measured by an older state of the code"
        )
    return "\n".join(lines)


def verify(profile: str, *, brief: bool = False) -> int:
    """Print the verdict table of ``profile``; returns the exit status."""
    records = RecordStore(profile).read()
    found = evaluate_all(records)
    print(render(profile, found, records, brief=brief), flush=True)
    return exit_status(found)
