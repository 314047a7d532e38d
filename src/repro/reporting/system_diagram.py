"""DynaExq and PagedWeight side by side, drawn: what lies in GPU memory, and what moves.

One idea: both systems change the precision of single experts under a hard memory cap; the
picture shows where they differ.  DynaExq keeps one whole version of every expert, wide or
narrow, in two pools of fixed size.  PagedWeight keeps stacks of bit-planes, and what the
stacks give up, the KV cache takes.

An FP16 expert is drawn four times as large as an INT4 one; the rest is not to scale.
It is a sketch of the ideas with few experts, not the state of a running engine.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from repro.reporting import style

_INK = "#222222"
_DENSE = "#CFCFCF"
_KV = style.YELLOW
_HIGH = style.BLUE
_LOW = style.SKY
_MOVES = style.VERMILLION
_LEFT = 22.0  # edge of GPU memory


def two_systems() -> Figure:
    """The sketch, at notebook width."""
    with style.context():
        figure, (panels,) = style.new_figure(1, 2, 4.3)
        for axes in panels:
            axes.set_xlim(0, 100)
            axes.set_ylim(0, 106)
            axes.set_axis_off()
        panels[0].set_title("DynaExq: whole experts, wide or narrow")
        panels[1].set_title("PagedWeight: planes make room for KV")
        _dynaexq(panels[0])
        _pagedweight(panels[1])
    return figure


def _box(axes: Axes, x: float, y: float, w: float, h: float, face: str, text: str = "") -> None:
    axes.add_patch(Rectangle((x, y), w, h, facecolor=face, edgecolor=_INK, linewidth=0.8))
    if text:
        colour = "white" if face == _HIGH else _INK
        axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", color=colour, fontsize=7.5)


def _ghost(axes: Axes, x: float, y: float, w: float, h: float) -> None:
    """A place that is empty now."""
    patch = Rectangle((x, y), w, h, facecolor="none", edgecolor="#888888", linewidth=0.7)
    patch.set_linestyle((0, (2, 2)))
    axes.add_patch(patch)


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, bend: float = 0.0
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=8,
            color=colour,
            linewidth=1.1 if colour == _MOVES else 0.8,
            linestyle="--" if colour == _MOVES else "-",
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=0,
            shrinkB=1,
            zorder=5,
        )
    )


def _text(axes: Axes, x: float, y: float, text: str, **more: object) -> None:
    axes.text(x, y, text, **{"fontsize": 7.5, "va": "center", "color": _INK, **more})  # type: ignore[arg-type]


def _common(axes: Axes, host: str, decides: str) -> None:
    """The frame of GPU memory with its cap, the host, and what decides."""
    axes.add_patch(Rectangle((_LEFT, 29), 77, 71, facecolor="none", edgecolor=_INK, linewidth=1.6))
    _text(axes, _LEFT, 103, "GPU memory, hard cap", fontweight="bold")
    _box(axes, _LEFT + 2, 88, 26, 9, _DENSE, "dense weights")
    _box(axes, 45, 4, 54, 12, "#FFFFFF", host)
    _box(axes, 0, 4, 38, 12, "#FFFFFF", decides)
    _arrow(axes, (38, 10), (45, 10), _INK)


def _column(slot: int) -> float:
    """Left edge of the place of one of the eight experts."""
    return _LEFT + 2 + 8.9 * slot


def _dynaexq(axes: Axes) -> None:
    _common(
        axes,
        "host memory: both\nversions of every expert",
        "router counts ->\nhot experts -> top n",
    )
    _box(axes, 53, 88, 44, 9, _KV, "KV cache, fixed size")
    _text(axes, 20, 76, "high pool\nFP16", ha="right")
    _text(axes, 20, 59.5, "handles", ha="right")
    _text(axes, 20, 42.4, "low pool\nINT4", ha="right")
    high = {2: 24.0, 5: 49.0}
    for expert, x in high.items():
        _box(axes, x, 70, 23, 12, _HIGH, f"expert {expert}")
    _ghost(axes, 74, 70, 23, 12)
    _text(axes, 85.5, 76, "free block", ha="center", color="#555555")
    for expert in range(8):
        x = _column(expert)
        middle = x + 3.9
        _box(axes, x, 57, 7.8, 5, "#FFFFFF", str(expert))
        if expert in high:
            _ghost(axes, x, 38, 7.8, 8.8)
            _arrow(axes, (middle, 62), (high[expert] + 11.5, 70), _INK)
        else:
            _box(axes, x, 38, 7.8, 8.8, _LOW, str(expert))
            _arrow(axes, (middle, 57), (middle, 46.8), _INK)
    _text(axes, 59, 33, "a handle names the one valid version", ha="center")
    _arrow(axes, (96.3, 16), (95, 70), _MOVES)
    promotion = "promote: copy expert 7, then switch its handle"
    _text(axes, 94, 22.5, promotion, color=_MOVES, ha="right")


def _pagedweight(axes: Axes) -> None:
    _common(axes, "host memory: planes\nthat left the GPU", "damage per byte,\nsmallest first")
    _text(axes, 53, 92.5, "KV cache, grows with requests")
    for row in range(2):
        for slot in range(8):
            x, y = _column(slot), 80.5 - 6.2 * row
            if row == 0 or slot < 5:
                _box(axes, x, y, 7.8, 4.8, _KV)
            else:
                _ghost(axes, x, y, 7.8, 4.8)
    _text(axes, 20, 79.5, "blocks", ha="right")
    for slot, n_bits in enumerate((8, 6, 3, 4, 7, 3, 3, 5)):
        for plane in range(8):
            y = 38 + 4.0 * plane
            if plane < n_bits:
                _box(axes, _column(slot), y, 7.8, 3.2, _HIGH if plane < 3 else _LOW)
            else:
                _ghost(axes, _column(slot), y, 7.8, 3.2)
        _text(axes, _column(slot) + 3.9, 33.5, str(n_bits), ha="center")
    _text(axes, 20, 67.5, "last bit", ha="right")
    _text(axes, 20, 53.5, "bit-planes\nof one\nexpert", ha="right")
    _text(axes, 20, 39.5, "top bit", ha="right")
    _text(axes, 20, 33.5, "bits now", ha="right")
    _arrow(axes, (_column(6) + 3.9, 62), (_column(6) + 3.9, 74), _MOVES)
    _arrow(axes, (93, 29), (93, 16), _MOVES)
    _text(axes, 91, 22.5, "planes out; KV blocks take their place", color=_MOVES, ha="right")
