"""The last things that happened to experts, in order: for timelines, and for finding out.

The one idea: a bounded list of (when, what, whom), written where it happens.  It costs an
append, and nothing depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

from repro.contract import Clock

What = Literal["accepted", "copied", "published", "reclaimed", "cancelled", "failed"]
_LENGTH = 4096


class Event(NamedTuple):
    """Something that the caller's thread did or noticed."""

    at: float  # of the injected clock
    what: What
    layer: int
    expert: int
    n_bits: tuple[int, ...]  # the widths a change leads to; those published, once reclaimed


class History:
    """The newest events, oldest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=_LENGTH)

    def note(self, what: What, owner: tuple[int, int], n_bits: tuple[int, ...]) -> None:
        """Append an event."""
        self._events.append(Event(self._clock.now(), what, *owner, n_bits))

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))
