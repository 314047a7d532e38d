"""Scheduling, sampling, stopping: decisions of the engine that need no model."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.errors import UnknownNameError
from repro.serving.answers import sampling_of, several_prompts
from repro.serving.metrics import Metrics, StepRecord, summary
from repro.serving.request import (
    Completion,
    Phase,
    Request,
    RequestError,
    SamplingParams,
    Timing,
    check_prompt,
)
from repro.serving.sampling import greedy, request_seed, sample
from repro.serving.scheduler import Scheduler
from repro.serving.stopping import Stopper

BLOCK = 4


class Blocks:
    """A table that is a number of blocks; the pool counts."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self.n_blocks = 0


class CountingPool:
    def __init__(self, n_blocks: int) -> None:
        self.free = n_blocks

    def new_table(self):
        return Blocks()

    def blocks_for(self, n_tokens):
        return -(-n_tokens // BLOCK)

    def blocks_of(self, table):
        return table.n_blocks

    def free_blocks(self):
        return self.free

    def extend(self, table, n_tokens):
        more = self.blocks_for(n_tokens) - table.n_blocks
        if more > self.free:
            return False
        if more > 0:
            self.free -= more
            table.n_blocks += more
        return True

    def release(self, table):
        self.free += table.n_blocks
        table.n_blocks = table.n_tokens = 0


def request(n_prompt: int, n_new: int, number: int) -> Request:
    return Request(
        tokens=list(range(1, n_prompt + 1)),
        n_prompt=n_prompt,
        max_new_tokens=n_new,
        sampling=SamplingParams(),
        timing=Timing(0.0),
        number=number,
    )


def execute(scheduler: Scheduler, plan, now: float) -> list[Request]:
    """What a model would do: caches grow, finished prompts and decode rows get a token."""
    done = []
    for one, n in [*((r, 1) for r in plan.decode), *plan.prefill]:
        assert one.table.n_blocks * BLOCK >= one.n_cached + n, "computed without memory"
        one.table.n_tokens += n
        if one.n_pending == 0:
            one.tokens.append(0)
            if one.n_new >= one.max_new_tokens:
                scheduler.finish(one, now)
                done.append(one)
    return done


def serve(scheduler: Scheduler, requests: list[Request], limit: int = 5000) -> list[int]:
    """Serve all; the numbers in the order in which they end."""
    for one in requests:
        scheduler.add(one)
    order: list[int] = []
    for now in range(limit):
        if not scheduler.n_unfinished:
            return order
        plan = scheduler.plan(float(now))
        if plan.empty:
            assert scheduler.preempt() is not None, "stuck"
        order += [r.number for r in execute(scheduler, plan, float(now))]
    raise AssertionError(f"not finished after {limit} steps")


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12),
    n_blocks=st.integers(13, 60),
    max_running=st.integers(1, 8),
    max_step_tokens=st.integers(1, 40),
    can_chunk=st.booleans(),
)
def test_all_finish_and_all_memory_comes_back(
    sizes, n_blocks, max_running, max_step_tokens, can_chunk
):
    pool = CountingPool(n_blocks)
    scheduler = Scheduler(
        pool, max_running=max_running, max_step_tokens=max_step_tokens, can_chunk=can_chunk
    )
    requests = [request(a, b, i) for i, (a, b) in enumerate(sizes)]
    order = serve(scheduler, requests)
    assert sorted(order) == list(range(len(sizes)))
    assert pool.free == n_blocks
    assert all(r.n_new == r.max_new_tokens and r.phase is Phase.FINISHED for r in requests)


def test_a_step_keeps_its_limits():
    pool = CountingPool(100)
    scheduler = Scheduler(pool, max_running=3, max_step_tokens=7)
    for number in range(6):
        scheduler.add(request(10, 5, number))
    while scheduler.n_unfinished:
        plan = scheduler.plan(0.0)
        assert len(scheduler.running) <= 3
        assert len(plan.decode) + sum(n for _, n in plan.prefill) <= 7
        execute(scheduler, plan, 0.0)


def test_a_short_request_that_comes_later_ends_earlier():
    pool = CountingPool(100)
    scheduler = Scheduler(pool, max_running=4, max_step_tokens=8)
    scheduler.add(request(6, 50, 0))
    for now in range(10):
        execute(scheduler, scheduler.plan(now), now)
    scheduler.add(request(3, 4, 1))
    assert serve(scheduler, []) == [1, 0]


def test_a_long_prompt_does_not_stop_the_others():
    pool = CountingPool(200)
    scheduler = Scheduler(pool, max_running=4, max_step_tokens=8)
    scheduler.add(request(2, 30, 0))
    execute(scheduler, scheduler.plan(0.0), 0.0)
    scheduler.add(request(100, 2, 1))
    for _ in range(8):
        plan = scheduler.plan(0.0)
        assert [r.number for r in plan.decode] == [0], "a chunk takes what is left, no more"
        assert [(r.number, n) for r, n in plan.prefill] == [(1, 7)]
        execute(scheduler, plan, 0.0)


def test_without_chunks_a_prompt_goes_in_one_piece():
    pool = CountingPool(200)
    scheduler = Scheduler(pool, max_running=4, max_step_tokens=8, can_chunk=False)
    scheduler.add(request(50, 2, 0))
    assert [n for _, n in scheduler.plan(0.0).prefill] == [50]


def test_stalls_are_counted_as_time_and_demand():
    pool = CountingPool(4)
    scheduler = Scheduler(pool, max_running=4, max_step_tokens=100)
    first, second = request(7, 20, 0), request(7, 20, 1)
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan(0.0)
    assert len(plan.prefill) == 2 and not plan.needed_blocks
    execute(scheduler, plan, 0.0)
    execute(scheduler, scheduler.plan(1.0), 1.0)  # both reach 9 tokens: 3 blocks each
    plan = scheduler.plan(2.0)
    assert not plan.decode and plan.stalled == [first, second] and plan.needed_blocks == 2
    assert scheduler.preempt() is second, "the newest"
    plan = scheduler.plan(5.0)
    assert plan.decode == [first] and first.timing.kv_stall_s == 3.0
    assert scheduler.waiting[0] is second and second.table is None


def test_a_request_alone_is_not_preempted():
    scheduler = Scheduler(CountingPool(2), max_running=4, max_step_tokens=100)
    scheduler.add(request(7, 20, 0))
    execute(scheduler, scheduler.plan(0.0), 0.0)
    execute(scheduler, scheduler.plan(0.0), 0.0)
    assert scheduler.plan(0.0).empty and scheduler.preempt() is None


# Prompts and parameters --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "n_new", "message"),
    [
        ([], 4, "the prompt is empty"),
        ([1], 0, "max_new_tokens=0"),
        ([1] * 90, 20, "90 tokens and 20 new ones exceed the model's context of 100"),
        ([1, 500], 4, "token id 500 is not in the vocabulary of 300"),
        ([1, -2], 4, "token id -2 is not"),
    ],
)
def test_prompts_that_no_engine_serves(ids, n_new, message):
    with pytest.raises(RequestError, match=message):
        check_prompt(ids, n_new, 100, 300)


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}]
)
def test_parameters_out_of_range_are_named(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_greedy_takes_the_lowest_of_equals():
    assert greedy(torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])) == [1, 0]


def test_sampling_follows_the_probabilities_and_the_seed():
    logits = torch.tensor([0.0, 1.0, 2.0, -5.0])
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(temperature=1.0)
    drawn = torch.tensor([sample(logits, params, generator) for _ in range(4000)])
    share = torch.bincount(drawn, minlength=4) / len(drawn)
    assert torch.allclose(share, torch.softmax(logits, 0), atol=0.03)
    again = torch.Generator().manual_seed(1)
    assert [sample(logits, params, again) for _ in range(50)] == drawn[:50].tolist()


def test_top_k_and_top_p_leave_out_the_tail():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    generator = torch.Generator().manual_seed(0)

    def drawn(**options):
        params = SamplingParams(temperature=1.0, **options)
        return {sample(logits, params, generator) for _ in range(300)}

    assert drawn(top_k=2) == {2, 3}
    assert drawn(top_k=1) == {3} == drawn(top_p=0.01)
    assert drawn(top_p=0.8) == {2, 3}  # 0.64 + 0.24
    assert drawn() == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="not finite"):
        sample(torch.tensor([math.nan, 0.0]), SamplingParams(temperature=1.0), generator)


def test_seeds_of_requests_differ():
    seeds = {request_seed(s, n) for s in range(3) for n in range(100)}
    assert len(seeds) == 300 and all(0 <= s < 2**63 for s in seeds)


# Text --------------------------------------------------------------------------------------


class Bytes:
    """One token a byte, as the last resort of every tokenizer."""

    @staticmethod
    def decode(ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace")


def feed(text: str, stop=()) -> tuple[list[str], Stopper]:
    stopper, pieces = Stopper(Bytes(), stop), []
    for token in text.encode():
        pieces.append(stopper.push(token))
        if stopper.stopped:
            break
    pieces.append(stopper.finish())
    return pieces, stopper


@settings(max_examples=100, deadline=None)
@given(
    st.text(alphabet="abXY é漢🙂", max_size=60), st.lists(st.text("abXY", min_size=1), max_size=2)
)
def test_pieces_make_the_text_up_to_the_first_stop(text, stop):
    pieces, stopper = feed(text, tuple(stop))
    at = min((i for s in stop if (i := text.find(s)) >= 0), default=len(text))
    assert "".join(pieces) == stopper.text == text[:at]
    assert stopper.stopped == (at < len(text) or any(text.find(s) == at for s in stop))


def test_half_characters_and_half_stop_strings_are_held_back():
    pieces, _ = feed("aé END", stop=("END!",))
    assert pieces[:3] == ["a", "", "é"]
    assert pieces[3:] == [" ", "", "", "", "END"]


# Metrics -----------------------------------------------------------------------------------


def test_percentiles_ignore_what_was_not_measured():
    assert summary([]) == {"n": 0}
    found = summary([1.0, 3.0, math.nan, 2.0])
    assert found["n"] == 3 and found["mean"] == 2.0 and found["p50"] == 2.0
    assert 2.9 < found["p99"] <= 3.0


def test_throughput_counts_each_kind_of_step_alone():
    metrics = Metrics()
    metrics.add_step(StepRecord(1, "prefill", 1, 100, 0.5, 0.0, 0))
    metrics.add_step(StepRecord(2, "decode", 4, 4, 0.1, 0.0, 2))
    metrics.add_step(StepRecord(3, "decode", 4, 4, 0.1, 0.0, 1))
    metrics.add_completion(Completion("", (1, 2), "length", 3, 0.2, 0.1, 0.3))
    report = metrics.report()
    assert report["prefill_tokens_per_s"] == 200 and report["decode_tokens_per_s"] == 40
    assert report["n_kv_stalls"] == 3 and report["ttft_s"]["p50"] == 0.2
    metrics.reset()
    assert metrics.report()["prefill_tokens_per_s"] is None


def test_an_unknown_sampling_option_is_named():
    with pytest.raises(UnknownNameError, match="temprature"):
        sampling_of(None, {"temprature": 1.0})


def test_one_prompt_or_many():
    assert several_prompts("a") == ["a"] and several_prompts([1, 2]) == [[1, 2]]
    assert several_prompts(["a", [3]]) == ["a", [3]]
    with pytest.raises(RequestError, match="no prompt was given"):
        several_prompts([])
