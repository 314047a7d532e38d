"""Prompt heads: a planted relation is found, noise is left alone, everything is reproducible."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.calibration.blocks import BlockRef
from repro.calibration.damage import Damage
from repro.calibration.features import PromptFeatures, prompt_features
from repro.calibration.heads import Head, Heads
from repro.calibration.probes import probing
from repro.calibration.ridge import Fit, fit_ridge
from repro.calibration.scores import r_squared, rank_correlation, ranks
from repro.calibration.table import SensitivityTable
from repro.calibration.training import (
    all_transitions,
    examples,
    held_out_prompts,
    train_heads,
)
from repro.contract import Block
from repro.errors import CheckpointError, UnknownNameError
from repro.integration.experts import experts_layers
from repro.models.tiny import tiny_model

WEIGHTS = np.array([0.8, -0.5, 0.3])
N_PROMPTS, N_EXPERTS = 24, 10


def _world(strength: float = 1.0, noise: float = 0.1, seed: int = 0):
    """Damage = g * mass ratio * exp(planted line + noise), for 40 blocks and 24 prompts."""
    rng = np.random.default_rng(seed)
    shape = (N_PROMPTS, 2, N_EXPERTS, 2)
    values = np.exp(rng.standard_normal((*shape, 3)))
    mass = rng.random(shape[:3]) * 10 + 0.1
    n_tokens = rng.integers(50, 60, N_PROMPTS)
    s = np.exp(rng.standard_normal((2, N_EXPERTS, 2, 1))) * np.array([4.0, 1.0])
    table = SensitivityTable(
        s, (2, 3), (0, 1), "fisher", np.zeros((2, N_EXPERTS), bool),
        np.ones((2, N_EXPERTS)), rng.random((2, N_EXPERTS)) + 0.1,
    )  # fmt: skip
    blocks = tuple(BlockRef(i, e, b) for i in range(2) for e in range(N_EXPERTS) for b in Block)
    kl = np.zeros((len(blocks), 2, N_PROMPTS))
    for row, ref in enumerate(blocks):
        at = (ref.layer_index, ref.expert)
        ratio = mass[:, at[0], at[1]] / n_tokens / table.mass[at]
        line = np.log(values[:, at[0], at[1], ref.block]) @ WEIGHTS * strength - 1.0
        error = noise * rng.standard_normal(N_PROMPTS)
        kl[row] = s[at][ref.block][:, None] * ratio * np.exp(line + error)
    damage = Damage(blocks, (2, 3), kl, kl, np.full(N_PROMPTS, 50), np.ones(N_PROMPTS))
    return table, damage, PromptFeatures(values, mass, n_tokens, (0, 1))


def test_a_planted_relation_is_found():
    table, damage, features = _world()
    heads, report = train_heads(table, damage, features)
    assert len(report) == len(heads.heads) == 2 * 3
    for row in report:
        assert row["r2_log_residual"] > 0.95 and row["confidence"] == 1.0
        assert row["r2_g"] < row["r2_g_mass"] < row["r2_g_mass_eta"]
        assert row["rank_g"] < row["rank_g_mass"] < row["rank_g_mass_eta"]
        assert row["within_block_g_mass_eta"] > row["within_block_g_mass"] + 0.1
        assert row["n_train"] + row["n_test"] == 20 * N_PROMPTS and row["excluded"] == {}
    fit = heads.head(Block.DOWN, 16, 2).fit
    slopes = np.asarray(fit.weights) / np.asarray(fit.scale)
    np.testing.assert_allclose(slopes, WEIGHTS, atol=0.05)
    # eta is the factor on g * mass ratio
    some = features.values[3, 1, 4, Block.DOWN]
    expected = np.exp(np.log(some) @ WEIGHTS - 1.0)
    assert heads.eta(Block.DOWN, 16, 2, some) == pytest.approx(expected, rel=0.15)


def test_pure_noise_explains_nothing():
    table, damage, features = _world(strength=0.0, noise=1.0)
    heads, report = train_heads(table, damage, features)
    for row in report:
        assert abs(row["r2_log_residual"]) < 0.05
    for head in heads.heads.values():
        assert max(np.abs(head.fit.weights)) < 0.25


def test_noise_around_zero_is_not_trusted():
    rng = np.random.default_rng(3)
    features, prompts = np.exp(rng.standard_normal((400, 3))), np.arange(400) % 20
    fit = fit_ridge(features, rng.standard_normal(400), prompts)
    assert np.abs(fit.log_eta(features)).max() < 0.2


@settings(max_examples=20)
@given(st.integers(0, 100))
def test_clip_bounds_hold_and_fits_repeat(seed):
    rng = np.random.default_rng(seed)
    features, prompts = np.exp(rng.standard_normal((120, 3))), np.arange(120) % 8
    residual = np.log(features) @ WEIGHTS + rng.standard_t(2, 120)
    fit = fit_ridge(features, residual, prompts, seed=seed)
    assert fit == fit_ridge(features, residual, prompts, seed=seed)
    far = np.exp(rng.standard_normal((50, 3)) * 20)
    bounds = sorted(fit.confidence * np.asarray(fit.clip))
    found = fit.log_eta(far)
    assert (found >= bounds[0] - 1e-12).all() and (found <= bounds[1] + 1e-12).all()
    assert 0 <= fit.confidence <= 1 and fit.clip[0] >= residual.min()


def test_folds_hold_whole_prompts():
    """A feature that only names the prompt explains all of it, and nothing of an unseen one."""
    rng = np.random.default_rng(0)
    prompts = np.repeat(np.arange(10), 40)
    per_prompt = rng.standard_normal(10)
    features = np.exp(np.stack([rng.standard_normal(10)[prompts]] * 3, axis=1))
    fit = fit_ridge(features, per_prompt[prompts], prompts)
    unseen = np.exp(np.repeat(rng.standard_normal((200, 1)), 3, axis=1))
    assert np.std(fit.log_eta(unseen)) < 0.6 * np.std(per_prompt)


def test_without_prompts_to_hold_out_nothing_is_trusted():
    features = np.exp(np.random.default_rng(0).standard_normal((30, 3)))
    one = fit_ridge(features, np.log(features) @ WEIGHTS, np.zeros(30, dtype=np.int64))
    none = fit_ridge(features[:0], np.zeros(0), np.zeros(0, dtype=np.int64))
    for fit in (one, none):
        assert fit.confidence == 0 and not fit.log_eta(features).any()
    # constant and missing features
    flat = np.ones((40, 3))
    flat[:5] = 0
    fit = fit_ridge(flat, np.arange(40.0), np.arange(40) % 4)
    assert np.isfinite(fit.log_eta(np.zeros((2, 3)))).all()


def test_examples_without_a_target_are_counted():
    table, damage, features = _world()
    features.mass[0, 0, 0] = 0  # not chosen by one prompt
    table.mass[0, 1] = 0  # never in calibration
    table.s[0, 2] = 0  # nothing predicted
    damage.kl[:, :, 5] = 0  # nothing measured
    damage.n_scored[6] = 0
    found = examples(table, damage, features, Block.DOWN, (16, 2))
    assert found.excluded == {
        "nothing scored": 20,
        "not routed by the prompt": 1,
        "not routed in calibration": 23,
        "no damage predicted": 23,
        "no damage measured": 18,
    }
    assert len(found.residual) == 20 * N_PROMPTS - 85 and np.isfinite(found.residual).all()
    down = examples(table, damage, features, Block.DOWN, (3, 2))
    i = 40 - 1
    mine = (down.block == i) & (down.prompt == 1)
    assert down.log_damage[mine] == pytest.approx(np.log(damage.kl[i, 0, 1] - damage.kl[i, 1, 1]))
    with pytest.raises(UnknownNameError, match="damage at 5 bits"):
        examples(table, damage, features, Block.DOWN, (16, 5))


def test_prompts_that_do_not_fit_are_refused():
    table, damage, features = _world()
    fewer = PromptFeatures(features.values[:3], features.mass[:3], features.n_tokens[:3], (0, 1))
    with pytest.raises(UnknownNameError, match="features of 3 prompts"):
        train_heads(table, damage, fewer)


def test_every_domain_is_on_both_sides():
    domains = ["text"] * 8 + ["math"] * 4 + ["code"]
    held = held_out_prompts(13, 0.25, 0, domains)
    assert held[:8].sum() == 2 and held[8:12].sum() == 1 and not held[12]
    assert held_out_prompts(1, 0.25, 0).sum() == 0 and held_out_prompts(2, 0.9, 0).sum() == 1


def test_transitions_are_all_ways_down():
    assert all_transitions((2, 4, 3)) == ((16, 4), (16, 3), (16, 2), (4, 3), (4, 2), (3, 2))


def test_heads_are_stored_and_refused_by_name(tmp_path):
    table, damage, features = _world()
    heads, _ = train_heads(table, damage, features, meta={"model": "abc"})
    path = tmp_path / "heads.json"
    heads.save(path)
    again = Heads.load(path, model="abc")
    assert again.meta == {"model": "abc"}
    for key, head in heads.heads.items():
        assert again.heads[key] == head
    first = path.read_bytes()
    again.save(path)
    assert path.read_bytes() == first
    with pytest.raises(CheckpointError, match=r"heads.json.*another model"):
        Heads.load(path, model="abd")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "layout_version": 0}))
    with pytest.raises(CheckpointError, match="layout 0, this version reads 1"):
        Heads.load(path)
    del content["heads"][0]["clip"]
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="not a whole file of heads"):
        Heads.load(path)
    path.write_text(json.dumps(content)[:50])
    with pytest.raises(CheckpointError, match="not a whole file of heads"):
        Heads.load(path)
    with pytest.raises(CheckpointError, match="calibrate first"):
        Heads.load(tmp_path / "other.json")
    with pytest.raises(UnknownNameError, match="down 4->2"):
        heads.head(Block.DOWN, 4, 2)


def test_eta_of_unknown_norms_is_that_of_average_ones():
    fit = Fit((0.0,) * 3, (1.0,) * 3, (1.0, 0.0, 0.0), 0.5, (-1.0, 2.0), 0.5, 1.0)
    head = Head(Block.DOWN, 4, 3, fit, 10)
    norms = np.array([[0.0, 0.0, 0.0], [1.0, 5.0, 5.0], [np.e, 1, 1], [1e9, 1, 1], [1e-9, 1, 1]])
    np.testing.assert_allclose(np.log(head.eta(norms)), [0.25, 0.25, 0.75, 1.0, -0.5])


def test_extended_heads_learn_the_power_of_the_mass(tmp_path):
    table, damage, features = _world()
    for row, ref in enumerate(damage.blocks):
        mass = features.mass[:, ref.layer_index, ref.expert] / features.n_tokens
        damage.kl[row] *= (mass / table.mass[ref.layer_index, ref.expert]) ** 0.7
    transitions = [(16, 2)]
    _, plain = train_heads(table, damage, features, transitions=transitions)
    heads, extended = train_heads(table, damage, features, transitions=transitions, extended=True)
    for before, after in zip(plain, extended, strict=True):
        assert before["r2_log_residual"] < 0.8 and after["r2_log_residual"] > 0.95
    fit = heads.head(Block.DOWN, 16, 2).fit
    assert fit.weights[3] / fit.scale[3] == pytest.approx(0.7, abs=0.05)
    heads.save(tmp_path / "heads.json")
    assert Heads.load(tmp_path / "heads.json") == heads


def test_scores():
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]
    assert rank_correlation(np.arange(5.0), np.exp(np.arange(5.0))) == pytest.approx(1)
    assert np.isnan(rank_correlation(np.ones(4), np.arange(4.0)))
    assert r_squared(np.array([1.0, 2, 3]), np.array([1.0, 2, 3])) == 1
    assert r_squared(np.array([1.0, 2, 3]), np.full(3, 2.0)) == 0


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_features_equal_a_loop_over_tokens(arch):
    model = tiny_model(arch)
    ids = torch.randint(2, 64, (4, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :5] = False
    found = prompt_features(model, ids, mask, micro_batch=3)
    whole = prompt_features(model, ids, mask, micro_batch=4)
    np.testing.assert_allclose(found.values, whole.values, rtol=1e-4, atol=1e-7)
    assert found.n_tokens.tolist() == [9, 4, 9, 9]
    layers = experts_layers(model)
    assert found.layer_ids == tuple(x.layer_index for x in layers)

    class Keep:
        gradients = False

        def __init__(self):
            self.calls = []

        def wants(self, layer_index):
            return True

        def begin(self, layer_index, top_k_index, top_k_weights):
            pass

        def expert(self, call):
            self.calls.append(call)

        def end(self, layer_index):
            pass

    probe = Keep()
    with probing(model, probe), torch.no_grad():
        model(ids, attention_mask=mask.long())
    expected = {}
    for call in probe.calls:
        for i, token in enumerate(call.token.tolist()):
            if not mask.reshape(-1)[token]:
                continue
            for block, x in ((0, call.inputs[i]), (1, call.inner[i])):
                key = (token // 9, found.layer_ids.index(call.layer_index), call.expert, block)
                norm = float(x.double().norm())
                expected.setdefault(key, []).append((float(call.weight[i]), norm))
    seen = np.zeros(found.values.shape[:4], dtype=bool)
    for key, rows in expected.items():
        r, norm = np.array(rows).T
        seen[key] = True
        assert found.mass[key[:3]] == pytest.approx(r.sum(), rel=1e-5)
        np.testing.assert_allclose(
            found.values[key],
            [(r * norm).sum() / r.sum(), np.sqrt((r * norm**2).sum() / r.sum()), norm.max()],
            rtol=1e-4,
        )
    assert not found.values[~seen].any() and not found.mass[~seen[..., 0]].any()
