"""At the dimensions of Qwen3-30B-A3B: fast enough, and in the order the papers report."""

import time

import pytest

from repro.simulate import (
    Setup,
    SimulatedModel,
    TraceRouting,
    arena_bytes,
    get_device,
    phases,
    published_model,
    recorded_routing,
    row_of,
    simulate,
)

A6000 = get_device("rtx-a6000")


@pytest.fixture(scope="module")
def model() -> SimulatedModel:
    return published_model("Qwen3-30B-A3B")


@pytest.fixture(scope="module")
def routing(model: SimulatedModel) -> TraceRouting:
    return recorded_routing(model)


def test_dense_parts_are_the_published_ones(model: SimulatedModel) -> None:
    experts = model.n_layers * model.n_experts * sum(model.block_params)
    rest = model.dense_params + model.head_params + model.embedding_params
    assert experts + rest == 30_532_122_624  # as published, to the parameter
    assert model.kv.token_bytes == 48 * 2 * 4 * 128 * 2


def test_a_hundred_requests_in_a_minute_and_in_the_papers_order(
    model: SimulatedModel, routing: TraceRouting
) -> None:
    """DynaExq 5.3: static < DynaExq < offloading in TTFT, TPOP and end-to-end; the gap grows."""
    cap = arena_bytes(A6000, model)
    gaps = []
    for batch, n in ((4, 12), (32, 100)):
        workloads = ("prose", "word-problems", "python")
        requests = phases(workloads, -(-n // 3), 256, 16)[:n]
        rows = {}
        for policy in ("static", "dynaexq", "pagedweight", "offload"):
            options = {"interval": 0.5, "margin": "mean"} if policy == "dynaexq" else {}
            setup = Setup(policy, cap, 6 << 30, options=options, max_running=batch)
            start = time.perf_counter()
            result = simulate(setup, model, A6000, routing, requests)
            assert time.perf_counter() - start < 60
            assert len(result.completions) == n
            rows[policy] = row_of(result, cache_passes=4)
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            for which in ("mean", "p99"):
                order = [rows[p][name][which] for p in ("static", "dynaexq", "offload")]
                assert order == sorted(order), (batch, name, which)
        assert rows["offload"]["weight_wait_s"] > 0 == rows["dynaexq"]["weight_wait_s"]
        assert all(row["status"] == "simulated" for row in rows.values())
        gaps.append(rows["offload"]["tpot_s"]["mean"] / rows["dynaexq"]["tpot_s"]["mean"])
    assert gaps[1] > gaps[0] > 1


@pytest.mark.parametrize(
    ("name", "traces"),
    [
        ("Qwen3-Next-80B-A3B", "moe-fine"),
        ("Phi-3.5-MoE", "moe-shared"),
        ("Qwen1.5-MoE-A2.7B", "moe-fine"),
        ("Gemma-4-26B-A4B", "moe-fine"),
        ("OLMoE-1B-7B", "moe-shared"),
        ("DeepSeek-V2-Lite", "moe-shared"),
    ],
)
def test_other_published_models_can_be_simulated(name: str, traces: str) -> None:
    other = published_model(name)
    routing = recorded_routing(other, traces, ("prose",))
    device = get_device("h200")
    setup = Setup("static", arena_bytes(device, other), 4 << 30, max_running=4)
    result = simulate(setup, other, device, routing, phases(("prose",), 4, 32, 4))
    assert result.report["metrics"]["decode_tokens_per_s"] > 0
