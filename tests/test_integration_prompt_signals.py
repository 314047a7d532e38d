"""Norms gathered while serving equal those of the calibration, merged by KV memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import repro
from repro.calibration import prompt_features
from repro.integration.prompt_signals import PromptSignals
from repro.models.tiny import tiny_model
from repro.policies import HeadCoefficients, ResidualHeads

PROMPTS = [list(range(2, 14)), list(range(20, 50)), [5, 9, 3, 4]]


def features_of(model, prompt):
    return prompt_features(model, torch.tensor([prompt]))


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("chunk", [5, 64])
def test_signals_of_served_prompts_are_those_of_calibration(arch, chunk):
    expected = [features_of(tiny_model(arch), p) for p in PROMPTS]
    with repro.Engine(tiny_model(arch), None, "dense", device="cpu", max_step_tokens=chunk) as e:
        context = e._parts.context
        shape = (e.residency.n_layers, e.residency.n_experts)
        context.signals = PromptSignals(4, shape, torch.device("cpu"))
        requests = [e.submit(p, 40, ignore_eos=True) for p in PROMPTS]
        while any(r.n_new < 3 for r in requests):
            e.step()
        for request, alone in zip(requests, expected, strict=True):
            found = context.signals.merged({request.number: 2.0})
            assert np.allclose(found, alone.values[0], rtol=1e-4, atol=1e-6)
        weights = {r.number: w for r, w in zip(requests, (1.0, 3.0, 2.0), strict=True)}
        values = np.stack([f.values[0] for f in expected])
        share = np.array([1.0, 3.0, 2.0])[:, None, None] * np.stack(
            [f.mass[0] > 0 for f in expected]
        )
        total = share.sum(axis=0)
        share /= np.where(total > 0, total, 1)
        merged = np.einsum("rle,rlebf->lebf", share, values)
        assert np.allclose(context.signals.merged(weights), merged, rtol=1e-4, atol=1e-6)
        for request in requests:
            e.cancel(request)
        e.step()
        assert context.signals.merged(weights) is None, "nobody runs, nothing is known"


def test_slots_are_used_again_and_begin_empty():
    signals = PromptSignals(1, (1, 2), torch.device("cpu"))
    one = torch.tensor([0])
    for number, size in ((7, 3.0), (8, 1.0)):
        signals.begin([(number, 1)])
        x = torch.full((1, 4), size)
        signals.add(0, 1, one, torch.ones(1), x, x)
        signals.end()
        found = signals.merged({number: 1.0})
        assert np.allclose(found[0, 1], 2 * size) and not found[0, 0].any()
        signals.forget(number)
        assert signals.merged({number: 1.0}) is None


def test_an_engine_with_heads_shows_its_policy_features(monkeypatch):
    heads = ResidualHeads(
        {
            (block, 8, 7): HeadCoefficients((0.0,) * 3, (1.0,) * 3, (0.1,) * 3, 0.0, (-1, 1), 1.0)
            for block in (0, 1)
        }
    )
    import repro.serving.build as build

    monkeypatch.setattr(build.ResidualHeads, "of", staticmethod(lambda _: heads))

    def with_heads(*_):
        return build.Calibrated(heads=object())

    monkeypatch.setattr(build, "calibrated", with_heads)
    seen = []
    with repro.Engine(tiny_model("qwen3_moe"), None, "pagedweight", device="cpu", interval=0) as e:
        decide = e._parts.control.policy.decide

        def watched(state):
            seen.append(state.features)
            return decide(state)

        e._parts.control.policy.decide = watched
        e.generate(PROMPTS, 6, ignore_eos=True)
    known = [f for f in seen if f is not None]
    assert known and all(f.shape == (2, 8, 2, 3) and np.isfinite(f).all() for f in known)
    assert max(float(f.max()) for f in known) > 0
