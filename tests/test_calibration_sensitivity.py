"""Predicted damage: against exact expectations, in every kind, and as a stored table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro.calibration.agreement import agreement
from repro.calibration.blocks import BlockRef, block_weights
from repro.calibration.collect import collect
from repro.calibration.damage import Damage
from repro.calibration.probes import activate, probing
from repro.calibration.scaling import layer_factors, scale_by_layer
from repro.calibration.scores import rank_correlation
from repro.calibration.sensitivity import gain, sensitivity
from repro.calibration.table import LayerSensitivity, SensitivityTable, build_table
from repro.contract import Block
from repro.errors import CheckpointError, UnknownNameError
from repro.integration.experts import expert_matrices, experts_layers
from repro.models.tiny import tiny_model


class Shifted:
    """Decodes to the weight plus a fixed error, larger at fewer bits."""

    def __init__(self, weight: torch.Tensor, error: torch.Tensor, widths=(3, 4)) -> None:
        self._weight, self._error, self.widths = weight.float(), error, widths

    def decode(self, n_bits: int, expert: int | None = None) -> torch.Tensor:
        whole = self._weight + self._error / 2**n_bits
        return whole if expert is None else whole[expert]


@pytest.fixture(scope="module")
def calibrated():
    model = tiny_model("qwen2_moe")
    ids = torch.randint(2, 64, (6, 30), generator=torch.Generator().manual_seed(2))
    calibration = collect(model, ids, hessians=True, fisher=True, min_tokens=1)
    return model, ids, calibration


def _layer(model, calibration, row: int = 1):
    stats = calibration.layers[row]
    return stats, experts_layers(model)[row].module


class _Outputs:
    """The exact change of every expert's weighted output for a changed block."""

    gradients = False

    def __init__(self, layer_index: int, block: Block, error: torch.Tensor, even: bool) -> None:
        self.layer_index, self.block, self.error, self.even = layer_index, block, error, even
        self.total = torch.zeros(len(error), dtype=torch.float64)

    def wants(self, layer_index):
        return layer_index == self.layer_index

    def begin(self, layer_index, top_k_index, top_k_weights):
        self.n_tokens = len(top_k_index)

    def expert(self, call):
        error = self.error[call.expert].double()
        m = expert_matrices(call.module, call.expert)
        if self.block is Block.DOWN:
            change = call.inner.double() @ error.T
        else:
            pre = call.inputs.double() @ m.gate_up.double().T
            moved = activate(call.module, pre + call.inputs.double() @ error.T)
            change = (moved - activate(call.module, pre)) @ m.down.double().T
        r = call.weight.double()
        if self.even:
            r = r.square().mean().sqrt().expand(len(r))
        weighted = change * r[:, None]
        self.total[call.expert] += weighted.square().sum() / self.n_tokens

    def end(self, layer_index):
        pass


def _exact(model, ids, stats, block, error, even=False):
    probe = _Outputs(stats.layer_index, block, error, even)
    with probing(model, probe), torch.no_grad():
        model(ids)
    return probe.total.numpy()


def test_covariance_is_the_exact_squared_error_of_down(calibrated):
    """But for the routing weights, whose squares it takes as independent of the inputs."""
    model, ids, calibration = calibrated
    stats, module = _layer(model, calibration)
    weight = block_weights(module)[Block.DOWN]
    error = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    found = sensitivity(weight, Shifted(weight, error * 8, (3,)), stats, Block.DOWN, "covariance")
    exact = _exact(model, ids, stats, Block.DOWN, error, even=True)
    np.testing.assert_allclose(found[:, 0], exact, rtol=1e-3)


@pytest.mark.parametrize("block", list(Block))
def test_output_is_the_expected_squared_error_of_the_layer(calibrated, block):
    """Errors of random signs, where nothing off the diagonal is left, averaged over signs."""
    model, ids, calibration = calibrated
    stats, module = _layer(model, calibration)
    weight = block_weights(module)[block]
    generator = torch.Generator().manual_seed(4)
    size = torch.rand(weight.shape, generator=generator) * 0.02
    exact = np.zeros(len(weight))
    for _ in range(12):
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        exact += _exact(model, ids, stats, block, size * signs) / 12
    found = sensitivity(weight, Shifted(weight, size * 8, (3,)), stats, block, "output")[:, 0]
    assert np.corrcoef(np.log(found), np.log(exact))[0, 1] > 0.97
    np.testing.assert_allclose(found, exact, rtol=0.35)
    assert 0.85 < found.sum() / exact.sum() < 1.15


def test_fisher_and_weight_are_what_they_say(calibrated):
    model, _, calibration = calibrated
    stats, module = _layer(model, calibration)
    for block, weight in zip(Block, block_weights(module), strict=True):
        error = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
        stack = Shifted(weight, error)
        plain = sensitivity(weight, stack, stats, block, "weight")
        fisher = sensitivity(weight, stack, stats, block, "fisher")
        for column, n_bits in enumerate((3, 4)):
            squares = (error / 2**n_bits).square()
            np.testing.assert_allclose(plain[:, column], squares.sum((1, 2)), rtol=1e-4)
            np.testing.assert_allclose(
                fisher[:, column], 0.5 * (stats.fisher[block] * squares).sum((1, 2)), rtol=1e-3
            )


def test_few_tokens_and_none_stay_finite(calibrated):
    model, _, calibration = calibrated
    stats, module = _layer(model, calibration)
    nothing = replace(
        stats,
        n_tokens=0,
        **{
            name: torch.zeros_like(value)
            for name, value in vars(stats).items()
            if torch.is_tensor(value)
        },
    )
    counts = stats.counts.clone()
    counts[2] = 0
    starved = replace(stats, counts=counts, min_tokens=50)
    for block, weight in zip(Block, block_weights(module), strict=True):
        stack = Shifted(weight, torch.ones_like(weight))
        for kind in ("output", "covariance", "fisher", "weight"):
            for some in (nothing, starved):
                found = sensitivity(weight, stack, some, block, kind)
                assert np.isfinite(found).all() and (found >= 0).all()
                assert (found[:, 0] >= found[:, 1]).all()
                assert (found[:, 0] > 0).all()


def test_what_is_missing_is_named(calibrated):
    model, _, calibration = calibrated
    stats, module = _layer(model, calibration)
    weight = block_weights(module)[1]
    stack = Shifted(weight, torch.ones_like(weight))
    bare = replace(stats, gate_up_hessian=None, gate_up_fisher=None)
    with pytest.raises(CheckpointError, match="fisher=True"):
        sensitivity(weight, stack, bare, Block.DOWN, "fisher")
    with pytest.raises(CheckpointError, match="hessians=True"):
        sensitivity(weight, stack, bare, Block.DOWN, "covariance")
    with pytest.raises(UnknownNameError, match="'outputs'.*output"):
        sensitivity(weight, stack, stats, Block.DOWN, "outputs")
    broken = weight.clone()
    broken[4, 0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="layer 1, expert 4"):
        sensitivity(broken, stack, stats, Block.DOWN)


def test_large_stacks_are_decoded_expert_by_expert(calibrated, monkeypatch):
    model, _, calibration = calibrated
    stats, module = _layer(model, calibration)
    weight = block_weights(module)[0]
    stack = Shifted(weight, torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    whole = sensitivity(weight, stack, stats, Block.GATE_UP)
    monkeypatch.setattr("repro.calibration.sensitivity._VALUES_AT_ONCE", 3 * weight[0].numel())
    np.testing.assert_allclose(sensitivity(weight, stack, stats, Block.GATE_UP), whole, rtol=1e-5)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1e6))
def test_gain_is_never_negative(values, other):
    s = np.array(values)
    found = gain(s, np.full(len(values), other))
    assert (found >= 0).all() and (found >= other - s).all()


def _table(n_layers=2, widths=(2, 3, 4)) -> SensitivityTable:
    rng = np.random.default_rng(0)
    layers = [
        LayerSensitivity(
            i, widths, rng.random((4 - i, 2, len(widths))), np.zeros(4 - i, bool),
            np.ones(4 - i), np.full(4 - i, 0.5),
        )
        for i in range(n_layers)
    ]  # fmt: skip
    return build_table(layers, "fisher", {"model": "a" * 64})


def test_table_round_trip_and_refusal(tmp_path):
    table = _table()
    assert table.s.shape == (2, 4, 2, 3) and bool(table.few_tokens[1, 3])
    table.save(tmp_path / "s.npz")
    again = SensitivityTable.load(tmp_path / "s.npz", model="a" * 64)
    assert np.array_equal(again.s, table.s) and again.kind == "fisher"
    assert (again.widths, again.layer_ids, again.meta) == ((2, 3, 4), (0, 1), table.meta)
    with pytest.raises(CheckpointError, match=r"s.npz.*another model"):
        SensitivityTable.load(tmp_path / "s.npz", model="b" * 64)
    with pytest.raises(CheckpointError, match="calibrate first"):
        SensitivityTable.load(tmp_path / "t.npz")
    (tmp_path / "t.npz").write_bytes(b"not an archive")
    with pytest.raises(CheckpointError, match="not a whole sensitivity table"):
        SensitivityTable.load(tmp_path / "t.npz")


def test_gain_of_a_table():
    table = _table()
    np.testing.assert_array_equal(table.gain(16, 2), table.s[..., 0])
    np.testing.assert_array_equal(
        table.gain(4, 2), np.maximum(0, table.s[..., 0] - table.s[..., 2])
    )
    for n_from, n_to in ((5, 2), (16, 8)):
        with pytest.raises(UnknownNameError, match="choose one of 2, 3, 4"):
            table.gain(n_from, n_to)


def _damage(table: SensitivityTable, factor: np.ndarray, noise: float = 0.0) -> Damage:
    rng = np.random.default_rng(1)
    blocks = tuple(BlockRef(i, e, b) for i in (0, 1) for e in range(4 - i) for b in Block)
    truth = np.stack(
        [table.s[r.layer_index, r.expert, r.block] * factor[r.layer_index] for r in blocks]
    )
    truth = truth * np.exp(noise * rng.standard_normal(truth.shape))
    kl = np.repeat(truth[..., None], 3, axis=2)
    kl[..., 2] *= 100  # a prompt that is held out
    return Damage(blocks, table.widths, kl, kl, np.array([5, 5, 5]), np.ones(3))


def test_planted_layer_factors_are_found():
    table, planted = _table(), np.array([[2.0, 3.0, 4.0], [0.1, 0.2, 0.3]])
    kept = np.array([True, True, False])
    found = layer_factors(table, _damage(table, planted), kept, prior_blocks=0)
    np.testing.assert_allclose(found, planted)
    pulled = layer_factors(table, _damage(table, planted), kept, prior_blocks=1e9)
    np.testing.assert_allclose(pulled[0], pulled[1])
    scaled = scale_by_layer(table, _damage(table, planted), kept, prior_blocks=0)
    np.testing.assert_allclose(scaled.s, table.s * planted[:, None, None])
    assert scaled.kind == "fisher+measured" == scale_by_layer(scaled, _damage(table, planted)).kind


def test_unmeasured_widths_and_layers_keep_what_is_known():
    table = _table()
    damage = _damage(table, np.full((2, 3), 5.0))
    only = replace(
        damage,
        blocks=tuple(r for r in damage.blocks if r.layer_index == 0),
        kl=damage.kl[:8, :1],
        widths=(2,),
    )
    kept = np.array([True, True, False])
    np.testing.assert_allclose(layer_factors(table, only, kept), [[5, 1, 1], [5, 1, 1]], rtol=1e-9)
    with pytest.raises(UnknownNameError, match="layer 9"):
        layer_factors(table, replace(damage, blocks=(BlockRef(9, 0, Block.DOWN),)))


def _many_blocks(n_experts=40):
    rng = np.random.default_rng(2)
    s = np.exp(rng.standard_normal((2, n_experts, 2, 1))) * np.array([9.0, 3.0, 1.0])
    layers = [
        LayerSensitivity(
            i, (2, 3, 4), s[i], np.zeros(n_experts, bool), np.ones(n_experts), np.ones(n_experts)
        )
        for i in range(2)
    ]
    table = build_table(layers, "fisher", {})
    blocks = tuple(BlockRef(i, e, b) for i in (0, 1) for e in range(n_experts) for b in Block)
    truth = np.stack([s[r.layer_index, r.expert, r.block] for r in blocks])[..., None]
    return table, Damage(blocks, (2, 3, 4), truth, truth, np.array([9]), np.ones(1)), rng


def test_agreement_is_perfect_for_the_truth_and_none_for_noise():
    table, damage, rng = _many_blocks()
    for row in agreement(table, damage, n_resamples=50):
        assert row["rank_correlation"] == pytest.approx(1) == row["low"] and row["n_blocks"] == 160
    noise = np.exp(rng.standard_normal(damage.kl.shape))
    rows = agreement(table, replace(damage, kl=noise), n_resamples=200)
    for row in rows:
        assert abs(row["rank_correlation"]) < 0.25 and row["low"] < 0 < row["high"]
    assert [(r["from"], r["to"]) for r in rows][:3] == [(16, 4), (16, 3), (16, 2)]


def test_agreement_with_layers_of_other_scale_and_other_usage():
    table, damage, rng = _many_blocks()
    layer = np.array([r.layer_index for r in damage.blocks])
    moved = replace(damage, kl=damage.kl * np.where(layer, 50.0, 1.0)[:, None, None])
    plain = agreement(table, moved, transitions=[(16, 2)], n_resamples=0)[0]
    scaled = agreement(table, moved, transitions=[(16, 2)], n_resamples=0, scaled=True)[0]
    assert plain["rank_correlation"] < 0.7 and scaled["rank_correlation"] > 0.99
    mass = np.exp(rng.standard_normal(table.mass.shape) * 2)
    ratio = np.array([mass[r.layer_index, r.expert] for r in damage.blocks])
    used = replace(damage, kl=damage.kl * ratio[:, None, None])
    plain = agreement(table, used, transitions=[(4, 2)], n_resamples=0)[0]
    known = agreement(table, used, transitions=[(4, 2)], n_resamples=0, mass=mass)[0]
    assert plain["rank_correlation"] < 0.8 and known["rank_correlation"] == pytest.approx(1)


def test_every_block_is_scaled_by_the_others():
    table, damage, rng = _many_blocks(3)
    damage = replace(damage, kl=np.exp(2 * rng.standard_normal(damage.kl.shape)))
    predicted = np.stack([table.s[r.layer_index, r.expert, r.block] for r in damage.blocks])
    scaled = predicted.copy()
    for row, ref in enumerate(damage.blocks):
        kept = [i for i in range(len(damage.blocks)) if i != row]
        others = replace(damage, blocks=tuple(damage.blocks[i] for i in kept), kl=damage.kl[kept])
        scaled[row] *= layer_factors(table, others)[ref.layer_index]
    ours = agreement(table, damage, transitions=[(16, 2)], n_resamples=0, scaled=True)[0]
    expected = rank_correlation(damage.mean()[:, 0], scaled[:, 0])
    assert ours["rank_correlation"] == pytest.approx(expected)


def test_no_block_is_scaled_by_itself():
    """Predictions that know nothing stay worthless, however few blocks a layer has."""
    table, damage, rng = _many_blocks(4)
    noise = replace(damage, kl=np.exp(3 * rng.standard_normal(damage.kl.shape)))
    row = agreement(table, noise, transitions=[(16, 2)], n_resamples=0, scaled=True)[0]
    assert row["rank_correlation"] < 0.5
