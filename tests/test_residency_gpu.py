"""What only a GPU can show: two streams, events, pinned memory, a table read by graphs."""

from __future__ import annotations

import gc
import random
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
    expected_pages,
    expert_bytes,
    stack_of,
)
from test_residency_guards import scattered

from repro.contract import HEADER_WORDS, Action, Outcome, State
from repro.residency import Limits

pytestmark = pytest.mark.gpu

SLEEP = 400_000_000  # cycles, about a quarter of a second


def on_gpu(layout: str = "planes", mode: str = "mirrored", **options) -> Watcher:
    options.setdefault("limits", Limits(copy_limit=1e9))
    return Watcher(build(layout, mode, device="cuda", **options))


def _pages(row: np.ndarray) -> torch.Tensor:
    """Page numbers of a row on the device; waits for the stream, so before it sleeps."""
    return torch.from_numpy(row[HEADER_WORDS : HEADER_WORDS + row[3]].astype(np.int64)).cuda()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("worker", ["manual", "thread"])
def test_a_change_under_a_running_step(layout, worker):
    """The step sleeps, then reads its old version; nothing blocks, nothing is reclaimed early."""
    watcher = on_gpu(layout, worker=worker)
    residency = watcher.residency
    old = int(residency.n_bits[0, 0, 0])
    low = residency.widths[0]
    assert watcher.submit(0, 0, low) is Outcome.ACCEPTED
    residency.advance_copies()
    step = residency.begin_step()
    index = [_pages(step.table[0, 0, block]) for block in range(2)]
    # A kernel's first launch loads it, and that waits for whatever runs: load them now.
    read = [residency.arena.data.index_select(0, pages) for pages in index]
    rows = residency.device_table.view(-1, residency.device_table.shape[-1])
    rows.index_copy_(0, torch.zeros(2, dtype=torch.int64, device="cuda"), rows[:1].repeat(2, 1))
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(SLEEP)
    read = [residency.arena.data.index_select(0, pages) for pages in index]
    residency.end_step(step)
    assert residency.publish() == ((0, 0),)
    assert residency.state(0, 0) is State.EVICTING
    assert residency.reclaiming_bytes() > 0
    assert time.perf_counter() - start < 0.1, "a call waited for the device"
    torch.cuda.synchronize()
    residency.publish()
    assert residency.state(0, 0) is State.RESIDENT and residency.reclaiming_bytes() == 0
    for block in range(2):
        right = torch.from_numpy(expected_pages(layout, 0, block, old)[0].copy())
        assert torch.equal(read[block].cpu(), right)
    watcher.check()
    residency.close()


@pytest.mark.parametrize("worker", ["manual", "thread"])
def test_a_ring_of_one_and_two_promotions(worker):
    """A sleeping compute stream holds the copies up; the one slot serves one after the other."""
    spare = 12 * expert_bytes("planes", 4)
    watcher = on_gpu(staging_bytes=3 * PAGE, staging_slots=1, spare=spare, worker=worker)
    scattered(watcher)
    torch.cuda._sleep(SLEEP)
    start = time.perf_counter()
    assert watcher.residency.submit(Action(0, 0, (6, 6))) is Outcome.ACCEPTED
    assert watcher.residency.submit(Action(1, 1, (6, 6))) is Outcome.ACCEPTED
    assert time.perf_counter() - start < 0.1
    watcher.residency.advance_copies()
    assert set(watcher.residency.publish()) == {(0, 0), (1, 1)}
    watcher.check()
    watcher.residency.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_down_and_up_again_is_the_same_bit_for_bit(layout, mode):
    watcher = on_gpu(layout, mode, worker="thread", spare=4 * expert_bytes("planes", 8))
    residency = watcher.residency
    assert residency.store.pinned or not residency.store._pin
    first = int(residency.n_bits[0, 0, 0])
    for n_bits in (residency.widths[0], first):
        assert watcher.submit(0, 0, n_bits) is Outcome.ACCEPTED
        for _ in range(200):
            watcher.settle()
            torch.cuda.synchronize()
            if not residency.in_transition.any():
                break
        watcher.check()
        for block in range(2):
            reference = stack_of(layout, 0, block, n_bits).decode(n_bits, 0)
            assert torch.equal(watcher.decode(0, 0, block), reference)
    watcher.rests()
    residency.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_thread_beside_steps(layout, mode):
    """Many changes while the compute stream is busy: every invariant after each operation."""
    rng = random.Random(5)
    watcher = on_gpu(layout, mode, worker="thread")
    residency = watcher.residency
    for _ in range(300):
        what = rng.choice("begin end swap swap publish kv free".split())
        if what == "begin" and len(watcher.steps) < 3:
            watcher.begin()
            torch.cuda._sleep(rng.randrange(2_000_000))
        elif what == "end" and watcher.steps:
            watcher.end(rng.randrange(len(watcher.steps)))
        elif what == "swap":
            widths, layer = residency.widths, rng.randrange(LAYERS)
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
        if rng.random() < 0.3:
            watcher.check()
    for _ in range(200):
        watcher.settle()
        torch.cuda.synchronize()
        if not residency.in_transition.any():
            break
    watcher.check()
    watcher.rests()
    residency.close()


def test_a_captured_graph_reads_what_is_published():
    """The table never moves: a graph captured before the change replays on the new row."""
    watcher = on_gpu(worker="thread")
    residency = watcher.residency
    table, address = residency.device_table, residency.device_table.data_ptr()
    seen = torch.zeros(HEADER_WORDS, dtype=torch.int32, device="cuda")
    page = torch.zeros(PAGE, dtype=torch.uint8, device="cuda")

    def kernel() -> None:
        seen.copy_(table[0, 0, 0, :HEADER_WORDS])
        last = table[0, 0, 0].gather(0, (seen[3:4] + HEADER_WORDS - 1).long())  # of the LUT
        page.copy_(residency.arena.data.index_select(0, last)[0])

    kernel()
    graph = torch.cuda.CUDAGraph()
    with residency.paused():
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            kernel()
    for n_bits in (4, 2, 3):
        if n_bits != 4:
            assert watcher.submit(0, 0, n_bits) is Outcome.ACCEPTED
            watcher.settle()
        graph.replay()
        torch.cuda.synchronize()
        residency.publish()
        assert seen.tolist()[1] == n_bits
        right = expected_pages("planes", 0, 0, n_bits)[0][-1]
        assert np.array_equal(page.cpu().numpy(), right)
    assert residency.device_table.data_ptr() == address
    residency.close()


def test_memory_is_the_arena_and_returns():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    residency = build("planes", device="cuda", spare=1 << 24)
    grown = torch.cuda.memory_allocated() - before
    table = residency.device_table.nbytes
    assert residency.capacity_bytes <= grown < 1.05 * residency.capacity_bytes + table
    residency.close()
    del residency
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + table + 4096
