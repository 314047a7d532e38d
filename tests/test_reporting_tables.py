"""Tables: ours and the papers' rows apart, no cell empty, every published row present."""

import re

import pytest
from test_reporting_samples import add_activation, add_all

from repro.reporting import paper, paper_tables
from repro.reporting.records import RecordStore
from repro.reporting.tables import Column, Row, Table, fixed, grouped


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return add_all(RecordStore("tiny", root=tmp_path_factory.mktemp("records")))


def cells(table: Table, *start: str) -> tuple[str, ...]:
    (row,) = [row for row in table.rows if row.cells[: len(start)] == start]
    return row.cells[len(start) :]


def test_table_1_holds_ours_the_bound_and_every_published_row(records):
    table = paper_tables.table1(records)
    ours = cells(table, "moe-fine", "prose", "mean of steps")
    assert ours[0] == "8.3"  # one token: no interval
    assert re.fullmatch(r"\d+\.\d ±1\.5", ours[-1])
    assert cells(table, "moe-fine", "any", "uniform routing")[-1] == "93.8"
    published = cells(table, "Qwen3-30B-A3B", "v3, text", "as printed, R")
    assert published == ("6.3", "-", "-", "-", "-", "62.0")
    kinds = {row.origin for row in table.rows}
    assert kinds == {"ours", "bound", "paper", "corrected"}
    marks = {row.cells[:2]: row.mark for row in table.rows}
    assert marks["Qwen3-30B-A3B", "authors' raw files"] == "withdrawn"
    assert marks["Qwen3-30B-A3B", "re-collected draft"] == ""
    assert marks["Qwen3-Next-80B-A3B", "re-collected draft"] == "unverified"
    corrected = cells(table, "DeepSeek-V2-Lite", "re-collected draft", "x 27/26, C")
    assert corrected[-1] == "70.2"
    assert len(table.keys) == 6  # two models, three workloads


def test_every_published_activation_value_is_shown(records):
    for stage, table in (
        ("decode", paper_tables.table1(records)),
        ("prefill", paper_tables.table2(records)),
    ):
        shown = [row.cells for row in table.rows if row.origin == "paper"]
        for row in paper.load_table(paper.ACTIVATION_TABLES[stage]):
            if row["version"] == "authors_raw_json" and "DeepSeek" in row["model"]:
                continue  # one spot check that confirms the draft's cell
            at = 3 + (1, 2, 4, 8, 16, 32).index(row["batch_size"])
            value = fixed(row["activation_pct"], 1)
            assert any(c[0] == row["base_model"] and c[at] == value for c in shown), row


def test_no_published_value_is_a_legal_cell(records):
    row = paper_tables.table2_length(records).rows[-1]
    assert row.origin == "paper"
    assert "no published value" in row.cells


def test_heavy_tail_and_overlap(records):
    table = paper_tables.heavy_tail(records)
    share = cells(table, "moe-fine", "prose")[1]
    assert re.fullmatch(r"60\.6 \[60\.6, 60\.6\]", share)
    overlap = paper_tables.overlap(records)
    assert cells(overlap, "moe-shared", "prose / python")[-1] == "6.3"  # 100 / 16, halves up
    assert overlap.rows[-1].cells[2] == "0"


def test_table_3_counts_and_published_rows(records):
    table = paper_tables.table3(records)
    assert "9,437,184" in cells(table, "Qwen3-30B-A3B")
    assert cells(table, "Qwen3-30B-A3B-Instruct-2507")[:2] == (
        "30.5e9",
        "3.3e9",
    )


def test_an_empty_store_gives_the_papers_rows_alone():
    table = paper_tables.table1([])
    assert {row.origin for row in table.rows} == {"paper", "corrected"}
    assert not table.keys


def test_two_devices_are_told_apart(records, tmp_path):
    store = RecordStore("tiny", root=tmp_path)
    add_activation(store)
    other = []
    for record in store.read():
        device = {**record.provenance["device"], "name": "Other GPU"}
        data = {**record.to_dict(), "provenance": {**record.provenance, "device": device}}
        other.append(type(record).from_dict(data))
    table = paper_tables.table1([*store.read(), *other])
    ours = [row.cells[1] for row in table.rows if row.origin == "ours"]
    assert len(ours) == 24
    assert sum("on Other GPU" in name for name in ours) == 12
    assert all(" on " in name for name in ours)


def test_text_and_html_show_the_same_cells(records):
    table = paper_tables.table1(records)
    text, page = table.to_text(), table.to_html()
    for row in table.rows:
        assert all(cell in text for cell in row.cells)
    assert page.count("<tr") == len(table.rows) + 2  # a head for ours, a head for the papers'
    assert 'class="paper withdrawn"' in page
    assert 'class="corrected unverified"' in page
    assert max(map(len, text.split("\n")[1:20])) < 150
    assert str(table) == text


def test_measured_and_published_numbers_never_share_a_column(records):
    for build in (paper_tables.table1, paper_tables.table3, paper_tables.overlap):
        ours, published = build(records).parts()
        assert {row.origin for row in ours.rows} <= {"ours", "bound"}
        assert {row.origin for row in published.rows} <= {"paper", "corrected"}
        assert published.part("paper") == published
        pages = build(records).to_html().split("</table>")
        assert len(pages) == 3
        assert not any('class="ours' in page and 'class="paper' in page for page in pages)
        # In text each block has a head of its own, under one another at the same places.
        lines = build(records).to_text().split("\n")
        heads = [line for line in lines if line.startswith("from")]
        assert len(heads) == 2 and heads[0] == heads[1]
    codes = "R read in the named place"
    table = paper_tables.table1(records)
    assert codes in table.part("paper").to_html()
    assert codes not in table.part("ours").to_html()


def test_a_table_of_dashes_has_no_numbers(records):
    assert not paper_tables.table2_length(records).part("paper").has_numbers
    assert paper_tables.table1(records).part("paper").has_numbers


def test_where_every_row_is_ours_no_column_says_so():
    page = Table("t", (Column("a"),), (Row("ours", ("1",)), Row("ours", ("2",)))).to_html()
    assert "from" not in page
    mixed = Table("t", (Column("a"),), (Row("ours", ("1",)), Row("bound", ("2",)))).to_html()
    assert '<th scope="row">bound</th>' in mixed


def test_a_wrong_row_is_refused():
    columns = (Column("a"), Column("b", "s"))
    with pytest.raises(ValueError, match="a row of 1 cells"):
        Table("t", columns, (Row("ours", ("1",)),))
    with pytest.raises(ValueError, match="an empty cell"):
        Table("t", columns, (Row("ours", ("1", "")),))


def test_html_is_escaped():
    table = Table("t", (Column("<a>"),), (Row("ours", ("<b> & 'c'",), note="<i>"),))
    assert "<b>" not in table.to_html()
    assert "<i>" not in table.to_html()


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(6.25, 1, "6.3"), (6.24999, 1, "6.2"), (0.5, 0, "1"), (-1.25, 1, "-1.3"), (3, 0, "3")],
)
def test_halves_are_rounded_up(value, digits, text):
    assert fixed(value, digits) == text


def test_absent_numbers_have_words():
    assert fixed(None, 1) == "not measured"
    assert grouped(None) == "no published value"
    assert grouped(1234567) == "1,234,567"
