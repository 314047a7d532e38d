"""Experiments on serving: they run on a small random model and record what was seen."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from repro import experiments, paths, profiles
from repro.experiments import serving_pressure, serving_setup, serving_transitions, serving_trial
from repro.models.tiny import tiny_config
from repro.reporting.claims import evaluate_all
from repro.reporting.grouping import select
from repro.reporting.records import Record
from repro.reporting.serving_records import (
    GIVES,
    KEEPS,
    pressures,
    promotions,
    series,
    servings,
    value,
)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> str:
    """A random model with two layers of sixteen experts and the bundled tokenizer."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("small")
    config = tiny_config("qwen3_moe", num_experts=16, max_position_embeddings=512)
    config.vocab_size = 8192
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in (paths.models_dir() / "moe-fine").glob("tokenizer*"):
        shutil.copy(path, folder)
    return str(folder)


@pytest.fixture(scope="module")
def records(small_model, tmp_path_factory) -> dict[str, list[Record]]:
    """Every experiment once, by name; shorter, but with nothing left out."""
    out = tmp_path_factory.mktemp("records")
    profile = profiles.get("tiny", models=(small_model,))
    with pytest.MonkeyPatch.context() as patch:
        for module in (serving_transitions, serving_pressure):
            patch.setattr(module, "MODEL", small_model)
        patch.setattr(serving_transitions, "STEPS_OF_A_COPY", 12)
        patch.setattr(serving_pressure, "SAMPLES", 3)
        patch.setattr(serving_pressure, "TEXT_TOKENS", 48)
        patch.setattr(serving_trial, "PHASES", {"cpu": (2, 4)})
        patch.setattr(serving_trial, "NEW_TOKENS", {"cpu": 6})
        serving_setup.codes.cache_clear()
        found = {
            name: experiments.run(name, profile, out=out)
            for name in ("transitions", "kv-pressure", "serving")
        }
        again = experiments.run("kv-pressure", profile, out=out)
        assert [r.key for r in again] == [r.key for r in found["kv-pressure"]]
    return found


def test_steps_overtake_a_copy_and_switch_once(records):
    found = list(promotions(records["transitions"]))
    assert [layout for _, layout, _ in found] == ["versions", "planes"]
    for _, _, point in found:
        widths = series(point, "step_width")
        assert len(set(widths)) == 2 and (np.diff(widths) != 0).sum() == 1
        assert value(point, "steps_on_old_version") >= 5
        assert value(point, "weight_wait_s") == 0
        moments = [
            value(point, f"{name}_s")
            for name in ("submitted", "copy_began", "copy_ended", "published", "reclaimed")
        ]
        assert moments == sorted(moments)


def test_the_picture_of_the_engine_is_of_a_busy_one(records):
    (record,) = select(records["transitions"], metric="engine_state")
    state = record.config["snapshot"]
    assert state["states"]["promoting"] + state["states"]["demoting"] > 0
    assert sum(pool["used_bytes"] for pool in state["pools"].values()) == state["used_bytes"]


def test_pressure_is_met_by_weights_that_give_way_only(records):
    runs = {policy: point for _, policy, point in pressures(records["kv-pressure"])}
    gives, keeps = runs[GIVES], runs[KEEPS]
    for point in runs.values():
        assert max(series(point, "used_bytes")) <= value(point, "budget_bytes")
        assert value(point, "requests_finished") == serving_pressure.N_REQUESTS
    assert value(keeps, "lent_share_at_peak") == 0
    assert value(gives, "lent_share_at_peak") > 0
    assert value(gives, "final_mean_bits") == value(gives, "first_mean_bits")
    assert gives["restored_bit_for_bit"].value is True
    n_samples = len(series(gives, "bits_per_byte"))
    assert len(series(gives, "block_bits")) == n_samples * int(gives["block_bits"].n or 0)


def test_serving_changes_and_comes_back(records):
    found = list(servings(records["serving"]))
    assert [layout for *_, layout, _ in found] == ["versions", "planes"]
    for *_, point in found:
        assert point["restored_bit_for_bit"].value is True
        assert 0 < value(point, "changes_published") <= value(point, "changes_accepted")
        assert len(series(point, "step_s on")) == len(series(point, "step_s off")) == 8


def test_records_are_small(records):
    for found in records.values():
        assert sum(len(record.line()) for record in found) < 150_000
        assert all(np.isfinite(np.array(r.series or [0], dtype=float)).all() for r in found)


def test_every_claim_has_an_answer(records):
    every = [record for found in records.values() for record in found]
    results = {r.claim.code: r for r in evaluate_all(every) if r.claim.code[0] in "CK"}
    assert len(results) == 10
    assert {r.verdict for r in results.values()} <= {"pass", "fail"}
    for code in ("C1", "C2", "C2.1", "C3", "K3"):
        assert results[code].verdict == "pass", results[code].found


def test_widths_that_do_not_fit_are_said_to_be_so(small_model):
    options = {"policy": "static", "n_bits": 2, "worker": "manual"}
    with serving_setup.engine(small_model, "planes", "cpu", **options) as probe:
        bits = np.full_like(probe.residency.n_bits, 8)
        floor = probe.residency.weight_budget_bytes
    small = {**options, "budget_bytes": floor, "kv_bytes": 0}
    with (
        serving_setup.engine(small_model, "planes", "cpu", **small) as engine,
        pytest.raises(RuntimeError, match="no room"),
    ):
        for _ in range(2):
            engine.residency.reserve(engine.residency.free_bytes("kv"), "kv")
        serving_pressure.set_widths(engine, bits)
