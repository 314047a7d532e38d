"""Serving in figures, tables, words and verdicts: made from planted records, each break seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from repro.reporting import residency_diagram, serving_figures, serving_sentences, serving_tables
from repro.reporting import serving_records as names
from repro.reporting.claims import CLAIMS, evaluate
from repro.reporting.figures import FIGURES
from repro.reporting.records import Measurement, Record, RecordStore
from repro.reporting.report_sections import OPEN_POINTS, SECTIONS
from repro.reporting.style import png_bytes, png_size

POOLS = {
    name: {"quota_bytes": quota, "used_bytes": used, "free_bytes": quota - used}
    for name, quota, used in (("high", 900, 800), ("low", 500, 450), ("kv", 700, 100))
}
STATE = {
    "capacity_bytes": 2100, "used_bytes": 1350, "pools": POOLS, "layout": "versions",
    "n_bits": {"gate_up": {"16": 3, "4": 5}, "down": {"16": 3, "4": 5}},
    "states": {"resident": 5, "promoting": 2, "demoting": 1, "evicting": 0},
    "host": {"mode": "mirrored", "pinned": False, "held_bytes": 5000, "bytes": 5000},
    "worker": {"threaded": True, "jobs": 3, "ok": True}, "staging": {"slots": 2},
    "policy": "dynaexq", "format": "fp16/int4", "running": 4, "fixed_bytes": 77,
}  # fmt: skip


def add_serving(store: RecordStore, **changed: Any) -> list[Record]:
    """Records of all three experiments; ``changed`` replaces the value of a metric."""

    def one(claim: str, metric: str, value: Any, unit: str = "count", **more: Any) -> Measurement:
        kind = "derived" if metric == "step_ratio_on_off" else "measured"
        return Measurement(claim, kind, metric, changed.get(metric, value), unit, **more)

    found: list[Record] = []
    base = {"source": "embedded", "seed": 0}
    for layout, (old, new) in {"planes": (3, 8), "versions": (4, 16)}.items():
        config = {**base, "model": "moe-fine", "layout": layout}
        measure = _promotion(one, layout, old, new)
        found += store.measure_or_load("transitions", config, lambda m=measure: m)
    for policy in (names.GIVES, names.KEEPS):
        config = {**base, "model": "moe-fine", "policy": policy}
        measure = _pressure(one, policy)
        found += store.measure_or_load("kv-pressure", config, lambda m=measure: m)
    for model in ("moe-fine", "moe-shared"):
        for layout in names.LAYOUTS:
            config = {**base, "model": model, "layout": layout}
            measure = _serving(one)
            found += store.measure_or_load("serving", config, lambda m=measure: m)
    return found


def _promotion(one: Any, layout: str, old: int, new: int) -> list[Measurement]:
    began = [0.02 * i for i in range(30)]
    numbers = {
        "steps_on_old_version": 10, "weight_wait_s": 0.0, "bytes_moved": 33792,
        "submitted_s": 0.2, "copy_began_s": 0.201, "copy_ended_s": 0.39, "published_s": 0.4,
        "reclaimed_s": 0.42,
    }  # fmt: skip
    found = [one(names.PROMOTION, metric, value) for metric, value in numbers.items()]
    ended = [t + 0.019 for t in began]
    widths = [old] * 20 + [new] * 10
    for metric, values in (
        ("step_began_s", began), ("step_ended_s", ended), ("step_width", widths),
    ):  # fmt: skip
        found.append(one(names.PROMOTION, metric, None, series=values))
    for when in ("before", "during", "after"):
        found.append(
            one(names.PROMOTION, f"step_s_{when}", 0.02, n=10, p10=0.018, p50=0.02, p90=0.022)
        )
    if layout == "versions":
        found.append(one(names.ENGINE, "engine_state", None, labels={"snapshot": STATE}))
    return found


def _pressure(one: Any, policy: str) -> list[Measurement]:
    gives = policy == names.GIVES
    n_steps = 20 if gives else 60
    numbers = {
        "budget_bytes": 1000, "peak_used_bytes": 990, "kv_blocks_at_start": 24,
        "peak_kv_blocks": 96 if gives else 27, "lent_share_at_peak": 0.5 if gives else 0.0,
        "lowest_mean_bits": 4.2 if gives else 8.0, "final_mean_bits": 8.0,
        "first_mean_bits": 8.0, "requests_finished": 12,
        "concurrent_throughout": 12 if gives else 7, "preemptions": 0 if gives else 10,
        "kv_stalls": 5 if gives else 900, "steps": n_steps, "promotions": 8 if gives else 0,
        "demotions": 30 if gives else 0, "restored_bit_for_bit": True,
    }  # fmt: skip
    found = [one(names.LENDING, metric, value, n=12) for metric, value in numbers.items()]
    for metric in ("free_blocks", "blocks_in_use", "weight_bytes", "used_bytes"):
        found.append(one(names.LENDING, metric, None, series=list(range(n_steps + 1))))
    found.append(one(names.LENDING, "step_s", None, series=[0.0, *[0.03] * n_steps]))
    fall_and_rise = [8.0, 8.0, 6.0, 6.0, 4.2, 4.2, 7.0, 8.0] if gives else [8.0] * 8
    found.append(one(names.LENDING, "mean_bits", None, series=fall_and_rise))
    if gives:
        labels: dict[str, Any] = {"sampled_steps": [0, 10, 19]}
        found.append(
            one(names.LENDING, "bits_per_byte", 0.01, series=[1.5, 1.51, 1.5], labels=labels)
        )
        labels = {"rows": ["0", "10", "19"], "columns": "block", "layers": 2}
        bits = [8] * 16 + [2, 3, 4, 5] * 4 + [8] * 16
        found.append(one(names.LENDING, "block_bits", None, n=16, series=bits, labels=labels))
    return found


def _serving(one: Any) -> list[Measurement]:
    numbers = {
        "budget_bytes": 1000, "peak_used_bytes": 900, "host_bytes": 5000,
        "changes_accepted": 60, "changes_published": 55, "forced_bytes_moved": 70_000,
        "restored_bit_for_bit": True, "policy_weight_wait_s": 0.0, "weight_wait_s": 0.0,
        "step_ratio_on_off": 1.03, "prefill_tokens_per_s": 900.0, "decode_tokens_per_s": 200.0,
        "device_ledger_bytes": 1200, "device_workspace_bytes": 300, "device_peak_bytes": 1400,
    }  # fmt: skip
    found = [one(names.CHANGING, metric, value) for metric, value in numbers.items()]
    for kind in ("on", "off"):
        labels = {"transitions": kind, "p99": 0.05}
        found.append(
            one(names.CHANGING, "step_s", 0.03, p10=0.02, p50=0.03, p90=0.04, labels=labels)
        )
    for metric in ("ttft_s", "tpot_s", "e2e_s"):
        found.append(one(names.CHANGING, metric, 0.1, n=8, p50=0.1, labels={"p99": 0.2}))
    return found


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> list[Record]:
    return add_serving(RecordStore("tiny", root=tmp_path_factory.mktemp("records")))


def verdict(code: str, records: list[Record]) -> str:
    (claim,) = (claim for claim in CLAIMS if claim.code == code)
    return evaluate(claim, records).verdict


CODES = ("C1", "C2", "C2.1", "C2.2", "C3", "C3.1", "K1", "K2", "K3", "K4")


@pytest.mark.parametrize("code", CODES)
def test_claims_hold_on_what_was_planted_and_need_records(code, records):
    assert verdict(code, records) == "pass"
    assert verdict(code, []) == "not measured"


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("C1", {"peak_used_bytes": 1001}),
        ("C1", {"device_peak_bytes": 1551}),
        ("C2", {"weight_wait_s": 1e-9}),
        ("C2", {"policy_weight_wait_s": 0.1}),
        ("C2.1", {"steps_on_old_version": 4}),
        ("C3", {"changes_published": 61}),
        ("C3", {"changes_published": 0}),
        ("C3", {"demotions": 500}),
        ("C3.1", {"step_ratio_on_off": 1.3}),
        ("K1", {"preemptions": 1}),
        ("K1", {"requests_finished": 11}),
        ("K1", {"concurrent_throughout": 11}),
        ("K1", {"peak_kv_blocks": 95}),
        ("K2", {"lent_share_at_peak": 0.39}),
        ("K2", {"final_mean_bits": 7.9}),
        ("K3", {"restored_bit_for_bit": False}),
        ("K4", {"preemptions": 0}),
    ],
)
def test_each_break_is_seen(code, changed, tmp_path):
    assert verdict(code, add_serving(RecordStore("tiny", root=tmp_path), **changed)) == "fail"


def test_a_slow_copy_is_told_from_the_pace_around_it(tmp_path):
    records = add_serving(RecordStore("tiny", root=tmp_path))
    slow = [
        Record.from_dict({**r.to_dict(), "p50": 0.03}) if r.metric == "step_s_during" else r
        for r in records
    ]
    assert verdict("C2.2", slow) == "fail"


def test_a_wait_that_nobody_booked_is_seen_in_the_steps(records):
    """All of a copy in one step, as if it had been waited for; the books say 0 s."""
    waited = [
        Record.from_dict({**r.to_dict(), "series": [0.0, 0.2, 0.42] if "began" in r.metric else
                          [0.019, 0.41, 0.44]})
        if r.metric in ("step_began_s", "step_ended_s") else r
        for r in records
    ]  # fmt: skip
    assert verdict("C2", waited) == "fail"


def test_a_width_that_goes_to_and_fro_is_seen(records):
    flapping = [
        Record.from_dict({**r.to_dict(), "series": [8.0, 6.0, 7.0, 5.0, 8.0]})
        if r.metric == "mean_bits" else r
        for r in records
    ]  # fmt: skip
    assert verdict("C3", flapping) == "fail"


OURS = ("serving_promotion", "figure4_engine", "serving_pressure", "serving_on_off")


@pytest.mark.parametrize("name", OURS)
def test_figures_are_drawn_with_and_without_records(name, records):
    spec = FIGURES[name]
    figure = spec.function(spec.records(records))
    width, height = png_size(png_bytes(figure))
    assert width == 720 and height <= 800
    assert any(axes.patches or axes.lines or axes.collections for axes in figure.axes)
    assert png_size(png_bytes(spec.function([])))[0] == 720


def test_the_timeline_shows_every_step_and_the_copy(records):
    figure = serving_figures.serving_promotion(records)
    assert len(figure.axes) == 2
    for axes, widths in zip(figure.axes, ((4, 16), (3, 8)), strict=True):
        old, new, copy = axes.collections
        assert len(old.get_paths()) == 20 and len(new.get_paths()) == 10
        (bar,) = copy.get_paths()
        assert bar.vertices[:, 0].min() == pytest.approx(1, abs=1e-6)
        assert bar.vertices[:, 0].max() == pytest.approx(190, abs=1e-6)
        assert f"{widths[0]} to {widths[1]} bits" in axes.get_title(loc="left")


def test_older_records_without_the_copys_ends_are_drawn_too(records):
    older = [r for r in records if r.metric not in ("copy_began_s", "copy_ended_s")]
    figure = serving_figures.serving_promotion(older)
    (bar,) = figure.axes[0].collections[2].get_paths()
    assert bar.vertices[:, 0].max() == pytest.approx(200, abs=1e-6)
    assert serving_tables.promotion(older).rows


def test_pools_are_filled_to_scale():
    (axes,) = residency_diagram.draw_engine(STATE).axes
    bars = [p for p in axes.patches if getattr(p, "get_height", None) and p.get_x() == 44.0]
    widths = [bar.get_width() for bar in bars if 0 < bar.get_height() < 10]
    most = max(widths)
    assert most * 800 / 900 == pytest.approx(widths[1])
    said = " ".join(text.get_text() for text in axes.texts)
    for word in ("8 handles", "3 at 16 bits", "5 at 4 bits", "2 up, 1 down", "3 jobs", "mirrored"):
        assert word in said


def test_the_heat_map_sorts_blocks_within_their_layer(records):
    figure = serving_figures.serving_pressure(records)
    (mesh,) = figure.axes[1].collections
    shown = np.asarray(mesh.get_array()).reshape(16, 3)
    assert (shown[:8, 1] == sorted([2, 3, 4, 5] * 2)).all()
    assert (shown[:, 0] == 8).all() and (shown[:, 2] == 8).all()


@pytest.mark.parametrize(
    "make",
    [
        serving_tables.promotion,
        serving_tables.pressure,
        serving_tables.on_off,
        serving_tables.served,
    ],
)
def test_tables_have_rows_and_keys(make, records):
    made = make(records)
    assert made.rows and set(made.keys) <= {record.key for record in records}
    assert "nan" not in made.to_text()
    assert not make([]).rows


def test_what_a_cpu_cannot_count_is_a_dash(records):
    cpu = [r for r in records if not r.metric.startswith("device_")]
    rows = serving_tables.served(cpu).rows
    assert {row.cells[-2] for row in rows} == {"-"}
    assert verdict("C1", cpu) == "pass"


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (serving_sentences.promotion, "10 steps finish on the old version"),
        (serving_sentences.engine, "2 promoting, 1 demoting"),
        (serving_sentences.pressure, "50 % of the experts' bytes are lent"),
        (serving_sentences.serving, "3 %"),
    ],
)
def test_sentences_say_what_was_found(say, words, records):
    text = say(records)
    assert words in text and text.endswith(".")
    assert "ot measured" in say([])


def test_the_report_knows_them():
    sections = {section.id: section for section in SECTIONS}
    shown = [name for section in sections.values() for name in section.figures]
    assert set(OURS) <= set(shown)
    assert not any("Figure 4" in name for name, _ in OPEN_POINTS)
