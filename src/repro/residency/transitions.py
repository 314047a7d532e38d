"""From a decision to a published version and back to free pages: the life of a change.

The one idea: admission takes pages, the worker fills them, publication writes the row, and the
old pages return when no step reads them.  All four happen on the caller's thread, in calls
that never wait; whatever goes wrong ends one change and leaves the old version in place.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import chain

import numpy as np
import numpy.typing as npt

from repro.contract import Action, Clock, Health, Outcome, State
from repro.residency.changes import Change, Decisions, Owner
from repro.residency.driver import Driver
from repro.residency.evictions import Evictions
from repro.residency.history import History
from repro.residency.jobs import Chunk, CopyJob
from repro.residency.limits import Backpressure, Limits
from repro.residency.memory import Intake, Memory
from repro.residency.pages import Pages
from repro.residency.placement import Placement
from repro.residency.reclaim import Epochs
from repro.residency.slots import Slots
from repro.residency.staging import StagingRing
from repro.residency.streams import Streams
from repro.residency.supervisor import Supervisor
from repro.residency.worker import CopyWorker


class Transitions:
    """Changes under way, and the books of what the worker does for them."""

    def __init__(
        self,
        placement: Placement,
        memory: Memory,
        ring: StagingRing,
        streams: Streams,
        epochs: Epochs,
        supervisor: Supervisor,
        limits: Limits,
        clock: Clock,
    ) -> None:
        self._placement, self._memory, self._ring = placement, memory, ring
        self._streams = streams
        self.supervisor = supervisor
        self._pressure = Backpressure(limits, clock)
        self.history = History(clock)
        self.decisions = Decisions()
        self.changes: dict[Owner, Change] = {}
        self._discarding: set[CopyJob] = set()  # copies under way for a decision given up
        self.evictions = Evictions(
            placement, epochs, streams, limits.attempts, self._slot_pages, self._queue
        )
        self.counts: Counter[str] = Counter()
        self.last_error = ""

    @property
    def worker(self) -> CopyWorker:
        """The worker that gets new jobs."""
        return self.supervisor.worker

    @property
    def driver(self) -> Driver:
        """Who drives it."""
        return self.supervisor.driver

    # a wish ----------------------------------------------------------------------------------

    def submit(self, action: Action) -> Outcome:
        """Decide about one expert; nothing is changed unless the answer is yes."""
        self.settle()
        outcome, kind = self._decide(action)
        self.counts[f"{kind}_{outcome.value}"] += 1
        return outcome

    def _decide(self, action: Action) -> tuple[Outcome, str]:
        placement, owner = self._placement, (action.layer, action.expert)
        published = tuple(placement.n_bits[owner].tolist())
        wanted = tuple(int(w) for w in action.n_bits)
        kind = "promotion" if sum(wanted) > sum(published) else "demotion"
        if not placement.has_widths(wanted):
            return Outcome.REFUSED, kind
        change = self.changes.get(owner)
        if wanted == (published if change is None else change.n_bits):
            return Outcome.ACCEPTED, "unchanged"
        if change is not None and wanted == published:
            if not self._memory.may_end_at(max(published)):
                return Outcome.REFUSED, "cancellation"
            self._give_up(change)
            return Outcome.ACCEPTED, "cancellation"
        if not self.health().ok or self.evictions.reclaimer.is_evicting(owner):
            return Outcome.DEFERRED, kind
        incoming = placement.incoming(action)
        n_pages = sum(len(slots) for _, slots in incoming)
        frees = placement.n_outgoing(action) >= n_pages
        n_bytes = n_pages * placement.store.page_bytes
        n_in_flight = len(self.changes) - (change is not None)
        if not frees and self._pressure.holds(n_in_flight, n_bytes):
            return Outcome.DEFERRED, kind
        intake = Intake(n_pages, max(wanted), frees)
        outcome = self._make_room(intake, change)
        if outcome is Outcome.ACCEPTED:
            if change is not None and owner in self.changes:
                self._give_up(change)
            self._pressure.rate.charge(n_bytes)
            self._begin(owner, wanted, intake, incoming, kind == "promotion")
        return outcome, kind

    def _make_room(self, intake: Intake, change: Change | None) -> Outcome:
        """Whether there is room; gives up the overtaken change first if only that makes some."""
        pending = self.evictions.reclaimer.n_pages
        pending += sum(len(job.token.pages) for job in self._discarding)
        if change is None:
            return self._memory.answer(intake, pending)
        outcome = self._memory.answer(intake, len(change.pages))
        if outcome is Outcome.DEFERRED:
            # Its pages are free at once if its copy is over, or has not begun.
            if change.copied or self._withdrawn(change, force=False):
                self._drop(change)
                outcome = self._memory.answer(intake, 0)
        elif outcome is Outcome.REFUSED:
            outcome = self._memory.answer(intake, pending + len(change.pages))
        return outcome

    def _begin(
        self,
        owner: Owner,
        n_bits: tuple[int, ...],
        intake: Intake,
        incoming: list[tuple[int, Slots]],
        promotes: bool,
    ) -> None:
        pages = self._memory.take(intake)
        self._memory.retarget(int(self._placement.n_bits[owner].max()), max(n_bits))
        start, parts = 0, []
        chunks: deque[Chunk] = deque()
        for block, slots in incoming:
            here = pages[start : start + len(slots)]
            start += len(slots)
            parts.append((block, slots, here))
            assert self._placement.store.holds(*owner, block, slots), "not on the host"
            chunks += self._placement.chunks(owner, block, slots, here, self._slot_pages())
        decision = self.decisions.decide(owner)
        change = Change(owner, n_bits, decision, promotes, pages, tuple(parts))
        self.changes[owner] = change
        self.history.note("accepted", owner, n_bits)
        if not chunks:
            change.copied = True
            return
        event = self._streams.compute_event()
        change.job = CopyJob("in", change, chunks, intake.frees, event)
        self._queue(change.job)

    def _slot_pages(self) -> int:
        """0 where no staging slot can be had (none planned, or all held by hung workers)."""
        enough = self._ring.n_slots > self.supervisor.n_lost_slots
        return self._ring.slot_pages if enough else 0

    def _queue(self, job: CopyJob) -> None:
        # The ring is in use as long as there is a job that may pass through it.
        staging = self._memory.budget["staging"]
        if not staging.used:
            self._memory.budget.try_reserve("staging", staging.quota)
        self.supervisor.queue(job)

    # giving up -------------------------------------------------------------------------------

    def _withdrawn(self, change: Change, *, force: bool) -> bool:
        return change.job is None or self.worker.withdraw(change.job, force=force)

    def _give_up(self, change: Change) -> None:
        """Cancel: pages of a copy under way are free only once that copy is over."""
        if change.copied or self._withdrawn(change, force=True):
            self._drop(change)
        else:
            self._set_aside(change)

    def _set_aside(self, change: Change) -> None:
        assert change.job is not None
        self._discarding.add(change.job)
        self._forget(change)

    def _drop(self, change: Change) -> None:
        """Nothing writes to its pages: they are free."""
        self._forget(change)
        self._give(change.pages)

    def _give(self, pages: Pages) -> None:
        if len(pages):
            self._memory.give(pages)

    def _forget(self, change: Change) -> None:
        failed = change.job is not None and change.job.error
        self.history.note("failed" if failed else "cancelled", change.owner, change.n_bits)
        del self.changes[change.owner]
        published = int(self._placement.n_bits[change.owner].max())
        self._memory.retarget(max(change.n_bits), published)
        self.decisions.decide(change.owner)  # whatever is under way is stale

    # what the worker reports -----------------------------------------------------------------

    def settle(self) -> None:
        """Bring the books up to date with the worker and the device; never waits."""
        for job in self.supervisor.take_done():
            self._over(job)
        for retired in self.evictions.reclaimer.collect():
            self._memory.give(retired.pages)
            n_bits = tuple(self._placement.n_bits[retired.owner].tolist())
            self.history.note("reclaimed", retired.owner, n_bits)
        staging = self._memory.budget["staging"]
        if staging.used and self.supervisor.is_idle:
            self._memory.budget.release("staging", staging.used)

    def _over(self, job: CopyJob) -> None:
        if job.error:
            self.counts["copy_errors"] += 1
            self.last_error = job.error
        if job.direction == "out":
            self.evictions.left(job, alive=not self.worker.died)
            return
        change: Change = job.token
        self._discarding.discard(job)
        if not self.decisions.is_newest(change):
            self._give(change.pages)
        elif job.error or job.cancelled:
            self._drop(change)
        else:
            change.copied = True
            self.history.note("copied", change.owner, change.n_bits)

    def restart_worker(self) -> None:
        """Replace the worker, after it died or hung.

        Changes that were queued are given up, and so is the one under way; pages that a hung
        copy may still write stay in quarantine until it wakes up.
        """
        self.settle()
        for job in self.supervisor.restart():
            if job.direction == "in":
                self._over(job)
            else:
                self.evictions.parked.append(job.token)
        for change in list(self.changes.values()):
            if not change.copied:
                self._set_aside(change)
        self.evictions.try_again()
        self.settle()

    def health(self) -> Health:
        """Not ok while the worker is dead or stuck, or copies to the host fail."""
        health = self.supervisor.health()
        if health.ok and self.evictions.parked:
            n = len(self.evictions.parked)
            return Health(False, f"{n} copies to the host failed: {self.last_error}")
        return health

    # publication -----------------------------------------------------------------------------

    def publish(self) -> tuple[Owner, ...]:
        """Switch every expert whose copies are over; its old pages wait for their readers."""
        self.settle()
        ready = [change for change in self.changes.values() if change.copied]
        if not ready:
            return ()
        ready.sort(key=lambda change: change.decision)
        left = self._placement.switch(ready)
        for change, leaving in zip(ready, left, strict=True):
            del self.changes[change.owner]
            self.history.note("published", change.owner, change.n_bits)
            self.counts["promotions" if change.promotes else "demotions"] += 1
            for block, slots, _ in change.incoming:
                self._placement.store.hold(*change.owner, block, slots, False)
            if leaving:
                self.evictions.retire(change.owner, leaving)
        self.settle()
        return tuple(change.owner for change in ready)

    # questions -------------------------------------------------------------------------------

    def state(self, owner: Owner) -> State:
        """Where the expert stands between two versions."""
        change = self.changes.get(owner)
        if change is not None:
            return State.PROMOTING if change.promotes else State.DEMOTING
        evicting = self.evictions.reclaimer.is_evicting(owner)
        return State.EVICTING if evicting else State.RESIDENT

    def in_transition(self) -> npt.NDArray[np.bool_]:
        """``[L, E]``: experts that are not RESIDENT."""
        found = np.zeros(self._placement.n_bits.shape[:2], dtype=np.bool_)
        for layer, expert in chain(self.changes, self.evictions.reclaimer.owners()):
            found[layer, expert] = True
        return found

    def pages_under_way(self) -> Pages:
        """Pages that hold no published version but are taken, for checks."""
        taken = [np.empty(0, dtype=np.int32)]
        taken += [change.pages for change in self.changes.values()]
        taken += [job.token.pages for job in self._discarding]
        taken += [retired.pages for retired in self.evictions.reclaimer.waiting()]
        return np.concatenate(taken)
