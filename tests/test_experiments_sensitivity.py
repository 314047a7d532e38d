"""Sensitivity experiment: planted worlds give known records; a small real model runs through."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from repro import paths, profiles
from repro.calibration.agreement import predictions
from repro.calibration.blocks import BlockRef
from repro.calibration.damage import Damage
from repro.calibration.features import PromptFeatures
from repro.calibration.scores import rank_correlation, resampled_rank_correlation
from repro.calibration.second_order import SecondOrder
from repro.calibration.table import SensitivityTable
from repro.contract import Block
from repro.experiments import sensitivity
from repro.experiments.grids import grid_record, significant
from repro.experiments.sensitivity import BEST, NAMES, loss_predictors, measurements, predictors
from repro.experiments.sensitivity_heads import HEAD_COLUMNS
from repro.experiments.sensitivity_study import WIDTHS, Study
from repro.models.tiny import tiny_config
from repro.reporting.grids import column, grid, row
from repro.reporting.records import Record, RecordStore

N_LAYERS, N_EXPERTS, N_PROMPTS, N_SCORED = 3, 30, 12, 200
WEIGHTS = np.array([1.2, -0.8, 0.4])


def planted(seed: int = 0, *, error: float = 0.2, head: float = 1.0) -> Study:
    """Damage = table x layer factor x mass ratio x exp(head on the norms) x error."""
    rng = np.random.default_rng(seed)
    shape = (N_LAYERS, N_EXPERTS, len(Block))
    usage = rng.dirichlet(np.ones(N_EXPERTS) * 3, N_LAYERS) * 2
    per_token = np.exp(rng.standard_normal(shape)) * 1e-2
    widths = (2, 3, 4, 5, 6, 7, 8)
    s = (per_token * usage[..., None])[..., None] * 4.0 ** -np.arange(len(widths))
    few = np.zeros((N_LAYERS, N_EXPERTS), dtype=bool)

    def table(values: np.ndarray, kind: str) -> SensitivityTable:
        return SensitivityTable(
            values, widths, tuple(range(N_LAYERS)), kind, few, usage, usage / 2, {}
        )

    noise = np.exp(2 * rng.standard_normal(shape))[..., None]
    tables = {"fisher": table(s, "fisher"), "weight": table(s * noise, "weight")}
    tables |= {kind: table(s * noise**0.5, kind) for kind in ("output", "covariance")}
    norms = np.exp(0.5 * rng.standard_normal((N_PROMPTS, *shape, 3)))
    mass = usage / 2 * np.exp(0.3 * rng.standard_normal((N_PROMPTS, N_LAYERS, N_EXPERTS)))
    features = PromptFeatures(
        norms, mass * N_SCORED, np.full(N_PROMPTS, N_SCORED), tuple(range(N_LAYERS))
    )
    layers = np.array([8.0, 1.0, 0.2])
    blocks = tuple(
        BlockRef(i, e, b) for i in range(N_LAYERS) for e in range(N_EXPERTS) for b in Block
    )
    kl = np.empty((len(blocks), len(WIDTHS), N_PROMPTS))
    for place, (i, e, b) in enumerate(blocks):
        ratio = mass[:, i, e] / (usage[i, e] / 2)
        line = head * (np.log(norms[:, i, e, b]) @ WEIGHTS)
        bits = [widths.index(n_bits) for n_bits in WIDTHS]
        kl[place] = s[i, e, b, bits][:, None] * layers[i] * ratio * np.exp(line)
        kl[place] *= np.exp(error * rng.standard_normal((1, N_PROMPTS)))
    loss = kl + np.sqrt(2 * kl / N_SCORED) * rng.standard_normal(kl.shape)
    scored = np.full(N_PROMPTS, N_SCORED)
    damage = Damage(blocks, WIDTHS, kl, loss, scored, np.ones(N_PROMPTS))
    along = np.zeros((N_LAYERS, N_EXPERTS, len(Block), len(WIDTHS)))
    slope = along.copy()
    for place, (i, e, b) in enumerate(blocks):
        along[i, e, b] = kl[place].mean(axis=1)
        slope[i, e, b] = (loss - kl)[place].mean(axis=1)
    order = SecondOrder(along, slope, tuple(range(N_LAYERS)))
    domains = tuple(np.repeat(["text", "math", "code"], N_PROMPTS // 3))
    return Study(tables, damage, features, order, order, domains)


def records(found: Study, root) -> list[Record]:
    profile = profiles.get("tiny", bootstrap_samples=100)
    store = RecordStore("tiny", root=root)
    config = {"model": "moe-fine", "source": "embedded", "seed": 0}
    store.measure_or_load("sensitivity", config, lambda: measurements(found, profile), device="cpu")
    return store.read()


def one(found: list[Record], metric: str, **config: object) -> Record:
    (record,) = [
        r
        for r in found
        if r.metric == metric and all(r.config.get(k) == v for k, v in config.items())
    ]
    return record


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[Record]:
    return records(planted(), tmp_path_factory.mktemp("records"))


def test_what_a_predictor_knows_shows_in_its_rank(found):
    record = one(found, "rank_correlation", target="divergence")
    assert record.config["rows"] == list(predictors(planted()))
    ranks = {name: row(record, name).reshape(-1, 3) for name in record.config["rows"]}
    for least, more in (("weight", "fisher"), ("fisher", BEST), (BEST, "curvature of the text")):
        assert (ranks[more][:, 0] > ranks[least][:, 0]).all()
    best = ranks[BEST]
    assert best[:, 0].min() > 0.9 and ranks["curvature of the text"][:, 0].min() > 0.999
    assert (best[:, 1] < best[:, 0]).all() and (best[:, 0] < best[:, 2]).all()
    assert record.n == N_LAYERS * N_EXPERTS * 2
    assert record.config["columns"][::3] == list(NAMES)


def test_layer_factors_are_found(found):
    factors = grid(one(found, "layer_factors"))
    # The mean of all layers counts for two blocks of a layer's 24, and heads are no constant.
    assert factors[:, 0] / factors[1, 0] == pytest.approx([8, 1, 0.2], rel=0.35)


def test_scatter_points_are_the_measured_blocks(found):
    study = planted()
    record = one(found, "block_damage")
    kl = study.damage.mean("kl")
    expected = kl[:, WIDTHS.index(3)] - kl[:, WIDTHS.index(4)]
    np.testing.assert_allclose(row(record, "4->3 measured"), expected, rtol=1e-2)
    best = predictions(study.tables["fisher"], study.damage, mass=study.mass, scaled=True)
    predicted = row(record, "16->2 predicted")
    np.testing.assert_allclose(predicted, best[:, WIDTHS.index(2)], rtol=1e-2)
    refs = zip(*(row(record, name) for name in ("layer", "expert", "block")), strict=True)
    assert [tuple(map(int, ref)) for ref in refs] == [
        tuple(map(int, r)) for r in study.damage.blocks
    ]


def test_the_loss_is_noise_of_the_stated_size(found):
    record = one(found, "loss_noise")
    assert column(record, "ratio") == pytest.approx([1.0, 1.0], abs=0.25)
    share = column(record, "share above 2 noise")
    assert record.config["rows"] == ["16->4", "16->2"] and share[0] < share[1]
    best = column(record, "best rank")
    truth = planted().damage.mean("kl")[:, WIDTHS.index(2)]
    seen = planted().damage.mean("loss")[:, WIDTHS.index(2)]
    assert best[1] == pytest.approx(rank_correlation(truth, seen), abs=0.15)


def test_the_slope_explains_the_loss():
    named = loss_predictors(planted())
    truth = planted().damage.mean("loss")[:, WIDTHS.index(4)]
    ranks = {k: rank_correlation(truth, v[:, WIDTHS.index(4)]) for k, v in named.items()}
    assert ranks["slope + " + BEST] > 0.95 > ranks[BEST]


def test_damage_grows_and_hot_is_told_from_fragile(found):
    means = column(one(found, "mean_damage"), "divergence")
    assert (np.diff(means) > 0).all() and one(found, "share_growing_at_every_step").value == 1.0
    per_token, total = one(found, "mass_vs_per_token"), one(found, "mass_vs_total")
    assert abs(per_token.value) < 0.35 < total.value  # planted independent of usage
    assert per_token.ci_low < per_token.value < per_token.ci_high
    study = planted()
    usage = study.tables["fisher"].usage
    fragile = study.tables["fisher"].s * usage[..., None, None] ** 3
    tables = study.tables | {"fisher": replace(study.tables["fisher"], s=fragile)}
    (hot,) = [
        m
        for m in measurements(replace(study, tables=tables), profiles.get("tiny"))
        if m.metric == "mass_vs_per_token"
    ]
    assert hot.value > 0.5


def test_heads_find_what_was_planted_and_nothing_else(found, tmp_path):
    for block in ("gate_up", "down"):
        record = one(found, "prompt_heads", block=block)
        assert record.config["columns"] == list(HEAD_COLUMNS)
        assert (column(record, "r2_g_mass_eta") > column(record, "r2_g_mass") + 0.05).all()
        assert (column(record, "confidence") >= 0.8).all()
    flat = records(planted(head=0.0), tmp_path)
    for record in flat:
        if record.metric == "prompt_heads":
            assert (column(record, "r2_log_residual") < 0.2).all()
            loss = column(record, "r2_g_mass") - column(record, "r2_g_mass_eta")
            assert loss.max() < 0.05


def test_resampled_ranks_equal_repeated_values():
    rng = np.random.default_rng(2)
    a = rng.integers(0, 9, 30).astype(float)
    b = a + rng.integers(0, 9, 30)
    counts = rng.multinomial(30, np.full(30, 1 / 30), size=20)
    expected = [rank_correlation(np.repeat(a, c), np.repeat(b, c)) for c in counts]
    np.testing.assert_allclose(resampled_rank_correlation(a, b, counts), expected, atol=1e-12)
    assert np.isnan(resampled_rank_correlation(np.ones(30), b, counts)).all()


def test_grids_keep_their_shape_and_undefined_values(tmp_path):
    item = grid_record("c", "m", ["a", "b"], ["x", "y", "z"], [[1, 2.5, np.nan], [4, 5, 6]], n=2)
    assert item.series == [1.0, 2.5, None, 4, 5, 6] and significant(1.23456789e-9, 3) == 1.23e-9
    store = RecordStore("tiny", root=tmp_path)
    (record,) = store.measure_or_load("x", {"model": "m"}, lambda: [item], device="cpu")
    assert np.isnan(grid(record)[0, 2]) and column(record, "y").tolist() == [2.5, 5]
    with pytest.raises(ValueError, match="6 numbers for 2 x 2"):
        grid(replace(record, config={**record.config, "columns": ["x", "y"]}))


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> str:
    """A random model with two layers of eight experts and the bundled tokenizer."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("small")
    config = tiny_config("qwen3_moe")
    config.vocab_size = 8192
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in (paths.models_dir() / "moe-fine").glob("tokenizer*"):
        shutil.copy(path, folder)
    return str(folder)


def test_a_small_model_runs_through_and_is_not_measured_twice(small_model, tmp_path):
    profile = profiles.get(
        "tiny", models=(small_model,), calibration_prompts=2, calibration_tokens=64,
        damage_blocks=6, damage_prompts=2, damage_tokens=32, bootstrap_samples=50,
    )  # fmt: skip
    store = RecordStore("tiny", root=tmp_path)
    first = sensitivity.run(profile, store)
    assert {r.claim for r in first} == {"PagedWeight sensitivity", "PagedWeight prompt residual"}
    measured = row(one(first, "block_damage"), "16->2 measured")
    assert measured.shape == (6,) and (measured > 0).any()
    ranks = one(first, "rank_correlation", target="divergence")
    assert np.isfinite(row(ranks, "curvature of the text")).all()
    again = RecordStore("tiny", root=tmp_path)
    second = sensitivity.run(profile, again)
    assert again.n_measured == 0 and [r.key for r in second] == [r.key for r in first]
