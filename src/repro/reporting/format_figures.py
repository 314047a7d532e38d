"""Formats as pictures: quality against bytes, and what nesting costs.

One idea: one curve per kind of table over its widths, integer formats as single marks, all
over the same axis of bytes with everything counted; beside it, the same formats against the
least error that any code could have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from repro.reporting import style
from repro.reporting.checks_formats import BOUNDS
from repro.reporting.format_records import (
    CURVE,
    FAMILIES,
    JOINED,
    NESTING,
    Interval,
    bits_per_weight,
    by_point,
    data_name,
    family,
    penalties,
)
from repro.reporting.grouping import DOMAINS, panels, select, series_id
from repro.reporting.records import Record

# Colour, marker and line of each kind of format.
LOOKS: dict[str, tuple[str, str, str]] = {
    "any-precision": (style.BLUE, "o", "-"),
    "any-precision-r1": (style.VERMILLION, "s", "--"),
    "any-precision-r16": (style.PURPLE, "D", ":"),
    "any-precision-r0": (style.SKY, "v", "-."),
    "symmetric": (style.ORANGE, "^", ""),
    "asymmetric": (style.GREEN, "P", ""),
    "gptq": (style.BLACK, "x", ""),
}
MOST_BITS = 6.4  # wider formats lose nothing that can be seen
LEAST_NATS = 1e-3  # smaller rises, and falls, are drawn at the lower edge
ROW_STYLES = ("-", "--", ":", "-.")
TABLE_NAMES = {1: "per row", 64: "per 64 rows", 0: "per matrix"}


def formats_quality(records: Sequence[Record]) -> Figure:
    """Rise of the loss against bits per weight: a row per model, a column per domain."""
    chosen = select(records, claim=CURVE)
    shown = panels(select(chosen, metric="loss_increase"))
    with style.context():
        n_rows = max(1, len(shown))
        figure, axes = style.new_figure(n_rows, len(DOMAINS), 0.75 + 2.45 * n_rows, sharey="row")
        seen: set[str] = set()
        for row, (title, of_panel) in zip(axes, shown, strict=False):
            for place, domain in zip(row, DOMAINS, strict=True):
                for record in select(of_panel, domain=domain):
                    seen |= _quality(place, record, bits_per_weight(chosen, record))
                    place.set_title(series_id(record).workload)
            row[0].set_ylabel(f"{title}: rise of the loss\n(nats per token)")
            highs = [rise.high for record in of_panel for rise in by_point(record).values()]
            _nats_axis(row[0], max(highs))
        for place in axes[-1]:
            place.set_xlabel("bits per weight, all counted")
        handles = [_handle(name) for name in LOOKS if name in seen]
        if handles:
            figure.legend(
                handles=style.by_rows(handles, 4), loc="outside upper center", ncols=4
            )  # fmt: skip
    return figure


def _handle(name: str) -> Line2D:
    colour, marker, line = LOOKS[name]
    return Line2D([], [], color=colour, marker=marker, linestyle=line or "none",
                  label=FAMILIES[name])  # fmt: skip


def _quality(axes: Axes, record: Record, bits: dict[str, float]) -> set[str]:
    groups: dict[str, list[tuple[float, Interval]]] = {}
    for point, rise in by_point(record).items():
        if point in bits and bits[point] <= MOST_BITS and family(point) in LOOKS:
            groups.setdefault(family(point), []).append((bits[point], rise))
    for name, points in groups.items():
        points.sort(key=lambda item: item[0])
        colour, marker, line = LOOKS[name]
        x = [size for size, _ in points]
        rises = [rise for _, rise in points]
        y = [max(rise.value, LEAST_NATS) for rise in rises]
        spread = [
            [max(0.0, at - max(rise.low, LEAST_NATS)) for at, rise in zip(y, rises, strict=True)],
            [max(0.0, rise.high - at) for at, rise in zip(y, rises, strict=True)],
        ]
        axes.errorbar(
            x, y, yerr=spread, color=colour, marker=marker, linestyle=line or "none",
            elinewidth=0.8, zorder=4 if line else 3,
        )  # fmt: skip
    axes.set_xlim(1.9, MOST_BITS)
    return set(groups)


def _nats_axis(axes: Axes, most: float) -> None:
    axes.set_yscale("log")
    ticks = [LEAST_NATS * 10**step for step in range(5)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(LEAST_NATS * 0.8, 1.3 * max(most, 10 * LEAST_NATS))


def formats_nesting(records: Sequence[Record]) -> Figure:
    """Error over that of an exact code, by width: random rows and the models' blocks."""
    chosen = select(records, claim=NESTING, metric="penalty_pooled")
    devices = sorted({record.device for record in chosen})
    with style.context():
        n_rows = max(1, len(devices))
        figure, axes = style.new_figure(n_rows, 3, 2.9 * n_rows, sharey=True)
        for row, device in zip(axes, devices, strict=False):
            of_device = [record for record in chosen if record.device == device]
            suffix = f" ({device})" if len(devices) > 1 else ""
            for place, name in zip(row, ("gaussian", "student-t5"), strict=False):
                _random_rows(place, select(of_device, data=name))
                place.set_title(f"{name}, unweighted{suffix}")
            _blocks(row[2], select(of_device, weighted=True))
            row[2].set_title("blocks of models, weighted")
            row[0].set_ylabel("error / error of an exact code")
        for row in axes:
            for place in row:
                _bounds(place)
                place.set_xlabel("bits")
    return figure


def _random_rows(axes: Axes, records: Sequence[Record]) -> None:
    for record in select(records, rows_per_lut=1):
        ratios = penalties(record)
        for index, length in enumerate(sorted({length for length, _ in ratios})):
            _line(axes, ratios, length, style.VERMILLION, ROW_STYLES[index % len(ROW_STYLES)],
                  "s", f"per row, {length} values")  # fmt: skip
    for index, rows in enumerate((64, 0)):
        for record in select(records, rows_per_lut=rows):
            colour = (style.BLUE, style.SKY)[index]
            _line(axes, penalties(record), JOINED, colour, "-", ("o", "v")[index],
                  f"{TABLE_NAMES[rows]}, {JOINED} values")  # fmt: skip
    if any(record.config["data"] == "gaussian" for record in records):  # the same for both
        axes.legend(loc="upper left", fontsize=6.5)


def _blocks(axes: Axes, records: Sequence[Record]) -> None:
    for index, record in enumerate(select(records, rows_per_lut=1)):
        colour = style.SERIES_COLOURS[index % len(style.SERIES_COLOURS)]
        name = data_name(record)
        _line(axes, penalties(record), JOINED, colour, "-", "s", f"{name}, per row")
        for other in select(records, rows_per_lut=0):
            if data_name(other) == name:
                _line(axes, penalties(other), JOINED, colour, ":", "v", f"{name}, per matrix")
    if records:
        axes.legend(loc="upper left", fontsize=6)


def _line(
    axes: Axes, ratios: dict[tuple[int, int], float], length: int, colour: str, line: str,
    marker: str, label: str,
) -> None:  # fmt: skip
    places = sorted(n_bits for found, n_bits in ratios if found == length)
    axes.plot(
        places, [ratios[length, n_bits] for n_bits in places], color=colour, linestyle=line,
        marker=marker, markersize=3, label=label,
    )  # fmt: skip


def _bounds(axes: Axes) -> None:
    """Targets as short black bars."""
    axes.set_yscale("log")
    ticks: list[Any] = [1, 1.2, 1.5, 2, 3, 5, 10]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(0.97, 12)
    axes.set_xticks(range(2, 7))
    axes.set_xlim(1.7, 6.3)
    for n_bits, bound in BOUNDS.items():
        axes.plot([n_bits - 0.25, n_bits + 0.25], [bound, bound], color="black", linewidth=2)
