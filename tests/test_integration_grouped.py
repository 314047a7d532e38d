"""The fast grouped experts: equal to the library's bit for bit, or handed to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from repro.integration import grouped
from repro.integration.recording import record_decode
from repro.models.tiny import ARCHITECTURES, tiny_model

NAME = grouped.register()


def _experts(arch: str, **config):
    model = tiny_model(arch, **config)
    return next(
        m for m in model.modules() if hasattr(m, "gate_up_proj") and m.gate_up_proj.ndim == 3
    )


def _routing(module, n_tokens: int, top_k: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(n_tokens, module.num_experts, generator=generator)
    weights, index = torch.topk(scores.softmax(-1), top_k, dim=-1)
    hidden = module.gate_up_proj.shape[1 if module.is_transposed else 2]
    return torch.randn(n_tokens, hidden, generator=generator), index, weights


@pytest.mark.parametrize("n_tokens", [1, 3, 64, 513])
@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe"])
def test_bits_are_the_librarys(arch, n_tokens):
    module = _experts(arch)
    arguments = _routing(module, n_tokens, 2)
    before = [a.clone() for a in arguments]
    with torch.inference_mode():
        ours = grouped.grouped_experts(module, *arguments)
        theirs = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *arguments)
    assert torch.equal(ours, theirs)
    assert ours.abs().max() > 0
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


def test_one_expert_takes_everything_and_nothing_at_all():
    module = _experts("qwen3_moe")
    x, index, weights = _routing(module, 40, 2)
    index[:, 0], index[:, 1] = 3, 0
    with torch.inference_mode():
        ours = grouped.grouped_experts(module, x, index, weights)
        theirs = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, x, index, weights)
        empty = grouped.grouped_experts(module, x[:0], index[:0], weights[:0])
    assert torch.equal(ours, theirs)
    assert empty.shape == (0, x.shape[1])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_routes_alike_under_both(arch):
    model = tiny_model(arch)
    ids = torch.randint(2, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    traces = [
        record_decode(model, ids, 3, include_prompt=True, implementation=name)
        for name in (NAME, "grouped_mm")
    ]
    assert np.array_equal(traces[0].top_k_index, traces[1].top_k_index)
    assert traces[0].meta["generated_sha256"] == traces[1].meta["generated_sha256"]


def test_gradients_are_left_to_the_library():
    module = _experts("qwen3_moe")
    x, index, weights = _routing(module, 5, 2)
    x.requires_grad_()
    grouped.grouped_experts(module, x, index, weights).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
