"""Records: the same bytes whatever the order, one lost point at most, nothing lost in silence."""

import errno
import gzip
import json
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.errors import OutputError
from repro.reporting import records as module
from repro.reporting.jsonable import canonical, order_key, plain
from repro.reporting.records import Measurement, Record, RecordFileError, RecordStore, is_current


def rows(batch: int, value: float = 0.5) -> list[Measurement]:
    return [
        Measurement("T", "measured", "ratio", value * batch, "percent", n=3, labels={"layer": 2}),
        Measurement("T", "measured", "ratio", value * batch, "percent", labels={"layer": 10}),
        Measurement("T", "derived", "curve", None, "share", series=[0.1, np.float32(0.5)]),
    ]


def fill(store: RecordStore, batches: list[int]) -> None:
    for batch in batches:
        store.measure_or_load(
            "demo", {"batch_size": batch, "seed": 0}, lambda b=batch: rows(b), sources=(module,)
        )


def without_time(path: Path) -> str:
    lines = []
    for line in path.read_text().splitlines():
        data = json.loads(line)
        del data["provenance"]["time"]
        lines.append(json.dumps(data, sort_keys=True))
    return "\n".join(lines)


def test_a_record_survives_the_file(tmp_path):
    store = RecordStore("tiny", root=tmp_path)
    fill(store, [4])
    read = store.read("demo")
    assert [record.to_dict() for record in read] == [
        Record.from_dict(record.to_dict()).to_dict() for record in read
    ]
    curve = next(record for record in read if record.metric == "curve")
    assert curve.series == (0.1, 0.5)
    assert curve.value is None
    assert curve.config == {"profile": "tiny", "batch_size": 4, "seed": 0}
    assert {record.config.get("layer") for record in read} == {2, 10, None}
    assert curve.provenance["seed"] == 0
    assert curve.provenance["command"] == "python -m repro measure demo --profile tiny"


def test_order_and_interruption_leave_the_same_bytes(tmp_path):
    straight, resumed = (RecordStore("tiny", root=tmp_path / name) for name in "ab")
    fill(straight, [1, 2, 4, 16])

    def broken() -> list[Measurement]:
        raise KeyboardInterrupt

    fill(resumed, [16, 2])
    with pytest.raises(KeyboardInterrupt):
        resumed.measure_or_load("demo", {"batch_size": 1, "seed": 0}, broken, sources=(module,))
    assert len(resumed.read("demo")) == 2 * 3
    again = RecordStore("tiny", root=tmp_path / "b")
    fill(again, [1, 2, 4, 16])
    assert (again.n_measured, again.n_loaded) == (2, 2)
    assert without_time(straight.path("demo")) == without_time(again.path("demo"))
    # Sixteen stands after four: numbers are ordered by size, not by their digits.
    order = [r.config["batch_size"] for r in again.read("demo") if r.config.get("layer") == 2]
    assert order == [1, 2, 4, 16]


def test_a_known_point_is_loaded_and_force_measures(tmp_path):
    store = RecordStore("tiny", root=tmp_path)
    fill(store, [2])
    calls = []

    def measure() -> list[Measurement]:
        calls.append(1)
        return rows(2, value=9.0)

    config = {"seed": 0, "batch_size": 2}  # another order of the same names
    loaded = store.measure_or_load("demo", config, measure, sources=(module,))
    assert calls == []
    assert loaded == store.read("demo")
    forced = store.measure_or_load("demo", config, measure, sources=(module,), force=True)
    assert len(calls) == 1
    assert forced == store.read("demo")
    assert [record.value for record in forced] == [None, 18.0, 18.0]


def test_a_point_of_older_code_is_replaced(tmp_path):
    source = tmp_path / "source.py"
    source.write_text("FACTOR = 1\n")
    code = types.ModuleType("source")
    code.__file__ = str(source)
    store = RecordStore("tiny", root=tmp_path / "records")

    def measure() -> list[Measurement]:
        return [Measurement("T", "measured", "x", 1.0, "1")]

    (first,) = store.measure_or_load("demo", {"a": 1}, measure, sources=(code,))
    source.write_text('"""Better words."""\nFACTOR = 1  # why\n')
    (same,) = store.measure_or_load("demo", {"a": 1}, measure, sources=(code,))
    assert same == first
    source.write_text("FACTOR = 2\n")
    (newer,) = store.measure_or_load("demo", {"a": 1}, measure, sources=(code,))
    assert newer.key != first.key
    assert newer.point == first.point
    assert store.read("demo") == [newer]


def test_is_current_asks_the_code_of_today(tmp_path):
    store = RecordStore("tiny", root=tmp_path)
    (record,) = store.measure_or_load(
        "demo",
        {},
        lambda: [Measurement("T", "measured", "x", 1, "1")],
        sources=("repro.paths",),
    )
    assert is_current(record) is True
    stated = {**record.provenance, "sources": {"modules": ["repro.paths"], "digest": "0" * 16}}
    assert is_current(Record.from_dict({**record.to_dict(), "provenance": stated})) is False
    gone = {**stated, "sources": {"modules": ["repro.was_removed"], "digest": "0" * 16}}
    assert is_current(Record.from_dict({**record.to_dict(), "provenance": gone})) is None


def test_points_of_an_older_sweep_are_pruned(tmp_path):
    old = RecordStore("tiny", root=tmp_path)
    for source in ("embedded", "folder"):
        old.measure_or_load("demo", {"source": source, "n": 8}, lambda: rows(1))
    new = RecordStore("tiny", root=tmp_path)
    new.measure_or_load("demo", {"source": "embedded", "n": 16}, lambda: rows(1))
    assert new.prune("demo", source="embedded") == 3
    kept = {(record.config["source"], record.config["n"]) for record in new.read("demo")}
    assert kept == {("embedded", 16), ("folder", 8)}


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda text: text[:-40], 3),
        (lambda text: text.replace('"schema": 1', '"schema": 7', 1), 1),
        (lambda text: "[]\n" + text, 1),
        (lambda text: text.replace('"metric"', '"metrics"', 1), 1),
    ],
    ids=["truncated", "schema", "no object", "field"],
)
def test_a_damaged_file_is_named_and_kept(tmp_path, damage, line):
    store = RecordStore("tiny", root=tmp_path)
    fill(store, [2])
    path = store.path("demo")
    damaged = damage(path.read_text())
    path.write_text(damaged)
    with pytest.raises(RecordFileError, match=rf"demo\.jsonl' line {line} .*restore") as caught:
        fill(store, [4])
    assert "\n" not in str(caught.value)
    assert path.read_text() == damaged


def test_a_packed_file_reads_and_grows_like_a_plain_one(tmp_path):
    plain, packed = (RecordStore("tiny", root=tmp_path / name) for name in ("plain", "packed"))
    fill(plain, [1, 2])
    text = plain.path("demo").read_text()
    packed.root.mkdir()
    (packed.root / "demo.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    assert packed.experiments() == ["demo"] and packed.read() == plain.read()
    for store in (plain, packed):
        fill(store, [2, 4])
        assert store.n_measured == (2 if store is plain else 0) + 1
    assert [r.value for r in packed.read()] == [r.value for r in plain.read()]
    assert [p.name for p in packed.root.iterdir()] == ["demo.jsonl.gz"]
    path = packed.path("demo")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(RecordFileError, match=r"demo\.jsonl\.gz"):
        packed.read()


def test_bytes_that_are_no_text(tmp_path):
    store = RecordStore("tiny", root=tmp_path)
    store.path("demo").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordFileError, match=r"demo\.jsonl"):
        store.read("demo")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="cannot write"):
        RecordStore("tiny", root=tmp_path / "file").measure_or_load("demo", {}, pytest.fail)


def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    store = RecordStore("tiny", root=tmp_path)
    fill(store, [1])
    before = store.path("demo").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputError, match="No space left"):
        fill(store, [2])
    monkeypatch.undo()
    assert store.path("demo").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["demo.jsonl"]


@pytest.mark.parametrize(
    ("measurements", "message"),
    [
        ([], "no measurement"),
        ([Measurement("T", "measured", "x", float("nan"), "1")], "give None"),
        ([Measurement("T", "guessed", "x", 1, "1")], "kind 'guessed'"),
        ([Measurement("T", "measured", "x", 1, "1")] * 2, "same configuration"),
        ([Measurement("T", "measured", "x", 1, "1", labels={"a": 2})], "contradicts"),
        ([Measurement("T", "measured", "x", 1, "1", labels={"b": {1}})], "no record can hold"),
    ],
)
def test_a_measuring_function_at_fault(tmp_path, measurements, message):
    store = RecordStore("tiny", root=tmp_path)
    with pytest.raises(ValueError, match=message):
        store.measure_or_load("demo", {"a": 1}, lambda: measurements)
    assert not store.path("demo").exists()


def test_the_pipeline_is_told_what_was_touched(tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_RECORD_LOG", str(tmp_path / "touched"))
    store = RecordStore("tiny", root=tmp_path / "records")
    fill(store, [1])
    store.read()
    assert (tmp_path / "touched").read_text() == "write demo\nread demo\n"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), json_values, max_size=5))
def test_one_text_for_one_value(value):
    backwards = dict(reversed(list(value.items())))
    assert canonical(value) == canonical(backwards)
    assert json.loads(canonical(value)) == plain(value)


@given(st.lists(json_values, max_size=6))
def test_any_values_can_be_ordered(values):
    ordered = sorted(values, key=order_key)
    assert sorted(map(order_key, values)) == [order_key(value) for value in ordered]


def test_scalars_of_other_libraries_are_unwrapped():
    assert canonical({"a": np.int64(3), "b": np.array([1.5]), "c": (1, 2)}) == (
        '{"a":3,"b":[1.5],"c":[1,2]}'
    )
