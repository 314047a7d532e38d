"""What only a GPU can show: sums inside a replayed CUDA graph, and decode under `generate`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from repro.integration.experts import experts_layers, observe, use_experts
from repro.integration.recording import record_decode, record_prefill
from repro.integration.routing import capture_routing
from repro.integration.statistics import DeviceStatistics
from repro.models.tiny import ARCHITECTURES, tiny_model

pytestmark = pytest.mark.gpu


def _ids(n: int, length: int) -> torch.Tensor:
    ids = torch.randint(2, 64, (n, length), generator=torch.Generator().manual_seed(5))
    return ids.cuda()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_counts_are_tokens_times_k(arch):
    model = tiny_model(arch).cuda().bfloat16()
    for implementation in ("grouped_mm", "batched_mm", "repro"):
        with torch.inference_mode(), capture_routing(model, implementation=implementation) as r:
            model(_ids(3, 7))
        assert (r.trace().counts().sum(axis=1) == 42).all()
        assert np.array_equal(r.trace().counts(), r.statistics().counts)


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "gemma4"])
def test_reference_is_as_exact_as_eager(arch):
    model = tiny_model(arch).cuda().double()
    logits = []
    for name in ("eager", "repro"):
        with torch.inference_mode(), use_experts(model, name):
            logits.append(model(_ids(3, 7)).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-12, atol=1e-12)


def test_generate_is_seen_whatever_it_switches_to():
    model = tiny_model("qwen3_moe").cuda().bfloat16()
    model.set_experts_implementation("grouped_mm")
    with capture_routing(model) as recorder:
        model.generate(_ids(2, 5), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert recorder.trace().step_tokens == [5, 1, 1, 1]
    assert model.config._experts_implementation == "grouped_mm"


def test_decode_is_the_prefill_of_what_was_generated():
    # in double: other shapes take other kernels, whose rounding could turn a close choice
    model, ids = tiny_model("qwen3_moe").cuda().double(), _ids(3, 9)
    how = {"seed": 1, "include_prompt": True, "implementation": "repro"}
    both = record_decode(model, ids, 5, **how)
    assert both.step_tokens == [9, 1, 1, 1, 1, 1]
    whole = record_prefill(model, ids, implementation="repro")
    assert np.array_equal(both.select(tokens=slice(0, 9)).top_k_index, whole.top_k_index)
    again = record_decode(model, ids, 5, **how)
    assert np.array_equal(both.top_k_index, again.top_k_index)


def test_statistics_go_on_counting_in_a_replayed_graph():
    """Mask, counts and mass live in fixed memory: a replay reads the new mask and adds."""
    model = tiny_model("mixtral").cuda()
    layer = experts_layers(model)[0]
    statistics = DeviceStatistics((layer,))
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(6, 32, device="cuda")
    index = torch.zeros(6, 2, dtype=torch.long, device="cuda")
    weights = torch.zeros(6, 2, device="cuda")
    statistics.set_token_mask(torch.ones(6, dtype=torch.bool, device="cuda"))
    with torch.inference_mode(), observe(model, statistics, "batched_mm"):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer.module(x, index, weights)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer.module(x, index, weights)
    statistics.reset()
    expected_counts, expected_mass, real = np.zeros(8, dtype=int), np.zeros(8), 0
    for _ in range(4):
        new_index = torch.rand(6, 8, generator=generator).argsort(dim=1)[:, :2]
        new_weights = torch.rand(6, 2, generator=generator)
        mask = torch.rand(6, generator=generator) < 0.7
        index.copy_(new_index)
        weights.copy_(new_weights)
        statistics.set_token_mask(mask.cuda())
        graph.replay()
        real += int(mask.sum())
        for token in torch.nonzero(mask)[:, 0].tolist():
            for expert, weight in zip(new_index[token], new_weights[token], strict=True):
                expected_counts[expert] += 1
                expected_mass[expert] += float(weight)
    read = statistics.read()
    assert read.counts[0].tolist() == expected_counts.tolist()
    assert read.n_tokens.tolist() == [real] and read.counts.sum() == 2 * real
    np.testing.assert_allclose(read.mass[0], expected_mass, atol=1e-5)


def test_mass_is_the_same_bits_in_every_run():
    layers = experts_layers(tiny_model("mixtral"))
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 8, (100_000, 2), generator=generator).cuda()
    weights = torch.rand(100_000, 2, generator=generator).cuda()
    masses = []
    for _ in range(5):
        statistics = DeviceStatistics(layers)
        statistics.add(0, index, weights, None)
        masses.append(statistics.read().mass)
    assert all(np.array_equal(m, masses[0]) for m in masses)
