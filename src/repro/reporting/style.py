"""One look for every figure: colours, sizes, fonts, and how a PNG is written.

One idea: a figure must be readable at notebook width by everybody.  Colours are those of
Okabe and Ito, told apart also with colour-vision deficiencies, and never the only sign:
line style or marker differs too.  Fonts come with matplotlib, so that a PNG has the same
bytes on every run; its metadata is dropped for the same reason.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#6B6B6B"

SERIES_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
SERIES_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DOMAIN_COLOURS = {"text": BLUE, "math": VERMILLION, "code": GREEN}
DOMAIN_MARKERS = {"text": "o", "math": "s", "code": "^"}

WIDTH_IN = 7.2
DPI = 100

RC: dict[str, Any] = {
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "path.simplify": True,
    "text.parse_math": False,
}


@contextmanager
def context() -> Iterator[None]:
    """Draw inside with the project's settings, whatever a user's own are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def new_figure(
    rows: int, columns: int, height_in: float, **grid: Any
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of the standard width with ``rows`` x ``columns`` panels.

    It belongs to no pyplot state: nothing is shown twice and nothing must be closed.
    """
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **grid)
    return figure, [list(row) for row in axes]


def colour_of(domain: str, index: int) -> str:
    """Colour of a workload: by its domain, else by its place."""
    return DOMAIN_COLOURS.get(domain, SERIES_COLOURS[index % len(SERIES_COLOURS)])


def marker_of(domain: str, index: int) -> str:
    """Marker of a workload: by its domain, else by its place."""
    return DOMAIN_MARKERS.get(domain, SERIES_MARKERS[index % len(SERIES_MARKERS)])


def log2_axis(axes: Axes, places: Sequence[int], label: str) -> None:
    """A horizontal axis in powers of two with every place labelled by its number."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(places), [str(place) for place in places])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(label)


def percent_axis(axes: Axes, label: str) -> None:
    """A vertical axis from 0 to 100 percent."""
    axes.set_ylim(0, 104)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel(label)


def by_rows(handles: Sequence[Any], columns: int) -> list[Any]:
    """Legend entries so ordered that they read row by row; legends fill column by column."""
    return [handle for start in range(columns) for handle in handles[start::columns]]


def footnote(figure: Figure, text: str) -> None:
    """A small line below all panels: where the numbers of this picture come from."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7, color=GREY)


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG, the same bytes each time: no metadata, at most 128 colours."""
    raw = io.BytesIO()
    with context():
        figure.savefig(raw, format="png", dpi=DPI, facecolor="white")
    raw.seek(0)
    small = io.BytesIO()
    with Image.open(raw) as image:
        # A palette makes the file a third as large; text and lines look the same.
        palette = image.convert("RGB").quantize(
            colors=128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
        )
        palette.save(small, format="PNG", optimize=True, dpi=(DPI, DPI))
    return small.getvalue()


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG in pixels."""
    with Image.open(io.BytesIO(data)) as image:
        return image.size
