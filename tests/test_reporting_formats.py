"""Reading the records of formats, and what the sentences say when the numbers change."""

from __future__ import annotations

import dataclasses

import pytest

from repro.reporting import checks_formats, format_records, format_sentences, format_tables
from repro.reporting.format_records import Interval, by_point, family, largest_page, penalties
from repro.reporting.grouping import select
from repro.reporting.records import Measurement, Record, RecordStore
from repro.reporting.sentences import NOTHING


def recorded(tmp_path, *measurements: Measurement) -> list[Record]:
    config = {"model": "moe-fine", "workload": "prose", "domain": "text", "source": "embedded"}
    store = RecordStore("tiny", root=tmp_path)
    return store.measure_or_load("format-curve", config, lambda: list(measurements))


def curve(tmp_path, per_row: float, shared: float, whole: float | None = None) -> list[Record]:
    """Three formats at 4 bits or less, with these rises of the loss."""
    rises = {"any-precision-r1@3": per_row, "any-precision@4": shared, "int4-g32": 0.02}
    if whole is not None:
        rises["any-precision-r0@4"] = whole
    points = list(rises)
    values = list(rises.values())
    series = [*values, *(v - 0.001 for v in values), *(v + 0.001 for v in values)]
    n_bytes = [500, 520, 560, 515][: len(points)]
    difference = [shared - 0.02, shared - 0.021, shared - 0.019]
    labels = {"points": points, "rows": ["value", "low", "high"]}
    claim = format_records.CURVE
    return recorded(
        tmp_path,
        Measurement(claim, "derived", "expert_bytes", None, "bytes", series=n_bytes,
                    labels={"points": points, "n_weights": 1000}),
        Measurement(claim, "measured", "loss_increase", None, "nats", series=series, labels=labels),
        Measurement(claim, "measured", "curve_difference", None, "nats", series=difference,
                    labels={**labels, "points": ["int4-g32"], "curve": "any-precision"}),
    )  # fmt: skip


def test_a_series_of_points_is_taken_apart(tmp_path):
    records = curve(tmp_path, 0.05, 0.01)
    (record,) = select(records, metric="loss_increase")
    found = by_point(record)
    assert list(found) == record.config["points"]
    assert found["any-precision@4"] == Interval(0.01, pytest.approx(0.009), pytest.approx(0.011))
    bits = format_records.bits_per_weight(records, record)
    assert bits == {"any-precision-r1@3": 4.0, "any-precision@4": 4.16, "int4-g32": 4.48}
    short = dataclasses.replace(record, series=record.series[:-1])
    with pytest.raises(ValueError, match="zip"):
        by_point(short)


@pytest.mark.parametrize(
    ("point", "kind"),
    [
        ("any-precision@3", "any-precision"),
        ("any-precision-r0@3", "any-precision-r0"),
        ("int3-g64", "symmetric"),
        ("int3-g64-asym", "asymmetric"),
        ("int3-g64-gptq", "gptq"),
        ("int3-g64-asym-gptq", "gptq"),
        ("bf16", "dense"),
    ],
)
def test_every_point_has_a_kind(point, kind):
    assert family(point) == kind and kind in format_records.FAMILIES


def test_the_largest_page_counts_the_worst_width(tmp_path):
    labels = {"dimensions": ["a", "b"], "widths": [2, 4], "page_bytes": [256, 512]}
    shares = [0.01, 0.04, 0.02, 0.06, 0.0, 0.2, 0.07, 0.3]  # a: 2 bits, 4 bits; then b
    (record,) = recorded(
        tmp_path,
        Measurement(format_records.PAGES, "derived", "unused_share", None, "share", series=shares,
                    labels=labels),
    )  # fmt: skip
    assert largest_page(record, 0.05) == {"a": 256, "b": 0}
    assert largest_page(record, 0.06) == {"a": 512, "b": 0}
    assert largest_page(record, 0.30) == {"a": 512, "b": 512}


def test_ratios_are_named_by_row_length_and_width(tmp_path):
    labels = {"places": [[64, 2], [1024, 4]], "data": "gaussian", "rows_per_lut": 1}
    (record,) = recorded(
        tmp_path,
        Measurement(format_records.NESTING, "measured", "penalty_pooled", None, "ratio",
                    series=[1.1, 1.05], labels=labels),
    )  # fmt: skip
    assert penalties(record) == {(64, 2): 1.1, (1024, 4): 1.05}


def test_the_sentence_follows_the_curve(tmp_path):
    worse = format_sentences.default_tables(curve(tmp_path / "1", 0.05, 0.01))
    assert "rules out a table per row" in worse and "ways of sharing" not in worse
    better = format_sentences.default_tables(curve(tmp_path / "2", 0.01, 0.05))
    assert "rules out" not in better and "by 1.01 % (any-precision-r1@3, 4.00 bits)" in better
    three = format_sentences.default_tables(curve(tmp_path / "3", 0.05, 0.01, 0.03))
    assert "differ by at most 2.04 points" in three


def test_not_worse_means_that_the_interval_reaches_zero(tmp_path):
    (good,) = checks_formats.not_worse_at_equal_bytes(curve(tmp_path / "1", 0.05, 0.0205))
    assert good.holds and "+0.0005 nats" in good.found and "4.48 bits" in good.found
    (bad,) = checks_formats.not_worse_at_equal_bytes(curve(tmp_path / "2", 0.05, 0.0215))
    assert not bad.holds and bad.margin < 0 < good.margin
    assert "1 of 1" in format_sentences.quality(curve(tmp_path / "3", 0.05, 0.0205))
    assert "0 of 1" in format_sentences.quality(curve(tmp_path / "4", 0.05, 0.0215))


def test_the_table_marks_only_clear_differences(tmp_path):
    def cell(rise: float, name: str) -> str:
        return format_tables.equal_bytes(curve(tmp_path / name, 0.05, rise)).rows[0].cells[3]

    assert cell(0.0205, "1") == "+0.05"
    assert cell(0.0250, "2") == "+0.50 worse"
    assert cell(0.0100, "3") == "-1.00 better"


def test_without_records_nothing_is_said():
    for say in (format_sentences.nesting, format_sentences.quality, format_sentences.sizes):
        assert say([]) == NOTHING
    for make in (format_tables.nesting, format_tables.quality, format_tables.pages):
        assert make([]).rows == ()
