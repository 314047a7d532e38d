"""What happens to a version that was switched away from: readers, host copy, free pages.

The one idea: its pages are given back when both are true - no step can read them any more, and
in host mode ``single`` the host has their bytes.  A copy to the host that fails is tried again;
the only copy of a plane is never dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from repro.residency.changes import Owner
from repro.residency.jobs import CopyJob
from repro.residency.placement import Placement
from repro.residency.reclaim import Epochs, Reclaimer, Retired
from repro.residency.slots import Slots
from repro.residency.streams import Streams


class Evictions:
    """Old versions between their publication and free pages.

    Args:
        placement: where the bytes lie.
        epochs: which steps are under way.
        streams: of the device.
        attempts: how often a copy to the host is tried.
        slot_pages: pages of a staging slot, now.
        queue: gives the worker a job.
    """

    def __init__(
        self,
        placement: Placement,
        epochs: Epochs,
        streams: Streams,
        attempts: int,
        slot_pages: Callable[[], int],
        queue: Callable[[CopyJob], None],
    ) -> None:
        self._placement, self._epochs, self._streams = placement, epochs, streams
        self._attempts, self._slot_pages, self._queue = attempts, slot_pages, queue
        self.reclaimer = Reclaimer(epochs)
        self.parked: list[Retired] = []  # their copy to the host failed too often

    def retire(self, owner: Owner, leaving: tuple[tuple[int, Slots], ...]) -> None:
        """These (block, slots) of an expert were just switched away from."""
        pages = self._placement.forget(owner, leaving)
        retired = Retired(owner, pages, self._epochs.last, leaving)
        self.reclaimer.retire(retired)
        if self._placement.store.mode == "single":
            retired.copied_out = False
            self._copy_out(retired)

    def _copy_out(self, retired: Retired) -> None:
        job = CopyJob("out", retired, deque(), True, self._streams.compute_event())
        start = 0
        for block, slots in retired.leaving:
            pages = retired.pages[start : start + len(slots)]
            start += len(slots)
            job.chunks += self._placement.chunks(
                retired.owner, block, slots, pages, self._slot_pages()
            )
        self._queue(job)

    def left(self, job: CopyJob, *, alive: bool) -> None:
        """A copy to the host is over: done, failed, or given up with its worker."""
        retired: Retired = job.token
        if not job.error and not job.cancelled:
            for block, slots in retired.leaving:
                self._placement.store.hold(*retired.owner, block, slots, True)
            retired.copied_out = True
            return
        retired.attempts += bool(job.error)
        if alive and retired.attempts < self._attempts:
            self._copy_out(retired)
        else:
            self.parked.append(retired)

    def try_again(self) -> None:
        """With a new worker: copies to the host that were given up."""
        parked, self.parked = self.parked, []
        for retired in parked:
            retired.attempts = 0
            self._copy_out(retired)
