"""Profiles of devices: every number has a source; the fit finds a device that is known."""

from dataclasses import replace

import numpy as np
import pytest

from repro.errors import UnknownNameError
from repro.simulate import (
    DEVICES,
    CostModel,
    KernelCost,
    Point,
    SimulationError,
    fit_device,
    get_device,
    published_model,
    uniform_work,
)
from repro.simulate.device import OURS

MODEL = published_model("Qwen3-30B-A3B")
H200 = get_device("h200")


@pytest.mark.parametrize("name", DEVICES)
def test_every_number_of_a_profile_says_where_it_comes_from(name: str) -> None:
    device = DEVICES[name]
    wanted = {*device.numbers(), *(f"kernels.{k}" for k in device.kernels)}
    assert set(device.sources) == wanted
    for field, source in device.sources.items():
        assert len(source) > 10, field
        assert OURS in source or "NVIDIA" in source or "measured" in source or "nothing" in source


def test_a_number_without_a_source_or_without_sense_is_refused() -> None:
    fewer = {k: v for k, v in H200.sources.items() if k != "flops_per_s"}
    with pytest.raises(SimulationError, match="flops_per_s of device 'h200' has no source"):
        replace(H200, sources=fewer)
    with pytest.raises(SimulationError, match="hbm_bytes_per_s=0"):
        replace(H200, hbm_bytes_per_s=0)
    with pytest.raises(UnknownNameError, match="h200"):
        get_device("h20")
    with pytest.raises(UnknownNameError, match="max"):
        replace(H200, combine="mean")  # type: ignore[arg-type]


def test_decoding_cost_reproduces_what_was_timed() -> None:
    weights = 64 * 1536 * 2048
    nested = H200.kernel("any-precision")
    for n_bits, times_faster in ((3, 1.87), (4, 1.53), (5, 1.26), (6, 1.19), (8, 1.04)):
        found = nested.seconds_per_weight(n_bits) * weights
        assert found == pytest.approx(109e-6 / times_faster, rel=0.12), n_bits
    assert H200.kernel("group-affine").seconds_per_weight(4) * weights == pytest.approx(91e-6)


def test_a_decode_step_at_batch_1_takes_what_was_measured() -> None:
    work = uniform_work(H200, MODEL, "bf16", 16, n_sequences=1, active_share=8 / 128)
    assert CostModel(H200, MODEL).pass_s(work) == pytest.approx(10.8e-3, rel=0.05)


def _points(truth, noise: float, seed: int = 0) -> list[Point]:  # type: ignore[no-untyped-def]
    """Passes as a device with other constants would take them."""
    rng = np.random.default_rng(seed)
    factor = truth.kernel("any-precision").base_s / H200.kernel("any-precision").base_s
    points = []
    for batch, share in ((1, 0.0625), (8, 0.33), (2, 0.12), (16, 0.45), (32, 0.58)):
        for name, n_bits in (("bf16", 16), ("int4-g128", 4), ("any-precision", 3)):
            for tokens in (1, 256):
                work = uniform_work(
                    H200, MODEL, name, n_bits,
                    n_sequences=batch, tokens_each=tokens, cached_each=512,
                    active_share=share if tokens == 1 else 0.95,
                )  # fmt: skip
                real = replace(work, expert_decode=work.expert_decode * factor)
                seconds = CostModel(truth, MODEL).pass_s(real) * rng.normal(1, noise)
                points.append(Point(work, seconds, batch, f"{name} x{batch}"))
    return points


@pytest.mark.parametrize("combine", ["max", "sum"])
def test_the_fit_finds_a_known_device_and_predicts_held_out_batches(combine: str) -> None:
    device = replace(H200, combine=combine)  # type: ignore[arg-type]
    truth = device.changed(
        "made up",
        step_fixed_s=device.step_fixed_s * 0.4,
        layer_fixed_s=device.layer_fixed_s * 0.4,
        hbm_bytes_per_s=device.hbm_bytes_per_s * 0.7,
        flops_per_s=device.flops_per_s * 0.5,
        kernels={
            n: KernelCost(k.base_s * 1.6, k.per_bit_s * 1.6) for n, k in device.kernels.items()
        },
    )
    fit = fit_device(device, MODEL, _points(truth, 0.0))
    assert fit.factors["fixed"] == pytest.approx(0.4, rel=0.01)
    assert fit.factors["bytes"] == pytest.approx(1 / 0.7, rel=0.01)
    assert fit.factors["flops"] == pytest.approx(2.0, rel=0.01)
    assert fit.factors["decode"] == pytest.approx(1.6, rel=0.01)
    assert max(np.abs(fit.held_out)) < 0.01
    assert len(fit.fitted) == 12 and len(fit.held_out) == 18
    assert fit.device.sources["hbm_bytes_per_s"] == "fitted to measured passes"
    assert fit.device.hbm_bytes_per_s == pytest.approx(truth.hbm_bytes_per_s, rel=0.01)


def test_the_fit_bears_noise_and_states_its_error() -> None:
    truth = H200.changed("made up", hbm_bytes_per_s=3e12, layer_fixed_s=60e-6)
    fit = fit_device(H200, MODEL, _points(truth, 0.05, seed=3))
    found = fit.to_json()
    assert 0 < found["held_out"]["worst"] < 0.2
    assert found["held_out"]["mean"] < 0.08
    assert found["held_out"]["n"] == 18


def test_what_the_points_do_not_determine_keeps_its_value() -> None:
    works = [
        uniform_work(H200, MODEL, "bf16", 16, n_sequences=b, active_share=s)
        for b, s in ((1, 0.0625), (8, 0.33))
    ]
    points = [
        Point(w, CostModel(H200, MODEL).pass_s(w), b) for w, b in zip(works, (1, 8), strict=True)
    ]
    fit = fit_device(H200, MODEL, points)
    assert fit.factors["flops"] == pytest.approx(1.0)  # never the longest at batch 1 and 8
    assert fit.factors["decode"] == pytest.approx(1.0)
    assert fit.held_out == ()


def test_points_that_say_nothing_are_refused() -> None:
    points = _points(H200, 0.0)
    with pytest.raises(SimulationError, match="no point has a batch of"):
        fit_device(H200, MODEL, points, fit_batches=(64,))
    with pytest.raises(SimulationError, match="not positive"):
        fit_device(H200, MODEL, [replace(points[0], seconds=0.0)])
