"""Each finding against an independent recomputation, and each verdict against mended tables."""

import csv
import shutil

import pytest

from repro import paths
from repro.reporting import contradictions, findings, findings_activation, findings_results


def rows(name: str) -> list[dict[str, str]]:
    with (paths.paper_dir() / name).open(newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


@pytest.fixture(scope="module")
def found() -> dict[str, findings.Item]:
    return {item.code: item for item in contradictions.items()}


def paged(item: str) -> float:
    (row,) = [row for row in rows("pagedweight_stated.csv") if row["item"] == item]
    return float(row["value"])


def test_the_section_is_complete(found):
    assert len(found) == len(contradictions.CHECKS)
    listed = {*found, *(code for code, _ in contradictions.WORDS_ONLY)}
    assert {f"A{number}" for number in range(1, 16)} <= listed
    for item in found.values():
        assert item.evidence.endswith(".")
        assert "nan" not in item.evidence
        assert all(paths.paper_dir().glob(f"*{name}.csv") for name in item.tables)


def test_a1_the_phantom_layer(found):
    facts = found["A1"].facts
    assert facts["exact_pct"] == pytest.approx(100 * 6 / 64)
    assert facts["printed_pct"] == pytest.approx(100 * 6 / 64 * 26 / 27, abs=0.05)
    assert facts["corrected_plateau_pct"] == pytest.approx(96.3 * 27 / 26)
    assert "96.3 % is 100.0 %" in found["A1"].conclusion


def test_a2_to_a4_the_withdrawn_row(found):
    raw = {
        row["batch_size"]: float(row["activation_pct"])
        for row in rows("dynaexq_table1_decode_activation.csv")
        if row["version"] == "authors_raw_json" and row["model"].startswith("Qwen3-30B")
    }
    assert found["A2"].facts["largest_gap_pp"] == pytest.approx(abs(raw["1"] - 6.3))
    assert found["A2"].verdict == "consistent"
    assert found["A3"].facts["ratio"] == pytest.approx(62 / 26)
    assert found["A4"].facts["one_token_pct"] == pytest.approx(100 * 8 / 128)
    assert found["A4"].facts["raw_batch2_pct"] == raw["2"] < 2 * 6.25
    assert found["A4"].verdict == "contradiction"


def test_b1_the_pool_that_holds_no_high_expert(found):
    facts = found["B1"].facts
    assert facts["all_low_gb"] == pytest.approx(512 * 3 * 4096 * 6400 * 0.53125 / 1e9)
    assert facts["n_high"] == 0 and found["B1"].verdict == "contradiction"
    assert facts["experts_per_migration"] == pytest.approx(53.02e9 / 536 / (6 * 4096 * 6400))


def test_a5_is_the_only_row_beyond_uniform(found):
    shapes = {
        "Qwen3-30B-A3B": (128, 8),
        "DeepSeek-V2-Lite": (64, 6),
        "Qwen3-Next-80B-A3B": (512, 10),
        "Phi-3.5-MoE-instruct": (16, 2),
    }
    beyond = set()
    for row in rows("dynaexq_table1_decode_activation.csv"):
        name = row["model"].split(" (")[0].removesuffix("-Instruct-2507")
        experts, top_k = shapes[name]
        bound = 100 - 100 * (1 - top_k / experts) ** int(row["batch_size"])
        if float(row["activation_pct"]) - 0.05 > bound:
            beyond.add((name, row["batch_size"]))
    assert beyond == {("Qwen3-Next-80B-A3B", "8")}
    assert [text.split(":")[0] for text in found["A5"].facts["beyond"]] == [
        "Qwen3-Next-80B-A3B batch 8"
    ]
    assert "2.22 times" in found["A5"].evidence


def test_a6_and_a7_figure_3(found):
    assert found["A6"].facts["n_points"] == 8
    assert found["A6"].facts["smallest_gap"] == pytest.approx(5.85 - 3.97)
    assert found["A7"].facts["to_int4"] == pytest.approx(7.19101 - 7.189)
    assert found["A7"].facts["to_fp16"] == pytest.approx(7.19101 - 6.413)


def test_a8_by_listing_every_possible_score(found):
    sizes = {"GPQA": 198, "HumanEval": 164, "GSM8K": 1319, "AIME25": 30, "MMLU-Pro": 12032}
    possible = {
        name: {f"{100 * k / n:.2f}" for k in range(n + 1)}
        | {f"{int(10000 * k / n) / 100:.2f}" for k in range(n + 1)}
        for name, n in sizes.items()
    }
    impossible = [
        f"{row['benchmark']} {float(row['accuracy_pct']):.2f} (of {sizes[row['benchmark']]})"
        for row in rows("dynaexq_table4_quality.csv")
        if row["version"] == "v3_text"
        and row["benchmark"] in sizes
        and f"{float(row['accuracy_pct']):.2f}" not in possible[row["benchmark"]]
    ]
    assert found["A8"].facts["v3"] == impossible
    assert len(impossible) == 6
    assert found["A8"].facts["impossible"].get("authors_draft_2026", 0) == 0


@pytest.mark.parametrize(
    ("percent", "n", "possible"),
    [(50.0, 2, True), (33.33, 3, True), (66.66, 3, True), (66.67, 3, True), (33.34, 3, False)],
)
def test_is_ratio(percent, n, possible):
    assert findings_results.is_ratio(percent, n) is possible


def test_a10_throughput(found):
    facts = found["A10"].facts
    assert facts["duration_s"] == pytest.approx(32 * 256 / 901)
    assert facts["ratio"] == pytest.approx(901 / 104.689046)
    assert facts["p99_s"] == 63
    assert facts["static_tok_per_s"] < facts["dynaexq_tok_per_s"]


def test_a11_a12_a13(found):
    assert found["A11"].facts == {
        "registered_pct": pytest.approx(100 * 43 / 128),
        "default_pct": 20.0,
    }
    assert found["A12"].facts["split"] == pytest.approx([59.13 * 8.46 / 1000, 54.76 * 9.15 / 1000])
    assert len(found["A12"].facts["single"]) == 8
    assert found["A13"].facts["worst_model"] == "Qwen3-Next-80B-A3B"
    assert found["A13"].facts["computed_pct"] == pytest.approx(
        100 * 77309411328 / 79674391296, abs=0.005
    )


def test_l1_and_q1(found):
    assert (found["L1"].facts["n_fit"], found["L1"].facts["n"]) == (5, 10)
    mean, printed = found["Q1"].facts["rows"]["Qwen3-80B DynaExq"]
    assert mean == pytest.approx((75.48 + 71.21 + 66.67 + 86.73 + 84.76) / 5)
    assert printed == 77.57
    assert (found["Q1"].facts["n_equal"], found["Q1"].facts["n_other"]) == (4, 2)


def test_pagedweight(found):
    full = paged("table2_longbench_memory FP16")
    assert found["P1"].facts["saved_pct"] == pytest.approx(100 * (1 - 16 / full))
    assert "saves 55 %" in found["P1"].evidence
    assert found["P2"].facts["share"] == pytest.approx(12.2 / 17.0)
    assert found["P3"].facts["score"] == [17.0, 16.5, 16.8]
    assert found["P4"].facts["losses_pct"][1] == pytest.approx(100 * (1 - 130.1 / 134.5))


@pytest.fixture
def mend(tmp_path, monkeypatch):
    """Copies the tables into a project of their own and edits one of them."""
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(paths.paper_dir(), tmp_path / "data" / "paper")

    def edit(name: str, old: str, new: str) -> None:
        path = tmp_path / "data" / "paper" / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.chmod(0o644)
        path.write_text(text.replace(old, new), encoding="utf-8")
        monkeypatch.setenv("REPRO_ROOT", str(tmp_path))

    return edit


def test_a_mended_row_changes_the_verdict(mend):
    assert findings_activation.beyond_uniform().verdict == "contradiction"
    mend("dynaexq_table1_decode_activation.csv", ",decode,8,14.9,", ",decode,8,12.9,")
    assert findings_activation.beyond_uniform().verdict == "consistent"


def test_a_mended_average_changes_the_verdict(mend):
    mend("dynaexq_table4_quality.csv", "Average,77.57", "Average,76.97")
    mend("dynaexq_table4_quality.csv", "Average,64.38", "Average,64.20")
    assert findings_results.five_task_means().verdict == "consistent"


def test_a_mended_saving_changes_the_verdict(mend):
    mend("pagedweight_stated.csv", "near_fp16_quality_memory,16,", "near_fp16_quality_memory,9.9,")
    (item,) = [check() for check in contradictions.CHECKS if check.__name__ == "memory_saved"]
    assert item.verdict == "consistent"


def test_a_missing_row_is_said(mend):
    mend("pagedweight_stated.csv", "gpu_memory_saving_max", "gpu_memory_saving_most")
    with pytest.raises(LookupError, match="gpu_memory_saving_max"):
        contradictions.items()


def test_the_table_has_a_row_for_each(found):
    text = contradictions.table().to_text()
    assert all(f"  {code}  " in text for code in found)
