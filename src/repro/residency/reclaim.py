"""Reclaiming by epoch: pages of an old version are free once nobody can read them any more.

The one idea: a step reads the table of its beginning.  Pages that a publication replaced can be
read by steps that began before it and by no other, so they are kept until the oldest step still
under way is younger than the publication.  On CUDA a step is under way until the event that was
recorded at its end has passed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from repro.residency.errors import StepError
from repro.residency.pages import Pages
from repro.residency.slots import Slots
from repro.residency.streams import is_done


class Epochs:
    """Which steps are under way."""

    def __init__(self) -> None:
        self.last = 0
        self._running: dict[int, Any] = {}  # in the order they began
        self._ending: deque[tuple[int, Any]] = deque()

    def begin(self, token: Any) -> int:
        """Number of a new step; ``token`` is given back when it has ended."""
        self.last += 1
        self._running[self.last] = token
        return self.last

    def end(self, number: int, event: Any | None) -> Any:
        """The step has enqueued all its work; ``event`` passes when the device has done it.

        Raises:
            StepError: it is not under way.
        """
        token = self._running.get(number)
        if token is None:
            raise StepError(f"step {number} is not under way: a step is ended once")
        if event is None:
            del self._running[number]
        else:
            self._running[number] = None
            self._ending.append((number, event))
        return token

    def oldest(self) -> int:
        """Number of the oldest step that may still read; one past the last if there is none."""
        while self._ending and is_done(self._ending[0][1]):
            del self._running[self._ending.popleft()[0]]
        return next(iter(self._running), self.last + 1)

    @property
    def n_running(self) -> int:
        """Steps under way."""
        return len(self._running)


@dataclass(eq=False)
class Retired:
    """Pages of an old version, from its publication until they are free again."""

    owner: tuple[int, int]
    pages: Pages
    epoch: int  # steps up to this one may read them
    leaving: tuple[tuple[int, Slots], ...] = ()  # (block, slots) to copy out to the host first
    copied_out: bool = True
    attempts: int = 0


class Reclaimer:
    """The old versions that still wait."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._waiting: dict[tuple[int, int], Retired] = {}
        self.n_pages = 0

    def retire(self, retired: Retired) -> None:
        """A publication has replaced these pages."""
        self._waiting[retired.owner] = retired
        self.n_pages += len(retired.pages)

    def is_evicting(self, owner: tuple[int, int]) -> bool:
        """Whether an old version of this expert still waits."""
        return owner in self._waiting

    def collect(self) -> list[Retired]:
        """Those that nobody reads any more and that are safe on the host; they are forgotten."""
        if not self._waiting:
            return []
        oldest = self._epochs.oldest()
        # In the order of publication, so epochs ascend: what waits ends the search.
        free = []
        for retired in self._waiting.values():
            if retired.epoch >= oldest:
                break
            if retired.copied_out:
                free.append(retired)
        for retired in free:
            del self._waiting[retired.owner]
            self.n_pages -= len(retired.pages)
        return free

    def owners(self) -> list[tuple[int, int]]:
        """Experts whose old version still waits."""
        return list(self._waiting)

    def waiting(self) -> list[Retired]:
        """What still waits, oldest publication first."""
        return list(self._waiting.values())
