"""Figures: same bytes each time, small, complete notes, devices never mixed unlabelled."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from test_reporting_samples import (
    add_activation,
    add_all,
    add_heavy_tail,
    add_models,
    project,
)

from repro.reporting import figures, heavy_tail_figures, model_records, style
from repro.reporting.figures import FIGURES, draw_all, save_figure
from repro.reporting.record_sets import footnote
from repro.reporting.records import Record, RecordStore


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> list[Record]:
    root = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        project(root, patch)
        add_models(root)
        return [*add_all(RecordStore("tiny")), *model_records.read()]


def on_device(records: list[Record], name: str) -> list[Record]:
    return [
        Record.from_dict(
            {
                **record.to_dict(),
                "provenance": {**record.provenance, "device": {"type": "cuda", "name": name}},
            }
        )
        for record in records
    ]


def texts(figure) -> list[str]:
    return [item.get_text() for item in figure.findobj(match=lambda a: hasattr(a, "get_text"))]


def draw(name: str, records: list[Record]):
    return FIGURES[name].function(FIGURES[name].records(records))


ACTIVATION = [
    "table1_decode_activation",
    "table2_prefill_activation",
    "activation_vs_prompt_length",
]


@pytest.mark.parametrize("name", FIGURES)
def test_a_png_is_small_and_of_notebook_width(records, name):
    data = style.png_bytes(draw(name, records))
    width, height = style.png_size(data)
    assert 650 <= width <= 750
    assert height <= 800
    assert len(data) < 60_000
    assert b"Software" not in data
    assert b"tEXt" not in data


def test_the_bytes_are_the_same_in_another_process(records, tmp_path, root):
    name = "figure2_heavy_tail"
    store = RecordStore("tiny", root=tmp_path)
    add_heavy_tail(store)
    code = (
        "import sys; from repro.reporting.records import RecordStore;"
        "from repro.reporting import style; from repro.reporting.figures import FIGURES;"
        f"spec = FIGURES[{name!r}]; store = RecordStore('tiny', root=sys.argv[1]);"
        "figure = spec.function(spec.records(store.read()));"
        "sys.stdout.buffer.write(style.png_bytes(figure))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(root / "src")},
        capture_output=True,
        check=True,
    )
    assert done.stdout == style.png_bytes(draw(name, records))


def test_a_users_own_style_does_not_matter(records):
    import matplotlib

    before = style.png_bytes(draw("activation_vs_prompt_length", records))
    with matplotlib.rc_context({"font.size": 22, "axes.facecolor": "red"}):
        assert style.png_bytes(draw("activation_vs_prompt_length", records)) == before


def test_what_is_drawn_is_what_was_measured(records):
    figure = draw("table1_decode_activation", records)
    ours = figure.axes[0]
    drawn = [tuple(np.round(line.get_ydata(), 6)) for line in ours.lines]
    chosen = [
        record
        for record in records
        if record.claim == "DynaExq Table 1"
        and record.metric == "activation_ratio"
        and record.config["model"] == "moe-fine"
    ]
    for workload in ("prose", "word-problems", "python"):
        for protocol in ("decode_mean", "next_token"):
            series = sorted(
                (record.config["batch_size"], record.value)
                for record in chosen
                if record.config["workload"] == workload and record.config["protocol"] == protocol
            )
            assert tuple(np.round([value for _, value in series], 6)) in drawn
    # The withdrawn row is there, dashed, in a panel of the paper's own.
    (old,) = [line for line in figure.axes[2].lines if "withdrawn" in line.get_label()]
    assert old.get_linestyle() == "--"
    assert old.get_ydata()[-1] == pytest.approx(62.0, abs=0.01)
    assert figure.axes[2].get_title(loc="left").startswith("Paper")


def test_two_devices_are_labelled(tmp_path):
    store = RecordStore("tiny", root=tmp_path)
    add_activation(store)
    add_heavy_tail(store)
    here = store.read()
    there = on_device(here, "Other GPU")
    for name, n_panels in (("table1_decode_activation", 4), ("activation_vs_prompt_length", 4)):
        panels = draw(name, [*here, *there]).axes[:n_panels]
        titles = [axes.get_title(loc="left") for axes in panels]
        assert sum("on Other GPU" in title for title in titles) == 2
        assert sum(f"on {here[0].device}" in title for title in titles) == 2
        alone = draw(name, here).axes[0]
        assert [len(axes.lines) for axes in panels] == [len(alone.lines)] * n_panels
    tail = draw("figure2_heavy_tail", [*here, *there])
    titles = [axes.get_title(loc="left") for axes in tail.axes]
    assert sum("on Other GPU" in title for title in titles) == 2
    assert len(titles) == 8


def test_one_device_needs_no_label(records):
    assert not any(" on " in text for text in texts(draw("table1_decode_activation", records)))


def test_overlap_matrix_is_symmetric_and_by_hand(records):
    chosen = [record for record in records if record.config.get("model") == "moe-fine"]
    overlaps = [record for record in chosen if record.metric == "top10_overlap"]
    matrix = heavy_tail_figures.overlap_matrix(overlaps, ["prose", "word-problems", "python"])
    assert (matrix == matrix.T).all()
    sets = {
        (record.config["workload"], record.config["layer"]): set(record.series)
        for record in chosen
        if record.metric == "top10_experts"
    }
    shared = [len(sets["prose", layer] & sets["python", layer]) for layer in range(6)]
    assert matrix[0, 2] == pytest.approx(np.mean(shared))
    assert heavy_tail_figures.chance_overlap(48) == pytest.approx(100 / 48)


def test_draw_all_writes_pictures_and_notes(tmp_path, monkeypatch):
    root = project(tmp_path, monkeypatch)
    assert draw_all("tiny") == []
    store = RecordStore("tiny")
    add_activation(store)
    drawn = draw_all("tiny")
    names = ACTIVATION
    assert [path.stem for path in drawn] == names
    assert all(path.parent == root / "figures" for path in drawn)
    note = json.loads(drawn[0].with_suffix(".json").read_text())
    keys = {record.key for record in store.read() if record.claim == "DynaExq Table 1"}
    assert note["record_keys"] == sorted(keys)
    assert note["profiles"] == ["tiny"]
    assert note["devices"] == [store.read()[0].device]
    assert note["title"] == FIGURES[names[0]].title
    assert drawn[0].read_bytes() == style.png_bytes(draw(names[0], store.read()))


def test_other_profiles_have_a_folder_of_their_own(tmp_path, monkeypatch):
    root = project(tmp_path, monkeypatch)
    assert figures.folder("tiny") == root / "figures"
    assert figures.folder("gpu") == root / "figures" / "gpu"


def test_committed_records_are_drawn_apart_and_say_where_they_are_from(tmp_path, monkeypatch):
    root = project(tmp_path, monkeypatch)
    add_activation(RecordStore("tiny"))
    add_activation(RecordStore("public"))
    drawn = draw_all("tiny")
    folders = [path.parent.relative_to(root / "figures").as_posix() for path in drawn]
    assert folders == ["."] * 3 + ["public"] * 3
    note = json.loads(drawn[3].with_suffix(".json").read_text())
    assert note["profiles"] == ["public"]
    assert set(note["record_keys"]).isdisjoint(
        json.loads(drawn[0].with_suffix(".json").read_text())["record_keys"]
    )
    public = RecordStore("public").read()
    said = footnote(public)
    assert said.startswith(f"Profile public, recorded on {public[0].device}, 2")
    assert "source embedded" in said
    assert footnote(RecordStore("tiny").read()) == ""
    figure = draw("activation_vs_prompt_length", public)
    save_figure(figure, "again", public)  # by default into the folder of its profile
    assert said in texts(figure)
    assert (root / "figures" / "public" / "again.png").is_file()
    # The page of the other profile has that profile's pictures and no others.
    assert {path.parent.name for path in draw_all("public")} == {"public"}


def test_training_curves_are_those_of_the_logs(records):
    figure = draw("models_training", records)
    (axes,) = figure.axes
    lines = {tuple(np.round(line.get_ydata(), 6)): line.get_xdata() for line in axes.lines[:2]}
    assert set(lines) == {(3.5, 3.0, 3.5, 3.0), (1.5, 1.0, 1.5, 1.0)}
    assert list(lines[1.5, 1.0, 1.5, 1.0]) == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3])
    assert {"wikitext2", "python"} <= set(texts(figure))
    assert "Trained on Some GPU." in " ".join(texts(figure))


def test_save_figure_alone(tmp_path, monkeypatch, records):
    root = project(tmp_path, monkeypatch)
    chosen = FIGURES["figure2_top10"].records(records)
    path = save_figure(FIGURES["figure2_top10"].function(chosen), "mine", chosen)
    assert path == root / "figures" / "mine.png"
    assert json.loads(path.with_suffix(".json").read_text())["n_records"] == len(chosen)
