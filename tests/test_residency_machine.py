"""Thousands of random operations on every layout and host mode; every invariant after each.

The copies are advanced by single micro-steps chosen by the test, so a worker that runs beside
the caller's thread is tried in every order that its parts allow.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_residency_bench import EXPERTS, LAYERS, PAGE, Watcher, build

from repro.contract import Outcome
from repro.residency import CopyFailed, WorkerKilled


class Moody:
    """Copies; on request the next copy fails half-way."""

    def __init__(self) -> None:
        self.next_error: type[BaseException] | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        error, self.next_error = self.next_error, None
        if error is not None:
            target[: len(source) // 2].copy_(source[: len(source) // 2])
            raise error("injected")
        target.copy_(source)


class Life(RuleBasedStateMachine):
    layout, mode = "planes", "mirrored"
    reached: ClassVar[Counter[str]] = Counter()

    @initialize(
        spare=st.sampled_from([0, 20, 60, 120, 240]),
        kv=st.integers(0, 20),
        staging=st.sampled_from([0, 1, 8]),
    )
    def build(self, spare: int, kv: int, staging: int) -> None:
        self.link = Moody()
        residency = build(
            self.layout,
            self.mode,
            spare=spare * PAGE,
            kv_bytes=kv * PAGE,
            staging_bytes=staging * PAGE,
            link=self.link,
        )
        self.watcher = Watcher(residency)

    @property
    def residency(self):
        return self.watcher.residency

    @rule()
    def begin(self) -> None:
        if len(self.watcher.steps) < 4:
            self.watcher.begin()

    @precondition(lambda self: self.watcher.steps)
    @rule(which=st.integers(0, 3))
    def end(self, which: int) -> None:
        self.watcher.end(which % len(self.watcher.steps))

    @rule(
        layer=st.integers(0, LAYERS - 1),
        expert=st.integers(0, EXPERTS - 1),
        which=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    )
    def submit(self, layer: int, expert: int, which: tuple[int, int]) -> None:
        widths = self.residency.widths
        n_bits = tuple(widths[i % len(widths)] for i in which)
        if self.layout == "versions":
            n_bits = n_bits[:1]
        self.watcher.submit(layer, expert, *n_bits)

    @rule(layer=st.integers(0, LAYERS - 1), lead=st.integers(0, EXPERTS - 1))
    def swap(self, layer: int, lead: int) -> None:
        """What a policy does: the high expert of a layer goes, another comes."""
        widths, n_bits = self.residency.widths, self.residency.n_bits[layer, :, 0]
        for expert in range(EXPERTS):
            if n_bits[expert] > widths[0] and expert != lead:
                self.watcher.submit(layer, expert, widths[0])
        self.watcher.submit(layer, lead, widths[-1])

    @rule(n=st.integers(0, 12))
    def boundary(self, n: int) -> None:
        """What an engine does between two steps."""
        self.residency.advance_copies(n)
        self.residency.publish()

    @rule(layer=st.integers(0, LAYERS - 1), lead=st.integers(0, EXPERTS - 1))
    def swap_and_copy(self, layer: int, lead: int) -> None:
        self.swap(layer, lead)
        self.boundary(12)

    @rule()
    def everything_is_copied(self) -> None:
        self.residency.advance_copies()

    @rule(choices=st.lists(st.integers(0, 7), min_size=1, max_size=12))
    def micro_steps(self, choices: list[int]) -> None:
        for choice in choices:
            options = self.residency.transitions.worker.options()
            if options:
                self.residency.transitions.worker.step(options[choice % len(options)])

    @rule()
    def publish(self) -> None:
        self.residency.publish()

    @rule(n_bytes=st.integers(0, 40 * PAGE))
    def reserve(self, n_bytes: int) -> None:
        free, used = self.residency.free_bytes("kv"), self.residency.used_bytes()
        reservation = self.watcher.reserve(n_bytes)
        n_pages = -(-n_bytes // PAGE)
        assert (reservation is None) == (n_pages * PAGE > free)
        if reservation is None:
            assert (free, used) == (self.residency.free_bytes("kv"), self.residency.used_bytes())
        else:
            assert len(reservation.pages) == n_pages
            assert self.residency.used_bytes() == used + n_pages * PAGE

    @precondition(lambda self: self.watcher.reservations)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        self.watcher.release(which % len(self.watcher.reservations))

    @precondition(lambda self: self.residency.targets())
    @rule(which=st.integers(0, 9), micro_steps=st.integers(0, 3))
    def change_of_mind(self, which: int, micro_steps: int) -> None:
        """Back to what is published, with a copy perhaps under way."""
        self.micro_steps([0] * micro_steps)
        owners = list(self.residency.targets())
        layer, expert = owners[which % len(owners)]
        self.watcher.submit(layer, expert, *self.residency.n_bits[layer, expert].tolist())

    @rule(how=st.integers(0, 3))
    def fail(self, how: int) -> None:
        self.link.next_error = {0: WorkerKilled, 1: CopyFailed, 2: CopyFailed}.get(how)

    @rule(anyway=st.integers(0, 7))
    def restart(self, anyway: int) -> None:
        if not anyway or not self.residency.health().ok:
            self.residency.restart_worker()

    @rule(n=st.integers(1, 12))
    def time_passes(self, n: int) -> None:
        """A worker that nobody drives looks like one that hangs."""
        self.residency.transitions.history._clock.steps += n

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "watcher"):
            self.watcher.check()
            assert self.residency.snapshot()["used_bytes"] == self.residency.used_bytes()

    def teardown(self) -> None:
        if not hasattr(self, "watcher"):
            return
        self.link.next_error = None
        self.reached.update(self.residency.transitions.counts)
        self.reached["evicting"] += len(self.residency.transitions.evictions.reclaimer.owners())
        self.residency.restart_worker()
        self.watcher.settle()
        self.watcher.check()
        self.watcher.rests()
        assert self.residency.health().ok
        # and it still works: the narrowest widths can always be reached
        if self.layout == "planes":
            for layer in range(LAYERS):
                for expert in range(EXPERTS):
                    assert self.watcher.submit(layer, expert, 2) is not Outcome.REFUSED
                    self.watcher.settle()
            assert (self.residency.n_bits == 2).all()
        self.residency.close()


@pytest.mark.parametrize("layout", ["planes", "versions"])
@pytest.mark.parametrize("mode", ["mirrored", "single"])
def test_life(layout, mode):
    machine = type("Life", (Life,), {"layout": layout, "mode": mode, "reached": Counter()})
    machine.TestCase.settings = settings(max_examples=30, stateful_step_count=50)
    machine.TestCase("runTest").runTest()
    # the operations did reach what they are meant to reach
    wanted = ["promotions", "demotions", "cancellation_accepted", "copy_errors", "evicting"]
    wanted += [f"promotion_{outcome}" for outcome in ("accepted", "deferred", "refused")]
    assert all(machine.reached[what] for what in wanted), dict(machine.reached)
