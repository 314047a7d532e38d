"""Pictures that only notebooks show: they say what they are given, in the same bytes each time."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from repro.reporting import notebook_figures as sketch
from repro.reporting import style
from repro.reporting.system_diagram import two_systems

BATCHES = (1, 2, 4, 8)


def _curves(**more: object) -> Figure:
    series = {"math": [5, 10, 20, 40], "other": [4, 8, 16, 32], "even": [6, 12, 24, 48]}
    labels = {"title": "T", "x_label": "batch", "y_label": "share (%)"}
    return sketch.curves(BATCHES, series, predicted=("even",), **labels, **more)


def _intervals() -> Figure:
    values = {"text": [40.0, 50.0], "code": [30.0, 60.0]}
    lows = {name: np.array(numbers) - 2 for name, numbers in values.items()}
    highs = {name: np.array(numbers) + 3 for name, numbers in values.items()}
    labels = {"title": "T", "x_label": "layer", "y_label": "share (%)"}
    return sketch.intervals(values, lows, highs, even=20.0, **labels)


def _bars() -> Figure:
    return sketch.bars([5, 70, 5, 20], [1, 3], title="T", x_label="expert", y_label="%")


def _choices() -> Figure:
    return sketch.choices(np.array([[3, 0], [5, 3]], np.uint8), 6, ["'a'", "'b'"], title="T")


def _matrix() -> Figure:
    return sketch.matrix(np.array([[10.4, 90.0]]), ["on text"], ["text", "math"], title="T")


ALL = (_curves, _intervals, _bars, _choices, _matrix, two_systems)


@pytest.mark.parametrize("draw", ALL, ids=lambda draw: draw.__name__.strip("_"))
def test_same_bytes_of_notebook_width_and_size(draw) -> None:
    first = style.png_bytes(draw())
    assert first == style.png_bytes(draw())
    assert style.png_size(first)[0] == round(style.WIDTH_IN * style.DPI)
    assert len(first) < 60_000


@pytest.mark.parametrize("draw", ALL, ids=lambda draw: draw.__name__.strip("_"))
def test_no_text_leaves_the_picture(draw) -> None:
    figure = draw()
    style.png_bytes(figure)
    box = figure.bbox
    for axes in figure.axes:
        for text in axes.texts:
            inside = text.get_window_extent()
            assert box.x0 <= inside.x0 <= inside.x1 <= box.x1, text.get_text()
            assert box.y0 <= inside.y0 <= inside.y1 <= box.y1, text.get_text()


def test_curves_set_predictions_apart_and_keep_the_colours_of_domains() -> None:
    (axes,) = _curves(log2=True, borders={"here": 4}).axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["math"].get_color() == style.DOMAIN_COLOURS["math"]
    assert lines["math"].get_linestyle() == "-"
    assert lines["even"].get_linestyle() == "--"
    assert lines["even"].get_zorder() > lines["math"].get_zorder()  # seen where both agree
    assert lines["other"].get_color() not in style.DOMAIN_COLOURS.values()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4", "8"]
    assert axes.get_ylim() == (0, 104)
    assert [text.get_text().strip() for text in axes.texts] == ["here"]


def test_lines_are_told_apart_without_colour() -> None:
    names = ["text", "math", "code", *"wxyz"]
    figure = sketch.curves(
        range(60),
        {name: range(60) for name in names},
        title="T",
        x_label="x",
        y_label="y",
        percent=False,
    )
    markers = [line.get_marker() for line in figure.axes[0].lines]
    assert len(set(markers)) == len(names)


def test_bars_name_the_chosen_experts() -> None:
    (axes,) = _bars().axes
    assert [text.get_text() for text in axes.texts] == ["1", "3"]
    assert [bar.get_hatch() is not None for bar in axes.patches] == [False, True, False, True]


def test_choices_write_the_rank_where_the_expert_is() -> None:
    (axes,) = _choices().axes
    placed = {text.get_position(): text.get_text() for text in axes.texts}
    assert placed == {(3, 0): "1", (0, 0): "2", (5, 1): "1", (3, 1): "2"}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["'a'", "'b'"]


def test_matrix_and_intervals_show_their_numbers() -> None:
    (axes,) = _matrix().axes
    assert [text.get_text() for text in axes.texts] == ["10", "90"]
    (axes,) = _intervals().axes
    ends = [segment for bars in axes.collections for segment in bars.get_segments()]
    assert {tuple(np.round(segment[:, 1])) for segment in ends} == {
        (38.0, 43.0), (48.0, 53.0), (28.0, 33.0), (58.0, 63.0),
    }  # fmt: skip
