"""Synthetic records in the agreed schema, shared by the tests of reporting and pipeline.

The numbers come from simulated routers with known behaviour, so that each claim can be
made to hold or to fail on purpose.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from repro.reporting.paper import uniform_activation
from repro.reporting.records import Measurement, Record, RecordStore

BATCHES = (1, 2, 4, 8, 16, 32)
LENGTHS = (8, 16, 32, 64, 128, 256, 512, 1024)
MODELS = {"moe-fine": (48, 4, 6), "moe-shared": (16, 2, 4)}  # experts, top-k, layers
SKEW = {"text": 1.0, "math": 1.3, "code": 1.15}  # relative to prose
WORKLOADS = {"prose": "text", "word-problems": "math", "python": "code"}


def popularity(n_experts: int, skew: float, seed: int) -> np.ndarray:
    """Share of each expert: a shuffled power law; ``skew`` 0 is uniform."""
    shares = (1.0 + np.arange(n_experts)) ** -skew
    return np.random.default_rng(seed).permutation(shares / shares.sum())


def touched(shares: np.ndarray, top_k: int, n_tokens: int) -> float:
    """Expected activated share in percent when tokens choose by ``shares``."""
    if n_tokens == 1:
        return 100.0 * top_k / len(shares)
    chosen = np.minimum(1.0, shares * top_k)
    return float(100.0 * np.mean(1.0 - (1.0 - chosen) ** n_tokens))


def _ratio(claim: str, value: float, bound: float, **labels: object) -> list[Measurement]:
    spread = 0.0 if labels["batch_size"] == 1 and labels["stage"] == "decode" else 1.5
    metric = "activation_ratio"
    measured = Measurement(
        claim,
        "measured",
        metric,
        value,
        "percent",
        n=128,
        ci_low=max(0.0, value - spread),
        ci_high=min(100.0, value + spread),
        labels=labels,
    )
    uniform = Measurement(claim, "derived", f"{metric}_uniform", bound, "percent", labels=labels)
    return [measured, uniform]


def add_activation(store: RecordStore, skew: float = 0.9, seed: int = 0) -> None:
    for (model, (experts, top_k, _)), (workload, domain) in itertools.product(
        MODELS.items(), WORKLOADS.items()
    ):
        shares = popularity(experts, skew * SKEW[domain], seed)
        config = {
            "model": model,
            "workload": workload,
            "domain": domain,
            "source": "embedded",
            "seed": seed,
            "n_experts": experts,
            "top_k": top_k,
        }

        def measure(shares=shares, top_k=top_k, experts=experts) -> list[Measurement]:
            found: list[Measurement] = []
            for batch in BATCHES:
                bound = uniform_activation(experts, top_k, batch)
                value = touched(shares, top_k, batch)
                for protocol, factor in (("decode_mean", 1.0), ("next_token", 0.8)):
                    labels = {
                        "stage": "decode",
                        "protocol": protocol,
                        "batch_size": batch,
                        "prompt_tokens": 256,
                    }
                    lowered = value if batch == 1 else max(value * factor, 100 * top_k / experts)
                    found += _ratio("DynaExq Table 1", lowered, bound, **labels)
                found += _prefill("DynaExq Table 2", shares, top_k, batch, 256)
            for batch, length in itertools.product((1, 8), LENGTHS):
                found += _prefill("DynaExq Table 2 (length)", shares, top_k, batch, length)
            return found

        store.measure_or_load("activation", config, measure, sources=("repro.paths",))


def _prefill(
    claim: str, shares: np.ndarray, top_k: int, batch: int, length: int
) -> list[Measurement]:
    labels = {
        "stage": "prefill",
        "protocol": "prefill",
        "batch_size": batch,
        "prompt_tokens": length,
    }
    value = touched(shares, top_k, batch * length)
    return _ratio(claim, value, uniform_activation(len(shares), top_k, batch * length), **labels)


def add_heavy_tail(store: RecordStore, skew: float = 0.9, shift: bool = True) -> None:
    for model, (experts, top_k, layers) in MODELS.items():
        config = {
            "model": model,
            "source": "embedded",
            "seed": 0,
            "n_experts": experts,
            "top_k": top_k,
        }

        def measure(
            model=model, experts=experts, layers=layers, skew=skew, shift=shift
        ) -> list[Measurement]:
            found: list[Measurement] = []
            claim = "DynaExq Figure 2"
            for layer in range(layers):
                top: dict[str, set[int]] = {}
                for index, (workload, domain) in enumerate(WORKLOADS.items()):
                    shares = popularity(
                        experts, skew * SKEW[domain], 100 * layer + (index if shift else 0)
                    )
                    order = np.argsort(-shares, kind="stable")
                    curve = np.cumsum(shares[order])
                    ids = sorted(int(expert) for expert in order[:10])
                    top[workload] = set(ids)
                    where = {"workload": workload, "domain": domain, "layer": layer}
                    entropy = float(-(shares * np.log(shares)).sum())
                    ranks = np.arange(1, experts + 1)
                    ascending = np.sort(shares)
                    gini = float(2 * (ranks * ascending).sum() / experts - (experts + 1) / experts)
                    share = float(curve[9])
                    found += [
                        _heavy("cumulative_share", share, "share", where, series=curve),
                        _heavy("gini", gini, "1", where, half=0.01),
                        _heavy(
                            "effective_experts_fraction",
                            float(np.exp(entropy) / experts),
                            "share",
                            where,
                        ),
                        _heavy("hill_index", 1.0 / max(skew, 0.1), "1", where, half=0.1),
                        _heavy("top10_share", share, "share", where, half=0.01),
                        _heavy("top10_experts", None, "expert ids", where, series=ids),
                    ]
                for first, second in itertools.combinations(WORKLOADS, 2):
                    where = {"layer": layer, "workload_a": first, "workload_b": second}
                    overlap = len(top[first] & top[second])
                    found.append(_heavy("top10_overlap", overlap, "experts", where))
            assert claim
            return found

        store.measure_or_load("heavy-tail", config, measure, sources=("repro.paths",))


def _heavy(metric, value, unit, labels, *, series=None, half=None) -> Measurement:
    return Measurement(
        "DynaExq Figure 2",
        "measured",
        metric,
        value,
        unit,
        n=100_000,
        ci_low=None if half is None else value - half,
        ci_high=None if half is None else value + half,
        series=series,
        labels=labels,
    )


def add_model_table(store: RecordStore) -> None:
    from repro.reporting.paper import load_table

    for row in load_table("model_bytes_computed"):
        config = {"model": row["model"]}

        def measure(row=row) -> list[Measurement]:
            claim = "DynaExq Table 3"
            return [
                Measurement(claim, "derived", "expert_bytes_fp16", row["bytes_fp16"], "bytes"),
                Measurement(
                    claim,
                    "derived",
                    "expert_bytes_int4_g128",
                    row["bytes_int4_g128_fp16scale"],
                    "bytes",
                ),
                Measurement(
                    claim,
                    "derived",
                    "expert_bytes_int2_g64",
                    row["bytes_int2_g64_fp16scale"],
                    "bytes",
                ),
                Measurement(claim, "derived", "total_params", row["total_params"], "parameters"),
                Measurement(claim, "derived", "routed_share", row["routed_share_pct"], "percent"),
            ]

        store.measure_or_load("model-table", config, measure, sources=("repro.paths",))


def add_all(store: RecordStore, **heavy: object) -> list[Record]:
    add_activation(store)
    add_heavy_tail(store, **heavy)
    add_model_table(store)
    return store.read()


def add_models(root: Path, gsm8k_bits: float = 0.85) -> Path:
    """Folder of a model that was trained in two stages, as the training room writes it."""
    from repro.models.integrity import fingerprint

    folder = root / "data" / "models" / "moe-fine"
    folder.mkdir(parents=True)
    config = {"num_hidden_layers": 2, "num_local_experts": 48, "num_experts_per_tok": 4}
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 64}))
    (folder / "model.safetensors").write_bytes(b"weights")
    stage = {"short_steps": 6, "batch_tokens": 100, "long_tokens": 4096}
    trained = {"device": "Some GPU", "date": "2026-01-02", "torch": "2.11.0"}
    recipe = {"stages": [stage, stage], "share_of_second_stage": 0.25, "trained_on": trained}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    for number, extra in ((1, []), (2, [{"step": 0, "revived_layer_expert_source": []}])):
        rows = [
            {
                "step": step,
                "tokens": 100 * step,
                "trained_s": 3.0 * step,
                "validation_nats": {"wikitext2": 4.0 - 0.1 * step, "python": 2.0 - 0.1 * step},
            }
            for step in (5, 10)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in [*extra, *rows])
        (folder / f"training-stage{number}.jsonl").write_text(lines)
    quality = {
        "test_sets": {
            name: {"bits_per_byte": bits, "n_tokens": 1000}
            for name, bits in (("wikitext2", 1.2), ("gsm8k", gsm8k_bits), ("humaneval", 1.1))
        },
        "tasks": {
            f"{task}/{level}": {"accuracy": 1.0 - 0.1 * level, "n": 200}
            for task in ("arithmetic", "recall")
            for level in (1, 2)
        },
        "routing": {
            "effective_experts_fraction": [0.7, 0.6],
            "n_unused": [0, 0],
            "n_tokens": 102_400,
        },
    }
    for name in ("quality-stage1.json", "quality-stage2.json"):
        (folder / name).write_text(json.dumps(quality))
    stated = {"checkpoint_sha256": fingerprint(folder), "device": "cpu", "date": "2026-01-03"}
    (folder / "quality.json").write_text(json.dumps({**quality, "provenance": stated}))
    return folder


def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder in ``tmp_path`` with the real paper tables."""
    from repro import paths

    paper = paths.paper_dir()
    for name in ("notebooks", "data", "figures"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "paper").symlink_to(paper, target_is_directory=True)
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    return tmp_path


def test_samples_follow_the_schema(tmp_path):
    records = add_all(RecordStore("tiny", root=tmp_path))
    assert {record.experiment for record in records} == {"activation", "heavy-tail", "model-table"}
    first = [
        record.value * record.config["n_experts"] / 100 / record.config["top_k"]
        for record in records
        if record.config.get("stage") == "decode" and record.config["batch_size"] == 1
    ]
    assert first == pytest.approx([1.0] * len(first))
