"""Pictures of single thoughts in the notebooks: one token, one formula, one stream.

One idea: a notebook shows its own arrays in the style of all figures, without a line of
plotting code.  These functions take arrays and names; figures of the papers' tables are
drawn from records elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from repro.reporting import style
from repro.reporting.tables import fixed

Numbers = npt.NDArray[Any] | Sequence[float]
DASHES = ("--", ":", "-.")
MARKERS = 8  # at most about so many on a line
_BLUES = LinearSegmentedColormap.from_list("whiteblue", ["#FFFFFF", style.SKY, style.BLUE])
_PALE = "#F2F2F2"


def curves(
    x: Numbers,
    series: Mapping[str, Numbers],
    *,
    title: str,
    x_label: str,
    y_label: str,
    predicted: Sequence[str] = (),
    log2: bool = False,
    percent: bool = True,
    borders: Mapping[str, float] | None = None,
) -> Figure:
    """Lines over one axis.

    Domains (text, math, code) keep the colours they have in every figure.

    Args:
        x: places of all series.
        series: name to values.
        title: of the picture.
        x_label: with its unit.
        y_label: with its unit.
        predicted: names of series that are no measurement; they are dashed and black.
        log2: horizontal axis in powers of two.
        percent: vertical axis from 0 to 100.
        borders: name to place of vertical lines.
    """
    with style.context():
        figure, ((axes,),) = style.new_figure(1, 1, 3.1)
        for index, (name, numbers) in enumerate(series.items()):
            if name in predicted:
                # Above the measurement: a prediction that holds would be hidden by it.
                line = DASHES[list(predicted).index(name) % len(DASHES)]
                axes.plot(x, numbers, line, color=style.BLACK, label=name, zorder=4)
                continue
            colour, marker = _look(name, index)
            every = max(1, len(x) // MARKERS) if len(x) > 2 * MARKERS else 1
            axes.plot(
                x, numbers, color=colour, marker=marker, markevery=every, label=name, zorder=3
            )
        axes.set_xlabel(x_label)
        if log2:
            style.log2_axis(axes, [int(place) for place in x], x_label)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(y_label)
        if percent:
            style.percent_axis(axes, y_label)
        for name, place in (borders or {}).items():
            axes.axvline(place, color="black", linewidth=0.8, linestyle=":", zorder=1)
            where = axes.get_xaxis_transform()
            axes.text(place, 0.02, f" {name}", transform=where, fontsize=8, va="bottom")
        axes.set_title(title)
        figure.legend(loc="outside right center")
    return figure


def _look(name: str, index: int) -> tuple[str, str]:
    """Colour and marker: a domain's own, and for everything else what no domain has."""
    if name in style.DOMAIN_COLOURS:
        return style.DOMAIN_COLOURS[name], style.DOMAIN_MARKERS[name]
    own = len(style.SERIES_COLOURS) - len(style.DOMAIN_COLOURS)
    place = len(style.DOMAIN_COLOURS) + index % own
    return style.SERIES_COLOURS[place], style.SERIES_MARKERS[place]


def bars(
    values: Numbers, chosen: Sequence[int], *, title: str, x_label: str, y_label: str
) -> Figure:
    """One bar per expert; the chosen ones stand out and carry their numbers."""
    heights = np.asarray(values, dtype=np.float64)
    picked = {int(place) for place in chosen}
    with style.context():
        figure, ((axes,),) = style.new_figure(1, 1, 2.4)
        colours = [style.VERMILLION if i in picked else "#BBBBBB" for i in range(len(heights))]
        drawn = axes.bar(range(len(heights)), heights, color=colours, width=0.8)
        for place in sorted(picked):
            bar = drawn[place]
            bar.set_hatch("///")
            bar.set_edgecolor("white")
            where = (place, bar.get_height())
            axes.annotate(str(place), where, (0, 2), textcoords="offset points", ha="center")
        axes.set_xlim(-0.7, len(heights) - 0.3)
        axes.margins(y=0.12)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_title(title)
    return figure


def choices(
    chosen: npt.NDArray[Any], n_experts: int, tokens: Sequence[str], *, title: str
) -> Figure:
    """Which experts each token chose: ``chosen[token, k]``, first choice first."""
    n_tokens, top_k = chosen.shape
    cells = np.zeros((n_tokens, n_experts), dtype=int)
    for row, experts in enumerate(chosen):
        cells[row, experts.astype(int)] = top_k - np.arange(top_k)  # first choice: darkest
    shades = [_BLUES(0.35 + 0.65 * i / top_k) for i in range(1, top_k + 1)]
    with style.context():
        figure, ((axes,),) = style.new_figure(1, 1, 0.75 + 0.24 * n_tokens)
        axes.pcolormesh(
            np.arange(n_experts + 1) - 0.5,
            np.arange(n_tokens + 1) - 0.5,
            cells,
            cmap=ListedColormap([_PALE, *shades]),
            vmin=-0.5,
            vmax=top_k + 0.5,
            edgecolors="white",
            linewidth=0.6,
        )
        for row, experts in enumerate(chosen):
            for rank, expert in enumerate(experts.astype(int)):
                colour = "white" if rank < top_k / 2 else "black"
                axes.text(expert, row, str(rank + 1), color=colour, ha="center", va="center")
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.set_yticks(range(n_tokens), tokens)
        axes.set_xlabel("expert (numbers in the cells: first choice, second choice, ...)")
        axes.set_title(title)
    return figure


def matrix(
    values: npt.NDArray[Any],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    row_label: str = "",
    column_label: str = "",
    digits: int = 0,
    most: float = 100.0,
) -> Figure:
    """A grid of numbers, shaded from 0 to ``most``."""
    numbers = np.asarray(values, dtype=np.float64)
    with style.context():
        figure, ((axes,),) = style.new_figure(1, 1, 0.95 + 0.36 * len(rows))
        axes.imshow(numbers, cmap=_BLUES, vmin=0, vmax=most, aspect="auto")
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.tick_params(length=0)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel(column_label)
        axes.set_ylabel(row_label)
        for row, line in enumerate(numbers.tolist()):
            for column, value in enumerate(line):
                colour = "white" if value > 0.7 * most else "black"
                text = fixed(value, digits)
                axes.text(column, row, text, color=colour, ha="center", va="center")
        axes.set_title(title)
    return figure


def intervals(
    values: Mapping[str, Numbers],
    lows: Mapping[str, Numbers],
    highs: Mapping[str, Numbers],
    *,
    title: str,
    x_label: str,
    y_label: str,
    even: float | None = None,
) -> Figure:
    """Values with their intervals per layer, series side by side."""
    with style.context():
        figure, ((axes,),) = style.new_figure(1, 1, 2.9)
        for index, (name, numbers) in enumerate(values.items()):
            middle = np.asarray(numbers, dtype=np.float64)
            places = np.arange(len(middle)) + 0.16 * (index - (len(values) - 1) / 2)
            _points(axes, places, middle, lows[name], highs[name], name, index)
        if even is not None:
            axes.axhline(even, color=style.GREY, linewidth=1.0, linestyle="--")
        handles, _ = axes.get_legend_handles_labels()
        if even is not None:
            handles.append(Line2D([], [], color=style.GREY, linestyle="--", label="even use"))
        axes.set_xticks(range(len(next(iter(values.values())))))
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(x_label)
        style.percent_axis(axes, y_label)
        axes.set_title(title)
        figure.legend(handles=handles, loc="outside right center")
    return figure


def _points(
    axes: Axes,
    places: npt.NDArray[Any],
    middle: npt.NDArray[Any],
    low: Numbers,
    high: Numbers,
    name: str,
    index: int,
) -> None:
    colour, marker = _look(name, index)
    axes.errorbar(
        places,
        middle,
        yerr=[middle - np.asarray(low), np.asarray(high) - middle],
        fmt=marker,
        color=colour,
        capsize=3,
        linewidth=1.2,
        label=name,
    )
