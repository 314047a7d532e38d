"""The demotion experiment from end to end, on a small random model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from repro import profiles
from repro.calibration.blocks import block_weights
from repro.errors import DataUnavailableError
from repro.experiments import demotion
from repro.experiments.demotion import Placement, Sweep, Tiers
from repro.experiments.evaluation import Evaluation
from repro.formats.registry import format_name
from repro.formats.tiers import get_pair
from repro.models.tiny import tiny_model
from repro.reporting import demotion_curves as dc
from repro.reporting.records import RecordStore

PROFILE = profiles.get(
    "tiny",
    models=("moe-fine",),
    bootstrap_samples=50,
    calibration_prompts=3,
    calibration_tokens=32,
    demotion_prompts=3,
    demotion_context_tokens=24,
    demotion_scored_tokens=8,
)
DOMAINS = {"text": "prose", "math": "word-problems", "code": "python"}
N_EXPERTS, N_SHARES = 8, 8


@pytest.fixture(scope="module")
def project(root: Path, tmp_path_factory) -> Path:
    """An empty project with a random model of 8 experts, and the real tokenizer."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "notebooks").mkdir()
    (folder / "data").mkdir()
    (folder / "data/paper").symlink_to(root / "data/paper", target_is_directory=True)
    torch.manual_seed(0)
    model = tiny_model("qwen3_moe", vocab_size=8192, num_experts=N_EXPERTS)
    for name, weight in model.named_parameters():
        if "experts" in name:  # loud experts, so that rounding them shows
            weight.data.mul_(20)
    model.save_pretrained(folder / "data/models/moe-fine")
    models = root / "data/models"
    tokenizer = next(d for d in models.iterdir() if (d / "tokenizer.json").is_file())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / "data/models/moe-fine" / name)
    return folder


@pytest.fixture(autouse=True)
def _here(project: Path, monkeypatch) -> None:
    monkeypatch.setenv("REPRO_ROOT", str(project))


@pytest.fixture(autouse=True, scope="module")
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def evaluation(project: Path) -> Evaluation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_ROOT", str(project))
        return Evaluation(PROFILE, "moe-fine", device="cpu", source="embedded")


@pytest.fixture(scope="module")
def records(project: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_ROOT", str(project))
        return demotion.run(PROFILE, RecordStore("tiny"))


def weights(evaluation: Evaluation) -> list[torch.Tensor]:
    return [w for layer in evaluation.layers for w in block_weights(layer.module)]


def test_shares_are_those_of_the_authors():
    for series in dc.published():
        assert series.shares_percent == demotion.SHARES_PERCENT


def test_one_record_for_every_domain_and_pair(records):
    assert len(records) == 3 * 3
    for record in records:
        config = record.config
        assert (record.claim, record.metric, record.unit, record.n) == (
            "DynaExq Figure 3",
            "demotion_curve",
            "nats",
            3,
        )
        assert DOMAINS[config["domain"]] == config["workload"]
        assert config["n_demoted"] == [0, 1, 2, 4, 5, 6, 7, 8]
        assert record.ci_low <= record.value <= record.ci_high
        assert len(record.line()) < 6000
    curves = dc.curves(records)
    assert len(curves) == 27
    assert {(c.pair, c.order) for c in curves} == {(p, o) for p in dc.PAIRS for o in dc.ORDERS}
    for curve in curves:
        assert tuple(curve.columns) == dc.COLUMNS[curve.order]
        assert all(len(column) == N_SHARES for column in curve.columns.values())
        assert curve["increase"][0] == curve["last_increase"][0] == 0.0
        assert (curve["increase_low"] <= curve["increase"]).all()
        assert (curve["increase"] <= curve["increase_high"]).all()


def test_columns_agree_with_each_other(records):
    for curve in dc.curves(records):
        expected = curve["perplexity"][0] * np.exp(curve["increase"])
        np.testing.assert_allclose(curve["perplexity"], expected, rtol=2e-5)
        if curve.order == dc.COLDEST:
            assert (curve["step_error"][1:] > 0).all()
            assert curve["line_error"][[0, -1]] == pytest.approx(0, abs=1e-9)
            assert (curve["perplexity_low"] < curve["perplexity_high"]).all()
        else:
            assert curve["coldest_error"][[0, -1]] == pytest.approx(0)
            assert (curve["coldest_error"][1:-1] > 0).any()


def test_endpoints_are_the_whole_model_quantised(records, evaluation):
    for domain, workload in DOMAINS.items():
        ids = evaluation.windows(workload, 3, 32)
        for pair in dc.PAIRS:
            tiers = get_pair(pair)
            for tier, place in ((tiers.high, 0), (tiers.low, -1)):
                stacks = evaluation.encode(format_name(tier))
                (n_bits,) = next(iter(stacks.values()))[0].widths
                with evaluation.restored():
                    evaluation.put(stacks, n_bits)
                    losses = evaluation.token_losses(ids)
                found = [c for c in dc.curves(records, pair=pair) if c.identity.domain == domain]
                assert len(found) == 3
                for curve in found:
                    expected = np.exp(losses.mean())
                    assert curve["perplexity"][place] == pytest.approx(expected, rel=1e-5)
                    if curve.order == dc.COLDEST:
                        expected = np.exp(losses[:, -8:].mean())
                        assert curve["last_perplexity"][place] == pytest.approx(expected, rel=1e-5)


def test_pairs_that_share_a_tier_share_its_endpoint(records):
    for domain in DOMAINS:
        ppl = {
            c.pair: c["perplexity"]
            for c in dc.curves(records, order=dc.COLDEST)
            if c.identity.domain == domain
        }
        assert ppl["fp16/int4"][0] == ppl["fp16/int2"][0]
        assert ppl["fp16/int4"][-1] == ppl["int4/int2"][0]
        assert ppl["fp16/int2"][-1] == ppl["int4/int2"][-1]


def test_every_state_is_measured_once(evaluation, monkeypatch):
    calls = []
    measure = evaluation.token_losses
    monkeypatch.setattr(evaluation, "token_losses", lambda ids: calls.append(1) or measure(ids))
    sweep = Sweep(Tiers(evaluation), "text", "prose")
    for pair in dc.PAIRS:
        demotion.measure_pair(sweep, pair)
    assert len(calls) == 3 * 3 * (N_SHARES - 2) + 3


def test_the_ranking_is_of_other_text_and_of_the_domain_alone(evaluation, monkeypatch):
    """Counts are those of the calibration windows, which are no windows that losses are of."""
    counts = {domain: demotion.routing_counts(evaluation, domain) for domain in DOMAINS}
    for domain, found in counts.items():
        ranked_on = evaluation.calibration_windows(domain)
        read = evaluation.windows(DOMAINS[domain], 3, 32)
        assert not {tuple(w) for w in ranked_on.tolist()} & {tuple(w) for w in read.tolist()}
        for layer in found.values():
            assert layer.sum() == ranked_on.numel() * 2
    assert any((counts["text"][i] != counts["code"][i]).any() for i in (0, 1))
    swapped = evaluation.calibration_windows("code")
    monkeypatch.setattr(evaluation, "calibration_windows", lambda domain: swapped)
    again = demotion.routing_counts(evaluation, "text")
    assert all((again[i] == counts["code"][i]).all() for i in (0, 1))


def test_the_ranking_is_frozen(evaluation):
    sweep = Sweep(Tiers(evaluation), "math", "word-problems")
    before = {order: {i: list(r) for i, r in of.items()} for order, of in sweep.rankings.items()}
    sweep.losses("fp16", "int2-g64")
    after = {order: {i: list(r) for i, r in of.items()} for order, of in sweep.rankings.items()}
    assert before == after


def test_orders_by_hand():
    counts = {0: np.array([5, 0, 7, 0]), 3: np.array([1, 2, 3, 4])}
    found = demotion.rankings(counts, [0])
    assert list(found["coldest"][0]) == [1, 3, 0, 2]  # of equals the lower number first
    assert list(found["hottest"][0]) == [2, 0, 3, 1]
    assert list(found["hottest"][3]) == [3, 2, 1, 0]
    assert sorted(found["random"][0]) == [0, 1, 2, 3]
    again = demotion.rankings(counts, [0])
    other = demotion.rankings({0: np.arange(64)}, [1])
    assert list(again["random"][0]) == list(found["random"][0])
    assert list(other["random"][0]) != list(demotion.rankings({0: np.arange(64)}, [2])["random"][0])


@pytest.mark.parametrize(("share", "n"), [(0, 0), (15, 7), (30, 14), (45, 22), (90, 43), (100, 48)])
def test_demoted_experts_of_48(share, n):
    assert demotion.n_demoted(share, 48) == n


def test_only_the_demoted_experts_are_low(evaluation):
    tiers = Tiers(evaluation)
    high, low = tiers.decoded("fp16"), tiers.decoded("int2-g64")
    with evaluation.restored():
        placement = Placement(evaluation.layers, {"fp16": high, "int2-g64": low})
        for demoted in ([3], [3, 1, 0], [2], []):
            placement.put("fp16", "int2-g64", {i: np.array(demoted, dtype=int) for i in (0, 1)})
            for layer in evaluation.layers:
                stacks = zip(
                    block_weights(layer.module),
                    high[layer.layer_index].values(),
                    low[layer.layer_index].values(),
                    strict=True,
                )
                for weight, as_high, as_low in stacks:
                    for expert in range(N_EXPERTS):
                        expected = as_low if expert in demoted else as_high
                        assert torch.equal(weight[expert], expected[expert])


def test_the_model_gets_its_own_weights_back(evaluation, monkeypatch):
    before = [w.clone() for w in weights(evaluation)]
    sweep = Sweep(Tiers(evaluation), "text", "prose")
    demotion.measure_pair(sweep, "fp16/int2")
    assert all(map(torch.equal, before, weights(evaluation)))

    def fail(ids):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "token_losses", fail)
    with pytest.raises(KeyboardInterrupt):
        Sweep(Tiers(evaluation), "text", "prose").losses("int4-g128", "int2-g64")
    assert all(map(torch.equal, before, weights(evaluation)))


def test_a_killed_run_loses_one_point_and_repeats_it_exactly(records, evaluation, monkeypatch):
    """Also that nothing is encoded from weights that are in place of the model's own."""
    monkeypatch.setattr(demotion, "Evaluation", lambda *_, **__: evaluation)
    path = RecordStore("tiny").path("demotion")
    lines = path.read_text().splitlines(keepends=True)
    try:
        path.write_text("".join(lines[:-1]))  # without text at INT4 to INT2
        store = RecordStore("tiny")
        repeated = demotion.run(PROFILE, store)
        assert (store.n_measured, store.n_loaded) == (1, 8)
        assert [r.timeless() for r in repeated] == [r.timeless() for r in records]
    finally:
        path.write_text("".join(lines))


def test_a_curve_by_hand():
    """Losses of two windows under three of the shares, the others as the one before."""
    shares = [0, 0, 1, 1, 1, 2, 2, 3]
    all_tokens = np.array([[1.0, 2.0], [1.1, 2.1], [1.2, 2.4], [1.8, 2.6]])[shares]
    losses = np.stack([all_tokens, 2 * all_tokens], axis=1)
    draws = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    found = demotion.curve(losses, losses, draws, n_experts=4)
    np.testing.assert_allclose(found["increase"], np.array([0, 0.1, 0.3, 0.7])[shares])
    np.testing.assert_allclose(found["last_increase"], 2 * found["increase"])
    np.testing.assert_allclose(found["perplexity"], np.exp(np.array([1.5, 1.6, 1.8, 2.2])[shares]))
    assert found["step_error"][5] == pytest.approx(0.1)  # steps of 0.1 and 0.3: mean 0.2 +- 0.1
    assert found["line_error"][-1] == pytest.approx(0, abs=1e-12)
    # one of four is 1/4: 0.1 - 0.8/4 and 0.1 - 0.6/4
    assert found["line_error"][2] == pytest.approx(0.025)
    assert (found["coldest_error"] == 0).all()
    assert found["increase_low"][-1] < 0.7 < found["increase_high"][-1]
    assert found["increase_low"][2] == pytest.approx(0.1)  # alike in both windows: no width
    assert found["increase_high"][2] == pytest.approx(0.1)


def test_a_workload_of_one_window_has_no_interval(evaluation, monkeypatch):
    one = evaluation.windows("prose", 1, 32)
    monkeypatch.setattr(evaluation, "windows", lambda *_: one)
    with pytest.raises(DataUnavailableError, match="'prose' holds one window of 32 tokens"):
        Sweep(Tiers(evaluation), "text", "prose").losses("fp16", "int4-g128")


def test_long_windows_of_code_come_from_held_out_packages(evaluation, monkeypatch):
    assert demotion.workloads_of(evaluation) == DOMAINS
    monkeypatch.setattr(evaluation, "source", "folder")
    assert demotion.workloads_of(evaluation) == DOMAINS | {"code": "python-heldout"}
