"""The activation and heavy-tail experiments from end to end, on a small random model."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from repro import experiments, profiles
from repro.errors import DataUnavailableError, MissingDeviceError, UnknownNameError
from repro.experiments import activation, heavy_tail, statistics, traffic
from repro.experiments.traffic import Traffic
from repro.integration.traces import RoutingTrace
from repro.models.tiny import tiny_model
from repro.reporting.records import RecordStore

PROFILE = profiles.get(
    "tiny",
    models=("moe-fine",),
    n_prompts=6,
    prompt_tokens=16,
    prefill_lengths=(4, 8, 32),
    decode_steps=3,
    batch_sizes=(1, 2, 4),
    n_blocks=5,
    bootstrap_samples=50,
)
WORKLOADS = {"prose": "text", "word-problems": "math", "python": "code"}


@pytest.fixture(scope="module")
def model_folder(root: Path, tmp_path_factory) -> Path:
    """A random model of 16 experts where the bundled one would be, with the real tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("qwen3_moe", vocab_size=8192, num_experts=16, max_position_embeddings=64)
    model.save_pretrained(folder)
    tokenizer = next(
        d for d in (root / "data/models").iterdir() if (d / "tokenizer.json").is_file()
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return folder


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def project(model_folder: Path, tmp_path: Path, monkeypatch) -> Path:
    """An empty project with that model."""
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(model_folder, tmp_path / "data/models/moe-fine")
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def measured(model_folder: Path, tmp_path_factory):
    """Both experiments measured once, for the tests that only read."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "notebooks").mkdir()
    shutil.copytree(model_folder, folder / "data/models/moe-fine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_ROOT", str(folder))
        store = RecordStore("tiny")
        records = activation.run(PROFILE, store) + heavy_tail.run(PROFILE, store)
        flow = Traffic(PROFILE, device="cpu", source="embedded")
        traces = {
            (w, s): flow.trace("moe-fine", w, s)
            for w in WORKLOADS
            for s in ("prefill", "decode", "long-prefill")
        }
    return records, traces, folder


def _select(records, metric, **config):
    return [
        r
        for r in records
        if r.metric == metric and all(r.config.get(k) == v for k, v in config.items())
    ]


def test_activation_records(measured):
    records, _, _ = measured
    ratios = _select(records, "activation_ratio")
    assert len(ratios) == 3 * (3 * 3 + 3)  # batches x protocols; lengths (3 prompts: batch 1 only)
    for record in ratios:
        config = record.config
        assert record.kind == "measured" and record.unit == "percent" and record.n == 5
        assert WORKLOADS[config["workload"]] == config["domain"]
        assert (config["n_experts"], config["top_k"], config["n_layers"]) == (16, 2, 2)
        assert record.ci_low <= record.value <= record.ci_high
        assert record.p10 <= record.p50 <= record.p90
    tables = {(r.claim, r.config["stage"], r.config["protocol"]) for r in ratios}
    assert tables == {
        ("DynaExq Table 1", "decode", "decode_mean"),
        ("DynaExq Table 1", "decode", "next_token"),
        ("DynaExq Table 2", "prefill", "prefill"),
        ("DynaExq Table 2 (length)", "prefill", "prefill"),
    }


def test_one_token_activates_exactly_k(measured):
    records, _, _ = measured
    ones = _select(records, "activation_ratio", stage="decode", batch_size=1)
    assert len(ones) == 6
    assert all(r.value == r.ci_low == r.ci_high == pytest.approx(12.5, rel=1e-12) for r in ones)


def test_value_by_hand(measured):
    """Batch 2, decode: sets of experts, counted one by one."""
    records, traces, _ = measured
    trace = traces["python", "decode"]
    draws = statistics.blocks(6, 2, 5, np.random.default_rng([PROFILE.seed, 2]))
    by_step = np.zeros((5, 3))
    for b, rows in enumerate(draws.tolist()):
        for step in range(3):
            for layer in range(2):
                chosen = {int(e) for s in rows for e in trace.top_k_index[s, step, layer]}
                by_step[b, step] += 100 * len(chosen) / 16 / 2
    where = {"workload": "python", "batch_size": 2}
    (mean,) = _select(records, "activation_ratio", protocol="decode_mean", **where)
    (single,) = _select(records, "activation_ratio", protocol="next_token", **where)
    assert mean.value == pytest.approx(by_step.mean())
    assert single.value == pytest.approx(by_step[:, 0].mean())


def test_uniform_bound_stands_beside_every_value(measured):
    records, _, _ = measured
    bounds = _select(records, "activation_ratio_uniform")
    assert len(bounds) == len(_select(records, "activation_ratio"))
    for record in bounds:
        config = record.config
        tokens = config["batch_size"]
        tokens *= config["prompt_tokens"] if config["stage"] == "prefill" else 1
        assert record.kind == "derived"
        assert record.value == pytest.approx(100 * (1 - (1 - 2 / 16) ** tokens))


def test_length_sweep_is_a_prefix_of_the_long_prompts(measured):
    records, traces, _ = measured
    trace = traces["prose", "long-prefill"]
    assert (len(trace), trace.n_tokens, trace.step_tokens) == (3, 32, [32])
    values = [
        _select(
            records,
            "activation_ratio",
            workload="prose",
            sweep="length",
            batch_size=1,
            prompt_tokens=n,
        )
        for n in (4, 8, 32)
    ]
    numbers = [v[0].value for v in values]
    assert numbers == sorted(numbers) and numbers[0] < numbers[-1]


def test_ratios_of_traces_with_a_known_answer():
    same = np.broadcast_to(np.arange(2), (8, 4, 3, 2))
    everyone = np.ones((8, 4), bool)
    trace = RoutingTrace(same, everyone, None, 16, [0, 1, 2])
    draws = statistics.blocks(8, 4, 6, np.random.default_rng(0))
    assert (activation.step_ratios(trace, draws) == 12.5).all()

    rng = np.random.default_rng(1)
    free = rng.random((256, 4, 3, 16)).argsort(axis=-1)[..., :2]
    trace = RoutingTrace(free, np.ones((256, 4), bool), None, 16, [0, 1, 2])
    draws = statistics.blocks(256, 8, 200, rng)
    expected = 100 * (1 - (1 - 2 / 16) ** 8)
    assert activation.step_ratios(trace, draws).mean() == pytest.approx(expected, abs=1.0)

    one_each = np.arange(16).reshape(8, 1, 1, 2)
    trace = RoutingTrace(one_each, np.ones((8, 1), bool), None, 16, [0])
    assert activation.step_ratios(trace, np.arange(8)[None]).item() == 100.0


def test_heavy_tail_records(measured):
    records, traces, _ = measured
    for workload in WORKLOADS:
        counts = traces[workload, "prefill"].counts()
        for layer in (0, 1):
            where = {"workload": workload, "layer": layer}
            (curve,) = _select(records, "cumulative_share", **where)
            assert len(curve.series) == 16 and curve.series[-1] == pytest.approx(1)
            assert curve.claim == "DynaExq Figure 2"
            (top,) = _select(records, "top10_experts", **where)
            busiest = sorted(range(16), key=lambda e: (-counts[layer, e], e))[:10]
            assert list(top.series) == busiest
            (share,) = _select(records, "top10_share", **where)
            expected = counts[layer, busiest].sum() / counts[layer].sum()
            assert share.value == pytest.approx(expected)
            assert share.value == curve.value == curve.series[9]
            assert share.ci_low <= share.value <= share.ci_high
            for metric in ("gini", "effective_experts_fraction", "hill_index"):
                (record,) = _select(records, metric, **where)
                assert record.value > 0 and record.n == 6
                assert record.ci_low < record.ci_high


def test_overlap_of_every_pair_and_layer(measured):
    records, traces, _ = measured
    overlaps = _select(records, "top10_overlap")
    assert len(overlaps) == 3 * 2
    for record in overlaps:
        config = record.config
        a, b = (
            set(
                statistics.top_experts(
                    traces[config[k], "prefill"].counts()[config["layer"]]
                ).tolist()
            )
            for k in ("workload_a", "workload_b")
        )
        assert record.value == len(a & b)
        assert 4 <= record.ci_low <= record.ci_high <= 10  # ten of 16 share at least four


def test_mixed_traffic_is_the_sum_and_has_a_claim_of_its_own(measured):
    records, traces, _ = measured
    total = sum(traces[w, "prefill"].counts() for w in WORKLOADS)
    mixed = _select(records, "gini", workload="mixed")
    assert {r.claim for r in mixed} == {"DynaExq Figure 2 (mixed traffic)"}
    for record in mixed:
        assert record.value == pytest.approx(float(statistics.gini(total[record.config["layer"]])))
        assert record.n == 18


def test_a_second_run_measures_nothing(measured, monkeypatch):
    records, _, folder = measured
    monkeypatch.setenv("REPRO_ROOT", str(folder))
    store = RecordStore("tiny")
    again = activation.run(PROFILE, store) + heavy_tail.run(PROFILE, store)
    assert store.n_measured == 0 and store.n_loaded == 6 + 5
    assert [r.line() for r in again] == [r.line() for r in records]


def test_two_runs_give_the_same_bytes(measured, project):
    records, _, _ = measured
    store = RecordStore("tiny")
    fresh = activation.run(PROFILE, store) + heavy_tail.run(PROFILE, store)
    assert [r.timeless() for r in fresh] == [r.timeless() for r in records]


def test_damaged_cache_is_recorded_again(project, caplog):
    flow = Traffic(PROFILE, device="cpu", source="embedded")
    trace = flow.trace("moe-fine", "python", "decode")
    (cached,) = (project / "data/cache/traces/moe-fine").iterdir()
    content = cached.read_bytes()
    cached.write_bytes(content[: len(content) // 2])
    with caplog.at_level(logging.WARNING):
        again = Traffic(PROFILE, device="cpu", source="embedded").trace(
            "moe-fine", "python", "decode"
        )
    assert "damaged" in caplog.text
    assert np.array_equal(again.top_k_index, trace.top_k_index)
    assert cached.read_bytes() == content


def test_everything_that_decides_a_trace_is_in_its_key(project):
    def names():
        return {p.name for p in (project / "data/cache/traces/moe-fine").iterdir()}

    Traffic(PROFILE, device="cpu", source="embedded").trace("moe-fine", "python", "prefill")
    first = names()
    Traffic(PROFILE, device="cpu", source="embedded").trace("moe-fine", "python", "decode")
    assert names() == first  # two parts of one recording
    config = project / "data/models/moe-fine/generation_config.json"
    config.write_text(config.read_text() + "\n")
    Traffic(PROFILE, device="cpu", source="embedded").trace("moe-fine", "python", "prefill")
    second = names()
    assert len(second) == 2
    other = profiles.get("tiny", **{**_fields(), "seed": 1})
    Traffic(other, device="cpu", source="embedded").trace("moe-fine", "python", "prefill")
    assert len(names()) == 3
    # What is said about a model does not decide how it routes.
    for name in ("quality.json", "recipe.json", "README.md", "training-stage1.jsonl"):
        (project / "data/models/moe-fine" / name).write_text("{}")
    Traffic(PROFILE, device="cpu", source="embedded").trace("moe-fine", "python", "prefill")
    assert len(names()) == 3


def test_a_trace_of_a_name_that_several_sources_offer_names_its_source(project):
    def name(workload: str, source: str) -> str:
        return traffic.trace_path("moe-fine", workload, source).name

    assert name("prose", "embedded") == "prose.npz"
    assert name("gsm8k", "folder") == "gsm8k-folder.npz" != name("gsm8k", "hub")


def _fields() -> dict:
    return {k: getattr(PROFILE, k) for k in PROFILE.__dataclass_fields__ if k != "name"}


def test_saved_traces_hold_routing_and_no_text(project):
    # Records that are on file already must not keep the traces from being written.
    heavy_tail.run(PROFILE, RecordStore("tiny"))
    assert not (project / "data/traces").exists()
    heavy_tail.run(PROFILE, RecordStore("tiny"), save_traces=True)
    path, *others = sorted((project / "data/traces/moe-fine").iterdir())
    assert [other.name for other in others] == ["python.npz", "word-problems.npz"]
    saved = RoutingTrace.load(path)
    prefill = Traffic(PROFILE, device="cpu", source="embedded").trace(
        "moe-fine", "prose", "prefill"
    )
    assert path.name == "prose.npz" and saved.step_tokens == [16, 1, 1, 1]
    assert np.array_equal(saved.select(tokens=slice(0, 16)).counts(), prefill.counts())
    assert saved.weights is None
    with np.load(path) as arrays:
        assert sorted(arrays) == ["header", "mask", "top_k_index"]
    assert saved.meta["workload"] == "prose" and saved.meta["temperature"] == 1.0


def test_names_that_do_not_exist(project, tmp_path):
    with pytest.raises(UnknownNameError, match="'actvation'.*did you mean 'activation'"):
        experiments.run("actvation", "tiny")
    with pytest.raises(UnknownNameError, match="'model-table' has no option 'save_traces'"):
        experiments.run("model-table", "tiny", save_traces=True)
    with pytest.raises(UnknownNameError, match="unknown device 'tpu'"):
        experiments.run("activation", "tiny", device="tpu")
    with pytest.raises(UnknownNameError, match="'embeded'"):
        experiments.run("activation", "tiny", source="embeded")
    with pytest.raises(UnknownNameError, match="unknown stage 'train'"):
        Traffic(PROFILE, device="cpu", source="embedded").trace("moe-fine", "prose", "train")
    missing = profiles.get("tiny", **{**_fields(), "models": ("moe-none",)})
    with pytest.raises(DataUnavailableError, match="'moe-none' has no folder"):
        activation.run(missing, RecordStore("tiny"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_device_that_is_not_there(project):
    with pytest.raises(MissingDeviceError, match="needs a CUDA GPU"):
        experiments.run("activation", "tiny", device="cuda")
    with pytest.raises(MissingDeviceError):
        experiments.run("heavy-tail", "gpu")


def test_every_experiment_can_be_imported():
    from importlib import import_module

    for name, module in experiments.EXPERIMENTS.items():
        assert name == import_module(module).EXPERIMENT
