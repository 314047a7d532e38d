"""What notebooks print is the same everywhere, or says that it is wrong."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from repro.reporting.notebook import check, picture, show, table
from repro.reporting.tables import Column, Row, Table


def test_show_sorts_and_formats(capsys):
    show(tokens=np.int64(12345), names=["b", "a"], fits=True, rest=None, array=np.array([1, 2]))
    assert capsys.readouterr().out == (
        "array   1, 2\nfits    yes\nnames   b, a\nrest    none\ntokens  12,345\n"
    )


@pytest.mark.parametrize("value", [0.1, np.float32(1), {"a": 1}, {1, 2}, object()])
def test_show_refuses_what_may_differ(value):
    with pytest.raises(TypeError, match=r"show\(x=.*use check\(\)"):
        show(x=value)


def test_check_prints_one_sentence_while_it_holds(capsys):
    assert check("share", 0.501, 0.5, 0.01) is None  # a value would be shown by the cell
    first = capsys.readouterr().out
    check("share", 0.498, 0.5, 0.01)
    assert capsys.readouterr().out == first == "share: as expected, within 1 %\n"


@pytest.mark.parametrize("value", [0.52, float("nan"), float("inf")])
def test_check_shows_a_wrong_value(capsys, value):
    check("share", value, 0.5, 0.01)
    text = capsys.readouterr().out
    assert "NOT as expected" in text
    assert f"{value:.6g}" in text


def test_check_near_zero_and_exact(capsys):
    check("gap", 1e-9, 0.0, 0.0, atol=1e-6)
    check("count", 3, 3, 0.0)
    assert capsys.readouterr().out == (
        "gap: as expected, within 1e-06\ncount: as expected, exactly\n"
    )


def test_picture_is_the_png_of_the_file():
    from repro.reporting.style import png_bytes

    figure = Figure(figsize=(1, 1))
    assert picture(figure).data == png_bytes(figure)


def test_table_is_titled_html_whose_text_twin_is_the_same_everywhere():
    shown = table(Table("A < B", (Column("share", "%"),), (Row("ours", ("12.5",)),)))
    assert "A &lt; B" in shown.data
    assert ">12.5</td>" in shown.data
    assert repr(shown) == "<IPython.core.display.HTML object>"
