"""Sensitivity and formats on the page: the committed records, and what tampering does to them.

The records that were measured on a GPU are real input for every check, table, sentence and
figure; each check must fail when the one number it judges is made wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from repro.reporting import (
    format_sentences,
    format_tables,
    sensitivity_sentences,
    sensitivity_tables,
    style,
)
from repro.reporting.claims import CLAIMS, evaluate
from repro.reporting.figures import FIGURES
from repro.reporting.records import Record, RecordStore

EXPERIMENTS = ("nesting", "format-curve", "sensitivity")
CLAIM = {claim.code: claim for claim in CLAIMS}
Change = Callable[[float], float]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    found = [r for name in EXPERIMENTS for r in RecordStore("gpu").read(name)]
    assert found, "the GPU records are committed"
    return found


def changed(
    records: list[Record], change: Callable[[Record], Record], **where: Any
) -> list[Record]:
    """``change`` applied to the records of these metrics and configurations."""
    result, hits = [], 0
    for record in records:
        facts = {"metric": record.metric, **record.config}
        if all(facts.get(name) == value for name, value in where.items()):
            record, hits = change(record), hits + 1
        result.append(record)
    assert hits
    return result


def series(change: Change, places: slice = slice(None)) -> Callable[[Record], Record]:
    """Change these numbers of a record's series."""

    def apply(record: Record) -> Record:
        values = list(record.series or ())
        values[places] = [None if x is None else change(x) for x in values[places]]
        return dataclasses.replace(record, series=tuple(values))

    return apply


def value(change: Change) -> Callable[[Record], Record]:
    return lambda record: dataclasses.replace(record, value=change(record.value))


@pytest.mark.parametrize("code", ["F1", "F4", "F5", "F6", "S1", "S2", "S3", "S4", "S5"])
def test_what_was_measured_holds_the_required_claims(records: list[Record], code: str) -> None:
    result = evaluate(CLAIM[code], records)
    assert CLAIM[code].required and result.verdict == "pass" and result.n_cases > 0


@pytest.mark.parametrize(
    ("code", "change", "where"),
    [
        ("F1", series(lambda x: x * 1.2), {"metric": "penalty_pooled", "weighted": False}),
        ("F2", series(lambda x: x * 1.2), {"metric": "penalty_pooled", "weighted": True}),
        ("F3", series(lambda x: x + 1.0), {"metric": "curve_difference"}),
        ("F4", value(lambda x: 3), {"metric": "tables_not_falling"}),
        ("F5", series(lambda x: x * 1.1), {"metric": "table_bits_per_weight"}),
        ("F6", series(lambda x: 0.3), {"metric": "unused_share"}),
        ("F7", value(lambda x: 0.5), {"metric": "encode_rate"}),
        ("S1", series(lambda x: 0.5), {"metric": "rank_correlation", "target": "divergence"}),
        ("S2", series(lambda x: -x), {"metric": "mean_damage"}),
        ("S3", series(lambda x: -x), {"metric": "rank_correlation", "target": "divergence"}),
        ("S4", value(lambda x: 0.9), {"metric": "mass_vs_per_token"}),
        ("S5", series(lambda x: -x, slice(3, None, 20)), {"metric": "prompt_heads"}),
        ("S6", series(lambda x: 0.1), {"metric": "rank_correlation", "target": "loss"}),
    ],
)
def test_a_wrong_number_fails_its_claim(
    records: list[Record], code: str, change: Callable[[Record], Record], where: dict[str, Any]
) -> None:
    assert evaluate(CLAIM[code], changed(records, change, **where)).verdict == "fail"
    assert evaluate(CLAIM[code], []).verdict == "not measured"


def test_rank_correlations_of_few_blocks_are_not_judged(records: list[Record]) -> None:
    few = changed(records, lambda r: dataclasses.replace(r, n=24), metric="rank_correlation")
    assert evaluate(CLAIM["S1"], few).verdict == "not measured"


@pytest.mark.parametrize(
    "make",
    [
        format_tables.nesting,
        format_tables.quality,
        format_tables.equal_bytes,
        format_tables.published_bytes,
        format_tables.published_integers,
        format_tables.pages,
        format_tables.speed,
        sensitivity_tables.rank_correlations,
        sensitivity_tables.loss_noise,
        sensitivity_tables.heads,
    ],
)
def test_tables_have_rows_and_name_their_records(records: list[Record], make: Any) -> None:
    table = make(records)
    assert table.rows and table.keys
    assert all(len(row.cells) == len(table.columns) for row in table.rows)
    assert not any("nan" in str(cell) for row in table.rows for cell in row.cells)
    assert set(table.keys) <= {record.key for record in records}


@pytest.mark.parametrize(
    "say",
    [
        format_sentences.nesting,
        format_sentences.quality,
        format_sentences.sizes,
        sensitivity_sentences.sensitivity,
        sensitivity_sentences.heads,
    ],
)
def test_sentences_speak_of_both_models(records: list[Record], say: Any) -> None:
    text = say(records)
    assert text.endswith(".") and "nan" not in text and len(text) > 60


@pytest.mark.parametrize(
    "name", [n for n, spec in FIGURES.items() if set(spec.experiments) & set(EXPERIMENTS)]
)
def test_figures_are_drawn_from_them(records: list[Record], name: str) -> None:
    spec = FIGURES[name]
    figure = spec.function(spec.records(records))
    assert any(
        axes.lines or axes.images or axes.patches or axes.collections for axes in figure.axes
    )
    width, _ = style.png_size(style.png_bytes(figure))
    assert width == 720


def test_records_are_small_and_finite() -> None:
    for name in (*EXPERIMENTS, "demotion"):
        store = RecordStore("gpu")
        assert store.path(name).stat().st_size < 160_000
        for record in store.read(name):
            numbers = [x for x in record.series or () if x is not None]
            assert np.isfinite(numbers).all()
