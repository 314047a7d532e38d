"""The worker that copies: a state machine of micro-steps.

The one idea: all books are kept by the caller's thread; the worker only executes copies and
reports which are over.  Every micro-step is one of three: *load* a chunk into a staging slot,
*move* it on, *complete* it when its event has passed.  Whoever drives the machine
(:mod:`repro.residency.driver`) may choose among the possible ones, so tests can try any
interleaving; the thread takes the first.

In: host -> slot (over the link), slot -> pages (``index_copy_``).  Out: pages -> slot
(``index_select``), slot -> host.  A chunk whose pages lie together skips the slot.  What gives
memory back goes first when memory is tight.
"""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from repro.residency.jobs import CopyJob, Option, Progress, Transfer
from repro.residency.links import Link, WorkerKilled
from repro.residency.staging import StagingRing
from repro.residency.streams import Streams, is_done


class CopyWorker:
    """Executes copy jobs between ``slab`` and the pages of an arena.

    ``wake`` is notified whenever there may be something to do or to collect; ``gate`` is held
    while the device is called.
    """

    def __init__(
        self, pages: Tensor, slab: Tensor, ring: StagingRing, streams: Streams, link: Link
    ) -> None:
        self._bytes = pages  # uint8 [n_pages, page_bytes]
        # Without the ring: PyTorch refuses to scatter into memory that overlaps the source.
        self._first = ring.n_pages
        self._words = pages[self._first :].view(torch.int64)
        self._slab, self._ring, self._streams, self._link = slab, ring, streams, link
        self._lock = threading.RLock()
        self.wake = threading.Condition(self._lock)
        self.gate = threading.Lock()
        self._updates: deque[CopyJob] = deque()
        self._evictions: deque[CopyJob] = deque()  # and demotions
        self._transfers: list[Transfer] = []
        self._done: deque[CopyJob] = deque()
        self.stopping = False
        self.tight = False
        self.n_jobs = 0  # not over
        self.n_copied = 0  # chunks
        self.bytes_moved: dict[str, int] = {"in": 0, "out": 0}
        self.died = ""

    # what the caller's thread does ---------------------------------------------------------

    def submit(self, job: CopyJob) -> None:
        """Queue a job with at least one chunk."""
        with self.wake:
            (self._evictions if job.gives_back else self._updates).append(job)
            self.n_jobs += 1
            self.wake.notify()

    def withdraw(self, job: CopyJob, *, force: bool) -> bool:
        """Take back what has not begun.  True: nothing of the job is under way any more.

        Without ``force`` a job of which a chunk is under way is left as it is; with it the
        rest is cancelled, and the job is reported once that chunk is over.
        """
        with self._lock:
            if job.over or (job.n_busy and not force):
                return False
            job.cancelled = True
            job.chunks.clear()
            if job.n_busy:
                return False
            job.over = True
            self.n_jobs -= 1
            return True

    def take_done(self) -> list[CopyJob]:
        """Jobs that are over since the last call."""
        with self._lock:
            done = list(self._done)
            self._done.clear()
            return done

    def give_up(self, *, dead: bool) -> list[CopyJob]:
        """Stop for good.  Returns the jobs nothing of which is under way (``dead``: all)."""
        with self.wake:
            self.stopping = True
            self.wake.notify_all()
            jobs = [*self._evictions, *self._updates]
            jobs += dict.fromkeys(t.job for t in self._transfers if t.job not in jobs)
            self._evictions.clear()
            self._updates.clear()
            if dead:
                for transfer in self._transfers:
                    transfer.job.n_busy = 0
                    if transfer.slot is not None:
                        self._ring.release(transfer.slot)
                self._transfers.clear()
            return [job for job in jobs if self.withdraw(job, force=True)]

    @property
    def n_held_slots(self) -> int:
        """Staging slots that something is passing through."""
        with self._lock:
            return sum(transfer.slot is not None for transfer in self._transfers)

    @property
    def finished(self) -> bool:
        """Given up, and nothing under way any more."""
        return self.stopping and not self._transfers

    # micro-steps ----------------------------------------------------------------------------

    def options(self) -> list[Option]:
        """Micro-steps that are possible now, in the order the thread prefers."""
        with self._lock:
            moved = [t for t in self._transfers if t.stage == "moved" and is_done(t.event)]
            found: list[Option] = [("complete", t) for t in moved]
            found += [("move", t) for t in self._transfers if t.stage == "loaded"]
            job = self._next_job()
            if job is not None and (job.chunks[0].together or self._ring.n_free):
                found.append(("load", None))
            return found

    @property
    def has_work(self) -> bool:
        """Whether anything is queued or under way."""
        with self._lock:
            return bool(self._transfers) or self._next_job() is not None

    def step(self, option: Option | None = None) -> Progress:
        """Do one micro-step: the given one, else the first possible."""
        if self.died:
            return Progress.IDLE
        try:
            with self.gate:  # queries of events, too, would break the capture of a graph
                return self._step(option)
        except BaseException as error:
            with self.wake:
                self.died = f"{type(error).__name__}: {error}"
                self.wake.notify_all()
            if not isinstance(error, WorkerKilled):
                raise
            return Progress.IDLE

    def _step(self, option: Option | None) -> Progress:
        with self._lock:
            if option is None:
                possible = self.options()
                if not possible:
                    return Progress.WAITING if self.has_work else Progress.IDLE
                option = possible[0]
            what, transfer = option
            if what == "load":
                transfer = self._begin()
                if transfer is None:
                    return Progress.WAITING
            assert transfer is not None
            if what == "complete":
                self._complete(transfer)
                return Progress.COMPLETED
            transfer.stage = "loading" if what == "load" else "moving"
        try:
            with self._streams.migrating():
                if what == "load":
                    self._load(transfer)
                else:
                    self._move(transfer)
        except Exception as error:
            # What is enqueued already may still run: the slot is free after the event.
            transfer.event = self._streams.migration_event()
            with self._lock:
                transfer.job.error = f"{type(error).__name__}: {error}"
                transfer.job.chunks.clear()
                transfer.stage = "moved"
        return Progress.WORKED

    def _next_job(self) -> CopyJob | None:
        for queue in (self._evictions, self._updates):
            while queue and not queue[0].chunks:
                queue.popleft()
        queues = [queue for queue in (self._evictions, self._updates) if queue]
        if not queues or self.stopping:
            return None
        # In turns, so that neither waits for ever behind the other; tight: evictions first.
        turn = 0 if self.tight else self.n_copied
        return queues[turn % len(queues)][0]

    def _begin(self) -> Transfer | None:
        job = self._next_job()
        if job is None:
            return None
        slot = None
        if not job.chunks[0].together:
            slot = self._ring.acquire()
            if slot is None:
                return None
        job.n_busy += 1
        transfer = Transfer(job, job.chunks.popleft(), slot)
        self._transfers.append(transfer)
        return transfer

    def _load(self, transfer: Transfer) -> None:
        chunk, job, slot = transfer.chunk, transfer.job, transfer.slot
        self._streams.migration_waits_for(job.after)
        host = self._slab[chunk.host]
        if slot is None:
            first = int(chunk.pages[0])
            pages = self._bytes[first : first + len(chunk.pages)]
            self._link.copy(*((pages, host) if job.direction == "in" else (host, pages)))
            self._moved(transfer)
            return
        data = slot.data[: len(chunk.pages)]
        if job.direction == "in":
            self._link.copy(data, host)
        else:
            index = slot.point_at(chunk.pages - self._first)
            torch.index_select(self._words, 0, index, out=data.view(torch.int64))
        transfer.stage = "loaded"

    def _move(self, transfer: Transfer) -> None:
        chunk, slot = transfer.chunk, transfer.slot
        assert slot is not None
        data = slot.data[: len(chunk.pages)]
        if transfer.job.direction == "in":
            index = slot.point_at(chunk.pages - self._first)
            self._words.index_copy_(0, index, data.view(torch.int64))
        else:
            self._link.copy(self._slab[chunk.host], data)
        self._moved(transfer)

    def _moved(self, transfer: Transfer) -> None:
        transfer.event = self._streams.migration_event()
        transfer.stage = "moved"

    def _complete(self, transfer: Transfer) -> None:
        job = transfer.job
        self._transfers.remove(transfer)
        if transfer.slot is not None:
            self._ring.release(transfer.slot)
        self.n_copied += 1
        self.bytes_moved[job.direction] += len(transfer.chunk.pages) * self._bytes.shape[1]
        job.n_busy -= 1
        if not job.n_busy and not job.chunks:
            job.over = True
            self.n_jobs -= 1
            self._done.append(job)
        self.wake.notify_all()

    def wait_for_device(self, timeout_s: float = 1e-3) -> None:
        """Block until the oldest transfer is over, or for a moment if a slot is missing."""
        with self.wake:
            moved = [t for t in self._transfers if t.stage == "moved"]
            if not moved or moved[0].event is None:
                self.wake.wait(timeout_s)
                return
        with self.gate:
            moved[0].event.synchronize()
