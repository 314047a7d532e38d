"""Every guard of streams, versions and memory, and what happens without it.

A scenario passes on the package and must fail once its guard is taken out: that is the proof
that it would notice.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_residency_bench import EXPERTS, LAYERS, PAGE, Watcher, build, expert_bytes, payloads

from repro.contract import Outcome, State
from repro.residency import (
    FailingLink,
    HangingLink,
    Limits,
    WorkerKilled,
)
from repro.residency.budget import BudgetTracker
from repro.residency.changes import Change, Decisions
from repro.residency.evictions import Evictions
from repro.residency.limits import Watchdog
from repro.residency.memory import PlanesMemory, VersionsMemory
from repro.residency.reclaim import Epochs
from repro.residency.staging import StagingRing
from repro.residency.supervisor import Supervisor
from repro.residency.table import HandleTable, Snapshot
from repro.residency.transitions import Transitions
from repro.residency.worker import CopyWorker

ACCEPTED, DEFERRED, REFUSED = Outcome.ACCEPTED, Outcome.DEFERRED, Outcome.REFUSED


def scattered(watcher: Watcher) -> None:
    """Leave no two free pages side by side, so that copies must pass through the ring."""
    while watcher.reserve(PAGE) is not None:
        pass
    for i in reversed(range(len(watcher.reservations))):
        if i % 2:
            watcher.release(i)


# Staging ---------------------------------------------------------------------------------------


def ring_of_one() -> None:
    """Two promotions through one slot: the second waits until the first has passed."""
    watcher = Watcher(
        build(
            "planes", staging_bytes=3 * PAGE, staging_slots=1, spare=12 * expert_bytes("planes", 4)
        )
    )
    scattered(watcher)
    worker = watcher.residency.transitions.worker
    assert watcher.submit(0, 0, 6) is ACCEPTED and watcher.submit(1, 1, 6) is ACCEPTED
    worker.step(("load", None))
    for option in worker.options():
        if option[0] == "load":
            worker.step(option)
    watcher.residency.advance_copies()
    assert set(watcher.residency.publish()) == {(0, 0), (1, 1)}
    watcher.check()


def many_orders_of_micro_steps() -> None:
    """Two changes through two slots, in 60 of the orders that the machine allows."""
    for seed in range(60):
        rng = random.Random(seed)
        watcher = Watcher(
            build("planes", staging_bytes=6 * PAGE, spare=12 * expert_bytes("planes", 4))
        )
        scattered(watcher)
        watcher.submit(0, 0, 5, 4)
        watcher.submit(1, 1, 4, 5)
        worker = watcher.residency.transitions.worker
        while options := worker.options():
            worker.step(rng.choice(options))
        assert set(watcher.residency.publish()) == {(0, 0), (1, 1)}
        watcher.check()
        watcher.residency.close()


# Versions --------------------------------------------------------------------------------------


def stale_decision() -> None:
    """A newer decision while a promotion is under way: the older one is never switched to."""
    watcher = Watcher(build("planes"))
    residency = watcher.residency
    assert watcher.submit(0, 0, 5) is ACCEPTED
    residency.transitions.worker.step()  # a chunk of it is under way
    assert watcher.submit(0, 0, 3) is ACCEPTED
    watcher.check()
    residency.advance_copies()
    assert residency.publish() == ((0, 0),)
    watcher.check()
    assert [row.n_bits for row in residency.resolve(0, 0)] == [3, 3]
    watcher.settle()
    watcher.rests()


def cancelled_copy() -> None:
    """Pages of a cancelled copy are free when the copy is over, not before."""
    watcher = Watcher(build("planes", spare=4 * expert_bytes("planes", 4)))
    residency, worker = watcher.residency, watcher.residency.transitions.worker
    scattered(watcher)
    assert watcher.submit(0, 0, 5) is ACCEPTED
    worker.step(("load", None))
    assert worker.options()[0][0] == "move"
    assert watcher.submit(0, 0, 4) is ACCEPTED, "back to what is resident: cancel only"
    assert residency.state(0, 0) is State.RESIDENT
    while watcher.reserve(PAGE) is not None:
        pass
    residency.advance_copies()
    watcher.check()
    assert residency.publish() == ()
    watcher.settle()
    watcher.rests()


def early_publication() -> None:
    """A row is written when the copy is over, at a boundary."""
    watcher = Watcher(build("versions"))
    residency = watcher.residency
    assert watcher.submit(0, 0, 4) is ACCEPTED
    assert residency.publish() == ()
    residency.advance_copies(1)
    assert residency.publish() == () and residency.state(0, 0) is State.DEMOTING
    watcher.check()
    residency.advance_copies()
    watcher.begin()
    assert residency.publish() == ((0, 0),) and residency.state(0, 0) is State.EVICTING
    watcher.check()
    watcher.settle()
    watcher.rests()


def readers_finish_on_their_version() -> None:
    """Two steps read old versions; KV takes every free page meanwhile."""
    watcher = Watcher(build("planes"))
    residency = watcher.residency
    watcher.begin()
    watcher.submit(0, 0, 2)
    residency.advance_copies()
    assert residency.publish() == ((0, 0),)
    watcher.begin()
    watcher.submit(1, 0, 2)
    residency.advance_copies()
    assert residency.publish() == ((1, 0),)
    while watcher.reserve(PAGE) is not None:
        watcher.check()
    watcher.end(1)  # the younger one: the older still reads both
    assert watcher.reserve(PAGE) is None
    watcher.check()
    watcher.end()
    assert watcher.reserve(PAGE) is not None
    watcher.check()


def failed_copy() -> None:
    """An error ends the change, frees its pages, is counted and kept; the old version stays."""
    for call in range(3):
        link = FailingLink([call])
        watcher = Watcher(build("planes", link=link))
        residency = watcher.residency
        used = residency.used_bytes()
        assert watcher.submit(0, 0, 6) is ACCEPTED
        residency.advance_copies()
        assert residency.publish() == () and residency.state(0, 0) is State.RESIDENT
        watcher.check()
        assert residency.used_bytes() == used
        picture = residency.snapshot()["worker"]
        assert picture["copy_errors"] == 1 and f"copy {call} failed" in picture["last_error"]
        assert residency.health().ok
        assert watcher.submit(0, 0, 6) is ACCEPTED
        watcher.settle()
        watcher.check()
        assert [row.n_bits for row in residency.resolve(0, 0)] == [6, 6]


# Memory ----------------------------------------------------------------------------------------


def full_planes_make_progress() -> None:
    """With no free page at all, demotions still go through, one after the other."""
    watcher = Watcher(build("planes", spare=0))
    residency = watcher.residency
    assert residency.free_bytes("kv") == 0
    assert watcher.submit(0, 0, 5) is REFUSED
    for expert in range(EXPERTS):
        assert watcher.submit(0, expert, 3) is ACCEPTED
        watcher.settle()
        watcher.check()
        while watcher.reserve(PAGE) is not None:  # KV takes what was given up, byte for byte
            pass
    taken = sum(len(r.pages) for r in watcher.reservations) * PAGE
    assert taken == EXPERTS * (expert_bytes("planes", 4) - expert_bytes("planes", 3))
    watcher.check()


def full_pools_swap() -> None:
    """Both pools full: every swap makes progress through the slack."""
    watcher = Watcher(build("versions"))
    residency = watcher.residency
    for layer in range(LAYERS):
        for expert in range(1, EXPERTS):
            assert watcher.submit(layer, expert, 16) is REFUSED, "the slack is for swaps"
    for turn in range(2 * EXPERTS):
        old, new = turn % EXPERTS, (turn + 1) % EXPERTS
        assert watcher.submit(0, old, 4) is ACCEPTED
        assert watcher.submit(0, new, 16) is ACCEPTED
        watcher.begin()
        residency.advance_copies()
        assert set(residency.publish()) == {(0, old), (0, new)}
        watcher.check()
        watcher.settle()
        watcher.rests()


def ledger_is_strict() -> None:
    watcher = Watcher(build("planes", spare=6 * PAGE))
    for n_pages in (7, 3, 4, 3, 1):
        watcher.reserve(n_pages * PAGE)
        watcher.check()


def down_and_up_again() -> None:
    """Host mode single: what leaves is copied out first, and comes back bit for bit."""
    for layout, low in (("planes", 2), ("versions", 4)):
        watcher = Watcher(build(layout, "single"))
        before = [watcher.decode(0, 0, block) for block in range(2)]
        high = int(watcher.residency.n_bits[0, 0, 0])
        for n_bits in (low, high):
            assert watcher.submit(0, 0, n_bits) is ACCEPTED
            watcher.settle()
            watcher.check()
            watcher.rests()
        after = [watcher.decode(0, 0, block) for block in range(2)]
        assert all(bool((a == b).all()) for a, b in zip(before, after, strict=True))


# The worker ------------------------------------------------------------------------------------


def hung_worker() -> None:
    """Reported through the clock; replaced; what it may still write stays out of use."""
    link = HangingLink([1])
    watcher = Watcher(build("planes", worker="thread", link=link, limits=Limits(copy_limit=5)))
    residency, clock = watcher.residency, watcher.residency.transitions.history._clock
    try:
        assert watcher.submit(0, 0, 6) is ACCEPTED
        assert link.hanging.wait(10)
        assert residency.health().ok
        clock.steps += 6
        health = residency.health()
        assert not health.ok and "finished no copy" in health.message
        assert watcher.submit(0, 1, 6) is DEFERRED
        watcher.check()
        residency.restart_worker()
        assert residency.health().ok and residency.state(0, 0) is State.RESIDENT
        while watcher.reserve(PAGE) is not None:
            pass
        watcher.check()
    finally:
        link.wake()
    assert link.finished.wait(10)
    threading.Event().wait(0.05)  # for what the thread does with the bytes it copied
    for _ in range(2000):
        residency.used_bytes()  # looks at what the worker reports
        if residency.transitions.supervisor.is_idle:
            break
        threading.Event().wait(0.001)
    watcher.check()
    while watcher.reservations:
        watcher.release()
    assert watcher.submit(0, 0, 6) is ACCEPTED, "the quarantine is over"
    watcher.settle()
    watcher.check()
    watcher.rests()
    residency.close()


def dead_worker() -> None:
    """Reported at once; its pages are free; a new one goes on."""
    for kind in ("manual", "thread"):
        link = FailingLink([1], WorkerKilled)
        watcher = Watcher(build("planes", worker=kind, link=link))
        residency = watcher.residency
        used = residency.used_bytes()
        watcher.submit(0, 0, 6)
        residency.advance_copies()
        health = residency.health()
        assert not health.ok and "WorkerKilled: copy 1 failed" in health.message
        assert residency.used_bytes() == used and watcher.submit(0, 0, 6) is DEFERRED
        watcher.check()
        residency.restart_worker()
        assert residency.health().ok and watcher.submit(0, 0, 6) is ACCEPTED
        watcher.settle()
        watcher.check()
        watcher.rests()
        residency.close()


def tight_memory_evicts_first() -> None:
    """A queue of promotions does not hold up what gives memory back."""
    watcher = Watcher(build("planes", "single", spare=3 * expert_bytes("planes", 4)))
    residency = watcher.residency
    for expert in range(3):
        assert watcher.submit(0, expert, 5) is ACCEPTED
    assert watcher.submit(1, 0, 2) is ACCEPTED
    assert residency.reserve(residency.capacity_bytes, "kv") is None
    residency.advance_copies(2)  # the two tables of the demotion
    assert residency.publish() == ((1, 0),)
    watcher.check()


class NoWayOut:
    """Copies to the host fail until it is mended."""

    def __init__(self) -> None:
        self.broken = True
        self.slab = range(0)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.broken and target.data_ptr() in self.slab:
            raise RuntimeError("the host does not answer")
        target.copy_(source)


def copies_to_the_host_fail() -> None:
    """The only copy of a plane is not dropped; it is reported, and a new worker tries again."""
    link = NoWayOut()
    watcher = Watcher(build("planes", "single", link=link))
    residency, slab = watcher.residency, watcher.residency.store.slab
    link.slab = range(slab.data_ptr(), slab.data_ptr() + slab.nbytes)
    assert watcher.submit(0, 0, 2) is ACCEPTED
    for _ in range(6):
        residency.advance_copies()
        residency.publish()
        watcher.check()
    assert residency.state(0, 0) is State.EVICTING and residency.reclaiming_bytes() > 0
    health = residency.health()
    assert not health.ok and "copies to the host failed: RuntimeError: the host" in health.message
    assert watcher.submit(0, 1, 2) is DEFERRED
    link.broken = False
    residency.restart_worker()
    assert residency.health().ok
    watcher.settle()
    watcher.rests()
    assert watcher.submit(0, 0, 4) is ACCEPTED
    watcher.settle()
    watcher.check()


Scenario = Callable[[], None]
Mutation = Callable[[pytest.MonkeyPatch], None]


def patch(owner: object, name: str, value: object) -> Mutation:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value, raising=False)


def always(value: object) -> property:
    """An attribute that cannot be set."""
    return property(lambda self: value, lambda self, ignored: None)


def no_wait_for_the_slot(self: StagingRing):
    """Hands out a slot whose bytes have not been consumed yet."""
    self._all = getattr(self, "_all", None) or list(self._free)
    return self._all[0]


def live_table(self: HandleTable) -> Snapshot:
    return Snapshot(self._rows, self.host)


def give_without_refill(self: PlanesMemory, pages: np.ndarray) -> None:
    room = min(len(pages), self.budget["planes"].used)
    self.budget.release("planes", room)
    self.budget.release("slack", len(pages) - room)
    self._stack.give(pages)


def withdraw_at_once(self: CopyWorker, job, *, force: bool) -> bool:
    """As if nothing of it were under way."""
    if job.over:
        return False
    job.chunks.clear()
    job.over = True
    self.n_jobs -= 1
    return True


def drop_without_copy(self: Evictions, retired) -> None:
    retired.copied_out = True
    for block, slots in retired.leaving:
        self._placement.store.hold(*retired.owner, block, slots, True)


def copied_out_anyway(self: Evictions, job, *, alive: bool) -> None:
    job.token.copied_out = True


_over = Transitions._over
_give_up = CopyWorker.give_up


def ignore_errors(self: Transitions, job) -> None:
    job.error = ""
    _over(self, job)


GUARDS: list[tuple[Scenario, Mutation | None]] = [
    (ring_of_one, patch(StagingRing, "acquire", no_wait_for_the_slot)),
    (many_orders_of_micro_steps, patch(StagingRing, "acquire", no_wait_for_the_slot)),
    (stale_decision, patch(Decisions, "is_newest", lambda self, change: True)),
    (cancelled_copy, patch(CopyWorker, "withdraw", withdraw_at_once)),
    (early_publication, patch(Change, "copied", always(True))),
    (readers_finish_on_their_version, patch(Epochs, "oldest", lambda self: self.last + 1)),
    (readers_finish_on_their_version, patch(HandleTable, "begin", live_table)),
    (failed_copy, patch(Transitions, "_over", ignore_errors)),
    (full_planes_make_progress, patch(PlanesMemory, "give", give_without_refill)),
    (full_pools_swap, patch(VersionsMemory, "may_end_at", lambda self, n_bits: True)),
    (ledger_is_strict, patch(PlanesMemory, "free_for_kv", lambda self: 10**9)),
    (ledger_is_strict, patch(BudgetTracker, "try_reserve", lambda self, name, n: True)),
    (down_and_up_again, patch(Evictions, "_copy_out", drop_without_copy)),
    (copies_to_the_host_fail, patch(Evictions, "left", copied_out_anyway)),
    (hung_worker, patch(Watchdog, "look", lambda self, n_jobs, n_copied: 0.0)),
    (
        hung_worker,
        patch(CopyWorker, "give_up", lambda self, *, dead: _give_up(self, dead=True)),
    ),
    (dead_worker, patch(Supervisor, "_bury", lambda self, worker: [])),
    (tight_memory_evicts_first, patch(CopyWorker, "tight", always(False))),
]


@pytest.mark.parametrize("scenario", dict.fromkeys(scenario for scenario, _ in GUARDS))
def test_holds(scenario):
    scenario()


@pytest.mark.parametrize(("scenario", "mutation"), GUARDS)
def test_without_its_guard_it_fails(scenario, mutation, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        scenario()


def test_payloads_of_the_bench_differ():
    """Otherwise a wrong expert's bytes would pass."""
    for layout in ("planes", "versions"):
        first = payloads(layout)[0][0]
        n_bits = first.widths[0]
        spec = first.tensors(n_bits)[0]
        tensors = first.tensor(n_bits, spec)
        assert not bool((tensors[0] == tensors[1]).all())
