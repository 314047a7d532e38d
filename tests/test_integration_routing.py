"""Recording routing: complete or an error, padding excluded, on every architecture."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from repro.integration.experts import experts_layers
from repro.integration.recording import cache_argument
from repro.integration.routing import capture_routing
from repro.integration.statistics import DeviceStatistics
from repro.integration.steps import CaptureError
from repro.models.tiny import ARCHITECTURES, tiny_model

TOP_K = 2


def _ids(n: int, length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(2, 64, (n, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm", "repro"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_counts_are_tokens_times_k(arch, implementation):
    model = tiny_model(arch)
    with capture_routing(model, implementation=implementation) as recorder:
        model(_ids(3, 7))
    trace, statistics = recorder.trace(), recorder.statistics()
    layer_ids = [layer.layer_index for layer in experts_layers(model)]
    assert trace.layer_ids == list(statistics.layer_ids) == layer_ids
    assert trace.meta["implementation"] == implementation
    assert (trace.counts().sum(axis=1) == 21 * TOP_K).all()
    assert np.array_equal(trace.counts(), statistics.counts)
    assert trace.top_k_index.dtype == np.uint8 and trace.mask.all()


def test_same_routing_under_every_implementation():
    model = tiny_model("gpt_oss")
    traces = []
    for implementation in ("eager", "grouped_mm", "batched_mm", "repro"):
        with capture_routing(model, implementation=implementation) as recorder:
            model(_ids(3, 7))
        traces.append(recorder.trace().top_k_index)
    assert all(np.array_equal(t, traces[0]) for t in traces)


def _left_padded(sequences: list[torch.Tensor], token: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), token)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = sequence
        mask[row, width - len(sequence) :] = 1
    return ids, mask


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_left_padding_leaves_hotness_alone(arch):
    model = tiny_model(arch)
    sequences = [_ids(1, n, seed=n)[0] for n in (4, 9, 6)]
    with capture_routing(model) as recorder:
        for sequence in sequences:
            model(sequence[None])
    alone = recorder.statistics()

    ids, mask = _left_padded(sequences, token=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with capture_routing(model) as recorder:
        model(ids, attention_mask=mask, position_ids=positions)
    padded = recorder.statistics()
    assert np.array_equal(padded.counts, alone.counts)
    assert (padded.n_tokens == 4 + 9 + 6).all()
    np.testing.assert_allclose(padded.mass, alone.mass, atol=1e-4)
    assert np.array_equal(recorder.trace().counts(), alone.counts)

    # the trigger works: without a mask the padding pours into its favourite experts
    with capture_routing(model) as recorder, recorder.token_mask(torch.ones_like(ids)):
        model(ids, attention_mask=mask, position_ids=positions)
    assert not np.array_equal(recorder.statistics().counts, alone.counts)


def test_masks_by_argument_context_and_attention_mask_agree():
    model, ids = tiny_model("qwen2_moe"), _ids(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    counts = []
    with capture_routing(model, mask=mask) as recorder:
        model(ids, attention_mask=mask)
    counts.append(recorder.trace().counts())
    with capture_routing(model, mask=mask.bool().numpy()) as recorder:
        model(ids, attention_mask=mask)
    counts.append(recorder.trace().counts())
    with capture_routing(model) as recorder, recorder.token_mask(mask):
        model(ids, attention_mask=mask)
    counts.append(recorder.trace().counts())
    with capture_routing(model) as recorder:
        model(ids, attention_mask=mask)
    counts.append(recorder.trace().counts())
    assert counts[0].sum() == 10 * TOP_K * 2
    assert all(np.array_equal(c, counts[0]) for c in counts)
    assert not recorder.trace().top_k_index[0, :2].any()  # padding is stored as zeros


def test_masks_that_do_not_fit_are_named():
    model, ids = tiny_model("qwen3_moe"), _ids(2, 6)
    with pytest.raises(CaptureError, match=r"\(2, 5\).*2 sequences x 6 tokens"):
        with capture_routing(model) as recorder, recorder.token_mask(torch.ones(2, 5)):
            model(ids)
    with pytest.raises(CaptureError, match=r"\(2, 4\) does not fit.*token_mask"):
        with capture_routing(model, mask=torch.ones(2, 4)):
            model(ids)
    with pytest.raises(CaptureError, match=r"\(2, 1, 6, 6\) does not say"):
        with capture_routing(model):
            model(ids, attention_mask=torch.zeros(2, 1, 6, 6))
    assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prefill_and_decode_share_one_token_axis(arch):
    model = tiny_model(arch)
    ids, mask = _left_padded([_ids(1, 5, seed=1)[0], _ids(1, 3, seed=2)[0]], token=1)
    with capture_routing(model) as recorder:
        model.generate(
            ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
    trace = recorder.trace()
    assert trace.step_tokens == [5, 1, 1, 1]  # the last token is chosen but never fed
    assert trace.mask.tolist() == [[True] * 8, [False] * 2 + [True] * 6]
    assert [s.continues for s in recorder.steps] == [False, True, True, True]
    assert (trace.counts().sum(axis=1) == 14 * TOP_K).all()


def test_caches_that_take_turns_stay_apart():
    model = tiny_model("qwen3_moe")
    name = cache_argument(model)
    a, b = _ids(1, 4, seed=1), _ids(1, 6, seed=2)
    with capture_routing(model) as recorder:
        first, second = model(a, use_cache=True), model(b, use_cache=True)
        for step in range(2):
            for output in (first, second):
                cache = getattr(output, name)
                model(input_ids=torch.full((1, 1), 7 + step), use_cache=True, **{name: cache})
    trace = recorder.trace()
    assert trace.step_tokens == [6, 1, 1] and trace.n_sequences == 2
    assert trace.mask.sum(axis=1).tolist() == [6, 8]


def test_per_workload_and_per_step():
    model = tiny_model("olmoe")
    with capture_routing(model) as recorder:
        with recorder.workload("math"):
            model(_ids(2, 5, seed=1))
        with recorder.workload("code"):
            model(_ids(1, 8, seed=2))
            model(_ids(1, 8, seed=3))
    assert [s.workload for s in recorder.steps] == ["math", "code", "code"]
    math, code = recorder.trace("math"), recorder.trace("code")
    assert (math.n_sequences, code.n_sequences) == (2, 2)
    assert np.array_equal(recorder.statistics("code").counts, code.counts())
    assert np.array_equal(recorder.statistics().counts, math.counts() + code.counts())
    with pytest.raises(CaptureError, match="'prose'.*code.*math"):
        recorder.statistics("prose")


def test_statistics_alone_keep_no_trace():
    model = tiny_model("mixtral")
    with capture_routing(model, keep="statistics") as recorder:
        model(_ids(2, 5))
    assert recorder.statistics().counts.sum() == 2 * 10 * TOP_K
    with pytest.raises(CaptureError, match="keep='trace'"):
        recorder.trace()


def test_weights_are_kept_on_request():
    model = tiny_model("qwen3_moe")  # normalises the top-k weights: they sum to 1
    with capture_routing(model, keep_weights=True) as recorder:
        model(_ids(2, 5))
    trace = recorder.trace()
    np.testing.assert_allclose(trace.mass().sum(axis=1), 10, rtol=2e-3)
    np.testing.assert_allclose(trace.mass(), recorder.statistics().mass, atol=5e-3)
    with capture_routing(model) as recorder:
        model(_ids(2, 5))
    with pytest.raises(ValueError, match="keep_weights"):
        recorder.trace().mass()


# what the weights mean differs by architecture: compare with the router computed by hand


def _by_hand(arch: str, router, hidden: torch.Tensor) -> list[float]:
    """Mass per expert from the router's own matrices, one token at a time, in floats."""
    if arch == "gemma4":
        scale = router.scale / hidden.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * 32**-0.5
        logits = F.linear(hidden * scale, router.proj.weight)
    else:
        logits = F.linear(hidden, router.weight, getattr(router, "bias", None))
    mass = [0.0] * logits.shape[1]
    for row in logits.tolist():
        exp = [math.exp(v - max(row)) for v in row]
        top = sorted(range(len(row)), key=lambda e: -row[e])[:TOP_K]
        for rank, expert in enumerate(top):
            weight = exp[expert] / sum(exp)
            if arch in ("qwen3_moe", "qwen3_next", "mixtral", "gpt_oss", "gemma4"):
                weight = exp[expert] / sum(exp[e] for e in top)  # over the chosen only
            if arch == "gemma4":
                weight *= float(router.per_expert_scale[expert])
            if arch == "deepseek_v2":
                weight *= 2.5  # routed scaling, once
            if arch == "phimoe":  # over those within 2 % of the best that is left
                left = [e for e in range(len(row)) if e not in top[:rank]]
                best = row[expert]
                near = [e for e in left if (best - row[e]) / max(abs(row[e]), best) <= 0.02]
                weight = exp[expert] / sum(exp[e] for e in near)
            mass[expert] += weight
    return mass


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_routing_mass_equals_a_hand_computation_on_4_tokens(arch):
    model = tiny_model(arch)
    block = model.get_submodule(experts_layers(model)[0].name.rpartition(".")[0])
    router = getattr(block, "gate", None) or block.router
    inputs = []
    handle = router.register_forward_pre_hook(lambda m, a: inputs.append(a[0].reshape(-1, 32)))
    with capture_routing(model) as recorder:
        model(_ids(1, 4))
    handle.remove()
    expected = _by_hand(arch, router, inputs[0])
    np.testing.assert_allclose(recorder.statistics().mass[0], expected, atol=1e-5)


def test_biased_router_gives_zero_counts_to_an_expert():
    model = tiny_model("gpt_oss")
    for block in model.model.layers:
        block.mlp.router.bias[3] = -1e4
    with capture_routing(model) as recorder:
        model(_ids(4, 16))
    counts = recorder.statistics().counts
    assert (counts[:, 3] == 0).all() and (counts.sum(axis=1) == 64 * TOP_K).all()
    assert np.isfinite(recorder.statistics().mass).all()


# incomplete recordings are errors


def test_a_layer_that_goes_round_the_recorder():
    model = tiny_model("qwen3_moe")
    module = experts_layers(model)[1].module
    shared = module.config
    with pytest.raises(CaptureError, match=r"layers \[1\] have experts but were not seen"):
        with capture_routing(model):
            module.config = copy.deepcopy(shared)
            module.config._experts_implementation = "eager"
            model(_ids(1, 4))
    module.config = shared
    with capture_routing(model):
        model(_ids(1, 4))


def test_a_layer_that_runs_twice_or_alone():
    model = tiny_model("qwen3_moe")
    module = experts_layers(model)[0].module
    index, weights = torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)
    with pytest.raises(CaptureError, match="layer 0 ran outside"):
        with capture_routing(model):
            module(torch.zeros(4, 32), index, weights)

    def again(m, args, output):
        handle.remove()
        m(*args)

    handle = module.register_forward_hook(again)
    with pytest.raises(CaptureError, match="layer 0 ran twice"):
        with capture_routing(model):
            model(_ids(1, 4))


def test_a_layer_that_drops_tokens():
    model = tiny_model("qwen3_moe")
    block = model.model.layers[0].mlp
    keep = block.forward
    block.forward = lambda x: torch.cat([keep(x[:, :3]), torch.zeros_like(x[:, 3:])], dim=1)
    with pytest.raises(CaptureError, match="layer 0 routed 3 tokens in a step of 4"):
        with capture_routing(model):
            model(_ids(1, 4))


def test_an_absent_expert_is_an_error_of_the_recording():
    model = tiny_model("qwen3_moe")
    router = model.model.layers[0].mlp.gate
    whole = router.forward

    def partial(hidden):
        logits, weights, index = whole(hidden)
        index[0, 1], weights[0, 1] = 8, 0.0
        return logits, weights, index

    router.forward = partial
    with pytest.raises(CaptureError, match="1 choices of layer 0 name experts on another device"):
        with capture_routing(model, implementation="repro"):
            model(_ids(1, 4))


def test_counts_that_do_not_add_up(monkeypatch):
    model = tiny_model("qwen3_moe")
    add = DeviceStatistics.add

    def lossy(self, layer, index, weights, mask):
        add(self, layer, index[1:], weights[1:], mask.reshape(-1)[1:])

    monkeypatch.setattr(DeviceStatistics, "add", lossy)
    with pytest.raises(CaptureError, match="layer 0 counted 6 choices for 4 tokens x 2"):
        with capture_routing(model):
            model(_ids(1, 4))


def test_a_step_that_fails_leaves_nothing():
    model = tiny_model("qwen3_moe")

    def broken(module, args):
        raise RuntimeError("second layer broke")

    with capture_routing(model) as recorder:
        handle = experts_layers(model)[1].module.register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="second layer broke"):
            model(_ids(1, 4))
        handle.remove()
        model(_ids(2, 3))
    assert recorder.statistics().counts.sum() == 2 * 6 * TOP_K
    assert recorder.trace().n_sequences == 2


def test_everything_is_restored_also_after_an_error():
    model = tiny_model("gemma4")
    model.set_experts_implementation("batched_mm")
    hooks = (len(model._forward_hooks), len(model._forward_pre_hooks))
    with pytest.raises(KeyError):
        with capture_routing(model, implementation="eager"):
            raise KeyError
    assert model.config._experts_implementation == "batched_mm"
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks


def test_the_decoder_alone_and_embeddings_as_input():
    model = tiny_model("qwen3_moe")
    with capture_routing(model) as recorder:
        model.model(_ids(2, 5))
        model(inputs_embeds=model.get_input_embeddings()(_ids(2, 5)))
    trace = recorder.trace()
    assert np.array_equal(trace.top_k_index[:2], trace.top_k_index[2:])
    with pytest.raises(ValueError, match="keep='all'"):
        with capture_routing(model, keep="all"):
            pass


# statistics on the device


def test_device_statistics_are_exact_sums_and_can_be_reset():
    statistics = DeviceStatistics(experts_layers(tiny_model("qwen3_moe")))
    index = torch.tensor([[0, 7], [7, 3], [1, 7]])
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]])
    statistics.set_token_mask(torch.tensor([True, True, False]))
    statistics(torch.nn.Identity(), 0, index, weights)
    read = statistics.read()
    assert read.counts[0].tolist() == [1, 0, 0, 1, 0, 0, 0, 2]
    assert read.mass[0].tolist() == [0.75, 0, 0, 0.5, 0, 0, 0, 0.75]
    assert read.n_tokens.tolist() == [2, 0] and not read.counts[1].any()
    statistics.reset()
    assert not statistics.read().counts.any() and not statistics.read().mass.any()
    with pytest.raises(ValueError, match="token mask of 3 for a step of 2"):
        statistics(torch.nn.Identity(), 0, index[:2], weights[:2])
    statistics.set_token_mask(None)
    statistics(torch.nn.Identity(), 1, index, weights)
    assert statistics.read().counts[1].sum() == 6


def test_mass_does_not_depend_on_the_order_of_tokens():
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(0, 8, (5000, 2), generator=generator)
    weights = torch.rand(5000, 2, generator=generator)
    order = torch.randperm(5000, generator=generator)
    layers = experts_layers(tiny_model("qwen3_moe"))
    first, second = DeviceStatistics(layers), DeviceStatistics(layers)
    first.add(0, index, weights, None)
    second.add(0, index[order], weights[order], None)
    assert np.array_equal(first.read().mass, second.read().mass)
    exact = np.bincount(index.reshape(-1), weights.double().reshape(-1), 8)
    np.testing.assert_allclose(first.read().mass[0], exact, rtol=1e-7)


def test_mask_of_the_same_shape_stays_in_the_same_memory():
    statistics = DeviceStatistics(experts_layers(tiny_model("qwen3_moe")))
    statistics.set_token_mask(torch.tensor([True, False]))
    address = statistics._mask.data_ptr()
    statistics.set_token_mask(torch.tensor([[False], [True]]))
    assert statistics._mask.data_ptr() == address and statistics._mask.tolist() == [False, True]
