"""Tiny random models: every architecture, seeded, and none close to a tie."""

from __future__ import annotations

import pytest
import torch

from repro.errors import UnknownNameError
from repro.models.tiny import ARCHITECTURES, tiny_config, tiny_model


def test_the_nine():
    assert len(ARCHITECTURES) == 9
    with pytest.raises(UnknownNameError, match="'qwen3moe'.*did you mean 'qwen3_moe'"):
        tiny_config("qwen3moe")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_seed_decides_the_weights_and_nothing_else(arch):
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    first = tiny_model(arch)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(12)
    second, other = tiny_model(arch), tiny_model(arch, seed=1)
    assert not first.training
    assert sum(p.numel() for p in first.parameters()) < 100_000
    names = dict(second.named_parameters())
    assert all(torch.equal(p, names[name]) for name, p in first.named_parameters())
    ids = torch.arange(2, 14)[None]
    with torch.inference_mode():
        assert not torch.allclose(first(ids).logits, other(ids).logits)


def test_overrides():
    assert tiny_config("mixtral", num_local_experts=5).num_local_experts == 5
    assert tiny_model("qwen3_moe", num_hidden_layers=3).config.num_hidden_layers == 3
