"""The engine on tiny random models: what users ask of it, and what must not go wrong."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import repro
from repro.contract import Action, Block
from repro.errors import CheckpointError, MissingDeviceError, UnknownNameError
from repro.formats import make_format
from repro.integration.experts import experts_layers, use_experts
from repro.models.tiny import ARCHITECTURES, tiny_model
from repro.residency import BudgetError
from repro.serving import EngineError, RequestError, SamplingParams
from repro.serving.clocks import StepClock
from repro.serving.control import Pressure
from repro.serving.conversation import Conversation

PROMPTS = [list(range(2, 14)), [5, 9, 3], list(range(20, 50))]
POLICIES = ["dense", "static", "dynaexq", "pagedweight"]


def engine(policy: str = "dense", model=None, **options):
    options = {"device": "cpu", "worker": "manual", "clock": StepClock(), **options}
    return repro.Engine(model or tiny_model("qwen3_moe"), None, policy, **options)


def by_generate(model, prompt: list[int], n_new: int) -> tuple[int, ...]:
    with torch.inference_mode(), use_experts(model, "eager"):
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=n_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=1,
        )
    return tuple(ids[0, len(prompt) :].tolist())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_at_full_width_the_answers_are_those_of_generate(arch):
    reference = tiny_model(arch).double()
    expected = [by_generate(reference, p, 12) for p in PROMPTS]
    with engine(model=tiny_model(arch).double(), max_step_tokens=7, max_running=2) as e:
        found = e.generate(PROMPTS, max_new_tokens=12, ignore_eos=True)
        e.residency.check()
    assert [c.token_ids for c in found] == expected
    assert all(c.finish_reason == "length" and c.error is None for c in found)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_and_the_ledger_holds(policy):
    with engine(policy) as e:
        first = e.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)
        assert [len(c.token_ids) for c in first] == [8, 8, 8]
        assert all(c.ttft_s > 0 and c.tpot_s > 0 and c.e2e_s >= c.ttft_s for c in first)
        snapshot = e.snapshot()
        json.dumps(snapshot)
        assert snapshot["policy"]["name"] == policy
        assert snapshot["metrics"]["weight_wait_s"] == 0.0
        assert snapshot["kv"]["blocks_in_use"] == 0 < snapshot["kv"]["peak_blocks_in_use"]
        residency = snapshot["residency"]
        assert residency["used_bytes"] <= residency["capacity_bytes"] == snapshot["budget_bytes"]
        e.residency.check()
        again = e.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)
        assert [c.token_ids for c in again] == [c.token_ids for c in first]


# Any schedule of promotions ------------------------------------------------------------------


class Plain:
    """The reference: weights decoded at the widths of each step, one cache a request."""

    def __init__(self, arch: str, recipe: dict[int, str]) -> None:
        self.model = tiny_model(arch)
        self._layers = experts_layers(self.model)
        self._decoded = []
        with torch.no_grad():
            for layer in self._layers:
                module = layer.module
                blocks = []
                for weight in (module.gate_up_proj, module.down_proj):
                    by_width = {}
                    for n_bits, name in recipe.items():
                        stack = make_format(name).encode_stack(weight.detach())
                        by_width[n_bits] = stack.decode(n_bits)
                    blocks.append(by_width)
                self._decoded.append(blocks)
        self._caches: dict[int, DynamicCache] = {}

    @torch.inference_mode()
    def logits(self, request: int, tokens: list[int], n_bits: np.ndarray) -> torch.Tensor:
        for row, layer in enumerate(self._layers):
            for block, name in ((Block.GATE_UP, "gate_up_proj"), (Block.DOWN, "down_proj")):
                weight = getattr(layer.module, name)
                for expert in range(layer.n_experts):
                    width = int(n_bits[row, expert, block])
                    weight.data[expert] = self._decoded[row][block][width][expert]
        cache = self._caches.setdefault(request, DynamicCache(config=self.model.config))
        with use_experts(self.model, "eager"):
            out = self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        return out.logits[0, -1]


LAYOUTS = {
    "pagedweight": ("any-precision", dict.fromkeys(range(2, 9), "any-precision")),
    "dynaexq": ("fp16/int4", {4: "int4-g128", 16: "fp16"}),
}


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), policy=st.sampled_from(sorted(LAYOUTS)))
def test_any_schedule_of_changes_equals_the_plain_reference(seed, policy):
    """Design, section 3, item 5: same widths, no paging, one request at a time."""
    rng = np.random.default_rng(seed)
    name, recipe = LAYOUTS[policy]
    plain = Plain("qwen3_moe", recipe)
    options = {"format": name, "copies_per_step": 1, "max_step_tokens": 9, "max_running": 2}
    worst, changes = 0.0, 0
    with engine(policy, **options) as e:
        runner, published = e._runner, []
        forward = runner._forward

        def watched(chunks):
            n_bits = e.residency.n_bits
            given = [(r.number, r.tokens[r.n_cached : r.n_cached + n]) for r, n in chunks]
            logits = forward(chunks)
            nonlocal worst
            for row, (number, tokens) in enumerate(given):
                expected = plain.logits(number, tokens, n_bits)
                worst = max(worst, float((logits[row] - expected).abs().max()))
            return logits

        runner._forward = watched
        requests = [e.submit(p, 6, ignore_eos=True) for p in PROMPTS]
        with e.frozen():
            while any(r.finish_reason is None for r in requests):
                for _ in range(3):
                    layer, expert = int(rng.integers(2)), int(rng.integers(8))
                    width = int(rng.choice(list(recipe)))
                    e.residency.submit(Action(layer, expert, (width, width)))
                before = e.residency.n_bits
                e.step()
                changes += int((before != e.residency.n_bits).sum())
                e.residency.check()
        published.append(changes)
    assert changes > 3, "nothing changed, nothing was tested"
    assert worst < 2e-5


def test_wishes_without_room_wait_in_the_update_queue():
    """Two pairs of a decision find room at a time; the others follow as pages come free."""
    found = {}
    for queue in (True, False):
        with engine("dynaexq", copies_per_step=2, interval=10_000, n_high=4, slack=1) as e:
            e._parts.control.update_queue = queue
            request = e.submit(PROMPTS[0], 200, ignore_eos=True)
            e.step()
            control = e._parts.control
            before = e.residency.n_bits
            wanted = before[:, ::-1].copy()  # the other half of each layer
            wishes = [
                Action(layer, expert, tuple(int(w) for w in wanted[layer, expert]))
                for expert in range(8)
                for layer in range(2)
                if wanted[layer, expert, 0] != before[layer, expert, 0]
            ]
            control.policy.decide = lambda state, wishes=wishes: wishes
            control.tick(Pressure(10, 0), force=True)
            for _ in range(150):
                e.step()
            e.residency.check()
            found[queue] = (e.residency.n_bits == wanted).all()
            assert (control.report()["granted_late"] > 0) is queue
            e.cancel(request)
    assert found[True] and not found[False]


# Requests -----------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one letter a token."""

    def __call__(self, text):
        return {"input_ids": [ord(c) - 60 for c in text]}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(60 + i) for i in ids)


def spoken(**options):
    e = engine(**options)
    e.tokenizer = Letters()
    return e


def test_text_in_text_out_with_stop_strings_and_streaming():
    with spoken() as e:
        (whole,) = e.generate("HELLO", max_new_tokens=12, ignore_eos=True)
        assert len(whole.text) == 12
        stop = whole.text[4:6]
        pieces: list[tuple[int, str, int]] = []
        (cut,) = e.generate(
            "HELLO", 12, stop=stop, ignore_eos=True, on_token=lambda *a: pieces.append(a)
        )
        at = whole.text.index(stop)
        assert cut.text == whole.text[:at] and cut.finish_reason == "stop"
        assert "".join(text for _, text, _ in pieces) == cut.text
        assert [token for _, _, token in pieces] == list(cut.token_ids)


def test_end_of_text_ends_an_answer_unless_ignored():
    with engine() as e:
        (free,) = e.generate([PROMPTS[0]], 10, ignore_eos=True)
        e._parts.eos_ids = frozenset({free.token_ids[3]})
        (ended,) = e.generate([PROMPTS[0]], 10)
        first = free.token_ids.index(free.token_ids[3])
        assert ended.token_ids == free.token_ids[: first + 1] and ended.finish_reason == "eos"


def test_sampling_does_not_depend_on_the_batch():
    params = SamplingParams(temperature=1.0, seed=5)
    with engine(seed=3) as e:
        (alone,) = e.generate([PROMPTS[0]], 10, sampling=params, ignore_eos=True)
        together = e.generate([PROMPTS[1], PROMPTS[0]], 10, sampling=params, ignore_eos=True)
        assert together[1].token_ids == alone.token_ids
        other = e.generate([PROMPTS[0]], 10, temperature=1.0, ignore_eos=True)[0]
    with engine(seed=3) as e:
        e.generate([PROMPTS[0]] * 3, 10, ignore_eos=True)
        repeated = e.generate([PROMPTS[0]], 10, temperature=1.0, ignore_eos=True)[0]
    assert repeated.token_ids == other.token_ids, "the engine's seed and the request's number"


def test_a_short_request_that_comes_later_is_done_earlier():
    with engine() as e:
        long = e.submit(PROMPTS[2], 60, ignore_eos=True)
        for _ in range(10):
            e.step()
        short = e.submit(PROMPTS[1], 3, ignore_eos=True)
        done = e.result(short)
        assert long.finish_reason is None and done.finish_reason == "length"
        assert len(e.result(long).token_ids) == 60


def test_a_cancelled_request_leaves_nothing():
    with engine() as e:
        request, other = (e.submit(p, 30, ignore_eos=True) for p in PROMPTS[:2])
        for _ in range(5):
            e.step()
        e.cancel(request)
        gone = e.result(request)
        assert gone.finish_reason == "cancelled" and 0 < len(gone.token_ids) < 30
        assert len(e.result(other).token_ids) == 30
        assert e.snapshot()["kv"]["blocks_in_use"] == 0
        e.residency.check()


def test_a_callback_that_raises_fails_its_request_alone():
    def angry(text, token):
        raise RuntimeError("no more")

    with engine() as e:
        bad = e.submit(PROMPTS[0], 10, on_token=angry, ignore_eos=True)
        good = e.submit(PROMPTS[1], 10, ignore_eos=True)
        assert e.result(bad).error == "its callback raised RuntimeError: no more"
        assert len(e.result(good).token_ids) == 10


def test_a_step_from_inside_a_callback_is_refused():
    with engine() as e:
        for call in (e.step, e.close):
            request = e.submit(PROMPTS[0], 3, on_token=lambda *_, c=call: c(), ignore_eos=True)
            assert "called from inside a step" in e.result(request).error


def test_a_failure_in_a_step_fails_only_the_request_that_causes_it(monkeypatch):
    with engine() as e:
        expected = e.generate([PROMPTS[0], PROMPTS[2]], 8, ignore_eos=True)
        embed = e._parts.model.get_input_embeddings()
        forward = type(embed).forward

        def choking(self, ids):
            if (ids == 63).any():
                raise RuntimeError("token 63 is poison")
            return forward(self, ids)

        monkeypatch.setattr(type(embed), "forward", choking)
        found = e.generate([PROMPTS[0], [3, 63, 4], PROMPTS[2]], 8, ignore_eos=True)
        assert found[1].finish_reason == "error" and "token 63 is poison" in found[1].error
        assert [found[0].token_ids, found[2].token_ids] == [c.token_ids for c in expected]
        assert e.snapshot()["kv"]["blocks_in_use"] == 0
        e.residency.check()


def test_an_interrupt_leaves_an_engine_that_serves(monkeypatch):
    with engine() as e:
        expected = e.generate([PROMPTS[0]], 8, ignore_eos=True)
        calls = iter(range(100))

        def interrupted(*_):
            if next(calls) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            e.generate(PROMPTS, 8, ignore_eos=True, on_token=interrupted)
        snapshot = e.snapshot()
        assert snapshot["requests"] == {"waiting": 0, "running": 0}
        assert snapshot["kv"]["blocks_in_use"] == 0
        assert e.generate([PROMPTS[0]], 8, ignore_eos=True)[0].token_ids == expected[0].token_ids


def test_logits_that_are_no_numbers_fail_the_request():
    model = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.lm_head.weight[:] = math.nan
    with engine(model=model) as e:
        (failed,) = e.generate([PROMPTS[0]], 4)
        assert failed.finish_reason == "error" and "not finite" in failed.error


def test_scores_are_those_of_the_model():
    model = tiny_model("qwen3_moe")
    ids = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        log = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
    expected = log.gather(1, ids[0, 1:, None]).squeeze(1).double()
    with engine(max_step_tokens=7) as e:
        scores = e.score([PROMPTS[2], PROMPTS[0]])
        assert scores[0].n_tokens == 29 and scores[1].n_tokens == 11
        assert math.isclose(scores[0].log_likelihood, float(expected.sum()), rel_tol=1e-5)
        assert np.allclose(scores[0].token_log_likelihoods, expected, atol=1e-4)
        with pytest.raises(RequestError, match="nothing to score"):
            e.score([[4]])


def test_a_conversation_grows_and_may_lose_its_memory():
    with engine() as e:
        turns = [PROMPTS[0], [7, 8], PROMPTS[1]]
        conversation = e.conversation()
        answers, tokens = [], []
        for turn in turns:
            answers.append(conversation.say(turn, 6, ignore_eos=True))
            tokens += turn
            (whole,) = e.generate([tokens], 6, ignore_eos=True)
            assert whole.token_ids == answers[-1].token_ids
            tokens += whole.token_ids
            assert conversation.n_cached == len(tokens) - 1 and conversation.tokens == tokens
        held = e.snapshot()["kv"]["blocks_in_use"]
        assert held > 0
        conversation.evict()
        assert e.snapshot()["kv"]["blocks_in_use"] == 0
        again = conversation.say([3], 6, ignore_eos=True)
        (whole,) = e.generate([[*tokens, 3]], 6, ignore_eos=True)
        assert again.token_ids == whole.token_ids
        conversation.close()
        assert e.snapshot()["kv"]["blocks_in_use"] == 0
        with pytest.raises(RequestError, match="the turn is empty"):
            Conversation(e).say([])


# Bad input ----------------------------------------------------------------------------------


def test_prompts_that_cannot_be_served_start_nothing():
    with engine() as e:
        for bad, message in (
            ([], "no prompt was given"),
            ([[]], "the prompt is empty"),
            ([PROMPTS[0], []], "the prompt is empty"),
            ([[70]], "not in the vocabulary"),
            ([[2] * 250], "exceed the model's context of 256"),
            ("text", "needs a tokenizer"),
            (7, "7 is no prompt"),
        ):
            with pytest.raises(RequestError, match=message):
                e.generate(bad, 10)
        with pytest.raises(UnknownNameError, match="'temprature'.*did you mean 'temperature'"):
            e.generate(PROMPTS, 4, temprature=1.0)
        for n_new in (None, "3", 2.5, 0):
            with pytest.raises(RequestError, match="max_new_tokens="):
                e.generate(PROMPTS, n_new)
        assert e.snapshot()["requests"] == {"waiting": 0, "running": 0}
        (plain,) = e.generate([PROMPTS[0]], 4)
        for same in (np.array(PROMPTS[0]), torch.tensor([PROMPTS[0]]), [np.array(PROMPTS[0])]):
            assert e.generate(same, 4)[0].token_ids == plain.token_ids


def test_watermarks_fit_the_blocks_of_the_start():
    for n_blocks, marks in ((3, (1, 2)), (8, (2, 7)), (24, (8, 23)), (200, (8, 24))):
        with engine("pagedweight", kv_bytes=n_blocks * 4096) as e:
            report = e.snapshot()["policy"]
            assert (report["low_watermark"], report["high_watermark"]) == marks
    with engine("pagedweight", kv_bytes=8 * 4096, low_watermark=1, high_watermark=5) as e:
        assert e.snapshot()["policy"]["high_watermark"] == 5


def test_a_prompt_longer_than_all_kv_memory_is_refused_by_size():
    with engine(kv_bytes=8192) as e:
        capacity = e.snapshot()["residency"]["pools"]["kv"]["quota_bytes"]
        many = capacity // e.snapshot()["kv"]["block_bytes"] * 16
    if many < 200:
        with engine(kv_bytes=8192) as e:
            with pytest.raises(RequestError, match=r"all that can ever be had holds \d+ tokens"):
                e.generate([[2] * 200], 40)


def test_names_and_budgets_that_do_not_exist():
    model = tiny_model("qwen3_moe")
    for bad, error, message in (
        ({"policy": "dynaexk"}, UnknownNameError, "did you mean 'dynaexq'"),
        ({"policy": "static", "n_bit": 4}, UnknownNameError, "'n_bit'.*did you mean 'n_bits'"),
        ({"policy": "static", "format": "int5"}, UnknownNameError, "unknown format 'int5'"),
        ({"policy": "dynaexq", "format": "fp16/int5"}, UnknownNameError, "pair of tiers"),
        ({"policy": "dynaexq", "format": "fp16"}, BudgetError, "two versions"),
        ({"policy": "pagedweight", "format": "fp16/int4"}, BudgetError, "nested"),
        ({"policy": "dense", "budget_bytes": 1 << 12}, BudgetError, r"\d+ bytes below the floor"),
        ({"policy": "pagedweight", "budget_bytes": 1 << 12}, BudgetError, "below the floor"),
        ({"policy": "dense", "device_bytes": 1 << 12}, BudgetError, "less than what does not"),
        ({"policy": "dense", "device_bytes": 1, "budget_bytes": 1}, BudgetError, "not both"),
        ({"policy": "dense", "worker": "ghost"}, ValueError, "worker='ghost'"),
        ({"policy": "dense", "max_running": 0}, ValueError, "max_running=0"),
        ({"policy": "dense", "block_tokens": 0}, ValueError, "block_tokens=0"),
        ({"policy": "dense", "clock": 3}, ValueError, "clock=3"),
        ({"policy": "dense", "limits": 3}, ValueError, "limits=3"),
        (
            {"policy": "dense", "experts": "no/such"},
            CheckpointError,
            "folder that `repro quantize`",
        ),
    ):
        options = {"device": "cpu", **bad}
        with pytest.raises(error, match=message):
            repro.Engine(model, None, options.pop("policy"), **options)
    with engine(model=model) as e:  # nothing was taken from it by what was refused
        assert e.generate([PROMPTS[0]], 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there():
    with pytest.raises(MissingDeviceError, match="not on this machine"):
        repro.Engine(tiny_model("mixtral"), None, "dense", device="cuda")


def test_a_model_without_experts():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="has no experts"):
        repro.Engine(AutoModelForCausalLM.from_config(config), None, "dense", device="cpu")


def test_a_closed_engine_and_a_model_that_was_taken():
    model = tiny_model("qwen3_moe")
    e = engine(model=model)
    with pytest.raises(CheckpointError, match="another engine"):
        engine(model=model)
    e.close()
    e.close()
    for call in (lambda: e.generate([[3]]), lambda: e.snapshot(), lambda: e.step()):
        with pytest.raises(EngineError, match="closed"):
            call()
    with pytest.raises(CheckpointError, match="closed or not running"), torch.inference_mode():
        model(torch.tensor([[3, 4]]))


def test_weights_that_float32_cannot_hold_are_refused():
    model = tiny_model("qwen3_moe").double()
    with torch.no_grad():
        experts_layers(model)[0].module.down_proj[0, 0, 0] = 1 / 3
    with pytest.raises(CheckpointError, match="float32 cannot hold"):
        engine(model=model)


def test_a_whole_device_cap_is_split():
    with engine(device_bytes=3_000_000, scratch_bytes=1 << 16, max_running=4) as e:
        snapshot = e.snapshot()
        fixed = snapshot["fixed_bytes"]["total"]
        assert 0 < 3_000_000 - fixed - snapshot["budget_bytes"] < e.residency.page_bytes


def test_shared_experts_are_counted_and_not_paged():
    with engine(model=tiny_model("qwen2_moe")) as e:
        assert e.snapshot()["fixed_bytes"]["shared_experts"] == 4 * 2 * (3 * 32 * 48 + 32)
    with engine(model=tiny_model("gpt_oss")) as e:
        assert e.snapshot()["fixed_bytes"]["expert_biases"] == 4 * 2 * 8 * (48 + 32)
