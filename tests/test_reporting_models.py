"""The bundled models as records: what their files state, and the targets they must reach."""

import json

import pytest
from test_reporting_samples import add_models, project

from repro.models.integrity import fingerprint
from repro.reporting import model_records, model_tables
from repro.reporting.claims import evaluate_all
from repro.reporting.grouping import select
from repro.reporting.record_sets import MODELS, input_files, record_sets
from repro.reporting.records import RecordFileError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return add_models(project(tmp_path, monkeypatch))


def by_code() -> dict[str, str]:
    results = evaluate_all(model_records.read())
    return {r.claim.code: r.verdict for r in results if r.claim.code.startswith("M")}


def edit(folder, file: str, change) -> None:
    data = json.loads((folder / file).read_text())
    change(data)
    (folder / file).write_text(json.dumps(data))


def test_files_become_records_with_their_own_provenance(folder):
    records = model_records.read()
    (gsm8k,) = select(records, metric="bits_per_byte", workload="gsm8k", stage="final")
    assert (gsm8k.value, gsm8k.n, gsm8k.device) == (0.85, 1000, "a CPU")
    assert gsm8k.provenance["time"]["utc_start"] == "2026-01-03"
    (stage,) = select(records, metric="bits_per_byte", workload="gsm8k", stage="stage 1")
    assert stage.device == "Some GPU"
    curve = select(records, metric="validation_loss", corpus="python")
    assert [record.config["tokens"] for record in curve] == [500, 1000, 1500, 2000]
    (tokens,) = select(records, metric="trained_tokens")
    (seconds,) = select(records, metric="trained_time")
    assert (tokens.value, seconds.value) == (2000, 60.0)
    phases = select(records, metric="long_phase_from")
    assert [record.value for record in phases] == [600, 1600]
    (experts,) = select(records, metric="experts")
    assert experts.value == 48


def test_the_checksum_is_that_of_the_models_room(folder):
    assert model_records.checkpoint_sha256(folder) == fingerprint(folder)


def test_every_target_is_met_by_a_good_model(folder):
    assert by_code() == dict.fromkeys(("M1", "M2", "M3", "M4", "M5"), "pass")


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("M1", lambda q: q["test_sets"]["gsm8k"].update(bits_per_byte=0.861)),
        ("M2", lambda q: q["tasks"]["recall/1"].update(accuracy=0.79)),
        ("M3", lambda q: q["routing"].update(n_unused=[0, 1])),
        ("M4", lambda q: q["routing"].update(effective_experts_fraction=[0.7, 0.44])),
        ("M4", lambda q: q["routing"].update(effective_experts_fraction=[0.86, 0.7])),
        ("M5", lambda q: q["provenance"].update(checkpoint_sha256="0" * 64)),
    ],
)
def test_one_wrong_number_misses_one_target(folder, code, change):
    edit(folder, "quality.json", change)
    assert by_code() == {**dict.fromkeys(("M1", "M2", "M3", "M4", "M5"), "pass"), code: "fail"}


def test_other_weights_are_noticed(folder):
    (folder / "model.safetensors").write_bytes(b"other")
    assert by_code()["M5"] == "fail"


def test_stages_alone_answer_no_claim_about_the_committed_weights(folder):
    (folder / "quality.json").unlink()
    assert set(by_code().values()) == {"not measured"}
    sentence = model_tables.sentence(model_records.read())
    assert sentence.startswith("The quality of the committed weights is not recorded")
    row = model_tables.quality(model_records.read()).rows[0]
    assert row.cells[:4] == ("moe-fine", "WikiText-2", "1.29", "not measured")


def test_tables_hold_what_the_files_say(folder):
    records = model_records.read()
    assert model_tables.shapes(records).rows[0].cells[:4] == ("moe-fine", "not measured", "2", "48")
    assert model_tables.tasks(records).rows[0].cells == ("moe-fine", "arithmetic", "90.0", "80.0")
    effective, unused = model_tables.routing(records).rows
    assert effective.cells[2:] == ("70.0", "60.0")
    assert unused.cells[2:] == ("0", "0")


def test_damaged_files_are_named(folder):
    (folder / "quality.json").write_text("{")
    with pytest.raises(RecordFileError, match=r"'data/models/moe-fine/quality.json' is damaged"):
        model_records.read()
    (folder / "quality.json").write_text('{"routing": {"effective_experts_fraction": [0.5]}}')
    with pytest.raises(RecordFileError, match=r"'data/models/moe-fine' are not as this version"):
        model_records.read()


def test_a_model_without_a_recipe_is_left_alone(tmp_path, monkeypatch):
    root = project(tmp_path, monkeypatch)
    assert model_records.read() == model_records.files() == []
    (root / "data" / "models" / "somebodys").mkdir(parents=True)
    (root / "data" / "models" / "somebodys" / "config.json").write_text("{}")
    assert model_records.read() == []
    assert [item.name for item in record_sets("tiny")] == ["tiny"]


def test_the_set_and_its_files(folder):
    assert [item.name for item in record_sets("tiny")] == ["tiny", MODELS]
    assert [item.name for item in record_sets("public")] == ["public", MODELS]
    names = {path.name for path in input_files("tiny")}
    assert {"quality.json", "training-stage2.jsonl", "model.safetensors"} <= names
