"""``ExpertResidency``: experts on the pages of one arena, changed while steps read them.

The one idea: it satisfies :class:`repro.contract.Residency` by putting the parts of this room
together, and adds nothing of its own.  All calls come from one thread, none of them waits for a
copy.  A step boundary looks like this::

    for owner in residency.publish():      # rows of finished changes
        ...
    for action in policy.decide(state):    # wishes
        residency.submit(action)
    step = residency.begin_step()          # the table of this step, fixed
    ...                                    # the forward pass
    residency.end_step(step)

Sources: DynaExq (arXiv 2511.15015 v3, section 4: versioned experts, pools, transitions),
PagedWeight (arXiv 2607.16184 v1: planes and KV cache on the same pages).

Letters: L layers, E experts, B blocks, W widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from repro.contract import Action, Clock, Health, Outcome, Reservation, State, Step, TableRow
from repro.errors import unknown_name
from repro.residency.arena import Arena
from repro.residency.driver import Driver, ManualDriver, ThreadDriver
from repro.residency.errors import BudgetError, WorkerError
from repro.residency.facts import Facts
from repro.residency.host import HostStore
from repro.residency.limits import Limits, Watchdog
from repro.residency.links import DeviceLink, Link
from repro.residency.memory import PlanesMemory, VersionsMemory
from repro.residency.placement import Placement
from repro.residency.plan import DEFAULT_SLOTS, plan_memory
from repro.residency.reclaim import Epochs
from repro.residency.snapshot import take_snapshot
from repro.residency.staging import StagingRing
from repro.residency.start import first_widths
from repro.residency.streams import Streams
from repro.residency.supervisor import Supervisor
from repro.residency.transitions import Transitions
from repro.residency.worker import CopyWorker

WORKERS = ("thread", "manual")
_PAUSE_S = 10.0  # seconds that paused() waits for a device call of the worker
_JOIN_S = 2.0  # seconds that close() waits for a copy under way


class ExpertResidency(Facts):
    """Experts of a model under a hard cap.

    Args:
        store: host store with every block put in; it is closed with residency.
        capacity_bytes: the cap, whole pages: weights, tables, KV cache, staging and slack.
        initial_bits: widths to begin with: one for all, ``[L, E]`` or ``[L, E, B]``; None: the
            widest uniform width that fits (planes), or ``n_high`` spread over the layers, the
            first experts of each (versions).
        clock: for limits; see :class:`repro.contract.Clock`.
        device: where the arena lives.
        worker: ``thread`` copies in the background, ``manual`` when :meth:`advance_copies` is
            called.
        kv_bytes: initial KV partition; with planes its border moves, with versions it does not.
        staging_bytes, staging_slots, slack, slack_bytes, n_high: see
            :func:`repro.residency.plan_memory`.
        limits: back-pressure and watchdog.
        link: how bytes cross the bus; None: the device's own copy.

    Raises:
        BudgetError: the budget is below the floor, or no whole number of pages.
        UnknownNameError: no such worker.
        MissingDeviceError: no such device.
    """

    def __init__(
        self,
        store: HostStore,
        *,
        capacity_bytes: int,
        initial_bits: int | npt.ArrayLike | None = None,
        clock: Clock,
        device: torch.device | str = "cpu",
        worker: Literal["thread", "manual"] = "thread",
        kv_bytes: int = 0,
        staging_bytes: int | None = None,
        staging_slots: int = DEFAULT_SLOTS,
        slack_bytes: int | None = None,
        slack: int | None = None,
        n_high: int | None = None,
        limits: Limits | None = None,
        link: Link | None = None,
    ) -> None:
        if worker not in WORKERS:
            raise unknown_name("worker", worker, WORKERS)
        self.store = store
        self.layout = store.layout
        self.plan = plan_memory(
            store.payloads,
            capacity_bytes=capacity_bytes,
            page_bytes=store.page_bytes,
            kv_bytes=kv_bytes,
            staging_bytes=staging_bytes,
            staging_slots=staging_slots,
            slack_bytes=slack_bytes,
            slack=slack,
            n_high=n_high,
        )
        plan = self.plan
        n_bits = first_widths(initial_bits, store, plan)
        self.arena = Arena(plan.n_pages, plan.page_bytes, device)
        if plan.layout == "planes":
            self.memory = PlanesMemory(plan)
        else:
            self.memory = VersionsMemory(plan, store.payloads[0][0].widths)
        self._closed = False
        self._streams = Streams(self.arena.device)
        self._epochs = Epochs()
        self.n_refused_reserves = 0
        self._reserved = np.zeros(plan.n_pages, dtype=np.bool_)
        with torch.inference_mode(False):
            self.placement = Placement(store, self.arena)
            self.placement.load(n_bits, self.memory)
            ring = StagingRing(self.arena.data, plan.staging_slots, plan.slot_pages)
            limits = limits or Limits()
            watchdog = Watchdog(limits.copy_limit, clock)
            supervisor = Supervisor(self._hiring(ring, link, worker), watchdog, self._streams)
            self.transitions = Transitions(
                self.placement,
                self.memory,
                ring,
                self._streams,
                self._epochs,
                supervisor,
                limits,
                clock,
            )

    def _hiring(self, ring: StagingRing, link: Link | None, kind: str) -> Callable[[], Driver]:
        drives: type[ManualDriver | ThreadDriver]
        drives = ThreadDriver if kind == "thread" else ManualDriver
        data, slab, streams = self.arena.data, self.store.slab, self._streams
        how = link or DeviceLink()

        def hire() -> Driver:
            return drives(CopyWorker(data, slab, ring, streams, how), streams)

        return hire

    # the contract ----------------------------------------------------------------------------

    def resolve(self, layer: int, expert: int) -> tuple[TableRow, ...]:
        """The handle: the complete version of each block that the next step will read."""
        self._open()
        return self.placement.resolve(layer, expert)

    def state(self, layer: int, expert: int) -> State:
        """Where the expert stands between two versions."""
        return self._open().state((layer, expert))

    def read_pages(self, pages: Sequence[int]) -> bytes:
        """Bytes of these pages in order, as a kernel would load them now."""
        return self.arena.read(pages)

    def begin_step(self) -> Step:
        """A step reads the table as it is now, to its end."""
        self._open()
        snapshot = self.placement.table.begin()
        return Step(self._epochs.begin(snapshot), snapshot.view)

    def end_step(self, step: Step) -> None:
        """The step has enqueued all its work; what only it still read can be reclaimed.

        Raises:
            StepError: it is not under way.
        """
        transitions = self._open()
        snapshot = self._epochs.end(step.number, self._streams.compute_event())
        self.placement.table.end(snapshot)
        transitions.settle()

    def submit(self, action: Action) -> Outcome:
        """Ask for a change; see :class:`repro.contract.Residency`.

        A newer wish overtakes an older one that is not yet published; wishing for the
        published widths cancels.

        Raises:
            IndexError: no such layer or expert.
        """
        transitions = self._open()
        if not (0 <= action.layer < self.n_layers and 0 <= action.expert < self.n_experts):
            raise IndexError(
                f"layer row {action.layer}, expert {action.expert}: there are "
                f"{self.n_layers} rows of {self.n_experts} experts"
            )
        outcome = transitions.submit(action)
        if outcome is Outcome.REFUSED:
            self._note_pressure(short=True)
        return outcome

    def advance_copies(self, limit: int | None = None) -> int:
        """Let up to ``limit`` chunks be copied (None: all); returns how many were.

        With a thread, waits for it (at most a minute).
        """
        return self._open().driver.advance(limit)

    def publish(self) -> tuple[tuple[int, int], ...]:
        """Write the rows of all changes whose copies are over; their (layer, expert)."""
        published = self._open().publish()
        self._note_pressure(short=False)
        return published

    def reserve(self, n_bytes: int, purpose: str) -> Reservation | None:
        """Pages for KV cache or workspace, all or none; None changes nothing.

        With planes, free plane pages count too: the border moves over them.

        Raises:
            BudgetError: a negative number of bytes.
        """
        self._open().settle()
        if n_bytes < 0:
            raise BudgetError(f"{n_bytes} bytes cannot be reserved: ask for at least 0")
        pages = self.memory.reserve(-(-n_bytes // self.page_bytes))
        if pages is None:
            self.n_refused_reserves += 1
            self._note_pressure(short=True)
            return None
        self._reserved[pages] = True
        return Reservation(purpose, tuple(pages.tolist()))

    def release(self, reservation: Reservation) -> None:
        """Give the pages back, all of a reservation or some of them.

        Raises:
            BudgetError: they are not reserved (any more).
        """
        self._open()
        pages = np.asarray(reservation.pages, dtype=np.int32)
        if not self._reserved[pages].all() or len(np.unique(pages)) < len(pages):
            raise BudgetError(
                f"some of {len(pages)} pages of {reservation.purpose!r} are not reserved: "
                "a page is released once"
            )
        self._reserved[pages] = False
        self.memory.release(pages)

    def health(self) -> Health:
        """Not ok once copies make no progress for longer than the clock allows."""
        return self._open().health()

    # beyond it -------------------------------------------------------------------------------

    def restart_worker(self) -> None:
        """Replace a dead or hung worker; what it had not finished is given up."""
        self._open().restart_worker()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No device call of the worker inside: for the capture of a CUDA graph.

        Raises:
            WorkerError: a copy hangs in such a call.
        """
        gate = self._open().worker.gate
        if not gate.acquire(timeout=_PAUSE_S):
            raise WorkerError("the migration worker hangs in a copy: call restart_worker()")
        try:
            yield
        finally:
            gate.release()

    def snapshot(self) -> dict[str, Any]:
        """A JSON-able picture of bytes, widths, states and transitions."""
        self._open()
        return take_snapshot(self)

    def close(self) -> None:
        """Stop the worker, give arena and host store back; twice is fine."""
        if self._closed:
            return
        ended = self.transitions.supervisor.stop(_JOIN_S)
        self._closed = True
        self.arena.drop(unused=ended)
        self.store.close(unused=ended)

    def _note_pressure(self, *, short: bool) -> None:
        """Evictions go first while a wish found no room, or little is left."""
        little = self.memory.free_for_kv() < self.plan.n_pages // 32
        self.transitions.worker.tight = short or little
