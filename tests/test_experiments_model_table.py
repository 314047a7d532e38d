"""The model table as records: complete, resumable, equal to the papers' tables."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys

import pytest

from repro import profiles
from repro.errors import CheckpointError, DataUnavailableError, UnknownNameError
from repro.experiments import model_table
from repro.models import formula
from repro.models.published import PUBLISHED, bytes_row
from repro.models.specs import SPECS
from repro.paths import paper_dir
from repro.reporting.records import Record, RecordStore

PROFILE = profiles.get("tiny")
NEXT, GEMMA, QWEN = "Qwen3-Next-80B-A3B", "Gemma-4-26B-A4B", "Qwen3-30B-A3B"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project folder of its own: the papers' tables, no bundled models yet."""
    source = paper_dir()
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(source, tmp_path / "data" / "paper")
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def store(project) -> RecordStore:
    return RecordStore("tiny", root=project / "records")


def add_bundled(project, name: str) -> None:
    SPECS[name].config().save_pretrained(project / "data" / "models" / name)


def value(records: list[Record], model: str, metric: str, **labels: object) -> float:
    (found,) = (
        record.value
        for record in records
        if record.metric == metric
        and record.config["model"] == model
        and all(record.config.get(key) == label for key, label in labels.items())
    )
    return found


def test_the_table_of_the_published_models(store, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        records = model_table.run(PROFILE, store)
    assert {record.config["model"] for record in records} == set(PUBLISHED)
    assert {(r.experiment, r.claim, r.kind) for r in records} == {
        ("model-table", "DynaExq Table 3", "derived")
    }
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == 2
    assert all(name in note for name, note in zip(PROFILE.models, notes, strict=True))
    for name, model in PUBLISHED.items():
        row = bytes_row(model)
        for metric, column in (
            ("params_per_expert", "params_per_routed_expert"),
            ("expert_bytes_fp16", "bytes_fp16"),
            ("expert_bytes_int4_g128", "bytes_int4_g128_fp16scale"),
            ("expert_bytes_int4_g128_zero", "bytes_int4_g128_scale_and_zero"),
            ("expert_bytes_int2_g64", "bytes_int2_g64_fp16scale"),
            ("routed_experts", "routed_expert_count"),
        ):
            assert value(records, name, metric) == int(row[column]), (name, metric)
        assert value(records, name, "total_params") == PUBLISHED[name].count().total
        assert round(value(records, name, "routed_share_percent"), 2) == float(
            row["routed_share_pct"]
        )
        assert value(records, name, "count_minus_formula") == 0
        differs = value(records, name, "count_minus_table")
        assert differs == (formula.formula_parts(model)["norms"] if name == GEMMA else 0)


def test_rows_that_show_what_table_3_leaves_out(store) -> None:
    records = model_table.run(PROFILE, store, models=[QWEN, NEXT, GEMMA])
    assert value(records, NEXT, "total_params_with_mtp") == 81_324_862_720
    shares = [
        value(records, NEXT, "routed_share_percent_with_mtp", mtp_experts_counted=counted)
        for counted in (False, True)
    ]
    assert [round(share, 2) for share in shares] == [95.06, 97.04]
    # Text of v3: 6.68 MiB and 0.703 MiB for an upgrade.
    pairs = ((QWEN, "fp16", "int4_g128"), (NEXT, "int4_g128", "int2_g64"))
    upgrades = [
        value(records, name, "upgrade_bytes_per_expert", hi_tier=hi, lo_tier=lo) / 2**20
        for name, hi, lo in pairs
    ]
    assert [round(upgrades[0], 2), round(upgrades[1], 3)] == [6.68, 0.703]
    hosts = [
        value(records, name, "host_bytes_both_versions", hi_tier=hi, lo_tier=lo)
        for name, hi, lo in pairs
    ]
    assert hosts == [72_930_557_952, 61_605_937_152]
    third = {"hi_tier": "fp16", "lo_tier": "int4_g128_zero", "hi_share": "1/3"}
    assert round(value(records, QWEN, "uniform_bits_of_same_bytes", **third), 1) == 8.2
    assert value(records, QWEN, "mixture_bytes", **third) == 29_705_895_936
    assert value(records, QWEN, "mixture_bytes", n_hi_per_layer=43, lo_tier="int4_g128_zero") > 0
    fifth = third | {"hi_share": "1/5"}
    assert round(value(records, QWEN, "uniform_bits_of_same_bytes", **fifth), 1) == 6.6
    flat, by_row = (
        value(records, GEMMA, f"expert_bytes_int4_g128{end}") for end in ("", "_by_row")
    )
    assert by_row - flat == 2816


@pytest.mark.parametrize("name", sorted(SPECS))
def test_bundled_models_have_the_same_rows(project, store, name: str) -> None:
    add_bundled(project, name)
    records = model_table.run(PROFILE, store, models=[name, QWEN])
    metrics = {
        model: {record.metric for record in records if record.config["model"] == model}
        for model in (name, QWEN)
    }
    assert metrics[QWEN] - metrics[name] == {"count_minus_formula", "count_minus_table"}
    assert metrics[name] <= metrics[QWEN]
    config = SPECS[name].config()
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    assert value(records, name, "params_per_expert") == expert
    assert value(records, name, "expert_bytes_fp16") == 2 * expert
    assert value(records, name, "routed_experts_per_layer") == config.num_experts
    assert value(records, name, "top_k") == config.num_experts_per_tok


def test_narrow_rows_cost_the_fine_model_more(project, store) -> None:
    """Rows of 64 hold half a group of 128, and each pays for a whole one."""
    add_bundled(project, "moe-fine")
    records = model_table.run(PROFILE, store, models=["moe-fine"])
    width, hidden = 64, 256
    flat = value(records, "moe-fine", "expert_bytes_int4_g128")
    by_row = value(records, "moe-fine", "expert_bytes_int4_g128_by_row")
    assert flat == 3 * width * hidden // 2 + 3 * width * hidden // 128 * 2
    assert by_row == 3 * width * hidden // 2 + (2 * width * hidden // 128 + hidden) * 2
    assert by_row > flat


def test_a_second_run_measures_nothing_and_gives_the_same(project, store, monkeypatch) -> None:
    first = model_table.run(PROFILE, store, models=[QWEN, "OLMoE-1B-7B"])
    text = store.path("model-table").read_text(encoding="utf-8")

    def refuse(name: str) -> list:
        raise AssertionError(f"{name} was computed again")

    monkeypatch.setattr(model_table, "measure", refuse)
    again = RecordStore("tiny", root=store.root)
    second = model_table.run(PROFILE, again, models=[QWEN, "OLMoE-1B-7B"], source="folder")
    assert (again.n_measured, again.n_loaded) == (0, 2)
    assert [r.to_dict() for r in second] == [r.to_dict() for r in first]
    assert store.path("model-table").read_text(encoding="utf-8") == text
    with pytest.raises(AssertionError, match="computed again"):
        model_table.run(PROFILE, again, models=[QWEN], force=True)


def test_a_changed_configuration_is_another_point(project, store) -> None:
    add_bundled(project, "moe-fine")
    before = model_table.run(PROFILE, store, models=["moe-fine"])
    path = project / "data" / "models" / "moe-fine" / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**fields, "moe_intermediate_size": 32}), encoding="utf-8")
    after = model_table.run(PROFILE, store, models=["moe-fine"])
    widths = [value(rows, "moe-fine", "expert_width") for rows in (before, after)]
    assert widths == [64, 32]


def test_two_runs_give_the_same_bytes_apart_from_time(project) -> None:
    texts = []
    for folder in ("a", "b"):
        store = RecordStore("tiny", root=project / folder)
        model_table.run(PROFILE, store, models=["Mixtral-8x7B"])
        texts.append("\n".join(record.timeless() for record in store.read("model-table")))
    assert texts[0] == texts[1]


def test_bad_input(project, store) -> None:
    with pytest.raises(UnknownNameError, match=r"model 'Mixtral-8x22B'.*'Mixtral-8x7B'"):
        model_table.run(PROFILE, store, models=["Mixtral-8x22B"])
    with pytest.raises(DataUnavailableError, match=r"data/models/moe-fine/config\.json.*restore"):
        model_table.run(PROFILE, store, models=["moe-fine"])
    folder = project / "data" / "models" / "moe-fine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3_moe", ', encoding="utf-8")
    with pytest.raises(CheckpointError, match="'data/models/moe-fine' is truncated"):
        model_table.run(PROFILE, store, models=["moe-fine"])
    assert store.read("model-table") == []


def test_importing_the_tables_loads_no_torch() -> None:
    """`repro models` and a run whose points are on file must answer at once."""
    code = (
        "import sys, repro.models.published, repro.models.mixtures as m, repro.models.layout;"
        "m.bytes_at('Mixtral-8x7B', 0.5, 'fp16', 'int4');"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
