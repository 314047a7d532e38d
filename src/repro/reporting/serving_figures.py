"""Figures of serving: a promotion as a timeline, KV pressure on one axis, transitions on and off.

One idea: time runs to the right in all of them, in steps or in milliseconds, so that cause
stands left of effect.  A picture holds one set of records.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from repro.reporting import style
from repro.reporting.grids import grid
from repro.reporting.notebook_figures import _BLUES
from repro.reporting.records import Record
from repro.reporting.serving_records import (
    GIVES,
    KEEPS,
    LAYOUTS,
    Point,
    copy_span,
    label,
    pressures,
    promotions,
    series,
    servings,
    value,
)

_OLD, _NEW, _COPY = style.SKY, style.BLUE, style.VERMILLION
_LEAST = 1.0  # bits that are drawn white; the narrowest width stays visible
_MARGIN_STEPS = 6  # shown before the wish and after the old pages are free
_MARKS = {
    "submitted": ("submitted_s", ":"),
    "published": ("published_s", "-"),
    "old pages seen free": ("reclaimed_s", "--"),
}


def serving_promotion(records: Sequence[Record]) -> Figure:
    """Steps, the copy under them, and the moments between; a panel for each layout."""
    shown = list(promotions(records))
    with style.context():
        figure, axes = style.new_figure(max(1, len(shown)), 1, 1.1 + 1.45 * max(1, len(shown)))
        for (panel,), (device, layout, point) in zip(axes, shown, strict=False):
            _promotion(panel, layout, point)
            if len({d for d, _, _ in shown}) > 1:
                panel.set_title(f"{panel.get_title(loc='left')} on {device}")
        axes[-1][0].set_xlabel("milliseconds since the promotion was submitted")
        handles = [
            Patch(facecolor=_OLD, label="step reads the old version"),
            Patch(facecolor=_NEW, label="step reads the new version"),
            Patch(facecolor=_COPY, hatch="////", edgecolor="white", label="copy under way"),
            *(
                Line2D([], [], color=style.BLACK, linestyle=dash, label=name)
                for name, (_, dash) in _MARKS.items()
            ),
        ]
        figure.legend(handles=style.by_rows(handles, 3), loc="outside lower center", ncols=3)
    return figure


def _promotion(axes: Axes, layout: str, point: Point) -> None:
    zero = value(point, "submitted_s")
    began = 1000 * (np.array(series(point, "step_began_s")) - zero)
    ended = 1000 * (np.array(series(point, "step_ended_s")) - zero)
    widths = np.array(series(point, "step_width"))
    old, new = int(widths[0]), int(widths[-1])
    for width, colour in ((old, _OLD), (new, _NEW)):
        steps = [(b, e - b) for b, e, w in zip(began, ended, widths, strict=True) if w == width]
        axes.broken_barh(steps, (0.58, 0.34), facecolors=colour, edgecolor="white", linewidth=0.8)
    first, last = (1000 * (at - zero) for at in copy_span(point))
    bar = axes.broken_barh([(first, last - first)], (0.08, 0.34), facecolors=_COPY)
    bar.set_hatch("////")
    bar.set_edgecolor("white")
    for metric, dash in _MARKS.values():
        place = 1000 * (value(point, metric) - zero)
        axes.axvline(place, color=style.BLACK, linestyle=dash, linewidth=1.0, zorder=4)
    step = float(np.median(ended - began))
    after = 1000 * (value(point, "reclaimed_s") - zero)
    axes.set_xlim(-_MARGIN_STEPS * step, after + _MARGIN_STEPS * step)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.25, 0.75], ["link", "steps"])
    axes.grid(visible=False, axis="y")
    on_old = int(value(point, "steps_on_old_version"))
    axes.set_title(
        f"{LAYOUTS[layout]}: {old} to {new} bits, {on_old} steps finish on the old version"
    )


def serving_pressure(records: Sequence[Record]) -> Figure:
    """Blocks, bits of every block, quality and step time under KV pressure, on one axis."""
    found = {policy: point for _, policy, point in pressures(records)}
    with style.context():
        figure, axes = style.new_figure(4, 1, 6.6, sharex=True, height_ratios=(1.1, 1.6, 0.9, 1.0))
        panels = [row[0] for row in axes]
        if GIVES in found:
            _blocks(panels[0], found[GIVES])
            _bits(figure, panels[1], found[GIVES])
            _quality(panels[2], found[GIVES])
            panels[0].set_xlim(0, len(series(found[GIVES], "free_blocks")) - 1)
        _pace(panels[3], found)
        panels[3].set_xlabel("step of the engine")
    return figure


def _blocks(axes: Axes, point: Point) -> None:
    start = value(point, "kv_blocks_at_start")
    axes.plot(series(point, "blocks_in_use"), color=style.VERMILLION, label="in use")
    axes.plot(series(point, "free_blocks"), "--", color=style.GREEN, label="free")
    axes.axhline(start, color=style.GREY, linestyle=":", label="there at the start")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("KV blocks")
    n = int(point["requests_finished"].n or 0)
    axes.set_title(f"KV cache of {n} requests, all running")
    axes.legend(loc="upper left", ncols=3)


def _bits(figure: Figure, axes: Axes, point: Point) -> None:
    """Blocks of a layer next to each other, those that gave most at the bottom of each."""
    steps = [int(step) for step in label(point, "bits_per_byte", "sampled_steps")]
    bits = grid(point["block_bits"])  # [samples, blocks]
    layers = int(point["block_bits"].config.get("layers", 1))
    by_layer = bits.reshape(len(steps), layers, -1)
    order = np.argsort(by_layer.mean(axis=0), axis=1, kind="stable")
    ordered = np.take_along_axis(by_layer, order[None], axis=2).reshape(len(steps), -1)
    edges = np.array([*steps, steps[-1] + 1], dtype=np.float64)
    image = axes.pcolormesh(
        edges, np.arange(ordered.shape[1] + 1), ordered.T, cmap=_BLUES, vmin=_LEAST, vmax=8,
        rasterized=True,
    )  # fmt: skip
    size = ordered.shape[1] // layers
    for layer in range(1, layers):
        axes.axhline(layer * size, color="white", linewidth=1.2)
    axes.set_yticks([size * (i + 0.5) for i in range(layers)], [str(i) for i in range(layers)])
    axes.grid(visible=False)
    axes.set_ylabel("layer")
    axes.set_title("bits of every block; in each layer those that gave most lie at the bottom")
    figure.colorbar(image, ax=axes, ticks=range(2, 9, 2), label="bits", aspect=12, pad=0.01)


def _quality(axes: Axes, point: Point) -> None:
    steps = [int(step) for step in label(point, "bits_per_byte", "sampled_steps")]
    cost = np.array(series(point, "bits_per_byte"))
    axes.plot(steps, cost - cost[0], color=style.PURPLE, marker="o")
    axes.axhline(0, color=style.GREY, linewidth=0.8)
    axes.set_ylabel("bits per byte")
    axes.set_title("what fixed texts cost more with the widths of that step")


def _pace(axes: Axes, found: dict[str, Point]) -> None:
    names = {GIVES: "weights give way", KEEPS: "weights keep 8 bits"}
    for policy, colour, dash in ((GIVES, style.BLUE, "-"), (KEEPS, style.ORANGE, "--")):
        if policy in found:
            point = found[policy]
            took = 1000 * np.array(series(point, "step_s"))[1:]
            sent_back = int(value(point, "preemptions"))
            name = f"{names[policy]}: {len(took)} steps, {sent_back} preemptions"
            axes.plot(range(1, len(took) + 1), took, dash, color=colour, linewidth=1.0, label=name)
    shown = [
        1000 * t for point in found.values() for t in series(point, "step_s")[: _n_steps(found)]
    ]
    axes.set_ylim(0, 1.6 * max(shown, default=1.0))
    axes.set_ylabel("ms")
    axes.set_title("duration of a step")
    if found:
        axes.legend(loc="upper right")


def _n_steps(found: dict[str, Point]) -> int:
    """Steps that the axis shows: those of the run that gives way."""
    return len(series(found[GIVES], "free_blocks")) if GIVES in found else 1


def serving_on_off(records: Sequence[Record]) -> Figure:
    """Median and 99th percentile of a decode step, with experts changing and without."""
    shown = list(servings(records))
    with style.context():
        figure, ((axes,),) = style.new_figure(1, 1, 2.7)
        several = len({device for device, *_ in shown}) > 1
        for place, (*_, point) in enumerate(shown):
            for side, kind, colour, hatch in (
                (-0.2, "off", "#BBBBBB", ""),
                (0.2, "on", style.BLUE, "///"),
            ):
                record = point[f"step_s {kind}"]
                middle = 1000 * float(record.p50 or 0.0)
                slow = 1000 * float(record.config["p99"])
                axes.bar(place + side, middle, 0.36, color=colour, hatch=hatch, edgecolor="white")
                axes.plot([place + side] * 2, [middle, slow], color=style.BLACK, linewidth=0.9)
                axes.plot(place + side, slow, "_", color=style.BLACK, markersize=8)
            ratio = value(point, "step_ratio_on_off")
            axes.annotate(
                f"x {ratio:.2f}", (place, 0), (0, 4), textcoords="offset points", ha="center",
                color=style.BLACK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip
        names = [
            f"{model}\n{LAYOUTS[layout]}" + (f"\n{device}" if several else "")
            for device, model, layout, _ in shown
        ]
        axes.set_xticks(range(len(names)), names)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("ms per decode step")
        axes.set_title("decode steps while experts change at every step, and while none does")
        handles = [
            Patch(facecolor="#BBBBBB", label="no changes (median)"),
            Patch(facecolor=style.BLUE, hatch="///", edgecolor="white", label="changes (median)"),
            Line2D([], [], color=style.BLACK, marker="_", label="99th percentile"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure
