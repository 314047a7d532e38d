"""Recording over prompts: what is recorded does not depend on how prompts are batched."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from repro.integration.recording import _sample, record_decode, record_prefill, tokens_sha256
from repro.models.tiny import ARCHITECTURES, tiny_model


def _ids(n: int, length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(2, 64, (n, length), generator=torch.Generator().manual_seed(seed))


def _generate(model, ids, steps):
    with torch.inference_mode():
        out = model.generate(
            ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, eos_token_id=None
        )
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_decode_is_the_prefill_of_what_was_generated(arch):
    model, ids = tiny_model(arch), _ids(3, 9)
    decode = record_decode(model, ids, 5, temperature=0.0, batch_size=2)
    tokens = _generate(model, ids, 5)
    assert decode.meta["generated_sha256"] == tokens_sha256(tokens)
    whole = record_prefill(model, torch.cat([ids, tokens], dim=1), batch_size=2)
    assert whole.step_tokens == [14] and decode.step_tokens == [1] * 5
    assert np.array_equal(decode.top_k_index, whole.top_k_index[:, 9:])
    assert decode.layer_ids == whole.layer_ids
    both = record_decode(model, ids, 5, temperature=0.0, batch_size=2, include_prompt=True)
    assert both.step_tokens == [9, 1, 1, 1, 1, 1]
    assert np.array_equal(both.top_k_index, whole.top_k_index)


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen3_next", "deepseek_v2", "gemma4"])
def test_left_padded_prompts_decode_like_unpadded_ones(arch):
    model = tiny_model(arch)
    lengths = [4, 9, 6]
    sequences = [_ids(1, n, seed=n)[0] for n in lengths]
    ids, mask = torch.full((3, 9), 1), torch.zeros(3, 9, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, 9 - len(sequence) :], mask[row, 9 - len(sequence) :] = sequence, True
    padded = record_decode(model, ids, 4, temperature=0.0, mask=mask)
    prefill = record_prefill(model, ids, 2, mask.numpy())
    assert padded.mask.all() and prefill.mask.sum(axis=1).tolist() == lengths
    for row, sequence in enumerate(sequences):
        alone = record_decode(model, sequence[None], 4, temperature=0.0)
        assert np.array_equal(padded.top_k_index[row], alone.top_k_index[0])
        part = record_prefill(model, sequence[None])
        assert np.array_equal(prefill.top_k_index[row, 9 - len(sequence) :], part.top_k_index[0])


def test_batches_do_not_change_what_is_sampled():
    model, ids = tiny_model("qwen3_moe"), _ids(5, 6)
    traces = [record_decode(model, ids, 6, seed=3, batch_size=b) for b in (1, 2, 5)]
    assert len({t.meta["generated_sha256"] for t in traces}) == 1
    assert all(np.array_equal(t.top_k_index, traces[0].top_k_index) for t in traces)
    other = record_decode(model, ids, 6, seed=4)
    greedy = record_decode(model, ids, 6, temperature=0.0)
    hashes = {t.meta["generated_sha256"] for t in (traces[0], other, greedy)}
    assert len(hashes) == 3


def test_sampling_follows_the_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.0, 0.2, 0.3]])).expand(4000, 4)
    uniform = torch.from_numpy(np.random.default_rng(0).random(4000))
    tokens = _sample(logits, 1.0, uniform)
    shares = torch.bincount(tokens, minlength=4) / 4000
    assert shares[1] == 0
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.0, 0.2, 0.3]), atol=0.03, rtol=0)
    cold = torch.bincount(_sample(logits, 0.25, uniform), minlength=4) / 4000
    assert cold[0] > 0.8
    edges = _sample(logits[:2], 1.0, torch.tensor([0.0, 1.0 - 1e-16], dtype=torch.float64))
    assert edges.tolist() == [0, 3]


def test_the_model_is_left_as_it_was():
    model, ids = tiny_model("mixtral"), _ids(2, 4)
    model.set_experts_implementation("eager")
    trace = record_decode(model, ids, 2, implementation="grouped_mm")
    assert trace.meta["implementation"] == "grouped_mm"
    assert model.config._experts_implementation == "eager"
    assert record_prefill(model, ids, keep_weights=True).mass().shape == (2, 8)


def test_recording_is_silent(caplog, monkeypatch):
    """A warning would end on stderr, and in the stored outputs of a notebook."""
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)
    type(logger).warning_once.cache_clear()  # what an earlier test provoked was said once
    model, ids = tiny_model("olmoe"), _ids(2, 4)
    with caplog.at_level(logging.INFO, logger="transformers"):
        record_decode(model, ids, 2, mask=torch.ones(2, 4), include_prompt=True)
        record_prefill(model, ids)
    assert caplog.records == []


def test_meta_names_stage_prompts_and_sampling():
    meta = record_decode(tiny_model("olmoe"), _ids(2, 4), 2, temperature=0.5, seed=9).meta
    assert {k: meta[k] for k in ("stage", "prompt_tokens", "temperature", "seed")} == {
        "stage": "decode",
        "prompt_tokens": 4,
        "temperature": 0.5,
        "seed": 9,
    }
    assert meta["input_sha256"] == tokens_sha256(_ids(2, 4))
    assert tokens_sha256(torch.zeros(2, 3)) != tokens_sha256(torch.zeros(3, 2))


def test_bad_arguments_are_named():
    model = tiny_model("qwen3_moe")
    with pytest.raises(ValueError, match=r"input_ids of shape \(4,\)"):
        record_prefill(model, torch.zeros(4))
    with pytest.raises(ValueError, match="batch_size=0"):
        record_prefill(model, _ids(1, 2), 0)
    with pytest.raises(ValueError, match="steps=0"):
        record_decode(model, _ids(1, 2), 0)
    with pytest.raises(ValueError, match="temperature=-1"):
        record_decode(model, _ids(1, 2), 1, temperature=-1)
