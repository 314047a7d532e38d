"""The contract between the rooms, as tests.

Each invariant is a function ``*_invariant`` that takes a way to build an implementation and
fails with an AssertionError when the implementation breaks it.  It is run on everything in
``IMPLEMENTATIONS`` (to hold a new one to the contract, add one line there) and on the
deliberately broken stand-ins in ``BROKEN``, each of which must be caught: that is the proof
that the tests can fail.

The stand-ins are the smallest things that keep the contract: a residency made of a list of
pages, a round-to-nearest format with nested codes, a top-n policy, a step clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from repro.contract import (
    HEADER_WORDS,
    NO_PAGE,
    Action,
    Block,
    EncodedWeight,
    FormatId,
    Health,
    Outcome,
    Part,
    PolicyState,
    Reservation,
    RoutingStatistics,
    State,
    Step,
    TableRow,
    pack_row,
    pages_of,
    unpack_row,
)
from repro.formats import EncodedStack, make_format
from repro.formats.encoded import TensorSpec
from repro.integration.experts import ExpertsLayer
from repro.integration.statistics import DeviceStatistics
from repro.policies import make_policy
from repro.residency import BlockPayload, ExpertResidency, HostStore, Limits

# A format: 8-bit codes rounded to the nearest level of their row, nested ---------------------

PARENT_BITS = 8


class NearestEncoded:
    """Planes of the codes, most significant first, and one table of row levels per width."""

    format_id = FormatId.ANY_PRECISION
    nested = True
    widths = tuple(range(1, PARENT_BITS + 1))

    def __init__(self, weight: np.ndarray) -> None:
        self.shape = weight.shape
        low = weight.min(axis=1, keepdims=True)
        span = np.maximum(weight.max(axis=1, keepdims=True) - low, 1e-12)
        codes = np.minimum((weight - low) / span * 2**PARENT_BITS, 2**PARENT_BITS - 1)
        codes = codes.astype(np.uint8)
        self._bytes: dict[Part, bytes] = {}
        for plane in range(PARENT_BITS):
            bits = np.packbits(codes >> (PARENT_BITS - 1 - plane) & 1, axis=1)
            self._bytes[self._plane(plane)] = bits.tobytes()
        for n_bits in self.widths:
            levels = low + span * (np.arange(2**n_bits) + 0.5) / 2**n_bits
            self._bytes[self._table(n_bits)] = levels.astype(np.float32).tobytes()

    def _plane(self, index: int) -> Part:
        return Part("plane", index, self.shape[0] * -(-self.shape[1] // 8))

    def _table(self, n_bits: int) -> Part:
        return Part("lut", n_bits, self.shape[0] * 2**n_bits * 4)

    def slices(self, n_bits: int) -> tuple[Part, ...]:
        return (*(self._plane(i) for i in range(n_bits)), self._table(n_bits))

    def read(self, part: Part) -> bytes:
        return self._bytes[part]

    def nbytes(self, n_bits: int) -> int:
        return sum(part.n_bytes for part in self.slices(n_bits))

    def decode(self, n_bits: int, parts: dict[Part, bytes] | None = None) -> np.ndarray:
        parts = self._bytes if parts is None else parts
        rows, columns = self.shape
        codes = np.zeros(self.shape, dtype=np.int64)
        for part in self.slices(n_bits)[:-1]:
            packed = np.frombuffer(parts[part], dtype=np.uint8).reshape(rows, -1)
            codes = codes * 2 + np.unpackbits(packed, axis=1, count=columns)
        levels = np.frombuffer(parts[self._table(n_bits)], dtype=np.float32).reshape(rows, -1)
        return np.take_along_axis(levels, codes, axis=1)


class NearestFormat:
    encoded: type[NearestEncoded] = NearestEncoded

    def encode(self, weight: Any, importance: Any | None = None) -> NearestEncoded:
        return self.encoded(np.asarray(weight, dtype=np.float64))


def format_of(encoded: type[NearestEncoded]) -> Callable[[], NearestFormat]:
    return lambda: type("Broken", (NearestFormat,), {"encoded": encoded})()


class LeastSignificantFirst(NearestEncoded):
    """A width drops the leading planes, so a smaller one is no prefix of a larger one."""

    def slices(self, n_bits):
        return (
            *(self._plane(i) for i in range(PARENT_BITS - n_bits, PARENT_BITS)),
            self._table(n_bits),
        )


class ForgetsTables(NearestEncoded):
    def nbytes(self, n_bits):
        return sum(part.n_bytes for part in self.slices(n_bits) if part.kind == "plane")


class DropsTail(NearestEncoded):
    """Packs whole bytes only: the last K % 8 columns read as code 0."""

    def decode(self, n_bits, parts=None):
        full = super().decode(n_bits, parts)
        tail = self.shape[1] - self.shape[1] % 8
        full[:, tail:] = full[:, :1]
        return full


class DecodesFromMemory(NearestEncoded):
    def decode(self, n_bits, parts=None):
        return super().decode(n_bits)


class SameErrorAtAnyWidth(NearestEncoded):
    def decode(self, n_bits, parts=None):
        return super().decode(self.widths[0]) if parts is None else super().decode(n_bits, parts)


class DividesByImportance(NearestFormat):
    def encode(self, weight, importance=None):
        scale = 1.0 if importance is None else importance / importance.sum()
        return self.encoded(np.asarray(weight) + 0 * scale)


def _weight(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def prefix_invariant(build) -> None:
    """Item 4: the planes of b bits are the first planes of b + 1 bits."""
    encoded = build().encode(_weight((6, 20)))
    if not encoded.nested:
        return
    for n_bits, wider in zip(encoded.widths, encoded.widths[1:], strict=False):
        planes = [p for p in encoded.slices(n_bits) if p.kind == "plane"]
        more = [p for p in encoded.slices(wider) if p.kind == "plane"]
        assert len(planes) == n_bits and planes == more[:n_bits]
        assert [p.index for p in planes] == list(range(n_bits))


def bytes_invariant(build) -> None:
    """Item 2, for one block: all bytes of a width are counted, tables too."""
    encoded = build().encode(_weight((6, 20)))
    for n_bits in encoded.widths:
        parts = encoded.slices(n_bits)
        assert all(len(encoded.read(part)) == part.n_bytes for part in parts)
        assert encoded.nbytes(n_bits) == sum(part.n_bytes for part in parts)


def round_trip_invariant(build) -> None:
    """Item 4: the parts alone give the matrix back, at any K; the error falls with b."""
    for shape in ((5, 1), (3, 7), (4, 8), (6, 17), (2, 257)):
        weight = _weight(shape, seed=shape[1])
        encoded = build().encode(weight)
        errors = []
        for n_bits in encoded.widths:
            parts = {part: encoded.read(part) for part in encoded.slices(n_bits)}
            decoded = np.asarray(encoded.decode(n_bits))
            assert decoded.shape == shape and np.isfinite(decoded).all()
            assert np.array_equal(np.asarray(encoded.decode(n_bits, parts)), decoded)
            errors.append(float(((decoded - weight) ** 2).mean()))
            junk = {part: bytes(len(data)) for part, data in parts.items()}
            assert not np.array_equal(np.asarray(encoded.decode(n_bits, junk)), decoded)
        # Down to the rounding of the tables, where few weights have a code each.
        floor = 1e-6 * float((weight**2).mean())
        if shape[1] > 1:
            assert all(a > b or a < floor for a, b in zip(errors, errors[1:], strict=False)), errors
        if encoded.widths[-1] >= 8:
            span = weight.max() - weight.min()
            assert np.abs(np.asarray(encoded.decode(encoded.widths[-1])) - weight).max() < span / 64


def never_routed_invariant(build) -> None:
    """Item 7: an expert never routed in calibration has planes like any other."""
    encoded = build().encode(_weight((4, 16)), importance=np.zeros((4, 16)))
    for n_bits in encoded.widths:
        assert np.isfinite(np.asarray(encoded.decode(n_bits))).all()
        assert encoded.nbytes(n_bits) > 0


# A clock ---------------------------------------------------------------------------------


class StepClock:
    unit = "steps"

    def __init__(self) -> None:
        self.steps = 0

    def now(self) -> float:
        return float(self.steps)


class BackwardClock(StepClock):
    def now(self) -> float:
        return float(-self.steps)


def clock_invariant(build) -> None:
    clock = build()
    assert clock.unit in ("s", "steps")
    seen = []
    for _ in range(5):
        seen.append(clock.now())
        if hasattr(clock, "steps"):
            clock.steps += 1
    assert seen == sorted(seen) and seen[-1] >= 0


# A residency: pages in a list, copies that complete when told ------------------------------

Key = tuple[int, int, int]
PAGE_BYTES = 64
COPY_LIMIT = 10  # clock units a copy may take before it counts as dead


@dataclass
class _Change:
    action: Action
    incoming: dict[tuple[Key, Part], list[int]]  # parts that need new pages
    to_copy: list[tuple[Key, Part]]
    since: float


class PagedResidency:
    """Experts' parts on pages of one arena; host copies of all parts always exist."""

    page_bytes = PAGE_BYTES

    def __init__(self, encoded: dict[Key, Any], n_bits: int, capacity_bytes: int, clock: Any):
        self._encoded, self._clock = encoded, clock
        self.capacity_bytes = capacity_bytes
        self._data: list[bytes | None] = [None] * (capacity_bytes // PAGE_BYTES)
        self._free = list(range(len(self._data)))
        self._resident: dict[tuple[Key, Part], list[int]] = {}
        self._rows: dict[Key, TableRow] = {}
        self._changes: dict[tuple[int, int], _Change] = {}
        self._retired: list[tuple[list[int], set[int], tuple[int, int]]] = []
        self._running: set[int] = set()
        self._number = 0
        widest = max(e.widths[-1] for e in encoded.values())
        self._words = HEADER_WORDS + max(
            sum(pages_of(e.slices(widest), PAGE_BYTES)) for e in encoded.values()
        )
        for key, weight in encoded.items():
            for part in weight.slices(n_bits):
                self._resident[key, part] = self._take(part.n_bytes)
                self._copy(key, part, self._resident[key, part])
            self._rows[key] = self._row(key, n_bits, 0)

    # pages

    def _take(self, n_bytes: int) -> list[int]:
        n = -(-n_bytes // PAGE_BYTES)
        taken, self._free = self._free[:n], self._free[n:]
        return taken

    def _give(self, pages: list[int]) -> None:
        self._free = sorted(self._free + pages)

    def _copy(self, key: Key, part: Part, pages: list[int]) -> None:
        data = self._host(key, part)
        for i, page in enumerate(pages):
            self._data[page] = data[i * PAGE_BYTES : (i + 1) * PAGE_BYTES].ljust(PAGE_BYTES, b"\0")

    def _host(self, key: Key, part: Part) -> bytes:
        return self._encoded[key].read(part)

    def _row(self, key: Key, n_bits: int, generation: int) -> TableRow:
        parts = self._encoded[key].slices(n_bits)
        pages = [page for part in parts for page in self._resident[key, part]]
        return TableRow(self._encoded[key].format_id, n_bits, generation, tuple(pages))

    # what the contract names

    def used_bytes(self) -> int:
        return (len(self._data) - len(self._free)) * PAGE_BYTES

    def resolve(self, layer: int, expert: int) -> tuple[TableRow, ...]:
        return tuple(self._rows[layer, expert, block] for block in Block)

    def state(self, layer: int, expert: int) -> State:
        change = self._changes.get((layer, expert))
        if change is not None:
            now = sum(row.n_bits for row in self.resolve(layer, expert))
            return State.PROMOTING if sum(change.action.n_bits) > now else State.DEMOTING
        if any(owner == (layer, expert) for _, _, owner in self._retired):
            return State.EVICTING
        return State.RESIDENT

    def read_pages(self, pages) -> bytes:
        return b"".join(self._data[page] or bytes(PAGE_BYTES) for page in pages)

    def _table(self) -> np.ndarray:
        shape = [max(key[axis] for key in self._rows) + 1 for axis in range(3)]
        table = np.full((*shape, self._words), NO_PAGE, dtype=np.int32)
        for key, row in self._rows.items():
            table[key] = pack_row(row, self._words)
        return table

    def begin_step(self) -> Step:
        self._number += 1
        self._running.add(self._number)
        return Step(self._number, self._table())

    def end_step(self, step: Step) -> None:
        self._running.discard(step.number)
        self._reclaim()

    def _reclaim(self) -> None:
        waiting = []
        for pages, readers, owner in self._retired:
            readers &= self._running
            if readers:
                waiting.append((pages, readers, owner))
            else:
                self._give(pages)
        self._retired = waiting

    def submit(self, action: Action) -> Outcome:
        owner = (action.layer, action.expert)
        if self.state(*owner) is not State.RESIDENT:
            return Outcome.DEFERRED
        wanted = []
        for block in Block:
            key = (*owner, int(block))
            if action.n_bits[block] not in self._encoded[key].widths:
                return Outcome.REFUSED
            wanted += [(key, p) for p in self._encoded[key].slices(action.n_bits[block])]
        missing = [item for item in wanted if item not in self._resident]
        if sum(pages_of((p for _, p in missing), PAGE_BYTES)) > len(self._free):
            return Outcome.REFUSED
        incoming = {(key, part): self._take(part.n_bytes) for key, part in missing}
        self._changes[owner] = _Change(action, incoming, list(incoming), self._clock.now())
        return Outcome.ACCEPTED

    def advance_copies(self, limit: int | None = None) -> int:
        done = 0
        for change in self._changes.values():
            while change.to_copy and (limit is None or done < limit):
                key, part = change.to_copy.pop(0)
                self._copy(key, part, change.incoming[key, part])
                done += 1
        return done

    def publish(self) -> tuple[tuple[int, int], ...]:
        ready = [owner for owner, change in self._changes.items() if not change.to_copy]
        for owner in ready:
            self._switch(owner, self._changes.pop(owner))
        self._reclaim()
        return tuple(ready)

    def _switch(self, owner: tuple[int, int], change: _Change) -> None:
        self._resident |= change.incoming
        dropped: list[int] = []
        for block in Block:
            key = (*owner, int(block))
            n_bits = change.action.n_bits[block]
            before = self._rows[key]
            self._rows[key] = self._row(key, n_bits, before.generation + 1)
            keep = set(self._encoded[key].slices(n_bits))
            for part in self._encoded[key].slices(before.n_bits):
                if part not in keep:
                    dropped += self._resident.pop((key, part))
        self._retire(dropped, owner)

    def _retire(self, pages: list[int], owner: tuple[int, int]) -> None:
        self._retired.append((pages, set(self._running), owner))

    def reserve(self, n_bytes: int, purpose: str) -> Reservation | None:
        if -(-n_bytes // PAGE_BYTES) > len(self._free):
            return None
        return Reservation(purpose, tuple(self._take(n_bytes)))

    def release(self, reservation: Reservation) -> None:
        self._give(list(reservation.pages))

    def health(self) -> Health:
        late = [o for o, c in self._changes.items() if self._clock.now() - c.since > COPY_LIMIT]
        return Health(not late, f"copies of {late} do not complete" if late else "")


class PublishesEarly(PagedResidency):
    """The table entry is written as soon as the copy was started."""

    def publish(self):
        for change in self._changes.values():
            change.to_copy.clear()
        return super().publish()


class ReclaimsEarly(PagedResidency):
    """The old version goes at once, although steps under way still read it."""

    def _retire(self, pages, owner):
        self._give(pages)


class FreesAtRequest(PagedResidency):
    """A demotion hands the plane's pages to the KV cache before the switch."""

    def submit(self, action):
        outcome = super().submit(action)
        if outcome is Outcome.ACCEPTED:
            for block in Block:
                key = (action.layer, action.expert, int(block))
                keep = set(self._encoded[key].slices(action.n_bits[block]))
                for part in self._encoded[key].slices(self._rows[key].n_bits):
                    if part not in keep:
                        self._give(self._resident[key, part])
                        self._resident[key, part] = []
        return outcome


class ReservesOverTheCap(PagedResidency):
    def reserve(self, n_bytes, purpose):
        n = -(-n_bytes // PAGE_BYTES)
        while len(self._free) < n:
            self._free.append(len(self._data))
            self._data.append(None)
        return super().reserve(n_bytes, purpose)


class KeepsHalfOfAFailedReserve(PagedResidency):
    def reserve(self, n_bytes, purpose):
        pages = self._take(n_bytes)
        return Reservation(purpose, tuple(pages)) if len(pages) * PAGE_BYTES >= n_bytes else None


class KeepsBothVersions(PagedResidency):
    def _retire(self, pages, owner):
        pass


class LosesBytesOnTheWay(PagedResidency):
    """What comes back from the host is not what left."""

    def _copy(self, key, part, pages):
        super()._copy(key, part, pages)
        if self._number and part.kind == "plane":
            self._data[pages[0]] = bytes(PAGE_BYTES)


class LiveTable(PagedResidency):
    """A step is given the table itself and not what it was when the step began."""

    def begin_step(self):
        step = super().begin_step()
        self._views = [*getattr(self, "_views", []), step.table]
        return step

    def publish(self):
        ready = super().publish()
        for view in getattr(self, "_views", []):
            view[...] = self._table()
        return ready


class PublishesBlockByBlock(PagedResidency):
    def _switch(self, owner, change):
        half = Action(*owner, (change.action.n_bits[0], self._rows[*owner, 1].n_bits))
        rest = {i: pages for i, pages in change.incoming.items() if i[0][2] == 1}
        first = {i: pages for i, pages in change.incoming.items() if i[0][2] == 0}
        super()._switch(owner, _Change(half, first, [], change.since))
        if change.action.n_bits[1] != half.n_bits[1]:
            self._changes[owner] = _Change(change.action, rest, list(rest), change.since)


class SameGeneration(PagedResidency):
    def _row(self, key, n_bits, generation):
        return super()._row(key, n_bits, 0)


class SilentWorker(PagedResidency):
    def health(self):
        return Health(True)


LAYERS, EXPERTS = 2, 3
SHAPES = {Block.GATE_UP: (8, 24), Block.DOWN: (6, 40)}


class Bench:
    """A residency with everything a test needs to know about it."""

    def __init__(self, build, *, spare_pages: int = 60, n_bits: int = 3) -> None:
        self.clock = StepClock()
        self.encoded = {
            (layer, expert, int(block)): NearestFormat().encode(_weight(shape, 7 * layer + expert))
            for layer in range(LAYERS)
            for expert in range(EXPERTS)
            for block, shape in SHAPES.items()
        }
        resident = [p for e in self.encoded.values() for p in e.slices(n_bits)]
        pages = sum(pages_of(resident, PAGE_BYTES)) + spare_pages
        self.residency = build(self.encoded, n_bits, pages * PAGE_BYTES, self.clock)
        self.steps: list[tuple[Step, dict[Key, int]]] = []
        self.reservations: list[Reservation] = []

    def row_is_right(self, key: Key, row: TableRow) -> None:
        """The pages of a row hold exactly the parts of its width, and decode from there."""
        weight, residency = self.encoded[key], self.residency
        parts, start = {}, 0
        for part, n in zip(
            weight.slices(row.n_bits), pages_of(weight.slices(row.n_bits), PAGE_BYTES), strict=True
        ):
            data = residency.read_pages(row.pages[start : start + n])
            parts[part], start = data[: part.n_bytes], start + n
            assert parts[part] == weight.read(part), f"{key} at {row.n_bits} bits: {part}"
        assert start == len(row.pages)
        x = np.linspace(-1, 1, weight.shape[1])
        assert np.array_equal(weight.decode(row.n_bits, parts) @ x, weight.decode(row.n_bits) @ x)

    def check(self) -> None:
        residency = self.residency
        assert residency.used_bytes() <= residency.capacity_bytes
        owned: list[int] = [p for r in self.reservations for p in r.pages]
        read: set[int] = set()
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                for block, row in enumerate(residency.resolve(layer, expert)):
                    self.row_is_right((layer, expert, block), row)
                    owned += row.pages
        for step, n_bits in self.steps:
            for key, width in n_bits.items():
                row = unpack_row(step.table[key])
                assert row.n_bits == width, f"step {step.number} changed under way"
                self.row_is_right(key, row)
                read |= set(row.pages)
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert max(owned) < residency.capacity_bytes // residency.page_bytes
        assert not read & {p for r in self.reservations for p in r.pages}, "KV on a page being read"

    def settle(self) -> None:
        while self.steps:
            self.residency.end_step(self.steps.pop()[0])
        self.residency.advance_copies()
        self.residency.publish()

    def one_version_each(self) -> None:
        pages = sum(len(r.pages) for r in self.reservations)
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                assert self.residency.state(layer, expert) is State.RESIDENT
                pages += sum(len(row.pages) for row in self.residency.resolve(layer, expert))
        assert self.residency.used_bytes() == pages * self.residency.page_bytes

    def begin(self) -> None:
        step = self.residency.begin_step()
        widths = {
            (layer, expert, block): row.n_bits
            for layer in range(LAYERS)
            for expert in range(EXPERTS)
            for block, row in enumerate(self.residency.resolve(layer, expert))
        }
        self.steps.append((step, widths))

    def snapshot(self) -> tuple[Any, ...]:
        rows = [self.residency.resolve(i, j) for i in range(LAYERS) for j in range(EXPERTS)]
        return self.residency.used_bytes(), rows


def schedule_invariant(build) -> None:
    """Items 1, 2, 5 and 6 at every instant of many interleavings of everything."""
    accepted = refused = reserved = overlapping = 0
    for seed in range(25):
        rng = random.Random(seed)
        bench = Bench(build, spare_pages=rng.choice([0, 12, 60]))
        for _ in range(60):
            what = rng.choice(["begin", "end", "submit", "submit", "copy", "publish", "kv", "free"])
            if what == "begin" and len(bench.steps) < 3:
                bench.begin()
            elif what == "end" and bench.steps:
                bench.residency.end_step(bench.steps.pop(0)[0])
            elif what == "submit":
                widths = tuple(rng.choice([1, 2, 3, 4, 5]) for _ in Block)
                before = bench.snapshot()
                action = Action(rng.randrange(LAYERS), rng.randrange(EXPERTS), widths)
                outcome = bench.residency.submit(action)
                accepted += outcome is Outcome.ACCEPTED
                if outcome is not Outcome.ACCEPTED:
                    refused += 1
                    assert bench.snapshot() == before
            elif what == "copy":
                bench.residency.advance_copies(rng.randrange(1, 6))
            elif what == "publish":
                overlapping += bool(bench.residency.publish()) and bool(bench.steps)
            elif what == "kv":
                before = bench.snapshot()
                reservation = bench.residency.reserve(rng.randrange(1, 20 * PAGE_BYTES), "kv")
                if reservation is None:
                    assert bench.snapshot() == before, "a reserve that failed changed something"
                else:
                    reserved += 1
                    bench.reservations.append(reservation)
            elif what == "free" and bench.reservations:
                bench.residency.release(bench.reservations.pop())
            bench.check()
        bench.settle()
        bench.check()
        bench.one_version_each()
    # the schedules did reach what they are meant to reach
    assert min(accepted, refused, reserved, overlapping) > 10


def demote_promote_invariant(build) -> None:
    """Item 3: down and up again gives the very same bytes, in every block."""
    bench = Bench(build, n_bits=5)
    bench.begin()  # work has started: copies made now come from the host
    for n_bits in (1, 5, 2, 4, 5):
        assert bench.residency.submit(Action(1, 2, (n_bits, n_bits))) is Outcome.ACCEPTED
        bench.settle()
        bench.check()
    assert [row.n_bits for row in bench.residency.resolve(1, 2)] == [5, 5]


def publication_invariant(build) -> None:
    """Item 1: a change appears at a boundary, whole, after its copies, one generation later."""
    bench = Bench(build)
    residency = bench.residency
    before = residency.resolve(0, 1)
    assert residency.submit(Action(0, 1, (5, 4))) is Outcome.ACCEPTED
    assert residency.state(0, 1) is State.PROMOTING
    assert residency.publish() == () and residency.resolve(0, 1) == before
    residency.advance_copies(1)
    assert residency.publish() == () and residency.resolve(0, 1) == before
    bench.begin()
    residency.advance_copies()
    assert residency.resolve(0, 1) == before
    assert residency.publish() == ((0, 1),)
    after = residency.resolve(0, 1)
    assert [row.n_bits for row in after] == [5, 4], "both blocks or none"
    assert [b.generation - a.generation for a, b in zip(before, after, strict=True)] == [1, 1]
    assert residency.state(0, 1) is State.EVICTING
    bench.check()
    bench.settle()
    assert residency.state(0, 1) is State.RESIDENT
    assert residency.submit(Action(0, 1, (99, 99))) is Outcome.REFUSED


def full_pool_invariant(build) -> None:
    """Item 2: with no room at all a promotion is refused, a demotion still makes progress."""
    bench = Bench(build, spare_pages=12)
    hog = bench.residency.reserve(4 * PAGE_BYTES, "kv")
    assert hog is not None
    bench.reservations.append(hog)
    before = bench.snapshot()
    assert bench.residency.submit(Action(0, 0, (8, 8))) is Outcome.REFUSED
    assert bench.residency.reserve(bench.residency.capacity_bytes, "kv") is None
    assert bench.snapshot() == before
    assert bench.residency.submit(Action(0, 0, (2, 2))) is Outcome.ACCEPTED
    bench.settle()
    assert bench.residency.used_bytes() < before[0]
    bench.check()


def dead_worker_invariant(build) -> None:
    """Item 8: a copy that never completes is reported, and the old version serves on."""
    bench = Bench(build)
    assert bench.residency.health().ok
    before = bench.residency.resolve(0, 0)
    assert bench.residency.submit(Action(0, 0, (5, 5))) is Outcome.ACCEPTED
    bench.clock.steps += COPY_LIMIT
    assert bench.residency.health().ok
    bench.clock.steps += 1
    health = bench.residency.health()
    assert not health.ok and health.message
    bench.residency.publish()
    assert bench.residency.resolve(0, 0) == before
    bench.check()


# A policy: hottest n of each layer, with a margin that the newcomer must beat ----------------


class TopN:
    """As many experts of each layer at the widest width as the budget holds, hottest first."""

    def __init__(self, margin: float = 0.2) -> None:
        self._margin = margin
        self._decisions = 0

    def _n_high(self, state: PolicyState) -> int:
        n_layers, n_experts = state.counts.shape
        low, high = (int(state.block_bytes[:, i].sum()) for i in (0, -1))
        spare = state.budget_bytes // n_layers - n_experts * low
        return max(0, min(n_experts, spare // (high - low)))

    def decide(self, state: PolicyState) -> list[Action]:
        self._decisions += 1
        low, high = state.widths[0], state.widths[-1]
        actions = []
        for layer, counts in enumerate(state.counts):
            resident = state.n_bits[layer, :, 0] == high
            share = counts / max(1, counts.sum())
            score = share * np.where(resident, 1 + self._margin, 1.0)
            chosen = np.argsort(-score, kind="stable")[: self._n_high(state)]
            wanted = np.isin(np.arange(len(counts)), chosen)
            down = np.flatnonzero(resident & ~wanted)
            up = [e for e in chosen if not resident[e]]
            actions += [Action(layer, int(e), (low, low)) for e in down]
            actions += [Action(layer, int(e), (high, high)) for e in up]
        return actions

    def report(self) -> dict[str, Any]:
        return {"decisions": self._decisions}


class IgnoresBudget(TopN):
    def _n_high(self, state):
        return state.counts.shape[1]


class Rolls(TopN):
    """Breaks ties with a random number nobody seeded."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.SystemRandom()

    def decide(self, state):
        actions = super().decide(state)
        self._random.shuffle(actions)
        return actions


class AsksForUnknownWidths(TopN):
    def decide(self, state):
        return [a._replace(n_bits=(3, 3)) for a in super().decide(state)]


POLICY_BLOCK_BYTES = ((200, 400), (100, 200))  # [B, W]


def _state(counts: np.ndarray, n_bits: np.ndarray, n_high: int, now: int = 0) -> PolicyState:
    n_layers, n_experts = counts.shape
    block_bytes = np.array(POLICY_BLOCK_BYTES)
    low, high = block_bytes.sum(axis=0)
    return PolicyState(
        now=float(now),
        counts=counts,
        mass=counts / 2,
        n_bits=n_bits,
        in_transition=np.zeros(counts.shape, dtype=bool),
        widths=(4, 8),
        block_bytes=block_bytes,
        sensitivity=np.ones((n_layers, n_experts, 2, 2)),
        budget_bytes=int(n_layers * (n_experts * low + n_high * (high - low))),
        kv_free_blocks=100,
    )


def _drive(policy, trace: list[np.ndarray], n_high: int) -> tuple[list[list[Action]], int]:
    """Run a policy on counts per interval, every wish granted; its actions and the last total."""
    n_bits = np.full((*trace[0].shape, 2), 4, dtype=np.int8)
    history = []
    for now, counts in enumerate(trace):
        state = _state(counts, n_bits.copy(), n_high, now)
        actions = policy.decide(state)
        for action in actions:
            assert set(action.n_bits) <= set(state.widths) and len(action.n_bits) == 2
            n_bits[action.layer, action.expert] = action.n_bits
        which = np.searchsorted(state.widths, n_bits)
        used = sum(int(state.block_bytes[b][which[..., b]].sum()) for b in range(2))
        assert used <= state.budget_bytes, f"{used} bytes of {state.budget_bytes}"
        history.append(actions)
    return history, int((n_bits == 8).sum())


def _zipf_trace(seed: int, n: int = 20) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, 17)
    order = np.stack([rng.permutation(16) for _ in range(3)])
    return [rng.poisson(1000 * share[order]) for _ in range(n)]


def budget_invariant(build) -> None:
    """Item 2, for a policy: with every wish granted the budget holds, from none to all."""
    for n_high in (0, 1, 5, 16):
        _, high = _drive(build(), _zipf_trace(1), n_high)
        assert high <= 2 * 3 * n_high
    silence = [np.zeros((3, 16), dtype=np.int64)] * 3
    _drive(build(), silence, 4)  # no token at all: no division by zero, no crash


def repeat_invariant(build) -> None:
    """Item 9: the same statistics give the same decisions, in the same order."""
    runs = [_drive(build(), _zipf_trace(4), 5)[0] for _ in range(4)]
    assert sum(map(len, runs[0])) > 5
    assert all(run == runs[0] for run in runs)


def hysteresis_invariant(build) -> None:
    """Item 8: two experts that take turns at the border do not change places every time."""
    base = np.arange(160, 0, -10)[None].repeat(3, axis=0)
    trace = []
    for interval in range(40):
        counts = base.copy()
        counts[:, 4:6] = (125, 115) if interval % 2 else (115, 125)
        trace.append(counts)
    history, _ = _drive(build(), trace, 5)
    settled = sum(len(actions) for actions in history[2:])
    assert settled <= 2 * 3, f"{settled} transitions on an alternating trace"
    # and it is no standstill: when the hot experts change for good, it follows
    reverse = [c[:, ::-1].copy() for c in trace[:5]]
    history, _ = _drive(build(), trace[:5] + reverse, 5)
    assert sum(len(actions) for actions in history[5:]) >= 2 * 3 * 5


# Statistics ------------------------------------------------------------------------------


class CountingLoop:
    """The specification of the statistics: three nested loops."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self._shape = (n_layers, n_experts)
        self.reset()

    def reset(self) -> None:
        self._counts = np.zeros(self._shape, dtype=np.int64)
        self._mass = np.zeros(self._shape)
        self._tokens = np.zeros(self._shape[0], dtype=np.int64)
        self._absent = np.zeros(self._shape[0], dtype=np.int64)

    def set_token_mask(self, mask) -> None:
        self._mask = mask

    def add(self, layer_index, top_k_index, top_k_weights, mask) -> None:
        for token, (experts, weights) in enumerate(
            zip(top_k_index.tolist(), top_k_weights.tolist(), strict=True)
        ):
            if mask is not None and not bool(mask.reshape(-1)[token]):
                continue
            self._tokens[layer_index] += 1
            for expert, weight in zip(experts, weights, strict=True):
                if expert == self._shape[1]:
                    self._absent[layer_index] += 1
                else:
                    self._counts[layer_index, expert] += 1
                    self._mass[layer_index, expert] += weight

    def read(self) -> RoutingStatistics:
        ids = tuple(range(self._shape[0]))
        copies = (a.copy() for a in (self._counts, self._mass, self._tokens, self._absent))
        return RoutingStatistics(ids, *copies)


class CountsPadding(CountingLoop):
    def add(self, layer_index, top_k_index, top_k_weights, mask):
        super().add(layer_index, top_k_index, top_k_weights, None)


class ForgetsToReset(CountingLoop):
    def reset(self):
        if not hasattr(self, "_counts"):
            super().reset()


def device_statistics(n_layers: int, n_experts: int) -> DeviceStatistics:
    return DeviceStatistics(
        tuple(ExpertsLayer(f"layers.{i}", i, nn.Identity(), n_experts) for i in range(n_layers))
    )


def token_count_invariant(build) -> None:
    """Item 7: in every layer counts = real tokens x k; padding counts nothing."""
    statistics, reference = build(3, 8), CountingLoop(3, 8)
    generator = torch.Generator().manual_seed(1)
    real = 0
    for n_tokens in (1, 7, 0, 12):
        mask = torch.rand(n_tokens, generator=generator) < 0.6
        real += int(mask.sum())
        for layer in range(3):
            index = torch.rand(n_tokens, 8, generator=generator).argsort(dim=1)[:, :2]
            weights = torch.rand(n_tokens, 2, generator=generator)
            for target in (statistics, reference):
                target.add(layer, index, weights, mask)
    read, expected = statistics.read(), reference.read()
    assert (read.counts.sum(axis=1) == real * 2).all() and (read.n_tokens == real).all()
    assert np.array_equal(read.counts, expected.counts) and not read.absent.any()
    np.testing.assert_allclose(read.mass, expected.mass, atol=1e-5)
    statistics.reset()
    assert not statistics.read().counts.any() and not statistics.read().n_tokens.any()
    statistics.add(1, torch.tensor([[8, 3]]), torch.tensor([[0.0, 1.0]]), None)
    assert statistics.read().absent[1] == 1 and statistics.read().counts[1].sum() == 1


# What is held to the contract -----------------------------------------------------------------


class OfTensors:
    """The package's formats take tensors; the invariants are written with arrays."""

    def __init__(self, name: str) -> None:
        self.format = make_format(name)

    def encode(self, weight: np.ndarray, importance: np.ndarray | None = None) -> EncodedWeight:
        given = None if importance is None else torch.from_numpy(importance)
        return self.format.encode(torch.from_numpy(weight), given)


def of_tensors(name: str) -> Callable[[], OfTensors]:
    return lambda: OfTensors(name)


def of_policy(name: str, **options: Any) -> Callable[[], Any]:
    sizes = np.array(POLICY_BLOCK_BYTES)
    return lambda: make_policy(name, shape=(3, 16), widths=(4, 8), block_bytes=sizes, **options)


def expert_residency(
    encoded: dict[Key, Any], n_bits: int, capacity_bytes: int, clock: Any
) -> ExpertResidency:
    """The package's residency, copying by hand; its payloads are stacks of tensors."""
    payloads = [
        [
            stacked([encoded[layer, expert, block] for expert in range(EXPERTS)])
            for block in map(int, Block)
        ]
        for layer in range(LAYERS)
    ]
    store = HostStore(payloads, PAGE_BYTES, pin=False)
    for layer, blocks in enumerate(payloads):
        for block, payload in enumerate(blocks):
            store.put(layer, block, payload)
    resident = [p for weight in encoded.values() for p in weight.slices(n_bits)]
    spare = capacity_bytes // PAGE_BYTES - sum(pages_of(resident, PAGE_BYTES))
    return ExpertResidency(
        store,
        capacity_bytes=capacity_bytes,
        initial_bits=n_bits,
        clock=clock,
        worker="manual",
        staging_bytes=4 * PAGE_BYTES if spare >= 60 else 0,
        slack_bytes=4 * PAGE_BYTES if spare >= 12 else 0,
        limits=Limits(copy_limit=COPY_LIMIT),
    )


@dataclass(frozen=True)
class ByPart:
    """A scheme with one tensor of bytes per part."""

    like: Any
    name = "by-part"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.like, name)

    def tensors(self, n_bits: int) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(f"{p.kind}{p.index}", p.kind, p.index, torch.uint8, (p.n_bytes,))
            for p in self.like.slices(n_bits)
        )


def stacked(weights: list[Any]) -> BlockPayload:
    scheme = ByPart(weights[0])
    parts = {part for n_bits in scheme.widths for part in scheme.like.slices(n_bits)}
    tensors = {
        f"{part.kind}{part.index}": torch.stack(
            [torch.frombuffer(bytearray(w.read(part)), dtype=torch.uint8) for w in weights]
        )
        for part in parts
    }
    return BlockPayload.of_stack(EncodedStack(scheme, tensors))


# A way to build it, by room: add the real ones here.
IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "format": {
        "nearest": NearestFormat,
        **{
            name: of_tensors(name)
            for name in (
                "any-precision",
                "any-precision-r1",
                "any-precision-r2",
                "any-precision-r0",
                "int8-g8",
                "int4-g128",
                "int3-g32-asym",
                "int2-g64",
                "fp16",
                "fp32",
            )
        },
    },
    "clock": {"steps": StepClock},
    "residency": {"paged": PagedResidency, "experts": expert_residency},
    "policy": {
        "top-n": TopN,
        "dynaexq": of_policy("dynaexq"),
        "dynaexq-mass": of_policy("dynaexq", signal="mass", rank_slack=1),
        "dynaexq-sensitive": of_policy("dynaexq", sensitivity_weighted=True),
    },
    "statistics": {"loop": CountingLoop, "device": device_statistics},
}

INVARIANTS: dict[str, list[Callable[..., None]]] = {
    "format": [prefix_invariant, bytes_invariant, round_trip_invariant, never_routed_invariant],
    "clock": [clock_invariant],
    "residency": [
        schedule_invariant,
        demote_promote_invariant,
        publication_invariant,
        full_pool_invariant,
        dead_worker_invariant,
    ],
    "policy": [budget_invariant, repeat_invariant, hysteresis_invariant],
    "statistics": [token_count_invariant],
}

# Each with the invariant that must catch it.
BROKEN: list[tuple[Callable[..., None], Callable[..., Any]]] = [
    (prefix_invariant, format_of(LeastSignificantFirst)),
    (bytes_invariant, format_of(ForgetsTables)),
    (round_trip_invariant, format_of(DropsTail)),
    (round_trip_invariant, format_of(DecodesFromMemory)),
    (round_trip_invariant, format_of(SameErrorAtAnyWidth)),
    (never_routed_invariant, DividesByImportance),
    (clock_invariant, BackwardClock),
    (schedule_invariant, PublishesEarly),
    (schedule_invariant, ReclaimsEarly),
    (schedule_invariant, FreesAtRequest),
    (schedule_invariant, ReservesOverTheCap),
    (schedule_invariant, KeepsHalfOfAFailedReserve),
    (schedule_invariant, KeepsBothVersions),
    (schedule_invariant, LiveTable),
    (demote_promote_invariant, LosesBytesOnTheWay),
    (publication_invariant, PublishesEarly),
    (publication_invariant, PublishesBlockByBlock),
    (publication_invariant, SameGeneration),
    (full_pool_invariant, ReservesOverTheCap),
    (full_pool_invariant, KeepsHalfOfAFailedReserve),
    (dead_worker_invariant, SilentWorker),
    (dead_worker_invariant, PublishesEarly),
    (budget_invariant, IgnoresBudget),
    (budget_invariant, AsksForUnknownWidths),
    (repeat_invariant, Rolls),
    (hysteresis_invariant, lambda: TopN(margin=0.0)),
    (hysteresis_invariant, lambda: TopN(margin=1e9)),
    (token_count_invariant, CountsPadding),
    (token_count_invariant, ForgetsToReset),
]


@pytest.mark.parametrize(
    ("invariant", "build"),
    [
        pytest.param(invariant, build, id=f"{room}-{name}-{invariant.__name__}")
        for room, builds in IMPLEMENTATIONS.items()
        for name, build in builds.items()
        for invariant in INVARIANTS[room]
    ],
)
def test_holds(invariant, build):
    invariant(build)


@pytest.mark.parametrize(("invariant", "build"), BROKEN)
def test_a_broken_one_is_caught(invariant, build):
    with np.errstate(invalid="ignore"), pytest.raises(AssertionError):
        invariant(build)


def test_every_invariant_can_fail():
    assert {i for i, _ in BROKEN} == {i for each in INVARIANTS.values() for i in each}


def test_rows_survive_the_table():
    row = TableRow(FormatId.ANY_PRECISION, 4, 7, (3, 1, 4, 1_000_000))
    words = pack_row(row, HEADER_WORDS + 6)
    assert words.dtype == np.int32 and words[-1] == NO_PAGE
    assert unpack_row(words) == row
    with pytest.raises(ValueError, match="4 pages in a row of 7 words"):
        pack_row(row, HEADER_WORDS + 3)
    assert pages_of([Part("plane", 0, 1), Part("lut", 2, 128), Part("lut", 3, 129)], 64) == [
        1,
        2,
        3,
    ]
