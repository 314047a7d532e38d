"""Figure 3 from records to verdicts, tables, sentences and pictures, on curves of known shape."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from repro.reporting import checks_demotion as checks
from repro.reporting import demotion_curves as dc
from repro.reporting import demotion_figures, demotion_sentences, demotion_tables, style
from repro.reporting.claims import CLAIMS, evaluate
from repro.reporting.figures import FIGURES
from repro.reporting.records import Measurement, Record, RecordStore
from repro.reporting.report_sections import OPEN_POINTS, SECTIONS
from repro.reporting.sentences import NOTHING

SHARES = (0, 15, 30, 45, 60, 75, 90, 100)
DOMAINS = {"prose": "text", "word-problems": "math", "python": "code"}
MODELS = {"moe-fine": 48, "moe-shared": 16}
TOTALS = {"fp16/int4": 0.002, "fp16/int2": 0.30, "int4/int2": 0.28}
REQUIRED = ("O3.1", "O3.2", "O3.3", "O3.4", "O3.6")
CLAIM = {claim.code: claim for claim in CLAIMS}


def add_demotion(
    store: RecordStore, *, error: float = 0.004, n_prompts: int = 16, tokens: int = 256
) -> list[Record]:
    """Coldest first along f^3, hottest first along 1 - (1 - f)^3, random along f."""
    for model, n_experts in MODELS.items():
        for workload, domain in DOMAINS.items():
            for pair, total in TOTALS.items():
                config = {
                    "model": model,
                    "workload": workload,
                    "domain": domain,
                    "source": "embedded",
                    "pair": pair,
                    "shares_percent": SHARES,
                    "context_tokens": 3 * tokens // 4,
                    "scored_tokens": tokens // 4,
                }

                def measure(total=total, n_experts=n_experts) -> list[Measurement]:
                    demoted = [round(share * n_experts / 100) for share in SHARES]
                    f = np.array(demoted) / n_experts
                    shape = {"coldest": f**3, "hottest": 1 - (1 - f) ** 3, "random": f}
                    inside = ((f > 0) & (f < 1)) * error
                    series: list[float] = []
                    for order in dc.ORDERS:
                        increase = total * shape[order]
                        spread = np.where(f > 0, 2 * error, 0.0)
                        columns = {
                            "perplexity": 12 * np.exp(increase),
                            "perplexity_low": 10 * np.exp(increase),
                            "perplexity_high": 14 * np.exp(increase),
                            "increase": increase,
                            "increase_low": increase - spread,
                            "increase_high": increase + spread,
                            "step_error": np.where(f > 0, error, 0.0),
                            "line_error": inside,
                            "coldest_error": inside,
                            "last_perplexity": 11 * np.exp(increase),
                            "last_increase": increase,
                            "last_low": increase - 2 * spread,
                            "last_high": increase + 2 * spread,
                        }
                        table = np.stack([columns[name] for name in dc.COLUMNS[order]], axis=1)
                        series += table.flatten().tolist()
                    return [
                        Measurement(
                            dc.CLAIM,
                            "measured",
                            dc.METRIC,
                            total,
                            "nats",
                            n=n_prompts,
                            ci_low=total - 2 * error,
                            ci_high=total + 2 * error,
                            series=series,
                            labels={
                                "orders": dc.ORDERS,
                                "columns": dc.COLUMNS,
                                "n_experts": n_experts,
                                "n_demoted": demoted,
                            },
                        )
                    ]

                store.measure_or_load("demotion", config, measure, sources=("repro.paths",))
    return store.read("demotion")


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> list[Record]:
    return add_demotion(RecordStore("tiny", root=tmp_path_factory.mktemp("records")))


def tampered(records, name, change, *, order="coldest", pair="fp16/int2", place=-1, model=None):
    """The records with one number of one column changed, in the curves so described."""
    result = []
    for record in records:
        config = record.config
        if config["pair"] == pair and model in (None, config["model"]):
            series, start = list(record.series), 0
            for other in config["orders"]:
                width = len(config["columns"][other])
                if other == order:
                    row = range(len(SHARES))[place]
                    at = start + row * width + config["columns"][order].index(name)
                    series[at] = change(series[at])
                start += width * len(SHARES)
            record = dataclasses.replace(record, series=tuple(series))
        result.append(record)
    assert result != records
    return result


def verdict(code: str, records: list[Record]) -> str:
    return evaluate(CLAIM[code], records).verdict


def test_curves_come_back_as_they_were_put_in(records):
    found = dc.curves(records)
    assert len(found) == 2 * 3 * 3 * 3
    assert [c.identity.domain for c in found[:27:9]] == ["text", "math", "code"]
    (curve,) = [
        c
        for c in dc.curves(records, pair="int4/int2", order="hottest")
        if (c.identity.model, c.identity.workload) == ("moe-fine", "python")
    ]
    assert curve.n_demoted == (0, 7, 14, 22, 29, 36, 43, 48)
    f = np.array(curve.n_demoted) / 48
    np.testing.assert_allclose(curve["increase"], 0.28 * (1 - (1 - f) ** 3), atol=1e-12)
    np.testing.assert_allclose(curve.reached, 1 - (1 - f) ** 3, atol=1e-12)
    assert curve.at(45) == 3
    assert set(curve.columns) == set(dc.COLUMNS["hottest"])


def test_a_cut_series_is_refused(records):
    cut = dataclasses.replace(records[0], series=records[0].series[:-1])
    with pytest.raises(ValueError, match="191 numbers are no table of 8 shares and 24 columns"):
        dc.curves_of(cut)


def test_curves_of_that_shape_hold_every_required_claim(records):
    assert {verdict(code, records) for code in REQUIRED} == {"pass"}
    assert all(CLAIM[code].required for code in REQUIRED)
    assert verdict("O3.5", records) == verdict("O3.7", records) == "pass"
    # 4,096 tokens are too few to say anything about FP16 to INT4
    assert verdict("O3.8", records) == "not measured"
    assert not any(CLAIM[code].required for code in ("O3.5", "O3.7", "O3.8"))


def test_without_records_nothing_is_said():
    for code in (*REQUIRED, "O3.7", "O3.8"):
        result = evaluate(CLAIM[code], [])
        assert result.verdict == "not measured"
        assert result.found.startswith("needs")


@pytest.mark.parametrize(
    ("code", "name", "change", "where"),
    [
        ("O3.1", "increase_low", lambda v: -1e-6, {"pair": "int4/int2"}),
        ("O3.2", "increase", lambda v: v + 0.1, {"place": 3}),
        ("O3.3", "increase", lambda v: 0.088, {"place": 2, "model": "moe-shared"}),
        ("O3.3", "line_error", lambda v: 0.05, {"place": 2}),
        ("O3.4", "increase", lambda v: 0.001, {"order": "hottest", "place": 4}),
        ("O3.4", "coldest_error", lambda v: 0.2, {"order": "hottest", "place": 2}),
        ("O3.5", "increase", lambda v: 0.16, {"place": 5, "model": "moe-fine"}),
        ("O3.6", "increase_high", lambda v: 0.31, {"pair": "fp16/int4", "model": "moe-fine"}),
    ],
)
def test_one_wrong_number_fails_one_claim(records, code, name, change, where):
    wrong = tampered(records, name, change, **where)
    result = evaluate(CLAIM[code], wrong)
    assert result.verdict == "fail" and result.decides == (code in REQUIRED)
    assert 0 < result.n_holding < result.n_cases


def test_a_step_down_within_the_noise_is_none(records):
    """A step down by 0.018, where 4 errors are 0.016 and 5 % of 0.3 are 0.015."""
    lower = tampered(records, "increase", lambda v: v - 0.0394, place=3, model="moe-fine")
    assert verdict("O3.2", lower) == "fail"
    noisy = tampered(lower, "step_error", lambda v: 0.005, place=3, model="moe-fine")
    assert verdict("O3.2", noisy) == "pass"


def test_a_rise_in_one_step_is_no_smooth_one(records):
    late = records
    for place in range(1, 7):
        late = tampered(late, "increase", lambda v: v / 20, place=place)
    result = evaluate(CLAIM["O3.7"], late)
    assert result.verdict == "fail" and not result.decides
    assert "from 90 to 100 %" in result.found


def test_int4_is_judged_where_enough_tokens_were_read(tmp_path):
    many = {"n_prompts": 128, "tokens": 2304}
    sharp = add_demotion(RecordStore("gpu", root=tmp_path / "a"), error=0.0005, **many)
    assert verdict("O3.8", sharp) == "pass"
    blunt = add_demotion(RecordStore("gpu", root=tmp_path / "b"), error=0.004, **many)
    result = evaluate(CLAIM["O3.8"], blunt)
    assert result.verdict == "fail" and not result.decides
    assert result.found.endswith("below the noise")


def test_the_authors_series_are_read_with_what_they_are(records):
    series = dc.published()
    assert [(s.model, s.estimated) for s in series] == [
        ("Qwen3-30B", True),
        ("Qwen3-80B", False),
        ("Qwen3-80B", True),
    ]
    assert series[0].reached[2] == pytest.approx(np.log(6.825 / 6.413) / np.log(7.189 / 6.413))
    for item in series:
        assert item.reached[0] == 0.0 and item.reached[-1] == 1.0


def test_tables_keep_the_authors_apart(records):
    for make in (demotion_tables.perplexity, demotion_tables.reached, demotion_tables.controls):
        table = make(records)
        assert {row.origin for row in table.rows} == {"ours", "paper"}
        assert len(table.keys) == 18
    table = demotion_tables.perplexity(records)
    ours = [row for row in table.rows if row.origin == "ours"]
    assert len(ours) == 18
    assert ours[1].cells[:4] == ("moe-fine", "prose", "FP16 to INT2", "12.00")
    assert ours[1].cells[-2:] == ("0.3000 [0.2920, 0.3080]", "0.3000 [0.2840, 0.3160]")
    paper = [row for row in table.rows if row.origin == "paper"]
    assert [row.cells[3] for row in paper] == ["6.413", "5.740", "3.830"]
    assert "estimated" in paper[0].note and "estimated" not in paper[1].note
    assert "two series" in paper[1].note and "two series" in paper[2].note
    assert "16 windows of 256 tokens" in table.caption


def test_parts_of_a_rise_below_the_noise_are_left_out(records):
    table = demotion_tables.reached(records)
    ours = [row for row in table.rows if row.origin == "ours"]
    assert len(ours) == 12  # FP16 to INT4 is 0.002 +- 0.008
    assert ours[0].cells[2:4] == ("FP16 to INT2", "0.0")
    assert ours[0].cells[-1] == "100.0"
    flat = tampered(records, "increase_low", lambda v: -0.1, model="moe-fine")
    rows = [row for row in demotion_tables.reached(flat).rows if row.origin == "ours"]
    assert rows[0].cells[3:] == ("-",) * 8
    assert "noise" in rows[0].note


def test_controls_stand_beside_the_coldest(records):
    row = demotion_tables.controls(records).rows[1]
    f = 14 / 48
    expected = [300 * f**3, 300 * (1 - (1 - f) ** 3), 300 * f]
    assert [float(cell) for cell in row.cells[3:6]] == pytest.approx(expected, abs=0.06)


def test_sentences_are_computed(records):
    text = demotion_sentences.figure3(records)
    assert "raises perplexity in moe-fine by 35 % over" in text
    assert "the coldest first reach 22 % of that increase, the hottest first 94 %" in text
    assert "in 0 of 6 cases the interval is above zero" in text
    assert "4,096 tokens a point are too few for a verdict" in text
    assert demotion_sentences.figure3([]) == NOTHING
    said = demotion_sentences.figure3_paper()
    assert "3 series" in said
    part = 100 * np.log(6.825 / 6.413) / np.log(7.189 / 6.413)
    assert f"Qwen3-30B (authors' notebook) {part:.0f} %" in said


def test_pictures_have_a_panel_for_each_model_and_workload(records, tmp_path):
    figure = demotion_figures.figure3_demotion(records)
    assert len(figure.axes) == 6
    for axes in figure.axes:
        assert len(axes.lines) == 9 and len(axes.collections) == 3
    assert figure.axes[0].get_title(loc="left") == "moe-fine:\nprose"
    width, height = style.png_size(style.png_bytes(figure))
    assert width == 720 and 400 < height < 800

    figure = demotion_figures.figure3_normalised(records)
    ours, shared, authors = figure.axes
    assert len(ours.lines) == len(shared.lines) == 6 + 1
    assert len(authors.lines) == 3 + 1
    markers = {line.get_marker() for line in authors.lines[:3]}
    assert not markers & {line.get_marker() for line in ours.lines if line.get_marker()} - {"None"}
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sum("estimated" in text for text in said) == 2


def test_a_model_measured_on_one_workload_leaves_no_empty_frame(records):
    few = [r for r in records if r.config["model"] == "moe-fine" or r.config["domain"] == "text"]
    figure = demotion_figures.figure3_demotion(few)
    assert [axes.axison for axes in figure.axes] == [True] * 4 + [False] * 2


def test_figure_3_is_on_the_page_and_no_open_point():
    (section,) = [section for section in SECTIONS if section.id == "figure3"]
    assert section.claims == (dc.CLAIM,)
    for name in section.figures:
        assert FIGURES[name].claims == section.claims
        assert FIGURES[name].experiments == (dc.EXPERIMENT,)
    assert not any("Figure 3" in name for name, _ in OPEN_POINTS)


def test_checks_name_the_pairs_they_are_about():
    assert set(checks.PAIR_LABEL) == set(dc.PAIRS)
    assert set(checks.TO_INT2) == {p for p in dc.PAIRS if p.endswith("int2")}
