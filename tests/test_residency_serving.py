"""Beside a forward pass: copies that take many steps, threads, failures, and bytes that return."""

from __future__ import annotations

import random
import statistics
import threading
import time

import numpy as np
import pytest
import torch
from test_residency_bench import (
    EXPERTS,
    LAYERS,
    LAYOUTS,
    MODES,
    PAGE,
    Watcher,
    build,
    expert_bytes,
    payloads,
    stack_of,
)

from repro.contract import Action, Outcome, State
from repro.residency import (
    CopyFailed,
    ExpertResidency,
    HangingLink,
    Limits,
    SlowLink,
    WorkerKilled,
)


class WallClock:
    unit = "s"

    def now(self) -> float:
        return time.perf_counter()


def _until(condition, timeout_s: float = 20.0) -> None:
    end = time.perf_counter() + timeout_s
    while not condition():
        assert time.perf_counter() < end, "took too long"
        time.sleep(0.001)


def _forward(watcher: Watcher, x: torch.Tensor) -> tuple[float, float, list[int]]:
    """A step that reads one expert from its pages: (in all, in residency) seconds, widths."""
    residency = watcher.residency
    start = time.perf_counter()
    residency.publish()
    step = residency.begin_step()
    waited = time.perf_counter() - start
    row = step.table[0, 0, 0]
    for _ in range(20):
        (watcher.decode(0, 0, 0) @ x).sum().item()
    end = time.perf_counter()
    residency.end_step(step)
    now = time.perf_counter()
    return now - start, waited + now - end, [int(row[1])]


@pytest.mark.parametrize(("layout", "high"), [("planes", 8), ("versions", 4)])
def test_a_copy_spans_many_steps_that_finish_on_the_old_version(layout, high):
    n_bytes = expert_bytes(layout, high) - (expert_bytes(layout, 4) if layout == "planes" else 0)
    link = SlowLink(bytes_per_s=n_bytes / 0.4)
    options = {"worker": "thread", "link": link, "clock": WallClock(), "limits": Limits()}
    watcher = Watcher(build(layout, **options))
    residency, x = watcher.residency, torch.randn(40)
    old = int(residency.n_bits[0, 0, 0])
    alone = [_forward(watcher, x) for _ in range(20)]
    assert watcher.submit(0, 0, high) is Outcome.ACCEPTED
    beside = []
    while residency.state(0, 0) in (State.PROMOTING, State.DEMOTING):
        beside.append(_forward(watcher, x))
    watcher.check()
    assert residency.n_bits[0, 0].tolist() == [high, high]
    on_old = [step for step in beside if step[2] == [old]]
    assert len(on_old) >= 5
    # No call waited for the copy of 0.4 seconds, and steps took what they take.
    assert max(waited for _, waited, _ in beside) < 0.2
    usual = statistics.median(wall for wall, _, _ in alone)
    assert statistics.median(wall for wall, _, _ in beside) < 2 * usual + 0.002
    watcher.settle()
    watcher.rests()
    residency.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("worker", ["manual", "thread"])
def test_down_and_up_again_is_the_same_bit_for_bit(layout, mode, worker):
    """Real payloads, every expert, all widths; matrices as their formats decode them."""
    watcher = Watcher(build(layout, mode, worker=worker, spare=8 * expert_bytes("planes", 8)))
    residency = watcher.residency
    tours = {"planes": (2, 8, 3, 5, 4), "versions": (4, 16, 4)}[layout]
    for expert in range(EXPERTS if layout == "planes" else 1):
        first = int(residency.n_bits[0, expert, 0])
        for n_bits in tours:
            if watcher.submit(0, expert, n_bits) is not Outcome.ACCEPTED:
                continue
            watcher.settle()
            watcher.check()
            assert residency.n_bits[0, expert].tolist() == [n_bits, n_bits]
            for block in range(2):
                reference = stack_of(layout, 0, block, n_bits).decode(n_bits, expert)
                assert torch.equal(watcher.decode(0, expert, block), reference)
        if watcher.submit(0, expert, first) is Outcome.ACCEPTED:
            watcher.settle()
    watcher.rests()
    residency.close()


def test_the_sum_over_a_step_is_that_of_its_table():
    """Item 5: whatever is published meanwhile, products equal those of the plain matrices."""
    rng = random.Random(3)
    watcher = Watcher(build("planes"))
    residency = watcher.residency
    x = torch.randn(SHAPE := 40)
    assert payloads("planes")[0][0].shape[1] == SHAPE
    for _ in range(60):
        watcher.submit(rng.randrange(LAYERS), rng.randrange(EXPERTS), rng.choice([2, 3, 5, 6]))
        watcher.begin()
        step, widths = watcher.steps[-1]
        residency.advance_copies(rng.randrange(6))
        residency.publish()
        for expert in range(EXPERTS):
            n_bits = int(widths[0, expert, 0])
            assert step.table[0, expert, 0, 1] == n_bits
            if n_bits == residency.n_bits[0, expert, 0]:
                y = watcher.decode(0, expert, 0) @ x
                assert torch.equal(y, stack_of("planes", 0, 0, n_bits).decode(n_bits, expert) @ x)
        watcher.check()
        if len(watcher.steps) > 2:
            watcher.end(rng.randrange(len(watcher.steps)))
    watcher.settle()
    watcher.rests()


class Weather:
    """A link on which anything may happen, at any call."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.calm = False
        self.wake = threading.Event()
        self.n_hung = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        luck = 1.0 if self.calm else self._rng.random()
        target[: len(source) // 2].copy_(source[: len(source) // 2])
        if luck < 0.12:
            raise CopyFailed("injected")
        if luck < 0.20:
            raise WorkerKilled("injected")
        if luck < 0.25:
            self.n_hung += 1
            self.wake.wait(10)
        elif luck < 0.5:
            time.sleep(2e-4)
        target.copy_(source)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_thread_in_bad_weather(layout, mode):
    """Errors, deaths and hangs at random beside the main thread: nothing lost, nothing leaked."""
    seed = 11 * LAYOUTS.index(layout) + MODES.index(mode)
    rng, link = random.Random(seed), Weather(seed)
    limits = Limits(copy_limit=3)
    watcher = Watcher(build(layout, mode, worker="thread", link=link, limits=limits))
    residency, clock = watcher.residency, watcher.residency.transitions.history._clock
    restarts = 0
    for _ in range(500):
        what = rng.choice("begin end swap swap publish kv free tick nap".split())
        if what == "begin" and len(watcher.steps) < 3:
            watcher.begin()
        elif what == "end" and watcher.steps:
            watcher.end(rng.randrange(len(watcher.steps)))
        elif what == "swap":
            widths = residency.widths
            layer = rng.randrange(LAYERS)
            if layout == "versions":
                for expert in np.flatnonzero(residency.n_bits[layer, :, 0] == widths[-1]):
                    watcher.submit(layer, int(expert), widths[0])
            watcher.submit(layer, rng.randrange(EXPERTS), rng.choice(widths))
        elif what == "publish":
            residency.publish()
        elif what == "kv":
            watcher.reserve(rng.randrange(20) * PAGE)
        elif what == "free" and watcher.reservations:
            watcher.release(rng.randrange(len(watcher.reservations)))
        elif what == "tick":
            clock.steps += 1
        elif what == "nap":
            time.sleep(5e-4)
        if not residency.health().ok:
            residency.restart_worker()
            restarts += 1
            if rng.random() < 0.5:
                link.wake.set()
                link.wake = threading.Event()
        watcher.check()
    # which of them befell it depends on the thread, that some did does not
    assert restarts + residency.transitions.counts["copy_errors"] > 3
    link.calm = True
    link.wake.set()
    residency.restart_worker()

    def at_rest() -> bool:
        watcher.settle()
        return residency.transitions.supervisor.is_idle and not residency.in_transition.any()

    _until(at_rest)
    watcher.check()
    watcher.rests()
    picture = residency.snapshot()
    assert picture["worker"]["ok"] and picture["used_bytes"] == residency.used_bytes()
    residency.close()


@pytest.mark.parametrize("mode", MODES)
def test_closing_ends_the_thread_and_frees_the_memory(mode):
    before = {thread.ident for thread in threading.enumerate()}
    residency = build("planes", mode, worker="thread")
    arena, slab = residency.arena.data, residency.store.slab
    assert {thread.ident for thread in threading.enumerate()} > before
    residency.close()
    assert {thread.ident for thread in threading.enumerate()} <= before
    assert arena.numel() == slab.numel() == 0


def test_closing_beside_a_hung_copy_does_not_wait_for_it(monkeypatch):
    monkeypatch.setattr("repro.residency.residency._JOIN_S", 0.05)
    link = HangingLink([0])
    residency = build("planes", worker="thread", link=link)
    residency.submit(Action(0, 0, (6, 6)))
    assert link.hanging.wait(10)
    start = time.perf_counter()
    residency.close()
    assert time.perf_counter() - start < 2
    link.wake()  # what it still writes to is its own


def test_a_graph_can_be_captured_beside_the_worker():
    """Inside ``paused`` the worker makes no call; copies go on afterwards."""
    residency = build("planes", worker="thread")
    with residency.paused():
        residency.submit(Action(0, 0, (6, 6)))
        time.sleep(0.02)
        assert residency.transitions.worker.n_copied == 0
    assert residency.advance_copies() > 0 and residency.publish() == ((0, 0),)
    residency.close()


def test_the_snapshot_is_json_and_agrees_with_itself():
    import json

    for layout in LAYOUTS:
        watcher = Watcher(
            build(layout, kv_bytes=5 * PAGE, **({"slack": 2} if layout == "versions" else {}))
        )
        residency: ExpertResidency = watcher.residency
        watcher.reserve(3 * PAGE)
        watcher.begin()
        high, low = residency.widths[-1], residency.widths[0]
        watcher.submit(0, 0, low)
        residency.advance_copies()
        residency.publish()
        watcher.submit(1, 0, low)
        watcher.submit(1, 1, high)
        picture = residency.snapshot()
        assert json.loads(json.dumps(picture)) == picture
        assert picture["capacity_bytes"] == sum(
            pool["quota_bytes"] for pool in picture["pools"].values()
        )
        used = sum(pool["used_bytes"] for pool in picture["pools"].values())
        assert picture["used_bytes"] == used == residency.used_bytes()
        states = {state.value: 0 for state in State}
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                states[residency.state(layer, expert).value] += 1
        assert picture["states"] == states and states["evicting"] == 1
        assert picture["bytes_moved"]["in"] > 0 and picture["published"]["demotions"] == 1
        assert residency.reclaiming_bytes() > 0
        assert sum(picture["n_bits"]["down"].values()) == LAYERS * EXPERTS
        assert residency.targets()[1, 0] == (low, low)
        residency.close()


def test_a_promotion_as_a_timeline_and_published_too_early():
    """What the history tells; a row that is written before its bytes are there is noticed."""
    watcher = Watcher(build("planes"))
    residency, clock = watcher.residency, watcher.residency.transitions.history._clock
    watcher.submit(0, 0, 5)
    for call in (residency.advance_copies, residency.publish):
        clock.steps += 1
        residency.used_bytes()
        call()
    watcher.settle()
    told = [(e.at, e.what, e.layer, e.expert, e.n_bits) for e in residency.history]
    assert told == [
        (0.0, "accepted", 0, 0, (5, 5)),
        (2.0, "copied", 0, 0, (5, 5)),
        (2.0, "published", 0, 0, (5, 5)),
        (2.0, "reclaimed", 0, 0, (5, 5)),
    ]
    watcher.submit(0, 0, 6)
    watcher.submit(0, 1, 6)
    watcher.submit(0, 1, 4)
    assert [event.what for event in residency.history][-2:] == ["accepted", "cancelled"]
    residency.check_bytes()
    residency.transitions.changes[0, 0].copied = True  # it is not
    residency.publish()
    with pytest.raises(AssertionError, match="layer row 0, expert 0, block 0: not the bytes"):
        residency.check_bytes()
