"""Weights that give way to the KV cache and come back, and what happens where they cannot.

Step clock and copies at step boundaries: every run repeats to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import repro
from repro.contract import Action
from repro.formats import AnyPrecision
from repro.models.quantize import quantize
from repro.models.tiny import tiny_model
from repro.serving import RequestError
from repro.serving.clocks import StepClock
from repro.serving.request import Phase

TOWNS = ["Rome", "Paris", "Berlin", "Madrid", "Lyon", "Oslo", "Bonn", "Bern", "Kiel", "Ulm",
         "Graz", "Linz"]  # fmt: skip
FRESH = ["In the year 1900 the", "The river flows through", "A song by", "Its population was"]
BLOCK = 98_304  # bytes of a KV block of 16 tokens of moe-fine, whole pages
FIRST_BLOCKS = 24
BUDGET = 18_200_000  # weights at 8 bits, FIRST_BLOCKS of KV, staging and slack


@pytest.fixture(scope="session")
def moe_fine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in planes; without the search for row scales it takes a third."""
    folder = tmp_path_factory.mktemp("planes") / "moe-fine"
    fmt = AnyPrecision(scale_rounds=0)
    quantize("moe-fine", folder, fmt, progress=lambda text: None, device="cpu")
    return folder


def served(folder: Path, **options: Any) -> repro.Engine:
    model, tokenizer = repro.load_model("moe-fine", device="cpu")
    options = {
        "device": "cpu",
        "worker": "manual",
        "clock": StepClock(),
        "experts": folder,
        "budget_bytes": BUDGET,
        "kv_bytes": FIRST_BLOCKS * BLOCK,
        "max_running": len(TOWNS),
        **options,
    }
    return repro.Engine(model, tokenizer, "pagedweight", **options)


def logits_of(e: repro.Engine, prompts: list[str], n_new: int) -> list[torch.Tensor]:
    """All logits of a batch, pass by pass, with the widths as they are."""
    found: list[torch.Tensor] = []
    forward = e._runner._forward

    def watched(chunks: Any) -> Any:
        logits = forward(chunks)
        found.append(logits.clone())
        return logits

    e._runner._forward = watched
    try:
        with e.frozen():
            done = e.generate(prompts, n_new, ignore_eos=True)
    finally:
        del e._runner._forward
    assert all(c.error is None for c in done)
    return found


def settle(e: repro.Engine, first: np.ndarray) -> None:
    """Idle steps until the widths are those of the beginning."""
    for _ in range(200):
        e.step()
        if np.array_equal(e.residency.n_bits, first) and not e.residency.in_transition.any():
            return
    raise AssertionError(f"{(e.residency.n_bits != first).sum()} blocks did not come back")


@pytest.fixture(scope="module")
def untouched(moe_fine: Path) -> tuple[list[torch.Tensor], Any]:
    """Logits and scores of an engine that never knew pressure."""
    with served(moe_fine) as e:
        logits = logits_of(e, FRESH, 10)
        with e.frozen():
            return logits, e.score(FRESH)


@pytest.mark.parametrize("host_mode", ["mirrored", "single"])
def test_weights_lend_what_four_times_the_kv_blocks_need(moe_fine, untouched, host_mode):
    with served(moe_fine, host_mode=host_mode) as e:
        residency, scheduler = e.residency, e._parts.scheduler
        facts = e.snapshot()
        assert facts["residency"]["pools"]["kv"]["quota_bytes"] == FIRST_BLOCKS * BLOCK
        assert facts["kv"]["block_bytes"] == BLOCK
        first, weights = residency.n_bits, facts["residency"]["weight_bytes"]
        assert (first == residency.widths[-1]).all()

        requests = [
            e.submit(f"The history of the town of {town}", 120, ignore_eos=True) for town in TOWNS
        ]
        least, narrowest = weights, first
        while any(r.finish_reason is None for r in requests):
            e.step()
            assert residency.used_bytes() <= residency.capacity_bytes == BUDGET // 256 * 256
            unfinished = sum(r.phase is not Phase.FINISHED for r in requests)
            assert len(scheduler.running) == unfinished and not scheduler.waiting
            held = residency.placement.resident_pages() * residency.page_bytes
            if held < least:
                least, narrowest = held, residency.n_bits
            assert held + e._parts.kv.blocks_in_use * BLOCK <= residency.capacity_bytes

        done = [e.result(r) for r in requests]
        assert all(c.finish_reason == "length" and len(c.token_ids) == 120 for c in done)
        assert e.metrics.n_preemptions == 0 and not e.snapshot()["events"]
        peak = e.snapshot()["kv"]["peak_blocks_in_use"]
        assert peak >= 4 * FIRST_BLOCKS
        assert 1 - least / weights >= 0.4, f"only {1 - least / weights:.0%} were lent"
        assert narrowest.mean() < first.mean() - 2
        residency.check()

        settle(e, first)
        assert e.snapshot()["kv"]["blocks_in_use"] == 0
        residency.check()
        logits, scores = untouched
        again = logits_of(e, FRESH, 10)
        assert len(again) == len(logits)
        assert all(torch.equal(a, b) for a, b in zip(again, logits, strict=True))
        with e.frozen():
            assert e.score(FRESH) == scores


def test_equal_logits_need_equal_widths(moe_fine, untouched):
    """What the comparison above would notice: one expert one bit narrower."""
    logits, scores = untouched
    with served(moe_fine) as e:
        for layer in range(e.residency.n_layers):
            for expert in range(e.residency.n_experts):
                e.residency.submit(Action(layer, expert, (7, 8)))
        e.residency.advance_copies()
        e.residency.publish()
        again = logits_of(e, FRESH, 10)
        assert not all(torch.equal(a, b) for a, b in zip(again, logits, strict=False))
        with e.frozen():
            assert e.score(FRESH) != scores


# Where weights cannot give way -----------------------------------------------------------------


def engine(policy: str, model: Any = None, **options: Any) -> repro.Engine:
    options = {"device": "cpu", "worker": "manual", "clock": StepClock(), **options}
    return repro.Engine(model or tiny_model("qwen3_moe"), None, policy, **options)


def prompts(n: int, length: int = 20) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, 60, size=length).tolist() for _ in range(n)]


TINY_BLOCK = 4096  # bytes of a KV block of 16 tokens of the tiny model in float32


@pytest.mark.parametrize("policy", ["pagedweight", "dynaexq", "dense"])
def test_the_answer_of_a_preempted_request_is_the_same(policy):
    """float64: what runs beside a request does not change its tokens."""
    ask = prompts(6)
    options: dict[str, Any] = {"n_high": 2} if policy == "dynaexq" else {}  # equal widths
    with engine(policy, tiny_model("qwen3_moe").double(), **options) as e, e.frozen():
        expected = [c.token_ids for c in e.generate(ask, 50, ignore_eos=True)]
        assert e.metrics.n_preemptions == 0
    options |= {"kv_bytes": 12 * 2 * TINY_BLOCK, "max_running": 6}
    with engine(policy, tiny_model("qwen3_moe").double(), **options) as e, e.frozen():
        streamed: list[list[int]] = [[] for _ in ask]
        done = e.generate(
            ask, 50, ignore_eos=True, on_token=lambda i, text, token: streamed[i].append(token)
        )
        assert [c.token_ids for c in done] == expected
        assert [tuple(s) for s in streamed] == expected, "a token came twice, or not at all"
        facts = e.snapshot()
        n = facts["metrics"]["n_preemptions"]
        assert n == sum(c.n_preemptions for c in done) > 0
        assert n == sum("gives its KV memory back" in event for event in facts["events"])
        assert all(c.error is None for c in done) and facts["kv"]["blocks_in_use"] == 0
        assert done[0].n_preemptions == 0, "the oldest is never sent back"
        assert sum(c.kv_stall_s > 0 for c in done) and facts["metrics"]["n_kv_stalls"]
        e.residency.check()


def test_preemption_is_the_last_remedy():
    """Nobody is sent back while the policy still finds bits to give or memory is on its way."""
    with engine("pagedweight", kv_bytes=4 * TINY_BLOCK, max_running=8) as e:
        residency, preempt, before = e.residency, e._parts.scheduler.preempt, []
        first = residency.n_bits

        def watched() -> Any:
            report = e._parts.control.policy.report()
            assert not residency.in_transition.any()
            assert report["last_plan"] == "down" and report["last_actions"] == 0
            assert report["last_shortfall_bytes"] > 0
            before.append(residency.n_bits.mean())
            return preempt()

        e._parts.scheduler.preempt = watched
        done = e.generate(prompts(8), 60, ignore_eos=True)
        assert all(c.finish_reason == "length" for c in done)
        assert before and e.metrics.n_preemptions == len(before) == len(e.snapshot()["events"])
        assert max(before) < first.mean() - 1, "weights had hardly given way"
        residency.check()
        assert residency.used_bytes() <= residency.capacity_bytes


def test_idle_conversations_give_way_before_running_requests():
    """The one that has been idle longest first; none that is speaking."""
    with engine("dense", kv_bytes=10 * TINY_BLOCK, max_running=2) as e:
        old, new = e.conversation(), e.conversation()
        for conversation in (old, new):
            conversation.say(prompts(1)[0], 10, ignore_eos=True)
        blocks = e.snapshot()["kv"]["blocks_in_use"]
        assert blocks >= 4
        room = e.snapshot()["kv"]["free_blocks"]
        asked = e.submit(prompts(1, length=16 * room - 8)[0], 20, ignore_eos=True)
        e.result(asked)
        assert (old.n_evictions, new.n_evictions) == (1, 0)
        assert e.metrics.n_preemptions == 0 and e.metrics.n_conversation_evictions == 1
        assert e.snapshot()["events"] == [
            "an idle conversation gives its KV memory back; its next turn computes it again"
        ]
        whole = [*old.tokens, 7]
        answer = old.say([7], 6, ignore_eos=True)
        (alone,) = e.generate([whole], 6, ignore_eos=True)
        assert answer.token_ids == alone.token_ids
        for conversation in (old, new):
            conversation.close()
        assert e.snapshot()["kv"]["blocks_in_use"] == 0


def longest(e: repro.Engine) -> int:
    """Tokens that the engine says it could hold at most."""
    with pytest.raises(RequestError, match=r"need [\d,]+ bytes of KV memory, all that can") as no:
        e.generate([[2] * 200], 50)
    return int(str(no.value).split("holds ")[1].split(" ")[0])


@pytest.mark.parametrize("policy", ["dense", "dynaexq"])
def test_a_request_too_long_for_all_kv_memory_is_refused_by_size(policy):
    with engine(policy, kv_bytes=3 * TINY_BLOCK, budget_bytes=None, max_running=1) as e:
        most = longest(e)
        assert 0 < most < 250
        assert e.snapshot()["requests"] == {"waiting": 0, "running": 0}
        (done,) = e.generate([[2] * (most - 4)], 4, ignore_eos=True)
        assert done.finish_reason == "length", done.error
        with pytest.raises(RequestError, match="raise budget_bytes"):
            e.generate([[2] * (most - 3)], 4)


def test_versions_queue_behind_frozen_borders():
    """KV memory of two requests, six requests: they wait, and no weight moves for them."""
    with engine("dynaexq", kv_bytes=6 * TINY_BLOCK, max_running=6, interval=1e9) as e:
        residency = e.residency
        first, pools = residency.n_bits, residency.snapshot()["pools"]
        quotas = {name: pool["quota_bytes"] for name, pool in pools.items()}
        requests = [e.submit(p, 25, ignore_eos=True) for p in prompts(6)]
        waited = 0
        while any(r.finish_reason is None for r in requests):
            e.step()
            now = residency.snapshot()["pools"]
            assert {name: pool["quota_bytes"] for name, pool in now.items()} == quotas
            assert now["kv"]["used_bytes"] <= quotas["kv"]
            waited = max(waited, len(e._parts.scheduler.waiting))
        done = [e.result(r) for r in requests]
        assert waited >= 2 and all(c.finish_reason == "length" for c in done)
        assert np.array_equal(residency.n_bits, first)
        assert done[-1].kv_stall_s > 0 and done[-1].ttft_s > done[0].ttft_s
        assert e.snapshot()["kv"]["blocks_in_use"] == 0
        residency.check()


def test_what_is_admitted_by_size_is_served():
    """It lacks two blocks more than are free; the watermark alone would be content with that."""
    with engine("pagedweight", kv_bytes=2 * TINY_BLOCK, max_running=1) as e:
        for _ in range(30):  # traffic: bits have come and gone
            e.generate(prompts(1), 4, ignore_eos=True)
        (done,) = e.generate([[2] * (longest(e) - 4)], 4, ignore_eos=True)
        assert done.finish_reason == "length", done.error
