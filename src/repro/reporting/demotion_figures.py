"""Figure 3 as pictures: perplexity against the share of experts that is demoted.

One idea: a curve means something only beside its controls.  Every panel shows the coldest
first (solid, with its interval) and, thin, the hottest first and a random order.  The band is
that of the increase over no demotion: it says how sure the rise is, not how sure the
perplexity of the text is.

The authors' series are of other models, so they never share an axis of perplexity with ours;
what can stand side by side is which part of its whole increase each curve has reached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from repro.reporting import style
from repro.reporting.checks_demotion import PAIR_LABEL, TO_INT2
from repro.reporting.demotion_curves import (
    CLAIM,
    COLDEST,
    HOTTEST,
    ORDERS,
    PAIRS,
    RANDOM,
    Curve,
    curves,
    published,
)
from repro.reporting.grouping import SeriesId, panels, select
from repro.reporting.records import Record

_COLOURS = dict(zip(PAIRS, (style.GREEN, style.BLUE, style.VERMILLION), strict=True))
_MARKERS = dict(zip(PAIRS, ("^", "o", "s"), strict=True))
_LINES = {COLDEST: "-", HOTTEST: "--", RANDOM: ":"}
_ORDER_LABEL = {
    COLDEST: "coldest first, with 95 % interval of the rise",
    HOTTEST: "hottest first (control)",
    RANDOM: "random order (control)",
}
_AUTHORS_LOOK = ((style.BLACK, "X"), (style.PURPLE, "D"), (style.ORANGE, "P"))
X_LABEL = "experts demoted per layer (%)"


def figure3_demotion(records: Sequence[Record]) -> Figure:
    """Perplexity against the share demoted: a row for each model, a column for each workload."""
    shown = panels(select(records, claim=CLAIM))
    rows = [(title, _by_workload(chosen)) for title, chosen in shown]
    n_rows, n_columns = max(1, len(rows)), max([1, *(len(row) for _, row in rows)])
    with style.context():
        figure, grid = style.new_figure(n_rows, n_columns, 0.75 + 2.75 * n_rows)
        for axes_row, (title, row) in zip(grid, rows, strict=False):
            for axes, (identity, of_panel) in zip(axes_row, row.items(), strict=False):
                for curve in of_panel:
                    _draw(axes, curve)
                axes.set_title(f"{title}:\n{identity.workload}")
                _share_axis(axes)
            for axes in axes_row[len(row) :]:
                axes.set_axis_off()
            axes_row[0].set_ylabel("perplexity")
        for axes in grid[-1]:
            axes.set_xlabel(X_LABEL)
        pairs = [_line(_COLOURS[p], "-", _MARKERS[p], PAIR_LABEL[p], 1.4) for p in PAIRS]
        orders = [
            _line(style.GREY, _LINES[order], "", _ORDER_LABEL[order], _width(order))
            for order in ORDERS
        ]
        handles = style.by_rows([*pairs, *orders], 3)
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def figure3_normalised(records: Sequence[Record]) -> Figure:
    """Part of the whole increase that is reached: ours by model, then the authors' series."""
    shown = panels(select(records, claim=CLAIM))
    handles: dict[str, Line2D] = {}
    with style.context():
        figure, grid = style.new_figure(1, len(shown) + 1, 3.7, sharey=True)
        for axes, (title, chosen) in zip(grid[0], shown, strict=False):
            handles |= _draw_reached(axes, curves(chosen, order=COLDEST))
            axes.set_title(f"Ours: {title}")
        handles |= _draw_published(grid[0][-1])
        grid[0][-1].set_title("The authors' series")
        for axes in grid[0]:
            axes.plot([0, 100], [0, 100], "--", color=style.GREY, linewidth=1.0, zorder=1)
            _share_axis(axes)
            axes.set_xlabel(X_LABEL)
        grid[0][0].set_ylabel("part of the whole increase\nof the log perplexity (%)")
        even = "every expert costs the same"
        handles[even] = _line(style.GREY, "--", "", even, 1.0)
        figure.legend(
            handles=style.by_rows(list(handles.values()), 2), loc="outside upper center", ncols=2
        )
    return figure


def _by_workload(records: Sequence[Record]) -> dict[SeriesId, list[Curve]]:
    found: dict[SeriesId, list[Curve]] = {}
    for curve in curves(records):
        found.setdefault(curve.identity, []).append(curve)
    return found


def _draw(axes: Axes, curve: Curve) -> None:
    colour, is_coldest = _COLOURS[curve.pair], curve.order == COLDEST
    axes.plot(
        curve.shares_percent,
        curve["perplexity"],
        color=colour,
        linestyle=_LINES[curve.order],
        marker=_MARKERS[curve.pair] if is_coldest else "",
        linewidth=_width(curve.order),
        zorder=3 if is_coldest else 2,
    )
    if is_coldest:
        start = curve["perplexity"][0]
        ends = (start * np.exp(curve[name]) for name in ("increase_low", "increase_high"))
        axes.fill_between(curve.shares_percent, *ends, color=colour, alpha=0.15, linewidth=0)


def _draw_reached(axes: Axes, shown: Sequence[Curve]) -> dict[str, Line2D]:
    """Both pairs that end in INT2; FP16 to INT4 is too small to be divided by."""
    handles: dict[str, Line2D] = {}
    of_pairs = [curve for curve in shown if curve.pair in TO_INT2 and curve.rises]
    for index, curve in enumerate(of_pairs):
        domain, is_first = curve.identity.domain, curve.pair == TO_INT2[0]
        (line,) = axes.plot(
            curve.shares_percent,
            100 * curve.reached,
            color=style.colour_of(domain, index),
            marker=style.marker_of(domain, index) if is_first else "",
            linestyle="-" if is_first else ":",
            label=f"{curve.identity.workload}, {PAIR_LABEL[curve.pair]}",
        )
        handles[str(line.get_label())] = line
    return handles


def _draw_published(axes: Axes) -> dict[str, Line2D]:
    handles: dict[str, Line2D] = {}
    for series, (colour, marker) in zip(published(), _AUTHORS_LOOK, strict=True):
        tiers = series.series.replace("->", " to ")
        origin = f"{series.origin}{', estimated' if series.estimated else ''}"
        (line,) = axes.plot(
            series.shares_percent,
            100 * series.reached,
            color=colour,
            marker=marker,
            linestyle="-.",
            label=f"{series.model}, {tiers} ({origin})",
        )
        handles[str(line.get_label())] = line
    return handles


def _share_axis(axes: Axes) -> None:
    axes.set_xlim(-2, 102)
    axes.set_xticks([0, 30, 60, 90])


def _width(order: str) -> float:
    return 1.5 if order == COLDEST else 0.9


def _line(colour: str, line: str, marker: str, label: str, width: float) -> Line2D:
    return Line2D([], [], color=colour, linestyle=line, marker=marker, label=label, linewidth=width)
