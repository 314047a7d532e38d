"""Figure 2 as pictures: how unevenly experts are used, and who is in the hot set.

One idea: two separate statements stand side by side.  The curve says how much of the
traffic the busiest experts carry (identity does not matter); the overlap and the map of
top-10 sets say whether the busiest experts are the same ones for text, mathematics, code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from repro.reporting import style
from repro.reporting.grouping import (
    distinct,
    group_series,
    number,
    panels,
    select,
    workload_label,
)
from repro.reporting.records import Record
from repro.reporting.tables import fixed

CLAIM = "DynaExq Figure 2"
TOP = 10
_BLUES = LinearSegmentedColormap.from_list("whiteblue", ["#FFFFFF", style.SKY, style.BLUE])


def layer_records(records: Sequence[Record]) -> list[Record]:
    """Records of single layers (a summary over layers has no integer ``layer``)."""
    return [record for record in records if isinstance(record.config.get("layer"), int)]


def mean_curve(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, lowest and highest cumulative share over layers, per rank."""
    curves = np.array([record.series for record in records if record.series])
    return curves.mean(axis=0), curves.min(axis=0), curves.max(axis=0)


def pair_of(record: Record) -> tuple[str, str]:
    """The two workloads an overlap record compares.

    Raises:
        KeyError: the configuration names no pair.
    """
    config = record.config
    return str(config["workload_a"]), str(config["workload_b"])


def overlap_matrix(records: Sequence[Record], workloads: Sequence[str]) -> np.ndarray:
    """Mean number of shared top-10 experts over layers, workload by workload."""
    matrix = np.full((len(workloads), len(workloads)), np.nan)
    np.fill_diagonal(matrix, TOP)
    found: dict[tuple[int, int], list[float]] = {}
    for record in layer_records(records):
        first, second = pair_of(record)
        if first in workloads and second in workloads:
            place = (workloads.index(first), workloads.index(second))
            found.setdefault(place, []).append(number(record))
    for (row, column), numbers in found.items():
        matrix[row, column] = matrix[column, row] = float(np.mean(numbers))
    return matrix


def n_experts(records: Sequence[Record]) -> int:
    """Experts per layer: stated by the records, else as many as a curve has ranks.

    Raises:
        LookupError: the records tell neither, or not one number.
    """
    stated = set(distinct(records, "n_experts"))
    stated = stated or {len(r.series or ()) for r in select(records, metric="cumulative_share")}
    if len(stated) != 1:
        raise LookupError(f"the number of experts per layer is not one number: {stated or 'none'}")
    return int(stated.pop())


def chance_overlap(n_experts: int) -> float:
    """Expected overlap of two independent random top-10 sets."""
    return min(TOP, n_experts) ** 2 / n_experts


def figure2_heavy_tail(records: Sequence[Record]) -> Figure:
    """Cumulative share of routed tokens by expert rank, and overlap of top-10 sets."""
    shown = panels(select(records, claim=CLAIM))
    with style.context():
        figure, grid = style.new_figure(
            max(1, len(shown)), 2, 2.9 * max(1, len(shown)), width_ratios=[1.6, 1]
        )
        for (left, right), (title, chosen) in zip(grid, shown, strict=False):
            _curves(left, title, chosen)
            _heat_map(right, chosen)
    return figure


def _curves(axes: Axes, model: str, records: Sequence[Record]) -> None:
    curves = layer_records(select(records, metric="cumulative_share"))
    for index, (identity, series) in enumerate(group_series(curves).items()):
        mean, low, high = (np.concatenate([[0.0], curve]) for curve in mean_curve(series))
        share_of_experts = np.linspace(0, 100, len(mean))
        colour = style.colour_of(identity.domain, index)
        axes.plot(
            share_of_experts,
            100 * mean,
            color=colour,
            marker=style.marker_of(identity.domain, index),
            markevery=max(1, len(mean) // 8),
            label=workload_label(identity, curves),
            zorder=3,
        )
        axes.fill_between(
            share_of_experts, 100 * low, 100 * high, color=colour, alpha=0.13, linewidth=0
        )
    axes.plot(
        [0, 100], [0, 100], "--", color=style.GREY, linewidth=1.0, label="uniform use", zorder=1
    )
    axes.set_xlim(0, 100)
    style.percent_axis(axes, "cumulative share of selections (%)")
    axes.set_xlabel("busiest experts first (% of the layer's experts)")
    layers = len({record.config["layer"] for record in curves})
    axes.set_title(f"{model}: mean of {layers} layers, band = all layers")
    axes.legend(loc="lower right")


def _heat_map(axes: Axes, records: Sequence[Record]) -> None:
    overlaps = select(records, metric="top10_overlap")
    workloads = _workloads(records)
    matrix = overlap_matrix(overlaps, workloads)
    axes.imshow(matrix, cmap=_BLUES, vmin=0, vmax=TOP)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xticks(range(len(workloads)), workloads, rotation=20, ha="right")
    axes.set_yticks(range(len(workloads)), workloads)
    axes.tick_params(length=0)
    for row in range(len(workloads)):
        for column in range(len(workloads)):
            shared = float(matrix[row, column])
            text = "no\nrecord" if np.isnan(shared) else fixed(shared, 1)
            colour = "white" if shared > 0.6 * TOP else "black"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8.5)
    chance = chance_overlap(n_experts(records))
    axes.set_title(f"shared of the top 10 experts\n(mean; by chance {fixed(chance, 1)})")


def _workloads(records: Sequence[Record]) -> list[str]:
    series = group_series(select(records, metric="cumulative_share"))
    return list(dict.fromkeys(identity.workload for identity in series))


def figure2_top10(records: Sequence[Record]) -> Figure:
    """Which experts are among the ten busiest, per layer and workload."""
    shown = panels(select(records, claim=CLAIM))
    with style.context():
        rows = [
            _top_rows(layer_records(select(chosen, metric="top10_experts"))) for _, chosen in shown
        ]
        heights = [max(len(labels), 1) for labels, _ in rows] or [1]
        total = 0.9 * max(1, len(shown)) + 0.125 * sum(heights)
        figure, grid = style.new_figure(
            max(1, len(shown)), 1, total, height_ratios=[height + 4 for height in heights]
        )
        for (axes,), (title, chosen), (labels, sets) in zip(grid, shown, rows, strict=False):
            _membership(axes, title, labels, sets, n_experts(chosen))
    return figure


def _top_rows(
    records: Sequence[Record],
) -> tuple[list[tuple[int, str, str]], list[tuple[Any, ...]]]:
    labels: list[tuple[int, str, str]] = []
    sets: list[tuple[Any, ...]] = []
    groups = group_series(records)
    for layer in sorted({record.config["layer"] for record in records}):
        for identity, series in groups.items():
            for record in series:
                if record.config["layer"] == layer:
                    labels.append((layer, identity.workload, identity.domain))
                    sets.append(tuple(record.series or ()))
    return labels, sets


def _membership(
    axes: Axes,
    model: str,
    labels: Sequence[tuple[int, str, str]],
    sets: Sequence[tuple[Any, ...]],
    width: int,
) -> None:
    workloads = list(dict.fromkeys((name, domain) for _, name, domain in labels))
    colours = [style.colour_of(domain, i) for i, (_, domain) in enumerate(workloads)]
    cells = np.zeros((len(labels), width), dtype=int)
    for row, (_, name, domain) in enumerate(labels):
        for expert in sets[row]:
            cells[row, int(expert)] = 1 + workloads.index((name, domain))
    axes.pcolormesh(
        np.arange(width + 1) - 0.5,
        np.arange(len(labels) + 1) - 0.5,
        cells,
        cmap=ListedColormap(["#F2F2F2", *colours]),
        vmin=0,
        vmax=len(colours),
        edgecolors="white",
        linewidth=0.4,
    )
    axes.invert_yaxis()
    axes.grid(visible=False)
    layers = list(dict.fromkeys(layer for layer, _, _ in labels))
    per_layer = len(labels) / max(1, len(layers))
    centres = [per_layer * (i + 0.5) - 0.5 for i in range(len(layers))]
    axes.set_yticks(centres, [f"layer {layer}" for layer in layers])
    for i in range(1, len(layers)):
        axes.axhline(per_layer * i - 0.5, color="black", linewidth=0.7)
    axes.set_xlabel("expert")
    axes.set_title(f"{model}: the ten busiest experts of each workload")
    handles = [
        Patch(color=colour, label=name)
        for colour, (name, _) in zip(colours, workloads, strict=True)
    ]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        handlelength=1.2,
        borderaxespad=0.1,
    )
