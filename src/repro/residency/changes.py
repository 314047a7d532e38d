"""One expert's change from one width to another, and which decision is the newest.

The one idea: every decision about an expert has a number.  A change is published only if its
number is still the newest one of its expert, so a copy that finishes late, of a decision that
was overtaken, cancelled or given up, can never be switched to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from repro.residency.jobs import CopyJob
from repro.residency.pages import Pages
from repro.residency.slots import Slots

Owner = tuple[int, int]
"""``(layer row, expert)``."""


@dataclass(eq=False)
class Change:
    """From a decision until it is published or given up."""

    owner: Owner
    n_bits: tuple[int, ...]  # of the blocks, when it is over
    decision: int
    promotes: bool
    pages: Pages  # all that come in
    incoming: tuple[tuple[int, Slots, Pages], ...]  # (block, slots, their pages)
    copied: bool = False
    job: CopyJob | None = field(default=None, repr=False)


class Decisions:
    """Numbers of the newest decisions."""

    def __init__(self) -> None:
        self._newest: dict[Owner, int] = {}
        self._last = 0

    def decide(self, owner: Owner) -> int:
        """A new decision about this expert: every older one is stale from now on."""
        self._last += 1
        self._newest[owner] = self._last
        return self._last

    def is_newest(self, change: Change) -> bool:
        """Whether nothing was decided about the expert since."""
        return self._newest.get(change.owner) == change.decision
