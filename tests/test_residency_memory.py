"""Pages, ledger, plan and host store: arithmetic that must hold for all numbers."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_residency_bench import (
    EXPERTS,
    LAYERS,
    LAYOUTS,
    MODES,
    PAGE,
    StepClock,
    Watcher,
    build,
    expert_bytes,
    host_store,
    payloads,
)

from repro.contract import Action, Outcome, pages_of
from repro.errors import MissingDeviceError, UnknownNameError
from repro.formats import AnyPrecision, Dense, GroupAffine
from repro.formats.any_precision import AnyPrecisionScheme
from repro.formats.encoded import EncodedStack, all_tensors, to_bytes
from repro.formats.layout import fragmentation
from repro.formats.tiers import encode_pair
from repro.residency import (
    Arena,
    BlockPayload,
    BudgetError,
    BudgetTracker,
    ClosedError,
    ExpertResidency,
    HostStore,
    Limits,
    StepError,
    choose_page_bytes,
    page_fragmentation,
    plan_memory,
)
from repro.residency.limits import RateLimit
from repro.residency.pages import BlockPool, PageStack
from repro.residency.row_writer import RowWriter
from repro.residency.slots import runs, slot_map

# Free lists and ledger -----------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_a_page_has_one_owner(operations):
    stack, held = PageStack(3, 23), []
    for take, n in operations:
        if take and n <= stack.n_free:
            held.append(stack.take(n))
        elif not take and held:
            stack.give(held.pop(n % len(held)))
        everything = np.concatenate([stack.free(), *held]) if held else stack.free()
        assert sorted(everything.tolist()) == list(range(3, 23))


def test_fresh_pages_and_blocks_are_runs():
    stack = PageStack(5, 50)
    first = stack.take(10)
    assert first.tolist() == list(range(5, 15))
    stack.give(first)
    assert stack.take(10).tolist() == first.tolist()
    pool = BlockPool(4, 3, 5)
    blocks = [pool.take() for _ in range(3)]
    assert pool.n_free == 0 and pool.last == 19
    assert np.concatenate(blocks).tolist() == list(range(4, 19))
    pool.give(int(blocks[1][2]))
    assert pool.take().tolist() == blocks[1].tolist()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "release", "move"]),
            st.sampled_from("abc"),
            st.sampled_from("abc"),
            st.integers(0, 30),
        ),
        max_size=60,
    ),
    st.booleans(),
)
def test_the_ledger_never_exceeds_its_quotas(operations, frozen):
    quotas = {"a": 20, "b": 0, "c": 7}
    budget = BudgetTracker(27, quotas, frozen=frozen)
    for what, name, other, n in operations:
        before = {x: (budget[x].quota, budget[x].used) for x in budget.names}
        done = True
        if what == "reserve":
            done = budget.try_reserve(name, n)
        elif what == "move":
            done = budget.move_border(name, other, n)
            assert not (done and frozen)
        elif n <= budget[name].used:
            budget.release(name, n)
        if not done:
            assert before == {x: (budget[x].quota, budget[x].used) for x in budget.names}
        budget.check()
        assert budget.used <= 27
    with pytest.raises(BudgetError, match="do not make 27 pages"):
        BudgetTracker(27, {"a": 1}, frozen=True)


# Slots and pages -----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_runs_cover_everything_once(steps, longest):
    numbers = np.cumsum(np.asarray([0, *steps], dtype=np.int64))
    found = runs(numbers, longest)
    assert [i for cut in found for i in range(cut.start, cut.stop)] == list(range(len(numbers)))
    for cut in found:
        assert cut.stop - cut.start <= longest and (np.diff(numbers[cut]) == 1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_follow_the_parts(layout):
    for payload in payloads(layout)[0]:
        lies = slot_map(payload, PAGE)
        for n_bits in payload.widths:
            assert lies.n_pages(n_bits) == sum(pages_of(payload.parts(n_bits), PAGE))
            assert len(set(lies.order[n_bits].tolist())) == lies.n_pages(n_bits)
        low, high = payload.widths[0], payload.widths[-1]
        incoming, outgoing = lies.change(low, high)
        both = np.intersect1d(lies.order[low], lies.order[high])
        assert len(both) == (0 if layout == "versions" else lies.n_pages(low) - _table(payload))
        assert len(incoming) == lies.n_pages(high) - len(both)
        assert len(outgoing) == lies.n_pages(low) - len(both)
        assert lies.host_places("mirrored")[1] == lies.n_slots
        places, share = lies.host_places("single")
        if layout == "versions":  # one of the two is off the device: they share a place
            assert share == max(map(lies.n_pages, payload.widths))
        else:  # the planes of the narrowest width never leave
            assert (places[both] == -1).all() and share == lies.n_slots - len(both)


def _table(payload) -> int:
    return pages_of(payload.parts(payload.widths[0])[-1:], PAGE)[0]


def _published(shape, rows_per_lut=64) -> BlockPayload:
    """The scheme of a published size; its bytes are never needed."""
    scheme = AnyPrecisionScheme(*shape, rows_per_lut, rows_per_lut > 1)
    return BlockPayload(dict.fromkeys(scheme.widths, scheme), 128, True)


def test_page_size_at_published_dimensions():
    """Qwen3-30B-A3B: 8 KiB wastes at most 5 % at every width of both blocks, 16 KiB more."""
    blocks = [_published((1536, 2048)), _published((2048, 768))]
    choice = choose_page_bytes([blocks])
    assert choice.page_bytes == 8192 and choice.fragmentation <= 0.05
    assert page_fragmentation([blocks], 16384) > 0.05
    worst = max(fragmentation(b.parts(w), 8192) for b in blocks for w in b.widths)
    assert choice.fragmentation == worst


def test_tiny_models_get_the_page_that_wastes_least():
    choice = choose_page_bytes(payloads("planes"))
    others = [page_fragmentation(payloads("planes"), size) for size in (128, 256, 4096)]
    assert choice.page_bytes == 64 and choice.fragmentation < min(others)


# The plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    n_pages=st.integers(1, 1200),
    kv=st.integers(0, 300),
    staging=st.none() | st.integers(0, 40),
    slack=st.none() | st.integers(0, 3),
)
@settings(max_examples=150)
def test_a_plan_adds_up_or_says_what_is_missing(layout, n_pages, kv, staging, slack):
    options = {"page_bytes": PAGE, "kv_bytes": kv * PAGE, "slack": slack}
    options["staging_bytes"] = None if staging is None else staging * PAGE
    try:
        plan = plan_memory(payloads(layout), capacity_bytes=n_pages * PAGE, **options)
    except BudgetError as error:
        enough = int(str(error).split("give at least ")[1])
        short = int(str(error).split(f"{n_pages * PAGE} bytes is ")[1].split()[0])
        assert enough == n_pages * PAGE + short
        plan = plan_memory(payloads(layout), capacity_bytes=enough, **options)
        n_pages = enough // PAGE
    parts = (plan.kv_pages, plan.staging_pages, plan.weight_pages, plan.slack_pages)
    assert sum(parts) == n_pages and min(parts) >= 0 and plan.kv_pages >= kv
    floor = LAYERS * EXPERTS * expert_bytes(layout, payloads(layout)[0][0].widths[0])
    assert plan.weight_budget_bytes >= floor
    if layout == "versions":
        assert plan.n_high % LAYERS == 0 and plan.n_high + plan.n_low == LAYERS * EXPERTS
        pools = plan.high_blocks * plan.high_pages + plan.low_blocks * plan.low_pages
        assert pools == plan.weight_pages
        if slack and plan.n_high:
            assert plan.high_blocks - plan.n_high == plan.low_blocks - plan.n_low == slack


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_floor_is_exact(layout):
    options = {"staging_bytes": 8 * PAGE}
    if layout == "versions":
        options |= {"slack": 1, "n_high": LAYERS}
    else:
        options |= {"slack_bytes": 8 * PAGE}
    with pytest.raises(BudgetError, match="below the floor") as caught:
        ExpertResidency(host_store(layout), capacity_bytes=40 * PAGE, clock=StepClock(), **options)
    enough = int(str(caught.value).split("give at least ")[1])
    for capacity, fits in ((enough - PAGE, False), (enough, True)):
        try:
            ExpertResidency(
                host_store(layout), capacity_bytes=capacity, clock=StepClock(), **options
            ).close()
        except BudgetError:
            assert not fits
        else:
            assert fits


def test_one_width_is_a_version_of_its_own():
    """The ``dense`` policy: everything resident, nothing to change."""
    stack = Dense("float32").encode_stack(torch.randn(EXPERTS, 6, 10))
    payload = BlockPayload.of_stack(stack)
    store = HostStore([[payload, payload]], PAGE, pin=False)
    store.put(0, 0, payload)
    store.put(0, 1, payload)
    n_bytes = EXPERTS * 2 * -(-240 // PAGE) * PAGE
    residency = ExpertResidency(store, capacity_bytes=n_bytes + 640, clock=StepClock())
    assert residency.widths == (32,) and residency.used_bytes() == n_bytes
    assert residency.free_bytes("kv") == residency.lendable_bytes() == 640 - 0
    residency.check()
    residency.close()


# The host store --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_single_mode_holds_only_what_is_off_the_device(layout):
    both = [build(layout, mode) for mode in MODES]
    mirrored, single = (r.store for r in both)
    everything = sum(m.n_slots * EXPERTS * PAGE for row in mirrored.maps for m in row)
    assert mirrored.nbytes == mirrored.held_bytes == everything
    assert single.held_bytes < single.nbytes < everything
    Watcher(both[1]).rests()
    for residency in both:
        host = residency.snapshot()["host"]
        assert host["bytes"] == residency.store.nbytes and host["pinned"] is False
        residency.close()
        assert residency.store.nbytes == 0


def test_pinning_falls_back_to_pageable_memory(monkeypatch):
    zeros = torch.zeros

    def refuse(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.warns(RuntimeWarning, match=r"pageable.*pinning it failed \(CUDA error: out of"):
        store = HostStore(payloads("planes"), PAGE, pin=True)
    assert not store.pinned and store.nbytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostStore(payloads("planes"), PAGE, pin=False)


def test_a_store_must_be_full_and_a_single_one_serves_once():
    store = HostStore(payloads("planes"), PAGE, pin=False)
    store.put(0, 0, payloads("planes")[0][0])
    with pytest.raises(BudgetError, match="3 blocks are not in the host store"):
        ExpertResidency(store, capacity_bytes=1 << 20, clock=StepClock())
    with pytest.raises(BudgetError, match="not the one the store was made for"):
        store.put(0, 1, payloads("versions")[0][1])
    with pytest.raises(UnknownNameError, match="host mode 'double'"):
        HostStore(payloads("planes"), PAGE, mode="double")
    first = build("planes", "single")
    with pytest.raises(BudgetError, match="anew"):
        ExpertResidency(first.store, capacity_bytes=1 << 20, clock=StepClock())


# The arena -------------------------------------------------------------------------------------


def test_the_arena_is_one_memory_and_goes_away_at_once():
    arena = Arena(10, 64)
    words = arena.as_dtype(torch.float32)
    assert words.shape == (10, 16) and arena.capacity_bytes == 640
    words[3] = 1.0
    assert arena.read([3, 0]) == np.ones(16, np.float32).tobytes() + bytes(64)
    kept = arena.data  # a frame of a traceback, say
    arena.drop()
    assert kept.numel() == 0 and words.numel() == 0 and arena.closed
    assert kept.untyped_storage().nbytes() == 0
    with pytest.raises(ClosedError):
        arena.as_dtype(torch.float32)
    for pages, size in ((0, 64), (1, 4), (1, 20)):
        with pytest.raises(BudgetError):
            Arena(pages, size)
    with pytest.raises(BudgetError, match="give a smaller budget"):
        Arena(1 << 40, 1 << 20)
    if not torch.cuda.is_available():
        with pytest.raises(MissingDeviceError):
            Arena(1, 64, "cuda")


# Bad input -------------------------------------------------------------------------------------


def test_bad_input_is_refused_by_name():
    store = host_store("planes")
    clock = StepClock()
    good = {"capacity_bytes": 1000 * PAGE, "clock": clock, "worker": "manual"}
    for change, message in (
        ({"capacity_bytes": 1000 * PAGE + 1}, f"no whole number of pages .*use {1000 * PAGE}"),
        ({"capacity_bytes": 0}, "no whole number of pages"),
        ({"kv_bytes": -1}, "kv_bytes=-1: it cannot be negative"),
        ({"initial_bits": 9}, r"initial widths \[9\] are not among"),
        ({"initial_bits": [[2, 2]]}, "do not fit"),
        ({"initial_bits": 8, "capacity_bytes": 300 * PAGE}, "more than the budget leaves"),
    ):
        with pytest.raises(BudgetError, match=message):
            ExpertResidency(store, **(good | change))
    with pytest.raises(UnknownNameError, match="worker 'fiber'"):
        ExpertResidency(store, **(good | {"worker": "fiber"}))
    with pytest.raises(BudgetError, match="max_in_flight=0"):
        Limits(max_in_flight=0)
    with pytest.raises(BudgetError, match="to start high"):
        build("versions", initial_bits=4)
    with pytest.raises(BudgetError, match="one version"):
        build("versions", initial_bits=np.tile([16, 4], (LAYERS, EXPERTS, 1)))
    with pytest.raises(BudgetError, match="n_high=99"):
        build("versions", n_high=99)


def test_payloads_must_fit_together():
    planes = AnyPrecision().encode_stack(torch.randn(2, 4, 16))
    int4 = GroupAffine(4, 64).encode_stack(torch.randn(2, 4, 16))
    fp16 = Dense("float16").encode_stack(torch.randn(2, 4, 16))
    with pytest.raises(BudgetError, match="a version has exactly the width"):
        BlockPayload.of_versions({4: planes})
    with pytest.raises(BudgetError, match="can be one or two"):
        BlockPayload.of_versions({})
    with pytest.raises(BudgetError, match="differ in shape"):
        BlockPayload.of_versions({4: int4, 16: Dense().encode_stack(torch.randn(2, 5, 16))})
    pair = BlockPayload.of_versions({16: fp16, 4: int4})
    assert pair.widths == (4, 16) and pair.shape == (4, 16) and not pair.nested
    with pytest.raises(BudgetError, match="encode them alike"):
        HostStore([[pair, BlockPayload.of_stack(planes)]], PAGE)
    with pytest.raises(BudgetError, match="no MoE layer"):
        HostStore([], PAGE)
    with pytest.raises(UnknownNameError, match="width '3'"):
        pair.tensors(3)
    bare = pair.without_tensors()
    assert bare == pair and bare.parts(4) == pair.parts(4)
    with pytest.raises(BudgetError, match="have gone to the host store"):
        bare.tensor(4, bare.tensors(4)[0])


def test_use_after_close_and_closing_twice():
    for worker in ("manual", "thread"):
        residency = build("planes", worker=worker)
        step = residency.begin_step()
        residency.close()
        residency.close()
        for use in (
            residency.begin_step,
            residency.publish,
            residency.snapshot,
            residency.used_bytes,
            residency.health,
            lambda r=residency: r.reserve(1, "kv"),
            lambda r=residency, s=step: r.end_step(s),
            lambda r=residency: r.read_pages([0]),
        ):
            with pytest.raises(ClosedError):
                use()


def test_what_was_not_taken_is_not_given_back():
    watcher = Watcher(build("planes"))
    residency = watcher.residency
    reservation = watcher.reserve(3 * PAGE)
    watcher.release()
    with pytest.raises(BudgetError, match="released once"):
        residency.release(reservation)
    with pytest.raises(BudgetError, match="at least 0"):
        residency.reserve(-1, "kv")
    step = residency.begin_step()
    residency.end_step(step)
    with pytest.raises(StepError, match="a step is ended once"):
        residency.end_step(step)
    with pytest.raises(IndexError):
        watcher.submit(LAYERS, 0, 4)
    assert watcher.submit(0, 0, 9) is Outcome.REFUSED
    assert watcher.submit(0, 0, 4, 9) is Outcome.REFUSED
    watcher.check()


# Limits ----------------------------------------------------------------------------------------


def test_limits_hold_back_promotions_and_never_demotions():
    per_change = expert_bytes("planes", 5) - expert_bytes("planes", 4)
    watcher = Watcher(build("planes", limits=Limits(max_in_flight=1)))
    assert watcher.submit(0, 0, 5) is Outcome.ACCEPTED
    assert watcher.submit(0, 1, 5) is Outcome.DEFERRED
    assert watcher.submit(0, 0, 6) is Outcome.ACCEPTED, "an overtaking one takes its place"
    assert watcher.submit(0, 1, 3) is Outcome.ACCEPTED
    watcher.settle()
    assert watcher.submit(0, 2, 5) is Outcome.ACCEPTED

    clock = StepClock()
    watcher = Watcher(build("planes", clock=clock, limits=Limits(bytes_per_unit=per_change)))
    outcomes = []
    for expert in range(EXPERTS):
        outcomes.append(watcher.submit(0, expert, 5))
        assert watcher.submit(1, expert, 3) is Outcome.ACCEPTED, "memory may always come back"
        clock.steps += expert % 2
    assert Outcome.DEFERRED in outcomes and outcomes[0] is Outcome.ACCEPTED
    clock.steps += 10
    assert watcher.submit(0, outcomes.index(Outcome.DEFERRED), 5) is Outcome.ACCEPTED
    watcher.settle()
    watcher.check()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 300)), max_size=50))
def test_the_rate_is_kept(wishes):
    clock = StepClock()
    limit, total, largest = RateLimit(100.0, clock), 0, 0
    for wait, n_bytes in wishes:
        clock.steps += wait
        if limit.admits(n_bytes):
            limit.charge(n_bytes)
            total, largest = total + n_bytes, max(largest, n_bytes)
        assert total <= 100 * clock.steps + max(100, largest)


def test_borders_move_with_planes_and_stand_still_with_versions():
    watcher = Watcher(build("planes", kv_bytes=4 * PAGE))
    residency, budget = watcher.residency, watcher.residency.memory.budget
    planes = budget["planes"].quota
    everything = residency.free_bytes("kv") // PAGE
    watcher.reserve(everything * PAGE)
    assert budget["kv"].quota == everything and budget["planes"].free == 0
    assert residency.free_bytes("weights") == 0
    assert watcher.submit(0, 0, 5) is Outcome.REFUSED
    watcher.release()
    assert budget["kv"].quota == everything, "kept for KV until weights ask"
    assert residency.free_bytes("weights") == (everything - 4) * PAGE
    assert watcher.submit(0, 0, 5) is Outcome.ACCEPTED
    assert budget["kv"].quota >= 4 and budget["planes"].quota < planes
    watcher.settle()
    watcher.check()

    watcher = Watcher(build("versions", kv_bytes=4 * PAGE))
    residency, budget = watcher.residency, watcher.residency.memory.budget
    quotas = {name: budget[name].quota for name in budget.names}
    watcher.reserve(residency.free_bytes("kv"))
    assert residency.reserve(1, "kv") is None and residency.lendable_bytes() == 0
    watcher.submit(0, 0, 4)
    watcher.settle()
    assert residency.free_bytes("kv") == 0, "a low version makes no room for KV"
    assert quotas == {name: budget[name].quota for name in budget.names}
    watcher.check()


def test_lendable_is_what_the_narrowest_widths_would_free():
    watcher = Watcher(build("planes"))
    residency = watcher.residency
    promised = residency.lendable_bytes()
    per_expert = expert_bytes("planes", 4) - expert_bytes("planes", 2)
    assert promised == residency.free_bytes("kv") + LAYERS * EXPERTS * per_expert
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            assert watcher.submit(layer, expert, 2) is Outcome.ACCEPTED
    watcher.settle()
    assert residency.free_bytes("kv") == residency.lendable_bytes() == promised
    watcher.reserve(promised)
    watcher.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_layers_may_differ_in_size(layout, mode):
    """A first layer that is wider: blocks are as large as the largest, rows as they need."""
    rows = []
    for width in (48, 16):
        weight = torch.randn(3, width, 32)
        if layout == "planes":
            payload = BlockPayload.of_stack(
                AnyPrecision(rows_per_lut=width // 16).encode_stack(weight)
            )
        else:
            payload = BlockPayload.of_versions(encode_pair(weight, "fp16/int4"))
        rows.append([payload, payload])
    store = HostStore(rows, PAGE, mode, pin=False, layer_ids=[1, 4])
    for layer, row in enumerate(rows):
        for block, payload in enumerate(row):
            store.put(layer, block, payload)
    residency = ExpertResidency(
        store,
        capacity_bytes=2000 * PAGE,
        clock=StepClock(),
        worker="manual",
        n_high=2 if layout == "versions" else None,
        initial_bits=4 if layout == "planes" else None,
    )
    assert residency.layer_ids == (1, 4)
    assert residency.block_bytes.shape == (2, len(residency.widths))
    assert residency.placement.width_pages[0].sum() > residency.placement.width_pages[1].sum()
    high, low = (8, 2) if layout == "planes" else (16, 4)
    for expert in (1, 2, 0, 1):
        for layer in range(2):
            for other in range(3):
                if other != expert:
                    residency.submit(Action(layer, other, (low, low)))
            assert residency.submit(Action(layer, expert, (high, high))) is Outcome.ACCEPTED
            for _ in range(3):
                residency.advance_copies()
                residency.publish()
            residency.check()
            assert residency.n_bits[layer, expert, 0] == high
            row = residency.resolve(layer, expert)[0]
            right = b""
            for spec in rows[layer][0].tensors(high):
                data = to_bytes(rows[layer][0].tensor(high, spec)[expert])
                right += data.ljust(-(-len(data) // PAGE) * PAGE, b"\0")
            assert residency.read_pages(row.pages) == right
    residency.close()


def _lines_run(page_bytes: int) -> tuple[int, int]:
    """Lines of Python that one change takes from its decision to free pages, and its pages."""
    scheme = AnyPrecisionScheme(192, 1024, 64, True)
    tensors = {
        spec.name: torch.zeros((2, *spec.shape), dtype=spec.dtype) for spec in all_tensors(scheme)
    }
    payload = BlockPayload.of_stack(EncodedStack(scheme, tensors))
    store = HostStore([[payload, payload]], page_bytes, pin=False)
    store.put(0, 0, payload)
    store.put(0, 1, payload)
    residency = ExpertResidency(
        store,
        capacity_bytes=1 << 20,
        initial_bits=2,
        clock=StepClock(),
        worker="manual",
        staging_bytes=1 << 18,
    )
    n_lines = 0

    def count(frame, event, argument):
        nonlocal n_lines
        n_lines += event == "line" and "residency" in frame.f_code.co_filename
        return count

    for expert in (0, 1):  # the first fills the caches of what follows from shapes
        n_lines = 0
        sys.settrace(count)
        try:
            residency.submit(Action(0, expert, (8, 8)))
            residency.advance_copies()
            residency.end_step(residency.begin_step())
            residency.publish()
            residency.submit(Action(0, expert, (2, 2)))
        finally:
            sys.settrace(None)
    residency.close()
    return n_lines, store.maps[0][0].n_pages(8)


def test_no_loop_over_pages():
    """Ten times the pages take no more lines of Python."""
    few, many = _lines_run(2048), _lines_run(64)
    assert many[1] > 10 * few[1]
    assert many[0] <= few[0] * 1.1


@given(st.lists(st.integers(0, 299), min_size=1, max_size=200, unique=True), st.integers(0, 9))
def test_rows_are_written_in_pieces(flat, seed):
    """What CUDA does with its table, in host memory: any number of rows, each once."""
    rng = np.random.default_rng(seed)
    table = torch.zeros(300, 7, dtype=torch.int32)
    writer = RowWriter(table)
    rows = rng.integers(1, 1000, (len(flat), 7), dtype=np.int32)
    writer.write(np.asarray(flat, dtype=np.int64), rows)
    expected = np.zeros((300, 7), dtype=np.int32)
    expected[flat] = rows
    assert np.array_equal(table.numpy(), expected)
