"""The papers' tables: every row with source and status, marks computed, nothing dropped."""

import csv

import pytest

from repro import paths
from repro.errors import DataUnavailableError, UnknownNameError
from repro.reporting import paper


def raw(name: str) -> list[dict[str, str]]:
    with (paths.paper_dir() / name).open(newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def test_every_file_is_a_table_and_every_row_says_where_it_is_from():
    files = sorted(path.name for path in paths.paper_dir().glob("*.csv"))
    assert len(paper.list_tables()) == len(files)
    for name in paper.list_tables():
        rows = paper.load_table(name)
        assert len(rows) == len(raw(paper.table_path(name).name))
        assert all(row["source"] and row["status"] in paper.STATUS for row in rows)


def test_a_prefix_may_be_left_out_and_a_wrong_name_is_named():
    assert paper.load_table("table3_models") == paper.load_table("dynaexq_table3_models")
    with pytest.raises(UnknownNameError, match=r"'table9'.*table3_models"):
        paper.load_table("table9")


def test_numbers_are_numbers():
    row = paper.load_table("table1_decode_activation")[0]
    assert (row["batch_size"], row["activation_pct"]) == (1, 6.3)
    assert paper.load_table("model_configs")[3]["dense_intermediate_size"] is None


@pytest.mark.parametrize("stage", ["decode", "prefill"])
def test_the_withdrawn_rows_are_marked_and_kept(stage):
    rows = paper.load_table(paper.ACTIVATION_TABLES[stage])
    withdrawn = [row for row in rows if row["withdrawn"]]
    # All of Qwen3-30B except what was collected again.
    assert withdrawn == [
        row
        for row in rows
        if "Qwen3-30B" in row["model"] and row["version"] != "authors_draft_8e92d414"
    ]
    assert {row["activation_pct"] for row in withdrawn} >= {62.0 if stage == "decode" else 96.6}
    unverified = {row["base_model"] for row in rows if row["unverified"]}
    assert "Qwen3-Next-80B-A3B" in unverified
    assert "Qwen3-30B-A3B" not in unverified


def test_the_phantom_layer_is_taken_out():
    rows = paper.load_table("table2_prefill_activation")
    for row in rows:
        if "DeepSeek" in row["model"]:
            assert row["corrected_pct"] == pytest.approx(row["activation_pct"] * 27 / 26)
        else:
            assert row["corrected_pct"] is None
    (corrected,) = [row for row in paper.activation_rows("prefill") if row["corrected"]]
    assert corrected["status"] == "C"
    assert corrected["values"][32] == pytest.approx(100.0, abs=0.05)


def test_estimates_of_figure_3_are_marked():
    rows = [row for row in paper.load_table("figures_stated") if row["figure"] == "Fig 3"]
    assert {row["version"] for row in rows if row["estimated"]} == {
        "authors_notebook",
        "authors_working_ppl_md",
    }
    assert not any(r["estimated"] for r in rows if r["version"] == "v3_text")


def test_the_uniform_bound_agrees_with_a_simulation():
    import numpy as np

    rng = np.random.default_rng(0)
    draws = [len({int(e) for _ in range(8) for e in rng.permutation(16)[:2]}) for _ in range(4000)]
    assert paper.uniform_activation(16, 2, 8) == pytest.approx(100 * np.mean(draws) / 16, abs=0.5)
    assert paper.uniform_activation(128, 8, 1) == pytest.approx(6.25)


def test_records_carry_table_status_and_kind():
    records = paper.paper_records()
    stated = sum(
        len(paper.load_table(name))
        for name in paper.list_tables()
        if name not in ("model_configs", "model_bytes_computed")
    )
    assert sum(record.kind == "paper" for record in records) == stated
    assert len({record.key for record in records}) == len(records)
    old = [
        record
        for record in records
        if record.claim == "DynaExq Table 1" and record.config["withdrawn"] and record.value == 62.0
    ]
    assert len(old) == 1
    assert old[0].provenance["status"] == "R"
    assert all(record.provenance["source"] for record in records)


def test_model_names_of_the_tables_find_their_configuration():
    assert paper.model_config("Qwen3-Next-80B-A3B")["routed_experts"] == 512
    assert paper.model_config("OLMoE-1B-7B")["top_k"] == 8
    with pytest.raises(UnknownNameError, match="GPT-9"):
        paper.model_config("GPT-9")


@pytest.mark.parametrize("text", ["a,source\n1,x,surplus\n", "a,source\n1\n", "a,source\n\xff"])
def test_a_damaged_table_is_named(tmp_path, monkeypatch, text):
    for name in ("notebooks", "data/paper"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "paper" / "table3_models.csv").write_bytes(text.encode("latin-1"))
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    with pytest.raises(DataUnavailableError, match=r"table3_models\.csv.*restore it from git"):
        paper.load_table("table3_models")


def test_the_readme_names_every_file(root):
    text = (root / "data" / "paper" / "README.md").read_text()
    for path in paths.paper_dir().glob("*.csv"):
        assert f"`{path.name}`" in text
    for code in paper.STATUS:
        assert f"`{code}`" in text
