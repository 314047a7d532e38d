"""The committed traces: whole, of the committed models, small, and without text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from repro import paths, profiles
from repro.experiments.traffic import model_digest, trace_path
from repro.integration.traces import RoutingTrace, replay
from repro.models import load_model
from repro.workloads.base import domain_workloads

PROFILE = profiles.get(profiles.DEFAULT)
FILES = sorted(paths.traces_dir().rglob("*.npz"))
NAMES = [f"{path.parent.name}/{path.stem}" for path in FILES]
MAX_BYTES = 2 * 2**20


def test_every_model_and_workload_has_its_trace():
    expected = {
        trace_path(model, workload, source)
        for model in PROFILE.models
        for source in ("embedded", "folder")
        for workload in domain_workloads(source).values()
    }
    assert set(FILES) == expected
    assert sum(path.stat().st_size for path in FILES) < MAX_BYTES


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_trace_is_whole_and_of_the_committed_model(path: Path):
    trace = RoutingTrace.load(path)
    n_tokens = PROFILE.n_prompts * (PROFILE.prompt_tokens + PROFILE.decode_steps)
    assert trace.n_real_tokens() == n_tokens == trace.mask.size
    counts = trace.counts()
    assert (counts.sum(axis=1) == n_tokens * trace.top_k).all()
    assert trace.steps() == [PROFILE.prompt_tokens, *[1] * PROFILE.decode_steps]
    meta = trace.meta
    model, source = path.parent.name, meta["source"]
    assert path == trace_path(model, meta["workload"], source)
    assert domain_workloads(source)[meta["domain"]] == meta["workload"]
    assert (meta["model"], meta["model_digest"]) == (model, model_digest(model))
    assert {"seed", "temperature", "workload_sha256", "input_sha256", "generated_sha256"} <= set(
        meta
    )
    # No token chooses an expert twice, and replaying gives back what was counted.
    chosen = np.sort(trace.top_k_index, axis=-1)
    assert (np.diff(chosen.astype(int), axis=-1) > 0).all()
    assert sum(step.counts(trace.n_experts) for step in replay(trace)).tolist() == counts.tolist()


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_there_is_no_text_and_no_path_in_it(path: Path):
    with np.load(path) as arrays:
        assert sorted(arrays) == ["header", "mask", "top_k_index"]
        header = arrays["header"].tobytes().decode()
    assert len(header) < 2000
    assert not any(name in header for name in ("/home", "/root", "/work", "/tmp", "\\\\"))


@pytest.mark.parametrize("name", PROFILE.models)
def test_the_shape_is_that_of_the_model(name):
    model, _ = load_model(name, device="cpu", dtype="float32")
    config = model.config
    n_experts = getattr(config, "num_experts", None) or config.num_local_experts
    for path in FILES:
        if path.parent.name == name:
            trace = RoutingTrace.load(path)
            assert trace.n_experts == n_experts
            assert trace.top_k == config.num_experts_per_tok
            assert trace.layer_ids == list(range(config.num_hidden_layers))
