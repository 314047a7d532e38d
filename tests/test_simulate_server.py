"""The simulated server: times by hand, waits by theory, books that hold, the same bytes twice."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.contract import Action, Outcome
from repro.errors import UnknownNameError
from repro.simulate import (
    DeviceProfile,
    KernelCost,
    Result,
    Server,
    Setup,
    SimulatedModel,
    SimulatedRequest,
    SimulationError,
    SyntheticRouting,
    batch_of,
    simulate,
    toy_model,
)
from repro.simulate.result import adaptation
from repro.simulate.routing import Choices, Place
from repro.simulate.virtual_residency import VirtualResidency
from repro.simulate.virtual_time import VirtualClock

EXPERT = 2 * 3 * 64 * 64  # bytes of a toy expert in fp16: 24,576


def toy_device(**changes: Any) -> DeviceProfile:
    """1 MB/s of memory, 100 kB/s of link, 1 s a step and 0.5 s a layer."""
    numbers: dict[str, Any] = {
        "hbm_bytes_per_s": 1e6,
        "h2d_bytes_per_s": 1e5,
        "d2h_bytes_per_s": 5e4,
        "flops_per_s": 1e12,
        "step_fixed_s": 1.0,
        "layer_fixed_s": 0.5,
        "copy_fixed_s": 0.0,
        "memory_bytes": 10**9,
    } | changes
    kernels = {name: KernelCost() for name in ("dense", "group-affine", "any-precision")}
    names = [*numbers, *(f"kernels.{k}" for k in kernels)]
    sources = dict.fromkeys(names, "made up")
    return DeviceProfile("toy", kernels=kernels, sources=sources, **numbers)


class FixedRouting:
    """Every token chooses the same expert of each layer."""

    def __init__(self, model: SimulatedModel, experts: Sequence[int]) -> None:
        self.shape = (model.n_layers, model.n_experts, 1)
        self._row = np.asarray(experts, dtype=np.uint8)[None, :, None]

    def choices(self, places: Sequence[Place], number: int) -> Choices:
        return np.repeat(self._row, sum(p.n_tokens for p in places), axis=0)


def versions_bytes(n: int, high: int, low: int = 7680) -> int:
    """Roomy cap for a toy with ``high`` of ``n`` experts high."""
    return high * EXPERT + (n - high) * low


# times ------------------------------------------------------------------------------------------


def test_two_experts_by_hand() -> None:
    """One layer, two experts, a prompt of one token and one more token."""
    model = toy_model(n_layers=1, n_experts=2)
    setup = Setup("dense", capacity_bytes=1 << 20, kv_bytes=1 << 16)
    result = simulate(setup, model, toy_device(), FixedRouting(model, [1]), batch_of(1, 1, 2))
    read = EXPERT / 1e6  # one expert, whole
    token = 2 * 8 * 2  # bytes of keys and values
    first = 1.0 + 0.5 + read + token / 1e6
    second = 1.0 + 0.5 + read + 2 * token / 1e6
    (done,) = result.completions
    assert done.ttft_s == pytest.approx(first, rel=1e-12)
    assert done.tpot_s == pytest.approx(second, rel=1e-12)
    assert done.e2e_s == pytest.approx(first + second, rel=1e-12)
    assert result.report["metrics"]["weight_wait_s"] == 0
    assert result.report["active_share"] == {"prefill": 0.5, "decode": 0.5}


@pytest.mark.parametrize("combine", ["max", "sum"])
def test_arithmetic_by_hand_whole_and_in_chunks(combine: str) -> None:
    """A prompt of three tokens on a device that computes slowly."""
    model = toy_model(n_layers=1, n_experts=2)
    rate = 1e5
    device = replace(toy_device(flops_per_s=rate), combine=combine)  # type: ignore[arg-type]
    expert, attention = 2 * (EXPERT // 2) / rate, 4 * 8 / rate  # of a token; of a pair of them
    read, token = EXPERT / 1e6, 2 * 8 * 2 / 1e6
    for limit, chunks in ((8, [(0, 3)]), (2, [(0, 2), (2, 1)])):
        setup = Setup("dense", 1 << 20, 1 << 16, max_step_tokens=limit)
        result = simulate(setup, model, device, FixedRouting(model, [0]), batch_of(1, 3, 1))
        seconds = 0.0
        for before, n in chunks:
            pairs = n * before + n * (n + 1) / 2
            experts, keys = (n * expert, read), (pairs * attention, (before + n) * token)
            both = max if combine == "max" else lambda pair: sum(pair)
            seconds += 1.5 + both(experts) + both(keys)
        assert result.completions[0].ttft_s == pytest.approx(seconds, rel=1e-12)


def test_offloading_two_experts_by_hand() -> None:
    """Two blocks for two layers of two experts; both needed ones are missing once, then there."""
    model = toy_model(n_layers=2, n_experts=2)
    routing, device = FixedRouting(model, [1, 1]), toy_device()
    setup = Setup("offload", capacity_bytes=2 * EXPERT + (1 << 16), kv_bytes=1 << 16, prefetch=None)
    result = simulate(setup, model, device, routing, batch_of(1, 1, 3))
    copy, cache = EXPERT / 1e5, result.report["mechanism"]["cache"]
    assert (cache["n_slots"], cache["n_misses"], cache["n_hits"]) == (2, 2, 4)
    assert cache["wait_s"] == pytest.approx(2 * copy, rel=1e-12)
    token, read = 2 * 8 * 2, EXPERT / 1e6
    compute = 1.0 + 2 * (0.5 + read + token / 1e6)
    assert result.completions[0].ttft_s == pytest.approx(compute + 2 * copy, rel=1e-12)
    # what the link brought passed through memory too, charged to the next pass
    later = 2 * EXPERT / 1e6 + 2 * token / 1e6 + 2 * 2 * token / 1e6
    assert result.completions[0].tpot_s == pytest.approx(compute + later / 2, rel=1e-9)


def test_a_fetch_ahead_hides_what_the_layer_before_it_takes() -> None:
    model = toy_model(n_layers=2, n_experts=2)
    setup = Setup("offload", capacity_bytes=2 * EXPERT + (1 << 16), kv_bytes=1 << 16, prefetch=1.0)
    for link, hidden in ((1e5, False), (1e4, False), (1e6, True)):
        device = toy_device(h2d_bytes_per_s=link)
        result = simulate(setup, model, device, FixedRouting(model, [1, 1]), batch_of(1, 1, 1))
        copy, layer = EXPERT / link, 0.5 + EXPERT / 1e6 + 32 / 1e6
        cache = result.report["mechanism"]["cache"]
        assert cache["wait_s"] == pytest.approx(copy + max(0.0, copy - layer), rel=1e-9)
        assert (cache["wait_s"] == pytest.approx(copy)) is (copy <= layer)
        assert (cache["n_misses"], cache["n_ahead"]) == (1, 1)
        assert not hidden or cache["n_late"] == 0


def test_a_fetch_ahead_begins_when_it_was_asked_for() -> None:
    """Also if the link has been idle for seconds: it does not make up for them."""
    model = toy_model(n_layers=2, n_experts=2)
    setup = Setup("offload", capacity_bytes=2 * EXPERT + (1 << 16), kv_bytes=1 << 16, prefetch=1.0)
    device = toy_device(h2d_bytes_per_s=1e4)
    requests = [SimulatedRequest(5.0, 1, 1)]
    result = simulate(setup, model, device, FixedRouting(model, [0, 1]), requests)
    layer = 0.5 + EXPERT / 1e6 + 32 / 1e6
    cache = result.report["mechanism"]["cache"]
    assert cache["wait_s"] == pytest.approx(EXPERT / 1e4 - layer, rel=1e-9)
    assert (cache["n_misses"], cache["n_ahead"], cache["n_late"]) == (0, 1, 1)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(8, 24),
    rule=st.sampled_from(["lru", "lfu"]),
    top_k=st.integers(1, 3),
)
def test_without_overlap_the_stall_is_missed_bytes_over_link_rate(
    seed: int, slots: int, rule: str, top_k: int
) -> None:
    model = toy_model(n_layers=3, n_experts=8, top_k=top_k)
    routing = SyntheticRouting(3, 8, top_k, "zipf", seed=seed)
    setup = Setup(
        "offload", slots * EXPERT + (1 << 17), 1 << 17, prefetch=None, options={"rule": rule}
    )
    result = simulate(setup, model, toy_device(), routing, batch_of(3, 5, 8), check_every=1)
    mechanism = result.report["mechanism"]
    missed = mechanism["cache"]["n_misses"] * EXPERT
    assert mechanism["bytes_moved"]["in"] == missed
    assert mechanism["cache"]["wait_s"] == pytest.approx(missed / 1e5, rel=1e-9)
    assert result.report["metrics"]["weight_wait_s"] == pytest.approx(missed / 1e5, rel=1e-9)


def test_better_predictions_wait_less() -> None:
    model = toy_model(n_layers=4, n_experts=16, top_k=2)
    routing = SyntheticRouting(4, 16, 2, "uniform", seed=1)
    waits = []
    for accuracy in (0.0, 0.5, 0.8, 0.95, 1.0):
        setup = Setup("offload", 24 * EXPERT + (1 << 17), 1 << 17, prefetch=accuracy)
        result = simulate(setup, model, toy_device(), routing, batch_of(2, 4, 40), check_every=5)
        waits.append(result.report["metrics"]["weight_wait_s"])
    assert waits[0] > waits[2] > waits[4]
    assert waits[4] < 0.75 * waits[0]


# copies in the background -----------------------------------------------------------------------


def _residency(clock: VirtualClock, **options: Any) -> VirtualResidency:
    model = toy_model(n_layers=2, n_experts=4)
    options = {"kv_bytes": 1 << 16, "capacity_bytes": 1 << 18} | options
    return VirtualResidency(
        model.schemes("fp16/int4"), 2, 4, clock=clock, device=toy_device(), **options
    )


def test_a_promotion_is_published_when_its_bytes_are_over_the_link_and_no_sooner() -> None:
    clock = VirtualClock()
    residency = _residency(clock, n_high=2, initial_bits=4)
    n_bytes = int(residency.layer_block_bytes[0, :, 1].sum())
    clock.advance_to(10.0)
    residency.pump.advance()
    assert residency.submit(Action(0, 3, (16, 16))) is Outcome.ACCEPTED
    assert residency.submit(Action(1, 2, (16, 16))) is Outcome.ACCEPTED
    step = residency.begin_step()
    for number, owner in ((1, (0, 3)), (2, (1, 2))):
        end = 10.0 + number * n_bytes / 1e5
        clock.advance_to(end - 1e-6)
        residency.pump.advance()
        assert residency.publish() == ()
        assert residency.pump.next_end() == pytest.approx(end)
        clock.advance_to(end + 1e-9)
        residency.pump.advance()
        assert residency.publish() == (owner,)
        residency.check()
    residency.end_step(step)
    assert residency.bytes_moved() == {"in": 2 * n_bytes, "out": 0}
    assert residency.link.n_bytes == residency.bytes_moved()
    residency.inner.check_bytes()  # the miniature's own bytes arrived in their places
    residency.close()


def test_the_clock_does_not_go_back() -> None:
    clock = VirtualClock()
    clock.advance_to(2.0)
    with pytest.raises(SimulationError, match="cannot go back to 1.0"):
        clock.advance_to(1.0)


def test_a_miniature_has_the_pages_of_the_real_thing() -> None:
    residency = _residency(VirtualClock(), n_high=2)
    assert residency.capacity_bytes <= 1 << 18
    assert residency.inner.capacity_bytes * residency.scale == residency.capacity_bytes
    assert residency.block_bytes[:, 1].sum() == EXPERT
    free = residency.free_bytes("kv")
    taken = residency.reserve(5000, "kv")
    assert taken is not None
    assert free - residency.free_bytes("kv") == len(taken.pages) * residency.page_bytes >= 5000
    residency.release(taken)
    assert residency.reserve(1 << 30, "kv") is None
    residency.close()


# books ------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    policy=st.sampled_from(["static", "dynaexq", "pagedweight", "offload", "static_mixed"]),
    host=st.sampled_from(["mirrored", "single"]),
    kind=st.sampled_from(["uniform", "zipf", "drifting", "alternating"]),
    seed=st.integers(0, 100),
    prompts=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=6),
    queue=st.booleans(),
)
def test_the_cap_holds_and_no_page_has_two_owners_at_any_step(
    policy: str,
    host: str,
    kind: str,
    seed: int,
    prompts: list[tuple[int, int]],
    queue: bool,
) -> None:
    model = toy_model(n_layers=2, n_experts=6, top_k=2, heads=(2, 32))
    routing = SyntheticRouting(2, 6, 2, kind, period=7, seed=seed)
    options: dict[str, Any] = {}
    if policy == "dynaexq":
        options = {"interval": 3.0, "margin": 0.0, "alpha": 0.5}
    if policy == "pagedweight":
        options = {"interval": 5.0, "low_watermark": 1, "high_watermark": 3}
    sensitivity = None
    if policy == "static_mixed":
        sensitivity = np.random.default_rng(seed).random((2, 6, 2, 1)) * 4.0 ** -np.arange(2, 9)
    setup = Setup(
        policy, capacity_bytes=260_000, kv_bytes=60_000, options=options, host=host,
        max_running=3, max_step_tokens=32, update_queue=queue,
    )  # fmt: skip
    requests = [SimulatedRequest(2.0 * i, p, n) for i, (p, n) in enumerate(prompts)]
    server = Server(setup, model, toy_device(), routing, check_every=1, sensitivity=sensitivity)
    result = server.run(requests)
    assert len(result.completions) == len(requests)
    made = sorted(len(c.token_ids) for c in result.completions)
    assert made == sorted(n for _, n in prompts)
    assert result.report["peak_used_bytes"] <= result.report["mechanism"]["capacity_bytes"]
    if policy != "offload":
        assert result.report["metrics"]["weight_wait_s"] == 0


def test_kv_pressure_takes_bits_from_weights_and_gives_them_back() -> None:
    model = toy_model(n_layers=2, n_experts=8, heads=(4, 32))
    routing = SyntheticRouting(2, 8, 1, "zipf", seed=0)
    options = {"interval": 5.0, "low_watermark": 2, "high_watermark": 6, "exchange_margin": None}
    setup = Setup("pagedweight", 230_000, 20_000, options=options, max_running=8)
    # a wave that needs more KV memory than its partition, then one small request
    wave = batch_of(6, 64, 30)
    late = [SimulatedRequest(400.0, 8, 60)]
    result = simulate(setup, model, toy_device(), routing, [*wave, *late], check_every=1)
    published = result.report["mechanism"]["published"]
    assert published["demotions"] > 0 and published["promotions"] > 0
    assert len(result.completions) == 7


def test_a_request_that_fits_nowhere_is_an_error_and_not_a_loop() -> None:
    model = toy_model(n_layers=2, n_experts=8, heads=(4, 32))
    routing = SyntheticRouting(2, 8, 1, "uniform")
    setup = Setup("static", 16 * 9000 + 20_000, 10_000)
    with pytest.raises(SimulationError, match="nothing can make room"):
        simulate(setup, model, toy_device(), routing, batch_of(1, 5000, 1))


def test_what_cannot_be_simulated_is_refused() -> None:
    model = toy_model()
    with pytest.raises(UnknownNameError, match="dynaexq"):
        Setup("dynaexk", 1, 1)
    with pytest.raises(UnknownNameError, match="policy that is simulated"):
        Setup("dpllm", 1, 1)
    with pytest.raises(SimulationError, match="map the trace to the model"):
        Server(Setup("dense", 1 << 20, 0), model, toy_device(), SyntheticRouting(2, 5, 1))
    with pytest.raises(SimulationError, match="2 experts fit and a layer has 4"):
        Server(Setup("offload", 2 * EXPERT, 0), model, toy_device(), SyntheticRouting(2, 4, 1))
    with pytest.raises(SimulationError, match="wants 0"):
        simulate(
            Setup("dense", 1 << 20, 1 << 16), model, toy_device(),
            SyntheticRouting(2, 4, 1), batch_of(1, 3, 0),
        )  # fmt: skip


# the same again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["dynaexq", "pagedweight", "offload"])
def test_the_same_run_gives_the_same_bytes(policy: str) -> None:
    def run() -> str:
        model = toy_model(n_layers=3, n_experts=8, top_k=2)
        routing = SyntheticRouting(3, 8, 2, "drifting", period=5, seed=4)
        options = {} if policy == "offload" else {"interval": 4.0}
        setup = Setup(policy, 420_000, 60_000, options=options, prefetch=0.7, seed=3)
        result = simulate(setup, model, toy_device(), routing, batch_of(5, 12, 30, every_s=3.0))
        return result.to_json() + str(result.bounds())

    assert run() == run()


# theory -----------------------------------------------------------------------------------------


def _dynaexq(
    kind: str, n_high: int, n_new: int = 300, frozen: bool = False, period: int = 20, **options: Any
) -> Result:
    model = toy_model(n_layers=2, n_experts=16)
    routing = SyntheticRouting(2, 16, 1, kind, period=period, seed=9)
    cap = versions_bytes(32 + 8, 2 * n_high + 4) + 120_000
    setup = Setup(
        "dynaexq", cap, 60_000, options={"interval": 20.0, "n_high": n_high} | options,
        frozen=frozen, update_queue=True, slack=4,
    )  # fmt: skip
    device = toy_device(h2d_bytes_per_s=1e6)
    return simulate(setup, model, device, routing, batch_of(8, 1, n_new))


def test_uniform_traffic_is_served_high_in_proportion() -> None:
    result = _dynaexq("uniform", 4, frozen=True)
    bits = result.report["mechanism"]["blocks_by_width"]
    share = bits["16"] / (bits["16"] + bits["4"])
    assert result.report["high_share"] == pytest.approx(share, abs=0.02)


def test_stationary_traffic_is_served_as_by_the_oracle() -> None:
    result = _dynaexq("zipf", 4, margin=0.002)
    bounds = result.bounds()
    (phase,) = bounds["phases"]
    routing = SyntheticRouting(2, 16, 1, "zipf", seed=9)
    top = routing.popularity[:4].sum()
    assert phase["oracle_high_share"] >= top - 0.03
    late = result.trail[len(result.trail) // 2 :]
    share = sum(p.n_high for p in late) / sum(p.n_uses for p in late)
    assert share == pytest.approx(top, abs=0.03)
    assert phase["adaptation_passes"] is not None
    assert 0.5 < phase["of_damage_oracle"] <= 1.0 + 1e-9


def test_uniform_traffic_hits_a_cache_in_proportion() -> None:
    """Independent uniform uses: every rule that does not know the future has slots / experts."""
    model = toy_model(n_layers=2, n_experts=16)
    routing = SyntheticRouting(2, 16, 1, "uniform", seed=5)
    setup = Setup("offload", 16 * EXPERT + (1 << 17), 1 << 17, prefetch=None)
    result = simulate(setup, model, toy_device(), routing, batch_of(1, 1, 1500))
    cache = result.report["mechanism"]["cache"]
    assert cache["hit_rate"] == pytest.approx(cache["n_slots"] / 32, abs=0.04)
    bound = result.bounds(cache_passes=0)["cache"]
    assert bound["hit_rate"] >= cache["hit_rate"]
    assert bound["fetches_of_policy"] == cache["n_misses"]
    assert 0.3 < bound["of_clairvoyant"] <= 1


def test_alternating_traffic_is_served_as_the_average_of_both_orders() -> None:
    """A slow average sees the mixture; nobody without foresight can serve more of it for long."""
    result = _dynaexq("alternating", 4, n_new=500, period=7, alpha=0.9, margin=0.01)
    routing = SyntheticRouting(2, 16, 1, "alternating", period=7, seed=9)
    mixture = np.zeros((2, 16))
    for number in (0, 7):
        np.put_along_axis(
            mixture, routing.experts_of_rank(number),
            np.take_along_axis(mixture, routing.experts_of_rank(number), axis=1)
            + routing.popularity / 2, axis=1,
        )  # fmt: skip
    best = np.sort(mixture, axis=1)[:, -4:].sum(axis=1).mean()
    late = result.trail[len(result.trail) // 2 :]
    share = sum(p.n_high for p in late) / sum(p.n_uses for p in late)
    assert share == pytest.approx(best, abs=0.05)


def test_hysteresis_bounds_transitions_on_an_alternating_trace() -> None:
    """Without a margin near-equals change places at every update; with one they stay."""
    free = _dynaexq("alternating", 4, n_new=400, period=20, margin=0.0, alpha=0.7)
    held = _dynaexq("alternating", 4, n_new=400, period=20, margin=0.12, alpha=0.7)
    n_free, n_held = (r.report["mechanism"]["published"]["promotions"] for r in (free, held))
    assert n_free > 30
    assert n_held * 5 <= n_free


def test_an_update_queue_grants_what_a_forgetful_control_drops() -> None:
    model = toy_model(n_layers=2, n_experts=16)
    routing = SyntheticRouting(2, 16, 1, "zipf", seed=9)
    found = {}
    for queue in (False, True):
        setup = Setup(
            "dynaexq", versions_bytes(40, 12) + 120_000, 60_000,
            options={"interval": 60.0, "n_high": 4, "margin": 0.0}, update_queue=queue, slack=1,
        )  # fmt: skip
        device = toy_device(h2d_bytes_per_s=1e6)
        result = simulate(setup, model, device, routing, batch_of(8, 1, 60))
        mechanism = result.report["mechanism"]
        found[queue] = (mechanism["published"]["promotions"], result.report["high_share"])
        assert (mechanism["policy"]["granted_late"] > 0) is queue
    assert found[True] > found[False]


def test_adaptation_is_found_where_it_is() -> None:
    from repro.simulate.result import PassTrail, Phase

    counts = np.array([[6, 2]], dtype=np.uint16)
    best = np.array([[True, False]])
    rows = [
        PassTrail(float(i), "decode", "", counts, 2 if i < 10 else 6, 8, 0.0) for i in range(40)
    ]
    assert adaptation(Phase("", tuple(rows)), best) == 10
    assert adaptation(Phase("", tuple(rows[:10])), best) is None
