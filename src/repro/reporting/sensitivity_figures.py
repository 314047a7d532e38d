"""Figures of sensitivity: predicted against measured damage, predictors, hot experts, heads.

One idea: every transition has a panel or a marker of its own, because a cloud of all of them
looks well ordered as soon as two bits are worse than four.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from repro.reporting import style
from repro.reporting.checks_sensitivity import (
    BEST,
    DAMAGE,
    RANK,
    head_rows,
    ranks,
    transitions,
)
from repro.reporting.grids import column, grid, row, row_names
from repro.reporting.grouping import panels, select
from repro.reporting.records import Record

BLOCK_NAMES = ("gate_up", "down")
_PER_ROW = 3
_FLOOR = 1e-12  # nats; what lies below is rounding


def sensitivity_scatter(records: Sequence[Record]) -> Figure:
    """Predicted against measured divergence of single blocks, a panel for each transition."""
    chosen = select(records, claim=DAMAGE)
    shown = [(title, found) for title, found in panels(chosen) if _points(found) is not None]
    with style.context():
        per_model = -(-len(_names(shown[0][1])) // _PER_ROW) if shown else 1
        n_rows = max(1, per_model * len(shown))
        figure, axes = style.new_figure(n_rows, _PER_ROW, 0.3 + 1.85 * n_rows)
        for place, (title, found) in enumerate(shown):
            for i, name in enumerate(_names(found)):
                panel = axes[place * per_model + i // _PER_ROW][i % _PER_ROW]
                _scatter(panel, name, found, title if not i else "")
                if i % _PER_ROW == 0:
                    panel.set_ylabel("measured")
        for panel in axes[-1]:
            panel.set_xlabel("predicted (log10 of nats)")
    return figure


def _points(records: Sequence[Record]) -> Record | None:
    found = select(records, metric="block_damage")
    return found[0] if found else None


def _names(records: Sequence[Record]) -> list[str]:
    found = _points(records)
    ends = " measured"
    names = [] if found is None else row_names(found)
    return [name.removesuffix(ends) for name in names if name.endswith(ends)]


def _scatter(axes: Axes, name: str, records: Sequence[Record], title: str) -> None:
    points = _points(records)
    if points is None:
        return
    x, y = row(points, f"{name} predicted"), row(points, f"{name} measured")
    seen = (x > _FLOOR) & (y > _FLOOR)
    for kind, label in enumerate(BLOCK_NAMES):
        at = seen & (row(points, "block") == kind)
        axes.plot(
            np.log10(x[at]),
            np.log10(y[at]),
            style.SERIES_MARKERS[kind],
            color=style.SERIES_COLOURS[kind],
            markersize=2.2,
            markeredgewidth=0,
            label=label,
        )
    if seen.any():
        both = np.log10(np.concatenate([x[seen], y[seen]]))
        axes.axline(
            (both.min(), both.min()), slope=1, color=style.GREY, linestyle="--", linewidth=0.9
        )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
    heading = f"{title}\n" if title else ""
    axes.set_title(f"{heading}{name} bits: rank {_rank(records, name)}")
    if title:
        axes.legend(loc="lower right", handletextpad=0.1, borderaxespad=0.1)


def _rank(records: Sequence[Record], name: str) -> str:
    found = select(records, metric="rank_correlation", target="divergence")
    if not found:
        return "unknown"
    return f"{ranks(found[0], BEST)[transitions(found[0]).index(name), 0]:.2f}"


def sensitivity_predictors(records: Sequence[Record]) -> Figure:
    """Rank correlation of every predictor with measured divergence and with the loss."""
    chosen = select(records, claim=DAMAGE, metric="rank_correlation")
    shown = panels(chosen)
    with style.context():
        figure, axes = style.new_figure(
            2, max(1, len(shown)), 6.4, sharex=True, sharey="row", height_ratios=[8, 5]
        )
        for place, (title, found) in enumerate(shown):
            for target, top in zip(("divergence", "loss"), axes, strict=True):
                of_target = select(found, target=target)
                if of_target:
                    what = "divergence" if target == "divergence" else "increase of the loss"
                    _predictors(top[place], f"{title}: {what}", of_target[0])
            axes[-1][place].set_xlabel("rank correlation, 95 % interval")
        if shown:
            names = transitions(chosen[0])
            handles = _transition_handles(names)
            figure.legend(handles=handles, loc="outside upper center", ncols=len(names))
    return figure


def _predictors(axes: Axes, title: str, record: Record) -> None:
    names = row_names(record)
    for place, name in enumerate(names):
        values = ranks(record, name)
        offsets = np.linspace(-0.32, 0.32, len(values))
        for i, (offset, (value, low, high)) in enumerate(zip(offsets, values, strict=True)):
            colour, marker = _look(i)
            axes.plot([low, high], [place + offset] * 2, color=colour, linewidth=1.0)
            axes.plot([value], [place + offset], marker, color=colour, markersize=3.2)
    axes.axvline(RANK, color=style.GREY, linestyle="--", linewidth=1.0)
    axes.set_yticks(range(len(names)), [name.replace(" x ", "\nx ", 1) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(-0.7, 1.02)
    axes.set_title(title)


def _look(index: int) -> tuple[str, str]:
    colours, markers = style.SERIES_COLOURS, style.SERIES_MARKERS
    return colours[index % len(colours)], markers[index % len(markers)]


def _transition_handles(names: Sequence[str]) -> list[Line2D]:
    return [
        Line2D([], [], color=_look(i)[0], marker=_look(i)[1], label=f"{name} bits")
        for i, name in enumerate(names)
    ]


def sensitivity_hot(records: Sequence[Record]) -> Figure:
    """Routing mass of every expert beside its damage per token."""
    shown = panels(select(records, claim=DAMAGE))
    with style.context():
        n_rows = max(1, len(shown))
        figure, axes = style.new_figure(n_rows, 2, 0.3 + 2.1 * n_rows)
        for (left, right), (title, found) in zip(axes, shown, strict=False):
            _heat(figure, left, found, "routing_mass", f"{title}: routing mass", "Blues")
            related = select(found, metric="mass_vs_per_token")
            said = f"; rank with mass {related[0].value:.2f}" if related else ""
            heading = f"damage per token{said}"
            _heat(figure, right, found, "sensitivity_per_token", heading, "Oranges")
    return figure


def _heat(
    figure: Figure, axes: Axes, records: Sequence[Record], metric: str, title: str, colours: str
) -> None:
    found = select(records, metric=metric)
    if not found:
        return
    values = grid(found[0])
    # Each layer against its own mean: layers differ in scale, and what is asked is within one.
    relative = values / values.mean(axis=1, keepdims=True)
    image = axes.imshow(
        relative, cmap=colours, aspect="auto", vmin=0, vmax=3, interpolation="nearest"
    )
    axes.grid(visible=False)
    axes.set_yticks(range(len(values)), row_names(found[0]))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_title(title)
    bar = figure.colorbar(image, ax=axes, extend="max", pad=0.02)
    bar.set_label("layer's mean = 1", fontsize=7.5)


def prompt_heads(records: Sequence[Record]) -> Figure:
    """Held-out R2 of the log damage: g alone, with the routing mass, with the head."""
    shown: dict[str, dict[str, Record]] = {}
    for title, record in head_rows(records):
        shown.setdefault(title, {})[str(record.config["block"])] = record
    with style.context():
        n_rows = max(1, len(shown))
        figure, axes = style.new_figure(n_rows, 2, 0.6 + 2.1 * n_rows, sharey=True)
        for of_row, (title, by_block) in zip(axes, shown.items(), strict=False):
            of_row[0].set_ylabel("held-out R2 of log damage")
            for panel, block in zip(of_row, BLOCK_NAMES, strict=True):
                if block in by_block:
                    _head_bars(panel, f"{title}: {block}", by_block[block])
        handles, labels = axes[0][0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside upper center", ncols=len(handles))
    return figure


def _head_bars(axes: Axes, title: str, record: Record) -> None:
    names = row_names(record)
    bars = (("r2_g", "g"), ("r2_g_mass", "g x mass"), ("r2_g_mass_eta", "g x mass x head"))
    for i, (name, label) in enumerate(bars):
        axes.bar(
            np.arange(len(names)) + 0.27 * (i - 1),
            column(record, name),
            width=0.25,
            color=style.SERIES_COLOURS[i],
            hatch=("", "//", "..")[i],
            edgecolor="white",
            linewidth=0,
            label=label,
        )
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(names)), names)
    axes.set_title(title)
