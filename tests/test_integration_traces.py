"""Routing traces: what goes in comes out, damage is noticed, parts add up."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.errors import CheckpointError, OutputError
from repro.integration.traces import RoutingTrace, replay


@st.composite
def traces(draw, weights: bool | None = None) -> RoutingTrace:
    n, t, layers = draw(st.integers(0, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    n_experts = draw(st.sampled_from([2, 7, 48, 256, 300]))
    k = draw(st.integers(1, min(4, n_experts)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    index = rng.random((n, t, layers, n_experts)).argsort(axis=-1)[..., :k]
    with_weights = draw(st.booleans()) if weights is None else weights
    cut = draw(st.integers(0, t))
    return RoutingTrace(
        top_k_index=index,
        mask=rng.random((n, t)) < 0.8,
        weights=rng.random(index.shape).astype(np.float16) if with_weights else None,
        n_experts=n_experts,
        layer_ids=[2 * i + 1 for i in range(layers)],
        meta={"stage": "prefill", "seed": draw(st.integers(0, 9)), "text": "Ä"},
        step_tokens=draw(st.sampled_from([None, [cut, t - cut]])),
    )


def _same(a: RoutingTrace, b: RoutingTrace, *, weights: bool) -> bool:
    if weights and not np.array_equal(a.weights, b.weights):
        return False
    return (
        np.array_equal(a.top_k_index, b.top_k_index)
        and a.top_k_index.dtype == b.top_k_index.dtype
        and np.array_equal(a.mask, b.mask)
        and (a.n_experts, a.layer_ids, a.meta) == (b.n_experts, b.layer_ids, b.meta)
        and a.step_tokens == b.step_tokens
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("traces")


@settings(max_examples=60, deadline=None)
@given(trace=traces(), data=st.data())
def test_round_trip(folder, trace, data):
    with_weights = trace.weights is not None and data.draw(st.booleans())
    trace.save(folder / "a.npz", with_weights=with_weights)
    loaded = RoutingTrace.load(folder / "a.npz")
    assert _same(loaded, trace, weights=with_weights)
    assert (loaded.weights is not None) == with_weights
    loaded.save(folder / "b.npz", with_weights=with_weights)
    assert (folder / "a.npz").read_bytes() == (folder / "b.npz").read_bytes()


@settings(max_examples=60, deadline=None)
@given(trace=traces(weights=True))
def test_counts_are_tokens_times_k(trace):
    expected = trace.n_real_tokens() * trace.top_k
    assert trace.counts().shape == (trace.n_layers, trace.n_experts)
    assert (trace.counts().sum(axis=1) == expected).all()
    assert np.array_equal(trace.counts_per_sequence().sum(axis=0), trace.counts())
    steps = [step.counts(trace.n_experts) for step in replay(trace)]
    assert np.array_equal(np.sum(steps, axis=0), trace.counts())
    total = trace.weights[trace.mask].astype(float).sum(axis=(0, 2))
    np.testing.assert_allclose(trace.mass().sum(axis=1), total)


@settings(max_examples=60, deadline=None)
@given(trace=traces(), data=st.data())
def test_distinct_experts_per_step(trace, data):
    rows = data.draw(st.lists(st.integers(0, max(0, len(trace) - 1)), max_size=5, unique=True))
    rows = rows if len(trace) else []
    distinct = trace.distinct_per_step(rows)
    assert distinct.shape == (len(trace.steps()), trace.n_layers)
    start = 0
    for row, n_tokens in zip(distinct, trace.steps(), strict=True):
        for layer in range(trace.n_layers):
            chosen = set()
            for s in rows:
                for t in range(start, start + n_tokens):
                    if trace.mask[s, t]:
                        chosen |= set(trace.top_k_index[s, t, layer].tolist())
            assert row[layer] == len(chosen)
        start += n_tokens
    assert (distinct <= trace.distinct_per_step()).all()  # more sequences, never fewer experts


@settings(max_examples=40, deadline=None)
@given(trace=traces(weights=True), data=st.data())
def test_select(trace, data):
    stop = data.draw(st.integers(0, trace.n_tokens))
    head, tail = trace.select(tokens=slice(0, stop)), trace.select(tokens=slice(stop, None))
    assert np.array_equal(head.counts() + tail.counts(), trace.counts())
    assert sum(head.steps()) == stop
    twice = trace.select(sequences=[*range(len(trace))] * 2)
    assert np.array_equal(twice.counts(), 2 * trace.counts())
    assert np.array_equal(twice.weights[: len(trace)], trace.weights)


def _example() -> RoutingTrace:
    rng = np.random.default_rng(1)
    index = rng.random((3, 20, 2, 48)).argsort(axis=-1)[..., :4]
    return RoutingTrace(index, np.ones((3, 20), bool), None, 48, [0, 1], {"stage": "prefill"}, [20])


def test_steps_survive_selection():
    trace = _example()
    trace.step_tokens = [18, 1, 1]
    assert trace.select(tokens=slice(10, 19)).step_tokens == [8, 1]
    assert trace.select(tokens=[19]).step_tokens == [1]
    with pytest.raises(ValueError, match="in order"):
        trace.select(tokens=[19, 2])


def test_every_truncation_is_noticed(tmp_path):
    _example().save(tmp_path / "whole.npz")
    data = (tmp_path / "whole.npz").read_bytes()
    for length in [*range(0, len(data), 37), len(data) - 1]:
        (tmp_path / "cut.npz").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"'cut\.npz'.*record it again"):
            RoutingTrace.load(tmp_path / "cut.npz")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_changed_byte_never_changes_the_routing(folder, data):
    trace = _example()
    trace.save(folder / "whole.npz")
    content = bytearray((folder / "whole.npz").read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "changed.npz").write_bytes(content)
    try:
        assert _same(RoutingTrace.load(folder / "changed.npz"), trace, weights=False)
    except CheckpointError as error:
        assert "'changed.npz'" in str(error)


def test_foreign_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no trace 'none\.npz': record it first"):
        RoutingTrace.load(tmp_path / "none.npz")
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    with pytest.raises(CheckpointError, match="no header"):
        RoutingTrace.load(tmp_path / "other.npz")
    header = np.frombuffer(b'{"format": "cats"}', dtype=np.uint8)
    np.savez(tmp_path / "cats.npz", header=header)
    with pytest.raises(CheckpointError, match="format 'cats'"):
        RoutingTrace.load(tmp_path / "cats.npz")
    header = np.frombuffer(b'{"format": "repro-routing-trace", "version": 9}', dtype=np.uint8)
    np.savez(tmp_path / "new.npz", header=header)
    with pytest.raises(CheckpointError, match="version 9, this is 1"):
        RoutingTrace.load(tmp_path / "new.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(CheckpointError, match=r"'text\.npz'"):
        RoutingTrace.load(tmp_path / "text.npz")


def test_no_half_written_file(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="cannot write"):
        _example().save(tmp_path / "file" / "a.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_no_date_and_ordinary_npz(tmp_path):
    _example().save(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["top_k_index"].shape == (3, 20, 2, 4)


def test_packs_below_the_bits_of_an_index(tmp_path):
    """48 experts need 5.6 bits a choice; uniform routing is the worst case for a compressor."""
    rng = np.random.default_rng(0)
    index = rng.random((64, 128, 2, 48)).argsort(axis=-1)[..., :4]
    trace = RoutingTrace(index, np.ones((64, 128), bool), None, 48, [0, 1])
    trace.save(tmp_path / "a.npz")
    assert (tmp_path / "a.npz").stat().st_size * 8 / index.size < 6.0


def test_contradictions_are_refused():
    index, mask = np.zeros((1, 2, 1, 2), dtype=int), np.ones((1, 2), bool)
    with pytest.raises(ValueError, match="expert 9 of 4"):
        RoutingTrace(index + 9, mask, None, 4, [0])
    for wrong in (260, -1):  # both would fit a byte after a careless cast
        with pytest.raises(ValueError, match=f"expert {wrong} of 48"):
            RoutingTrace(index + wrong, mask, None, 48, [0])
    with pytest.raises(ValueError, match="mask"):
        RoutingTrace(index, mask[:, :1], None, 4, [0])
    with pytest.raises(ValueError, match="2 layer ids for 1 layers"):
        RoutingTrace(index, mask, None, 4, [0, 1])
    with pytest.raises(ValueError, match="steps of"):
        RoutingTrace(index, mask, None, 4, [0], step_tokens=[3])
    with pytest.raises(ValueError, match="no weights"):
        RoutingTrace(index, mask, None, 4, [0]).save("never.npz", with_weights=True)
