"""A thousand requests while things break: only what fails is lost, and nothing is left behind.

Failures come in through the seams that exist: links that fail, kill or hang the worker, pinned
memory that cannot be had, a reserve that is refused, a callback or a step that raises, an
interrupt.  Whatever happened, the same sentence must hold at the end (``Storm.is_over``).
"""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import repro
from repro.contract import Action, Health, Outcome, State
from repro.errors import ReproError
from repro.integration.experts import use_experts
from repro.models.tiny import tiny_model
from repro.residency import ExpertResidency, FailingLink, HangingLink, Limits, WorkerKilled
from repro.residency.links import DeviceLink
from repro.residency.supervisor import Supervisor
from repro.serving import EngineError, RequestError
from repro.serving.clocks import StepClock
from repro.serving.kv_pool import PagedKvPool
from repro.serving.paged_cache import PagedCache
from repro.serving.request import Phase, Request
from repro.serving.runner import Runner

POISON = 63  # this token cannot be embedded
PROBE = list(range(2, 14))
COPY_LIMIT = 12  # steps
LAYOUTS = ("pagedweight", "dynaexq")
HOST_MODES = ("mirrored", "single")
WORKERS = ("manual", "thread")


class Road:
    """A link that can be exchanged while the engine runs."""

    def __init__(self) -> None:
        self.link: Any = DeviceLink()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.link.copy(target, source)


class Refusals:
    """``residency.reserve`` answers None while ``n`` is above zero."""

    def __init__(self, residency: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = self.refused = 0
        reserve = residency.reserve

        def refusing(n_bytes: int, purpose: str) -> Any:
            if self.n > 0 and n_bytes:
                self.n -= 1
                self.refused += 1
                return None
            return reserve(n_bytes, purpose)

        monkeypatch.setattr(residency, "reserve", refusing)


class Faults:
    """What the model's first module does next: choke on poison, or raise once what it is told.

    An error is kept for the next pass of several requests: it is nobody's own failure.
    """

    def __init__(self, model: Any) -> None:
        self.once: BaseException | None = None
        model.get_input_embeddings().register_forward_pre_hook(self._before)
        model.lm_head.register_forward_hook(self._never_poison)

    @staticmethod
    def _never_poison(module: Any, arguments: Any, logits: torch.Tensor) -> torch.Tensor:
        """No answer chooses the poison by itself: who was to end well ends well."""
        bad = torch.arange(logits.shape[-1]) == POISON
        return logits.masked_fill(bad, -1e4)

    def _before(self, module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        several = len(arguments[0]) > 1
        if self.once is not None and (several or not isinstance(self.once, RuntimeError)):
            once, self.once = self.once, None
            raise once
        if bool((arguments[0] == POISON).any()):
            raise RuntimeError(f"token {POISON} is poison")


def engine(policy: str = "dense", model: Any = None, **options: Any) -> repro.Engine:
    options = {"device": "cpu", "worker": "manual", "clock": StepClock(), **options}
    return repro.Engine(model or tiny_model("qwen3_moe"), None, policy, **options)


def nothing_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def without(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return zeros(*args, **options)

    monkeypatch.setattr(torch, "zeros", without)


def books_agree(e: repro.Engine) -> None:
    """Bytes of the snapshot, pool by pool, are those of the free lists.

    A thread may finish a copy between two looks: then they are compared again.
    """
    for attempt in reversed(range(20)):
        try:
            return _books_agree(e)
        except AssertionError:
            if not attempt or not e.residency.transitions.driver.threaded:
                raise


def _books_agree(e: repro.Engine) -> None:
    e.residency.check()
    snapshot = e.snapshot()
    residency, memory = snapshot["residency"], e.residency.memory
    page, pools = residency["page_bytes"], residency["pools"]
    assert residency["used_bytes"] == sum(pool["used_bytes"] for pool in pools.values())
    assert residency["used_bytes"] <= residency["capacity_bytes"] == snapshot["budget_bytes"]
    for pool in pools.values():
        assert pool["used_bytes"] + pool["free_bytes"] == pool["quota_bytes"]
    assert residency["steps"]["under_way"] == 0, "a step was begun and never ended"
    staging = pools["staging"]
    in_use = e.residency.arena.n_pages * page - staging["quota_bytes"]
    in_use -= len(memory.free_pages()) * page
    assert residency["used_bytes"] - staging["used_bytes"] == in_use
    scheduler = e._parts.scheduler
    tables = [r.table for r in [*scheduler.running, *scheduler.waiting] if r.table is not None]
    tables += [c._table for c in e._conversations if c._table is not None]
    assert pools["kv"]["used_bytes"] == sum(table.n_bytes for table in tables)
    held = snapshot["kv"]["blocks_in_use"] * snapshot["kv"]["block_bytes"]
    assert held == pools["kv"]["used_bytes"]


@dataclass
class Storm:
    """Random requests, random changes of width, random failures; seeded."""

    policy: str
    host_mode: str
    worker: str
    seed: int
    monkeypatch: pytest.MonkeyPatch
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.deck: list[str] = []
        self.road = Road()
        self.hanging: list[HangingLink] = []
        self.e = engine(
            self.policy,
            host_mode=self.host_mode,
            worker=self.worker,
            link=self.road,
            pin=True,
            kv_bytes=10 * 4096,  # too little for eight requests: there is pressure, too
            max_running=8,
            max_step_tokens=32,
            copies_per_step=3,
            limits=Limits(copy_limit=COPY_LIMIT),
        )
        self.residency = self.e.residency
        self.faults = Faults(self.e._parts.model)
        self.refusals = Refusals(self.residency, self.monkeypatch)
        self.first_bits = self.residency.n_bits
        self.used = self.residency.used_bytes()
        self.free = self.residency.free_bytes("kv")
        self.expected = self.probe()
        self.fates: dict[Request, str] = {}

    def probe(self) -> tuple[int, ...]:
        with self.e.frozen():
            (answer,) = self.e.generate([PROBE], 10, ignore_eos=True)
        assert answer.finish_reason == "length", answer.error
        return answer.token_ids

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # requests --------------------------------------------------------------------------------

    def send(self) -> None:
        rng = self.rng
        tokens = rng.integers(2, POISON, size=int(rng.integers(1, 40))).tolist()
        fate = str(rng.choice(["well"] * 7 + ["cancelled", "callback", "poison"]))
        n_new, on_token = int(rng.integers(1, 16)), None
        if fate == "poison":
            tokens[int(rng.integers(len(tokens)))] = POISON
        if fate == "callback":
            at = int(rng.integers(n_new))
            seen = iter(range(1000))

            def on_token(text: str, token: int) -> None:
                if next(seen) == at:
                    raise RuntimeError("no more")

        options: dict[str, Any] = {"ignore_eos": True, "on_token": on_token}
        if rng.random() < 0.3:
            options["temperature"] = 1.0
        request = self.e.submit(tokens, n_new, **options)
        self.fates[request] = fate

    def some_is_cancelled(self) -> None:
        for request, fate in self.fates.items():
            if fate == "cancelled" and request.finish_reason is None and self.rng.random() < 0.2:
                self.e.cancel(request)

    # what breaks -----------------------------------------------------------------------------

    def something_breaks(self) -> None:
        if not self.deck:
            self.deck = ["copy error", "killed", "out of memory", "refusals", "interrupt"]
            if self.worker == "thread":  # a copy that hangs by hand would hang the test
                self.deck.append("hung")
            self.rng.shuffle(self.deck)
        choice = self.deck.pop()
        if choice == "copy error":
            self.road.link = FailingLink(self.rng.integers(0, 4, size=3).tolist())
        elif choice == "killed":
            self.road.link = FailingLink({int(self.rng.integers(3))}, WorkerKilled)
        elif choice == "hung":
            self.road.link = HangingLink({int(self.rng.integers(3))})
            self.hanging.append(self.road.link)
        elif choice == "out of memory":
            self.faults.once = torch.OutOfMemoryError("CUDA out of memory")
        elif choice == "refusals":
            self.refusals.n = int(self.rng.integers(4, 12))
        else:
            self.faults.once = KeyboardInterrupt()
        self.count(choice)

    def repair(self) -> None:
        """What an operator does when health says so."""
        health = self.residency.health()
        if not health.ok:
            self.count("reported")
            assert health.message
            if self.rng.random() < 0.1:
                self.road.link = DeviceLink()
                self.residency.restart_worker()
                self.count("restarted")
                assert self.residency.health().ok
            if self.hanging and self.rng.random() < 0.1:
                self.hanging.pop(0).wake()

    def someone_decides(self) -> None:
        """Changes beside the policy's own, so that the worker has something to do."""
        shape = self.first_bits.shape
        for _ in range(2):
            layer, expert = (int(self.rng.integers(n)) for n in shape[:2])
            widths = self.rng.choice(self.residency.widths, size=2).tolist()
            if self.residency.layout == "versions":
                widths = [widths[0]] * 2
            self.residency.submit(Action(layer, expert, tuple(widths)))

    def step(self) -> None:
        try:
            self.e.step()
        except KeyboardInterrupt:
            self.count("interrupted")

    def rages(self, n_requests: int) -> None:
        sent = 0
        while sent < n_requests or self.e._parts.scheduler.n_unfinished:
            if sent < n_requests and self.e._parts.scheduler.n_unfinished < 12:
                self.send()
                sent += 1
                if sent % 6 == 0:
                    self.something_breaks()
            self.some_is_cancelled()
            self.someone_decides()
            self.step()
            self.repair()
            assert self.residency.used_bytes() <= self.residency.capacity_bytes
            if self.rng.random() < 0.1:
                books_agree(self.e)

    # and after it ----------------------------------------------------------------------------

    def is_over(self) -> None:
        """Nothing lost but what failed, nothing leaked, and the engine serves as before."""
        self.everyone_ended_as_was_to_be_expected()
        for link in self.hanging:
            link.wake()
        self.road.link, self.refusals.n, self.faults.once = DeviceLink(), 0, None
        self.residency.restart_worker()
        self.back_to_the_first_widths()
        books_agree(self.e)
        snapshot = self.snapshot = self.e.snapshot()
        assert snapshot["kv"]["blocks_in_use"] == 0
        assert snapshot["requests"] == {"waiting": 0, "running": 0}
        assert self.residency.used_bytes() == self.used
        assert self.residency.free_bytes("kv") == self.free
        assert snapshot["residency"]["worker"]["ok"]
        assert self.probe() == self.expected
        self.e.close()

    def everyone_ended_as_was_to_be_expected(self) -> None:
        counts = self.counts
        for request, fate in self.fates.items():
            done = self.e.result(request)
            assert request.phase is Phase.FINISHED and request.table is None
            if done.finish_reason == "error":
                assert done.error
                reasons = {
                    "poison": ("is poison",),
                    "callback": ("its callback raised RuntimeError: no more",),
                }.get(fate, ())
                if any(reason in done.error for reason in reasons):
                    self.count(f"{fate}: error")
                else:
                    assert "do not fit into KV memory" in done.error, (fate, done.error)
                    self.count("refused alone")
            elif fate == "cancelled":
                assert done.finish_reason in ("cancelled", "length")
                self.count(done.finish_reason)
            else:
                assert fate == "well" and done.finish_reason == "length", (fate, done)
                assert len(done.token_ids) == request.max_new_tokens
                self.count("well")
        assert counts.get("refused alone", 0) <= self.refusals.refused

    def back_to_the_first_widths(self) -> None:
        """Ask again until all are there, narrower ones first; copies go well now."""
        residency, end = self.residency, time.monotonic() + 20
        while True:
            residency.advance_copies()
            residency.publish()
            wrong = (residency.n_bits != self.first_bits).any(axis=2)
            if not wrong.any() and not residency.in_transition.any():
                if residency.used_bytes() == self.used:
                    return
            assert time.monotonic() < end, (wrong.sum(), residency.health(), residency.snapshot())
            gain = residency.n_bits.astype(int) - self.first_bits
            for layer, expert in np.argwhere(wrong)[np.argsort(-gain[wrong].sum(axis=1))]:
                if residency.state(layer, expert) is State.RESIDENT:
                    bits = tuple(self.first_bits[layer, expert].tolist())
                    residency.submit(Action(int(layer), int(expert), bits))
            with self.e.frozen():
                self.e.step()  # the clock goes on


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("host_mode", HOST_MODES)
@pytest.mark.parametrize("policy", LAYOUTS)
def test_a_storm_takes_only_what_it_hits(policy, host_mode, worker, monkeypatch):
    seed = (LAYOUTS.index(policy) * 2 + HOST_MODES.index(host_mode)) * 2 + WORKERS.index(worker)
    nothing_can_be_pinned(monkeypatch)
    with pytest.warns(RuntimeWarning, match="pageable"):
        storm = Storm(policy, host_mode, worker, seed, monkeypatch)
    storm.rages(125)
    storm.is_over()
    counts = storm.counts
    assert counts["well"] > 70 and counts["cancelled"]
    assert counts["poison: error"] and counts["callback: error"]
    for what in ("interrupted", "copy error", "killed", "out of memory"):
        assert counts[what] >= 2, counts
    assert storm.refusals.refused and not storm.snapshot["residency"]["host"]["pinned"]
    assert counts["reported"] and counts["restarted"], "no worker died or hung"
    if worker == "thread":
        assert counts["hung"] >= 2
        assert storm.snapshot["metrics"]["weight_wait_s"] == 0.0
    else:  # a thread's road may be repaired before it has gone down it
        assert storm.snapshot["residency"]["worker"]["copy_errors"]


# Mutations: without its guard the storm takes more -------------------------------------------


def short_storm(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_can_be_pinned(monkeypatch)
    with pytest.warns(RuntimeWarning, match="pageable"):
        storm = Storm("pagedweight", "mirrored", "manual", 3, monkeypatch)
    storm.rages(40)
    storm.is_over()
    assert storm.counts.get("reported")


def test_a_short_storm_passes(monkeypatch):
    short_storm(monkeypatch)


def no_release(monkeypatch):
    monkeypatch.setattr(PagedKvPool, "release", lambda self, table: None)


def no_isolation(monkeypatch):
    def all_fail(self, kind, chunks, cached, error, timer):
        for request, _ in chunks:
            request.error, request.finish_reason = f"{error}", "error"
        return [request for request, _ in chunks]

    monkeypatch.setattr(Runner, "_isolate", all_fail)


def steps_that_never_end(monkeypatch):
    monkeypatch.setattr(ExpertResidency, "end_step", lambda self, step: None)


def no_watchdog_and_no_obituary(monkeypatch):
    monkeypatch.setattr(Supervisor, "health", lambda self: Health(True))


def tokens_counted_before_they_are_computed(monkeypatch):
    begin = PagedCache.begin

    def eager(self, tables, n_new):
        now = begin(self, tables, n_new)
        for table, n in zip(tables, n_new, strict=True):
            table.n_tokens += n
        return now

    monkeypatch.setattr(PagedCache, "begin", eager)
    monkeypatch.setattr(PagedCache, "commit", lambda self, tables, n_new: None)


@pytest.mark.parametrize(
    "mutation",
    [
        no_release,
        no_isolation,
        steps_that_never_end,
        no_watchdog_and_no_obituary,
        tokens_counted_before_they_are_computed,
    ],
)
def test_without_its_guard_the_storm_takes_more(mutation, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises((AssertionError, ReproError)):
        short_storm(monkeypatch)


# Who is not hit answers as if nothing had happened -------------------------------------------


@pytest.mark.parametrize("policy", LAYOUTS)
def test_the_others_answer_to_the_token_as_without_failures(policy, monkeypatch):
    """float64, so that what runs beside a request does not change its tokens."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, POISON, size=int(n)).tolist() for n in rng.integers(1, 40, size=24)]
    options: dict[str, Any] = {"kv_bytes": 8 * 8192, "max_running": 6, "max_step_tokens": 32}
    with engine(policy, tiny_model("qwen3_moe").double(), **options) as e:
        Faults(e._parts.model)
        with e.frozen():
            expected = [c.token_ids for c in e.generate(prompts, 12, ignore_eos=True)]
    with engine(policy, tiny_model("qwen3_moe").double(), **options) as e, e.frozen():
        faults, refusals = Faults(e._parts.model), Refusals(e.residency, monkeypatch)
        requests: dict[Request, int] = {}
        for number, prompt in enumerate(prompts):
            requests[e.submit(prompt, 12, ignore_eos=True)] = number
            if number % 4 == 0:
                bad = e.submit([3, POISON, 4], 12, ignore_eos=True)
                requests[bad] = -1
        steps = 0
        while e._parts.scheduler.n_unfinished:
            steps += 1
            if steps % 7 == 0 and len(e._parts.scheduler.running) > 2:
                faults.once = torch.OutOfMemoryError("CUDA out of memory")
            if steps % 11 == 0 and len(e._parts.scheduler.running) > 4:
                refusals.n = 3
            try:
                if steps % 13 == 0:
                    faults.once = KeyboardInterrupt()
                e.step()
            except KeyboardInterrupt:
                pass
        assert steps > 40 and refusals.refused
        for request, number in requests.items():
            done = e.result(request)
            if number < 0:
                assert done.finish_reason == "error" and "is poison" in done.error
            else:
                assert done.token_ids == expected[number], (number, done)
        books_agree(e)


# The worker -----------------------------------------------------------------------------------


def serve(e: repro.Engine, n: int) -> None:
    for _ in range(n):
        e.generate([PROBE], 2, ignore_eos=True)


@pytest.mark.parametrize("host_mode", HOST_MODES)
@pytest.mark.parametrize("policy", LAYOUTS)
@pytest.mark.parametrize("death", ["killed", "killed by hand", "hung"])
def test_serving_goes_on_without_a_worker_and_a_new_one_brings_changes_back(
    death, policy, host_mode
):
    road = Road()
    worker = "manual" if death == "killed by hand" else "thread"
    with engine(
        policy, worker=worker, link=road, host_mode=host_mode, limits=Limits(copy_limit=8)
    ) as e:
        residency = e.residency
        with e.frozen():
            expected = [c.token_ids for c in e.generate([PROBE, PROBE[:5]], 8, ignore_eos=True)]
        first = residency.n_bits
        wide, narrow = residency.widths[-1], residency.widths[0]
        owner = tuple(int(i) for i in np.argwhere((first == wide).all(axis=2))[0])
        narrower = tuple(int(i) for i in np.argwhere((first != narrow).all(axis=2))[-1])
        road.link = HangingLink({0}) if death == "hung" else FailingLink({0}, WorkerKilled)
        asked = [residency.submit(Action(*o, (narrow, narrow))) for o in (owner, narrower)]
        assert Outcome.ACCEPTED in asked
        with e.frozen():
            for _ in range(40):  # steps, so that the clock of the watchdog goes on
                serve(e, 1)
                if not residency.health().ok:
                    break
                time.sleep(0.002)
            health = residency.health()
            assert not health.ok and ("died" in health.message) == (death != "hung")
            worker_facts = e.snapshot()["residency"]["worker"]
            assert not worker_facts["ok"] and worker_facts["message"] == health.message
            assert np.array_equal(residency.n_bits, first), "half a change was published"
            again = e.generate([PROBE, PROBE[:5]], 8, ignore_eos=True)
            assert [c.token_ids for c in again] == expected, "on what is resident"
            assert residency.submit(Action(*owner, (wide, wide))) is Outcome.ACCEPTED  # cancels
            books_agree(e)

            hung, road.link = road.link, DeviceLink()
            residency.restart_worker()
            assert residency.health().ok
            for bits in (narrow, wide):
                deadline = time.monotonic() + 10
                while not (residency.n_bits[owner] == bits).all():
                    residency.submit(Action(*owner, (bits, bits)))
                    serve(e, 1)
                    assert time.monotonic() < deadline, residency.snapshot()["transitions"]
            if death == "hung":
                books_agree(e)
                hung.wake()  # long after: what it still writes hits nobody
                deadline = time.monotonic() + 10
                while residency.snapshot()["pools"]["staging"]["used_bytes"]:
                    assert time.monotonic() < deadline
                    time.sleep(0.002)
            deadline = time.monotonic() + 10
            while residency.in_transition.any() or not np.array_equal(residency.n_bits, first):
                for layer, expert in np.argwhere((residency.n_bits != first).any(axis=2)):
                    bits = tuple(first[layer, expert].tolist())
                    residency.submit(Action(int(layer), int(expert), bits))
                serve(e, 1)
                assert time.monotonic() < deadline
            after = e.generate([PROBE, PROBE[:5]], 8, ignore_eos=True)
            assert [c.token_ids for c in after] == expected
            assert residency.snapshot()["worker"]["restarts"] == 1
            books_agree(e)


# A request's own failure is its own -----------------------------------------------------------


def step_until_done(e: repro.Engine, requests: list[Request], limit: int = 100) -> list[str]:
    """Steps that must not raise; returns what was raised all the same."""
    raised = []
    for _ in range(limit):
        if all(r.phase is Phase.FINISHED for r in requests):
            break
        try:
            e.step()
        except (Exception, KeyboardInterrupt) as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised


class BrokenTokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        raise IndexError("piece id is out of range")


def with_a_tokenizer_that_cannot_decode(e: repro.Engine) -> Request:
    e.tokenizer = BrokenTokenizer()
    try:
        return e.submit(PROBE[:5], 6, ignore_eos=True)
    finally:
        e.tokenizer = None


def with_a_temperature_that_makes_infinities(e: repro.Engine) -> Request:
    return e.submit(PROBE[:5], 6, ignore_eos=True, temperature=1e-320)


def with_a_seed_of_no_generator(e: repro.Engine) -> Request:
    return e.submit(PROBE[:5], 6, ignore_eos=True, temperature=1.0, seed=1 << 70)


@pytest.mark.parametrize(
    "make",
    [
        with_a_tokenizer_that_cannot_decode,
        with_a_temperature_that_makes_infinities,
        with_a_seed_of_no_generator,
    ],
)
def test_a_token_that_cannot_be_chosen_fails_its_request_alone(make):
    with engine() as e:
        (alone,) = e.generate([PROBE], 6, ignore_eos=True)
        try:
            bad = [make(e)]
        except ReproError:  # refused at once is as good
            bad = []
        good = e.submit(PROBE, 6, ignore_eos=True)
        assert step_until_done(e, [*bad, good]) == []
        assert [r.finish_reason for r in bad] in ([], ["error"], ["length"])
        assert good.finish_reason == "length" and good.new_ids() == alone.token_ids
        books_agree(e)


def test_an_interrupt_in_a_callback_loses_no_other_request():
    with engine() as e:
        prompts = [PROBE, PROBE[:5], PROBE[3:]]
        expected = [c.token_ids for c in e.generate(prompts, 8, ignore_eos=True)]
        calls = iter(range(100))

        def interrupts(*_: object) -> None:
            if next(calls) == 3:
                raise KeyboardInterrupt

        requests = [
            e.submit(p, 8, ignore_eos=True, on_token=None if i else interrupts)
            for i, p in enumerate(prompts)
        ]
        assert step_until_done(e, requests) == ["KeyboardInterrupt: "]
        assert [r.new_ids() for r in requests] == expected
        assert all(r.finish_reason == "length" for r in requests)


def test_an_interrupted_pass_is_computed_again():
    with engine() as e:
        faults = Faults(e._parts.model)
        prompts = [PROBE, PROBE[:5], PROBE[3:]]
        expected = [c.token_ids for c in e.generate(prompts, 8, ignore_eos=True)]
        requests = [e.submit(p, 8, ignore_eos=True) for p in prompts]
        for n in range(3):
            faults.once = KeyboardInterrupt()
            for _ in range(n + 1):
                try:
                    e.step()
                except KeyboardInterrupt:
                    books_agree(e)
        assert step_until_done(e, requests) == []
        assert [r.new_ids() for r in requests] == expected


def test_what_a_failed_pass_held_is_free_before_its_requests_run_again():
    """Out of memory: the single passes must not find the batch's activations still there."""
    with engine() as e:
        model, seen = e._parts.model, []
        norm = model.model.norm

        def after(module: Any, arguments: Any, output: torch.Tensor) -> None:
            if len(output) > 1 and not seen:
                seen.append(weakref.ref(arguments[0]))
                held = arguments[0]  # a local of a frame of the traceback
                raise torch.OutOfMemoryError(f"CUDA out of memory for {held.shape}")
            if seen:
                gc.collect()
                assert seen[0]() is None, "activations of the failed batch are still held"

        norm.register_forward_hook(after)
        found = e.generate([PROBE, PROBE[:6]], 3, ignore_eos=True)
        assert seen and [c.error for c in found] == [None, None]


def test_a_failed_pass_is_not_counted():
    """Per layer, counts = tokens x top-k; also when a batch is computed again one by one."""
    with engine() as e:
        boom = [torch.OutOfMemoryError("CUDA out of memory")]

        def after(module: Any, arguments: Any, output: torch.Tensor) -> None:
            if boom and len(output) > 1:
                raise boom.pop()

        e._parts.model.model.norm.register_forward_hook(after)
        e._parts.context.statistics.reset()
        e.generate([PROBE, PROBE[:6]], 1, ignore_eos=True)
        assert not boom
        read = e._parts.context.statistics.read()
        assert read.counts.sum(axis=1).tolist() == [2 * (len(PROBE) + 6)] * 2


def test_a_snapshot_is_of_one_instant(monkeypatch):
    """A copy that ends while the snapshot is taken is in all of its numbers or in none."""
    with engine("pagedweight") as e:
        residency = e.residency
        assert residency.submit(Action(0, 0, (3, 3))) is Outcome.ACCEPTED
        health = residency.health

        def meanwhile() -> Health:
            residency.advance_copies()
            return health()

        monkeypatch.setattr(residency, "health", meanwhile)
        facts = e.snapshot()["residency"]
        assert facts["used_bytes"] == sum(p["used_bytes"] for p in facts["pools"].values())


# NaN stays with the request that made it ------------------------------------------------------


def poisoned(policy: str, **options: Any) -> repro.Engine:
    model = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    e = engine(policy, model, **options)
    model.lm_head.register_forward_hook(Faults._never_poison)
    return e


@pytest.mark.parametrize("policy", ["dense", *LAYOUTS])
def test_nan_fails_its_request_and_reaches_no_other(policy):
    """Its pages go to others afterwards, padding lies beside it in the batch."""
    prompts = [PROBE, PROBE[:3], list(range(20, 50))]
    with poisoned(policy, kv_bytes=16 * 4096) as e, e.frozen():
        expected = [c.token_ids for c in e.generate(prompts, 8, ignore_eos=True)]
        for _ in range(4):
            bad = [[3, POISON, *range(4, 30)], [POISON]]
            found = e.generate([bad[0], *prompts, bad[1]], 8, ignore_eos=True)
            for failed in (found[0], found[-1]):
                assert failed.finish_reason == "error" and "not finite" in failed.error
            assert [c.token_ids for c in found[1:-1]] == expected
            again = e.generate(prompts, 8, ignore_eos=True)
            assert [c.token_ids for c in again] == expected
        books_agree(e)


@pytest.mark.parametrize("policy", LAYOUTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_does_not_reach_the_statistics_that_policies_decide_by(policy):
    with poisoned(policy) as e:
        with e.frozen():
            e.generate([PROBE, [3, POISON, 4]], 4, ignore_eos=True)
            mass = e._parts.context.statistics.read().mass
        assert np.isfinite(mass).all() and mass.min() >= 0 and mass.max() < 1000
        for _ in range(40):
            e.step()
        arrays = vars(e._parts.control.policy).values()
        assert all(np.isfinite(a).all() for a in arrays if isinstance(a, np.ndarray))


# Bad use ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["twice", "of another engine"])
def test_a_result_that_is_not_there_is_said_so(case, monkeypatch):
    with engine() as e, engine() as other:
        request = e.submit(PROBE, 2)
        if case == "twice":
            e.result(request)
        asked = e if case == "twice" else other
        steps = iter(range(50))
        step = type(asked).step

        def limited(self: repro.Engine) -> bool:
            if next(steps, None) is None:
                raise TimeoutError("result() steps for ever")
            return step(self)

        monkeypatch.setattr(repro.Engine, "step", limited)
        with pytest.raises((EngineError, RequestError)):
            asked.result(request)


@pytest.mark.parametrize(
    ("policy", "bad"),
    [
        ("pagedweight", {"low_watermark": 50, "high_watermark": 10}),
        ("pagedweight", {"interval": -1.0}),
        ("dynaexq", {"alpha": 5.0}),
        ("static", {"format": "any-precision", "n_bits": 9}),
        ("static", {"format": "any-precision", "n_bits": 8, "budget_bytes": 60_000,
                                "kv_bytes": 4096}),
        ("dynaexq", {"n_high": 100}),
        ("pagedweight", {"host_mode": "both"}),
        ("pagedweight", {"kv_bytes": -5}),
        ("pagedweight", {"slack": -3}),
        ("pagedweight", {"calibration": "no/such"}),
        ("pagedweight", {"page_bytes": 12}),
    ],
)  # fmt: skip
def test_what_is_refused_leaves_the_model_whole(policy, bad):
    model = tiny_model("qwen3_moe")
    with pytest.raises(ReproError):
        engine(policy, model, **bad).close()
    assert not any(p.is_meta for p in model.parameters()), "the model cannot be used any more"


def test_a_conversation_can_be_closed_after_its_engine():
    e = engine()
    conversation = e.conversation()
    conversation.say(PROBE, 3, ignore_eos=True)
    e.close()
    with pytest.raises(ReproError, match="closed"):
        conversation.say([3])
    conversation.close()


# What users of such systems reported -----------------------------------------------------------


@pytest.mark.parametrize(("n_high", "alone"), [(0, "int4-g128"), (1, None), (8, "fp16")])
def test_no_fast_expert_one_and_all(n_high, alone):
    """ktransformers 1928, 1835: budgets at both ends; equal to the one width they come to."""
    with engine("dynaexq", n_high=n_high, interval=2.0) as e:
        for _ in range(5):
            assert len(e.generate([PROBE, PROBE[:3]], 6, ignore_eos=True)) == 2
            high = (e.residency.n_bits[..., 0] == 16).sum(axis=1)
            assert high.sum() <= 2 * n_high
        books_agree(e)
        assert e.snapshot()["policy"]["n_decisions"] > 3
        assert e.residency.transitions.counts["copy_errors"] == 0
        if n_high != 1:
            assert not e.snapshot()["residency"]["published"]["promotions"]
        scores = e.score([PROBE])
    if alone is not None:
        with engine("static", format=alone) as e:
            assert e.score([PROBE]) == scores


@pytest.mark.parametrize("policy", ["dense", *LAYOUTS])
def test_padding_is_never_counted(policy):
    """vllm 38128, 21883: a batch of unequal rows counts what its rows count alone."""
    prompts = [PROBE, PROBE[:1], list(range(20, 50))]
    counts, n_tokens = [], []
    for batches in ([prompts], [[p] for p in prompts]):
        with engine(policy, tiny_model("qwen3_moe").double()) as e, e.frozen():
            e._parts.context.statistics.reset()
            for batch in batches:
                e.generate(batch, 5, ignore_eos=True)
            read = e._parts.context.statistics.read()
            counts.append(read.counts)
            n_tokens.append(read.n_tokens)
    computed = sum(len(p) + 4 for p in prompts)
    assert n_tokens[0].tolist() == n_tokens[1].tolist() == [computed] * 2
    assert counts[0].sum(axis=1).tolist() == [2 * computed] * 2
    assert np.array_equal(counts[0], counts[1])


def poison_free_pages(e: repro.Engine) -> None:
    """All bits set is NaN in every float type; as memory looks that others used before."""
    e.residency.arena.data[torch.from_numpy(e.residency.memory.free_pages().astype(np.int64))] = 255


@pytest.mark.parametrize("host_mode", HOST_MODES)
@pytest.mark.parametrize("policy", LAYOUTS)
def test_away_and_back_is_the_same_to_the_bit(policy, host_mode):
    """vllm 38718, 36461: plausible garbage after offload and reload; pages reused in between."""
    with engine(policy, host_mode=host_mode, kv_bytes=30 * 4096) as e:
        residency = e.residency
        first, scores = residency.n_bits, e.score([PROBE, list(range(20, 50))])
        other = np.full_like(first, residency.widths[0])
        if policy == "dynaexq":  # pools are frozen: experts change places
            other = first[:, ::-1]
        with e.frozen():
            for _ in range(3):
                for goal in (other, first):
                    deadline = time.monotonic() + 10
                    while not np.array_equal(residency.n_bits, goal):
                        for layer, expert in np.argwhere((residency.n_bits != goal).any(axis=2)):
                            bits = tuple(goal[layer, expert].tolist())
                            residency.submit(Action(int(layer), int(expert), bits))
                        e.generate([PROBE], 2, ignore_eos=True)
                        assert time.monotonic() < deadline
                    while residency.in_transition.any():
                        e.generate([PROBE], 2, ignore_eos=True)
                    poison_free_pages(e)
                    again = e.score([PROBE, list(range(20, 50))])
                    assert (again == scores) == (goal is first)
        books_agree(e)


@pytest.mark.parametrize("policy", ["dense", *LAYOUTS])
def test_free_memory_full_of_nan_is_never_read(policy):
    """torchtitan 1237, transformers 48205: the first step passes because memory is fresh."""
    prompts = [PROBE, PROBE[:2], list(range(20, 50))]
    with engine(policy) as e, e.frozen():
        expected = e.generate(prompts, 9, ignore_eos=True)
        for _ in range(3):
            poison_free_pages(e)
            again = e.generate(prompts, 9, ignore_eos=True)
            assert [c.token_ids for c in again] == [c.token_ids for c in expected]
            assert all(c.error is None for c in again)


def test_all_tokens_to_the_same_experts():
    """pytorch 192497, 172439: groups without a token."""

    def one_sided() -> Any:
        model = tiny_model("qwen3_moe").double()
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.mlp.gate.weight)
        return model

    model = one_sided()
    with torch.inference_mode(), use_experts(model, "eager"):
        ids = model.generate(
            torch.tensor([PROBE]), max_new_tokens=6, do_sample=False, eos_token_id=None
        )
    with engine("dense", one_sided()) as e:
        e._parts.context.statistics.reset()
        (answer,) = e.generate([PROBE], 6, ignore_eos=True)
        counts = e._parts.context.statistics.read().counts
    assert (counts > 0).sum(axis=1).tolist() == [2, 2]
    assert list(answer.token_ids) == ids[0, len(PROBE) :].tolist()


def test_a_shared_expert_passes_its_gate_once():
    """sglang 8333: with a gate logit of 0 the shared expert counts half."""

    def model(halved: bool) -> Any:
        found = tiny_model("qwen2_moe").double()
        with torch.no_grad():
            for layer in found.model.layers:
                layer.mlp.shared_expert_gate.weight.zero_()
                if not halved:
                    layer.mlp.shared_expert.down_proj.weight.mul_(2)
        return found

    def reference(found: Any) -> float:
        ids = torch.tensor([PROBE])
        with torch.inference_mode(), use_experts(found, "eager"):
            log = torch.log_softmax(found(ids).logits[0, :-1], dim=-1)
        return float(log.gather(1, ids[0, 1:, None]).sum())

    scores = []
    for halved in (True, False):
        expected = reference(model(halved))
        with engine("dense", model(halved)) as e:
            scores.append(e.score([PROBE])[0].log_likelihood)
        assert scores[-1] == pytest.approx(expected, rel=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-4
