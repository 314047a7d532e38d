"""What the residency tests build: real payloads of both layouts, and every check at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from repro.contract import NO_PAGE, Action, Outcome, Reservation, State, Step, unpack_row
from repro.formats import AnyPrecision, EncodedStack
from repro.formats.encoded import from_bytes, to_bytes
from repro.formats.tiers import encode_pair
from repro.residency import BlockPayload, ExpertResidency, HostStore, Limits

LAYERS, EXPERTS = 2, 4
SHAPES = ((24, 40), (20, 24))  # gate_up, down
PAGE = 64
LAYOUTS = ("planes", "versions")
MODES = ("mirrored", "single")


class StepClock:
    unit = "steps"

    def __init__(self) -> None:
        self.steps = 0

    def now(self) -> float:
        return float(self.steps)


@cache
def payloads(layout: str) -> tuple[tuple[BlockPayload, ...], ...]:
    """``[L][B]`` of any-precision planes, or of an FP16 and an INT4 version."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for _ in range(LAYERS):
        row = []
        for shape in SHAPES:
            weight = torch.randn(EXPERTS, *shape, generator=generator)
            if layout == "planes":
                row.append(BlockPayload.of_stack(AnyPrecision().encode_stack(weight)))
            else:
                row.append(BlockPayload.of_versions(encode_pair(weight, "fp16/int4")))
        rows.append(tuple(row))
    return tuple(rows)


def host_store(layout: str, mode: str = "mirrored") -> HostStore:
    store = HostStore([[p.without_tensors() for p in r] for r in payloads(layout)], PAGE, mode,
                      pin=False)  # fmt: skip
    for layer, row in enumerate(payloads(layout)):
        for block, payload in enumerate(row):
            store.put(layer, block, payload)
    return store


def expert_bytes(layout: str, n_bits: int) -> int:
    """Whole pages of one expert at this width."""
    parts = [part for payload in payloads(layout)[0] for part in payload.parts(n_bits)]
    return sum(-(-part.n_bytes // PAGE) for part in parts) * PAGE


def build(
    layout: str,
    mode: str = "mirrored",
    *,
    worker: str = "manual",
    kind: type[ExpertResidency] = ExpertResidency,
    spare: int | None = None,
    **options: Any,
) -> ExpertResidency:
    """Planes: all at 4 bits and ``spare`` bytes; versions: one expert of a layer is high."""
    everyone = LAYERS * EXPERTS
    options.setdefault("clock", StepClock())
    options.setdefault("staging_bytes", 8 * PAGE)
    options.setdefault("limits", Limits(copy_limit=10))
    staging = options["staging_bytes"]
    kv = -(-options.get("kv_bytes", 0) // PAGE) * PAGE
    if layout == "planes":
        options.setdefault("slack_bytes", 8 * PAGE)
        options.setdefault("initial_bits", 4)
        spare = 3 * expert_bytes(layout, 4) if spare is None else spare
        capacity = everyone * expert_bytes(layout, 4) + spare + options["slack_bytes"]
    else:
        options.setdefault("slack", 1)
        options.setdefault("n_high", LAYERS)
        high, low = expert_bytes(layout, 16), expert_bytes(layout, 4)
        slack = options["slack"]
        capacity = (LAYERS + slack) * high + (everyone - LAYERS + slack) * low
        capacity += 10 * PAGE if spare is None else spare
    return kind(
        host_store(layout, mode), capacity_bytes=capacity + staging + kv, worker=worker, **options
    )


@cache
def expected_pages(layout: str, layer: int, block: int, n_bits: int) -> np.ndarray:
    """``uint8 [E, pages, PAGE]``: what the pages of a row must hold, from the formats alone."""
    payload = payloads(layout)[layer][block]
    whole = []
    for expert in range(EXPERTS):
        data = b""
        for spec in payload.tensors(n_bits):
            part = to_bytes(payload.tensor(n_bits, spec)[expert])
            data += part.ljust(-(-len(part) // PAGE) * PAGE, b"\0")
        whole.append(np.frombuffer(data, dtype=np.uint8).reshape(-1, PAGE))
    return np.stack(whole)


def stack_of(layout: str, layer: int, block: int, n_bits: int) -> EncodedStack:
    return payloads(layout)[layer][block].stacks[n_bits]


@dataclass
class Watcher:
    """Knows what must lie on every page; ``check`` after each operation."""

    residency: ExpertResidency
    steps: list[tuple[Step, np.ndarray]] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)  # what a request wrote on its pages

    @property
    def layout(self) -> str:
        return self.residency.layout

    def row_is_right(self, layer: int, expert: int, block: int, words: np.ndarray) -> None:
        row = unpack_row(words)
        right = expected_pages(self.layout, layer, block, row.n_bits)[expert]
        assert len(row.pages) == len(right) and NO_PAGE not in row.pages
        data = self.residency.arena.data[list(row.pages)].cpu().numpy()
        assert np.array_equal(data, right), f"{(layer, expert, block)} at {row.n_bits} bits"
        assert row.format_id == payloads(self.layout)[layer][block].format_id(row.n_bits)

    def decode(self, layer: int, expert: int, block: int) -> torch.Tensor:
        """The matrix as a kernel would decode it from the pages of the published row."""
        row = self.residency.resolve(layer, expert)[block]
        payload = payloads(self.layout)[layer][block]
        data, start, tensors = self.residency.read_pages(row.pages), 0, {}
        for spec in payload.tensors(row.n_bits):
            tensors[spec.name] = from_bytes(data[start : start + spec.n_bytes], spec)
            start += -(-spec.n_bytes // PAGE) * PAGE
        return payload.scheme(row.n_bits).decode(tensors, row.n_bits)

    def table_is_right(self, table: np.ndarray) -> None:
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                for block in range(2):
                    self.row_is_right(layer, expert, block, table[layer, expert, block])

    def check(self) -> None:
        """Items 1, 2 and 6: complete versions, no page twice, the cap, ledger = allocator."""
        residency = self.residency
        residency.check()
        table = residency.placement.table.host
        assert np.array_equal(residency.device_table.cpu().numpy(), table)
        assert np.array_equal(table[..., 1], residency.n_bits)
        self.table_is_right(table)
        lent = {page for r in self.reservations for page in r.pages}
        for number, reservation in enumerate(self.reservations):
            data = residency.arena.data[list(reservation.pages)].cpu()
            assert bool((data == self.written[id(reservation)]).all()), f"KV {number} was lost"
        for step, widths in self.steps:
            assert np.array_equal(step.table[..., 1], widths), "a step changed under way"
            self.table_is_right(step.table)
            read = step.table[..., 4:]
            assert not lent & set(read[read != NO_PAGE].tolist()), "KV on a page being read"
        free = set(residency.memory.free_pages().tolist())
        assert not free & lent
        if self.layout == "versions":
            pages = table[..., 4:]
            for layer in range(LAYERS):
                for expert in range(EXPERTS):
                    run = pages[layer, expert][pages[layer, expert] != NO_PAGE]
                    assert (np.diff(run) == 1).all(), "a version is one contiguous run"

    def begin(self) -> None:
        self.steps.append((self.residency.begin_step(), self.residency.n_bits))

    def end(self, which: int = 0) -> None:
        self.residency.end_step(self.steps.pop(which)[0])

    def submit(self, layer: int, expert: int, *n_bits: int) -> Outcome:
        """What was not accepted has changed nothing."""
        residency = self.residency
        action = Action(layer, expert, n_bits if len(n_bits) == 2 else n_bits * 2)
        before = (residency.used_bytes(), residency.n_bits, residency.in_transition)
        outcome = residency.submit(action)
        if outcome is not Outcome.ACCEPTED:
            after = (residency.used_bytes(), residency.n_bits, residency.in_transition)
            assert before[0] == after[0] or residency.transitions.driver.threaded
            assert np.array_equal(before[1], after[1])
        return outcome

    def reserve(self, n_bytes: int) -> Reservation | None:
        """KV pages, written to at once."""
        reservation = self.residency.reserve(n_bytes, "kv")
        if reservation is not None:
            value = 1 + len(self.written) % 255
            self.residency.arena.data[list(reservation.pages)] = value
            self.written[id(reservation)] = value
            self.reservations.append(reservation)
        return reservation

    def release(self, which: int = 0) -> None:
        self.residency.release(self.reservations.pop(which))

    def settle(self) -> None:
        """Nothing is left under way."""
        while self.steps:
            self.end()
        for _ in range(3):
            self.residency.advance_copies()
            self.residency.publish()

    def rests(self) -> None:
        """Exactly one version of everything, and no other page in use."""
        residency = self.residency
        assert not residency.in_transition.any()
        pages = sum(len(r.pages) for r in self.reservations)
        pages += residency.placement.resident_pages()
        assert residency.used_bytes() == pages * PAGE
        assert all(
            residency.state(i, e) is State.RESIDENT for i in range(LAYERS) for e in range(EXPERTS)
        )
        store = residency.store
        if store.mode == "single":
            assert store.held_bytes == _away(residency) * PAGE


def _away(residency: ExpertResidency) -> int:
    """Pages that can leave the device and have left it."""
    away = 0
    for layer, row in enumerate(residency.store.maps):
        for block, lies in enumerate(row):
            places, _ = lies.host_places("single")
            for n_bits in residency.n_bits[layer, :, block].tolist():
                gone = np.setdiff1d(np.flatnonzero(places >= 0), lies.order[n_bits])
                away += len(gone)
    return away


def test_the_bench_stands():
    for layout in LAYOUTS:
        for mode in MODES:
            watcher = Watcher(build(layout, mode))
            watcher.check()
            watcher.rests()
            watcher.residency.close()
