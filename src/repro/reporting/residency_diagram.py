"""DynaExq's Figure 4 drawn from a live engine: queues, pools, handles, worker, host store.

One idea: the architecture is a picture of what runs, so every number in it comes from
``engine.snapshot()`` and the fill of every pool is to scale.  Nothing in it is a measurement of
speed; it is the state of one engine between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from repro.reporting import style
from repro.reporting.grouping import select
from repro.reporting.records import Record
from repro.reporting.serving_records import ENGINE

_INK, _PAPER = "#222222", "#FFFFFF"
_POOLS = {
    "high": ("high pool", style.BLUE),
    "low": ("low pool", style.SKY),
    "planes": ("plane pool", style.BLUE),
    "kv": ("KV cache", style.YELLOW),
    "staging": ("staging", style.ORANGE),
    "slack": ("slack", style.GREY),
}
_LEFT, _WIDTH = 41.0, 58.0  # of the arena


def engine_state(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """What the picture needs of ``engine.snapshot()``."""
    residency = snapshot["residency"]
    names = ("capacity_bytes", "used_bytes", "pools", "n_bits", "states", "host", "worker",
             "staging", "layout")  # fmt: skip
    return {
        **{name: residency[name] for name in names},
        "policy": snapshot["policy"]["name"],
        "format": snapshot["format"],
        "fixed_bytes": snapshot["fixed_bytes"]["total"],
        "running": snapshot["requests"]["running"],
    }


def figure4_engine(records: Sequence[Record]) -> Figure:
    """The state that was recorded while several experts were changing."""
    found = select(records, claim=ENGINE, metric="engine_state")
    return draw_engine(found[0].config["snapshot"] if found else None)


def draw_engine(state: Mapping[str, Any] | None) -> Figure:
    """The picture of one state; see :func:`engine_state`."""
    with style.context():
        figure, ((axes,),) = style.new_figure(1, 1, 4.2)
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 100)
        axes.set_axis_off()
        if state is not None:
            _host_side(axes, state)
            _arena(axes, state)
            _arrows(axes)
            axes.set_title(
                f"policy {state['policy']}, format {state['format']}: one engine between two steps"
            )
    return figure


def _host_side(axes: Axes, state: Mapping[str, Any]) -> None:
    states, worker, host = state["states"], state["worker"], state["host"]
    _box(axes, 1, 86, 30, 11, f"requests running: {state['running']}\nrouter counts to the policy")
    _box(
        axes, 1, 64, 30, 13,
        f"update queue\n{states['promoting']} up, {states['demoting']} down",
    )  # fmt: skip
    _box(axes, 1, 45, 30, 11, f"eviction queue\n{states['evicting']} old versions")
    kind = "a thread" if worker["threaded"] else "driven by hand"
    health = "healthy" if worker["ok"] else "in trouble"
    slots = state["staging"]["slots"]
    _box(
        axes, 1, 24, 30, 13,
        f"worker: {kind}, {health}\n{worker['jobs']} jobs, {slots} staging slots",
    )  # fmt: skip
    pinned = "pinned" if host["pinned"] else "pageable"
    _box(axes, 1, 2, 30, 14, f"host store, {host['mode']}\n{_size(host['held_bytes'])}, {pinned}")


def _arena(axes: Axes, state: Mapping[str, Any]) -> None:
    frame = Rectangle((_LEFT, 2), _WIDTH, 92, facecolor="none", edgecolor=_INK, linewidth=1.6)
    axes.add_patch(frame)
    cap, used = state["capacity_bytes"], state["used_bytes"]
    _text(axes, _LEFT, 97, f"arena: {_size(used)} of {_size(cap)} in use", fontweight="bold")
    _handles(axes, state)
    pools = {name: state["pools"][name] for name in _POOLS if name in state["pools"]}
    pools = {name: pool for name, pool in pools.items() if pool["quota_bytes"]}
    most = max(pool["quota_bytes"] for pool in pools.values())
    height = 48.0 / max(1, len(pools))
    for place, (name, pool) in enumerate(pools.items()):
        y = 5 + height * (len(pools) - 1 - place)
        title, colour = _POOLS[name]
        quota, used = pool["quota_bytes"], pool["used_bytes"]
        scale = (_WIDTH - 6) / most
        width = max(0.6, quota * scale)
        bar = height * 0.42
        axes.add_patch(Rectangle((_LEFT + 3, y), width, bar, facecolor=_PAPER, edgecolor=_INK))
        axes.add_patch(
            Rectangle((_LEFT + 3, y), used * scale, bar, facecolor=colour, edgecolor="none")
        )
        text = f"{title}: {_size(used)} of {_size(quota)}"
        _text(axes, _LEFT + 3, y + bar + height * 0.2, text)


def _handles(axes: Axes, state: Mapping[str, Any]) -> None:
    states = state["states"]
    total = sum(states.values())
    by_width = state["n_bits"]["gate_up"]
    widths = ", ".join(
        f"{n} at {bits} bits" for bits, n in sorted(by_width.items(), key=lambda kv: -int(kv[0]))
    )
    _box(axes, _LEFT + 3, 62, _WIDTH - 6, 27, "")
    _text(axes, _LEFT + 5, 84.5, f"{total} handles, each to one valid version", fontweight="bold")
    _text(axes, _LEFT + 5, 78.5, f"published: {widths}" if len(by_width) <= 3 else "published:")
    if len(by_width) > 3:
        _text(axes, _LEFT + 17, 78.5, widths, fontsize=6.5)
    names = ("resident", "promoting", "demoting", "evicting")
    share = (_WIDTH - 10) / len(names)
    for place, name in enumerate(names):
        x = _LEFT + 5 + place * share
        busy = name != "resident" and states[name]
        face = style.VERMILLION if busy else "#EEEEEE"
        _box(axes, x, 64.5, share - 1.5, 9.5, f"{name}\n{states[name]}", face)


def _arrows(axes: Axes) -> None:
    _arrow(axes, (16, 86), (16, 77))
    _text(axes, 17, 81.5, "wishes", fontsize=7)
    _arrow(axes, (31, 70.5), (_LEFT + 3, 72))
    _arrow(axes, (_LEFT + 3, 65), (31, 52))
    _text(axes, 37.0, 50.5, "switched", fontsize=7, ha="center")
    _arrow(axes, (3, 64), (3, 37))
    _arrow(axes, (16, 45), (16, 37))
    _arrow(axes, (16, 16), (16, 24), style.VERMILLION)
    _arrow(axes, (31, 30.5), (_LEFT + 3, 30.5), style.VERMILLION)
    _text(axes, 36.2, 34, "copies", fontsize=7, ha="center", color=style.VERMILLION)


def _box(axes: Axes, x: float, y: float, w: float, h: float, text: str, face: str = _PAPER) -> None:
    axes.add_patch(Rectangle((x, y), w, h, facecolor=face, edgecolor=_INK, linewidth=0.8))
    colour = "white" if face == style.VERMILLION else _INK
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=7.5, color=colour)


def _text(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:
    axes.text(x, y, text, **{"fontsize": 7.5, "va": "center", "color": _INK, **more})


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = _INK
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=9, color=colour, linewidth=1.0,
            shrinkA=0, shrinkB=0, zorder=5,
        )
    )  # fmt: skip


def _size(n_bytes: float) -> str:
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= step:
            return f"{n_bytes / step:.1f} {unit}"
    return f"{n_bytes:.0f} B"
