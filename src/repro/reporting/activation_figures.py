"""Tables 1 and 2 as pictures: activated experts against batch size and prompt length.

One idea: our models and the published ones stand in separate panels, because they are
different models; what connects them is the bound of independent uniform routing, drawn
in both.  Withdrawn rows are dashed, unverified ones dotted.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from repro.reporting import paper, style
from repro.reporting.grouping import (
    SeriesId,
    distinct,
    group_series,
    number,
    panels,
    select,
    values,
)
from repro.reporting.records import Record

PROTOCOL_LABEL = {
    "decode_mean": "mean over decode steps",
    "next_token": "single next token after the prompt",
    "prefill": "whole prompt",
}
_PROTOCOL_LINE = {"decode_mean": "-", "next_token": ":", "prefill": "-"}
_VERSION_LABEL = {
    "authors_raw_json": "v3 row, from the authors' raw files",
    "authors_draft_8e92d414": "authors' draft, re-collected",
    "authors_draft_14f231a7": "authors' draft, re-collected",
}
_PAPER_COLOUR = {
    "Qwen3-30B-A3B": style.BLACK,
    "DeepSeek-V2-Lite": style.PURPLE,
    "Qwen3-Next-80B-A3B": style.ORANGE,
    "Phi-3.5-MoE-instruct": style.SKY,
}
_BATCH_LINES = ("-", "--", ":", "-.")
_BATCHES = (1, 2, 4, 8, 16, 32)


def table1_decode_activation(records: Sequence[Record]) -> Figure:
    """Activated share of experts in one decode step against batch size."""
    chosen = select(records, claim="DynaExq Table 1")
    return _against_batch(chosen, "decode", "experts activated in one decode step")


def table2_prefill_activation(records: Sequence[Record]) -> Figure:
    """Activated share of experts in one prefill against batch size."""
    chosen = select(records, claim="DynaExq Table 2")
    return _against_batch(chosen, "prefill", "experts activated in one prefill")


def activation_vs_prompt_length(records: Sequence[Record]) -> Figure:
    """Activated share of experts in one prefill against prompt length."""
    shown = panels(select(records, claim="DynaExq Table 2 (length)"))
    ours = select(records, claim="DynaExq Table 2 (length)", metric="activation_ratio")
    batches = sorted(set(distinct(ours, "batch_size")))
    with style.context():
        figure, grid = style.new_figure(1, max(1, len(shown)), 3.7, sharey=True)
        for axes, (title, chosen) in zip(grid[0], shown, strict=False):
            for batch, line in zip(batches, _BATCH_LINES, strict=False):
                _draw_panel(axes, select(chosen, batch_size=batch), "prompt_tokens", line, line)
            axes.set_title(_title(title, chosen))
            style.log2_axis(axes, sorted(distinct(ours, "prompt_tokens")), "tokens per prompt")
        style.percent_axis(grid[0][0], "experts activated in one prefill (%)")
        lines = [
            _line(style.GREY, line, "o", f"batch {batch}")
            for batch, line in zip(batches, _BATCH_LINES, strict=False)
        ]
        bound_line = _line(style.GREY, "-", None, "independent uniform routing, same dashes", 1.0)
        _shared_legend(figure, [*_workload_handles(ours), *lines, bound_line])
    return figure


def _against_batch(records: Sequence[Record], stage: str, label: str) -> Figure:
    shown = panels(records)
    ours = select(records, metric="activation_ratio")
    with style.context():
        figure, grid = style.new_figure(2, max(2, len(shown)), 7.2, sharey=True)
        for axes, (title, chosen) in zip(grid[0], shown, strict=False):
            _draw_panel(axes, chosen, "batch_size", None, "--")
            axes.set_title(f"Ours: {_title(title, chosen)}")
        for axes in grid[0][len(shown) :]:
            axes.set_axis_off()
        _paper_panels(grid[1], stage)
        lengths = ", ".join(f"{n:,}" for n in sorted(distinct(ours, "prompt_tokens")))
        of_tokens = f" of {lengths} tokens" if stage == "prefill" and lengths else ""
        for axes in grid[0][: len(shown)]:
            style.log2_axis(axes, _BATCHES, f"batch size (sequences{of_tokens})")
        for axes in grid[1][:2]:
            style.log2_axis(axes, _BATCHES, "batch size (sequences)")
        for row in grid:
            style.percent_axis(row[0], f"{label} (%)")
        protocols = [
            _line(style.GREY, _PROTOCOL_LINE.get(name, "-"), "o", PROTOCOL_LABEL.get(name, name))
            for name in sorted(set(distinct(ours, "protocol")))
        ]
        bound_line = _line(style.GREY, "--", None, "independent uniform routing", 1.0)
        several = protocols if len(protocols) > 1 else []
        _shared_legend(figure, [*_workload_handles(ours), *several, bound_line])
    return figure


def _draw_panel(
    axes: Axes, records: Sequence[Record], axis: str, line: str | None, bound_line: str
) -> None:
    """All series of one model, source and device, and the bound."""
    measured = select(records, metric="activation_ratio")
    for index, (identity, series) in enumerate(group_series(measured).items()):
        chosen = line or _PROTOCOL_LINE.get(identity.protocol, "-")
        _draw_ours(axes, values(series, axis), identity, index, chosen)
    _draw_bound(axes, select(records, metric="activation_ratio_uniform"), axis, bound_line)


def _workload_handles(records: Sequence[Record]) -> list[Line2D]:
    """One legend entry per workload; device and source stand in the titles of the panels."""
    handles: dict[str, Line2D] = {}
    for index, identity in enumerate(group_series(records)):
        colour = style.colour_of(identity.domain, index)
        marker = style.marker_of(identity.domain, index)
        entry = _line(colour, "-", marker, identity.workload)
        handles.setdefault(identity.workload, entry)
    return list(handles.values())


def _line(colour: str, line: str, marker: str | None, label: str, width: float = 1.4) -> Line2D:
    face = colour if line == "-" else "white"
    return Line2D(
        [],
        [],
        color=colour,
        linestyle=line,
        marker=marker or "",
        markerfacecolor=face,
        linewidth=width,
        label=label,
    )


def _shared_legend(figure: Figure, handles: list[Line2D]) -> None:
    columns = min(3, len(handles))
    ordered = style.by_rows(handles, columns)
    figure.legend(handles=ordered, loc="outside upper center", ncols=columns)


def _title(model: str, records: Sequence[Record]) -> str:
    experts, top_k = distinct(records, "n_experts"), distinct(records, "top_k")
    if len(experts) == 1 and len(top_k) == 1:
        return f"{model} ({experts[0]} experts, top-{top_k[0]})"
    return model


def _draw_ours(
    axes: Axes,
    points: dict[int, Record],
    identity: SeriesId,
    index: int,
    line: str,
) -> None:
    colour = style.colour_of(identity.domain, index)
    hollow = "white" if line != "-" else colour
    places = list(points)
    axes.plot(
        places,
        [number(record) for record in points.values()],
        line,
        color=colour,
        marker=style.marker_of(identity.domain, index),
        markerfacecolor=hollow,
        zorder=3,
    )
    known = [place for place in places if points[place].ci_low is not None]
    axes.fill_between(
        known,
        [float(points[place].ci_low or 0.0) for place in known],
        [float(points[place].ci_high or 0.0) for place in known],
        color=colour,
        alpha=0.18,
        linewidth=0,
        zorder=2,
    )


def _draw_bound(axes: Axes, records: Sequence[Record], axis: str, line: str) -> None:
    """The bound depends on the model alone; equal values of several workloads are one line."""
    points: dict[int, float] = {}
    for record in records:
        points[record.config[axis]] = number(record)
    if points:
        places = sorted(points)
        axes.plot(
            places,
            [points[place] for place in places],
            line,
            color=style.GREY,
            linewidth=1.0,
            zorder=1,
        )


def _paper_panels(row: Sequence[Axes], stage: str) -> None:
    rows = paper.activation_rows(stage)
    first, second = row[0], row[1]
    for axes in row[2:]:
        axes.set_axis_off()
    for entry in rows:
        axes = first if entry["base_model"] == "Qwen3-30B-A3B" else second
        _draw_paper(axes, entry)
    for axes, models in ((first, ["Qwen3-30B-A3B"]), (second, list(_PAPER_COLOUR)[1:])):
        handles, _ = axes.get_legend_handles_labels()
        if stage == "decode":
            for model in models:
                _paper_bound(axes, model)
            bound = "independent uniform routing"
            bound += ", in each model's colour" if len(models) > 1 else ""
            handles.append(_line(style.GREY, "--", None, bound, 0.8))
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.02, -0.2), fontsize=7)
    first.set_title("Paper: Qwen3-30B-A3B, 128 experts")
    second.set_title("Paper: the other models")


def _draw_paper(axes: Axes, entry: paper.Row) -> None:
    line, note = "-", ""
    if entry["withdrawn"]:
        line, note = "--", ", withdrawn"
    elif entry["corrected"]:
        line, note = "-", ", without the phantom layer"
    elif entry["unverified"]:
        line, note = ":", ", unverified"
    model = entry["base_model"]
    name = _VERSION_LABEL.get(entry["version"], entry["version"])
    if model != "Qwen3-30B-A3B":
        name = model.removesuffix("-instruct")
        if model == "DeepSeek-V2-Lite" and not entry["corrected"]:
            note = ", as printed"
    axes.plot(
        list(entry["values"]),
        list(entry["values"].values()),
        line,
        color=_PAPER_COLOUR.get(model, style.BLACK),
        marker="x" if line != "-" else "D",
        markersize=4,
        label=f"{name}{note}",
    )


def _paper_bound(axes: Axes, model: str) -> None:
    config = paper.model_config(model)
    bound = [
        paper.uniform_activation(config["routed_experts"], config["top_k"], batch)
        for batch in _BATCHES
    ]
    colour = _PAPER_COLOUR[model] if model != "Qwen3-30B-A3B" else style.GREY
    axes.plot(_BATCHES, bound, "--", color=colour, linewidth=0.8, alpha=0.7, label="_")
