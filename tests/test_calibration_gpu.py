"""On a GPU: the same counts, moments, gradients and damages as on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from repro.calibration.blocks import block_weights, sample_blocks
from repro.calibration.collect import collect
from repro.calibration.damage import measure_damage
from repro.calibration.features import prompt_features
from repro.calibration.second_order import second_order
from repro.calibration.sensitivity import KINDS, sensitivity
from repro.contract import Block
from repro.formats.group_affine import GroupAffine
from repro.integration.experts import experts_layers
from repro.models.tiny import tiny_model

pytestmark = pytest.mark.gpu


def _prompts() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, 64, (4, 20), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[2, :6] = False
    return ids, mask


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_statistics_and_sensitivities(arch):
    ids, mask = _prompts()
    found = {}
    for device in ("cpu", "cuda"):
        model = tiny_model(arch).to(device)
        calibration = collect(model, ids.to(device), mask, hessians=True, fisher=True)
        layer = experts_layers(model)[1]
        tables = [
            sensitivity(
                w, GroupAffine(2, 32).encode_stack(w.float()), calibration.layers[1], b, kind
            )
            for b, w in zip(Block, block_weights(layer.module), strict=True)
            for kind in KINDS
        ]
        found[device] = calibration, tables, prompt_features(model, ids.to(device), mask)
    cpu, gpu = found["cpu"], found["cuda"]
    for a, b in zip(cpu[0].layers, gpu[0].layers, strict=True):
        assert torch.equal(a.counts, b.counts)
        for name, value in vars(a).items():
            if torch.is_tensor(value) and name != "counts":
                torch.testing.assert_close(getattr(b, name), value, rtol=1e-2, atol=1e-5)
    for ours, theirs in zip(cpu[1], gpu[1], strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=2e-2, atol=1e-9)
    np.testing.assert_allclose(gpu[2].values, cpu[2].values, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe"])
def test_damage(arch):
    ids, mask = _prompts()
    found = []
    for device in ("cpu", "cuda"):
        model = tiny_model(arch).to(device)
        layers = experts_layers(model)
        stacks = {
            x.layer_index: [
                GroupAffine(2, 32).encode_stack(w.float()) for w in block_weights(x.module)
            ]
            for x in layers
        }
        before = [p.clone() for p in model.parameters()]
        found.append(measure_damage(model, stacks, sample_blocks(layers, 8), (2,), ids, mask))
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, value)
    np.testing.assert_allclose(found[1].kl, found[0].kl, rtol=2e-2, atol=1e-8)
    np.testing.assert_allclose(found[1].loss, found[0].loss, rtol=2e-2, atol=1e-5)


def test_second_order():
    ids, mask = _prompts()
    found = []
    for device in ("cpu", "cuda"):
        model = tiny_model("qwen3_moe").to(device)
        weight = block_weights(experts_layers(model)[1].module)[1]
        error = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(device)
        found.append(second_order(model, ids.to(device), {(1, Block.DOWN): error[None]}, mask))
    np.testing.assert_allclose(found[1].quadratic, found[0].quadratic, rtol=2e-2, atol=1e-9)


def test_bf16_statistics_stay_finite():
    ids, mask = _prompts()
    model = tiny_model("qwen3_moe").to("cuda", torch.bfloat16)
    for stats in collect(model, ids.cuda(), mask, fisher=True).layers:
        assert torch.isfinite(stats.gate_up_fisher).all() and stats.gate_up_fisher.sum() > 0
