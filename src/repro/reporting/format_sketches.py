"""Pictures of the any-precision format itself, for the notebook: cuts on a line, bits in planes.

One idea: both show the same code, once as intervals of the number line that are split with
every bit, once as black and white cells that a kernel would read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from repro.reporting import style

_CELLS = ListedColormap(["#FFFFFF", style.BLUE])


def nested_cuts(
    values: npt.ArrayLike,
    thresholds: Mapping[int, Sequence[float]],
    levels: Mapping[int, Sequence[float]],
    *,
    title: str,
) -> Figure:
    """Values on a line; for each width its cuts (lines) and levels (marks), narrow at the top."""
    with style.context():
        figure, ((axes,),) = style.new_figure(1, 1, 0.9 + 0.42 * (len(thresholds) + 1))
        numbers = np.asarray(values, dtype=np.float64).ravel()
        axes.plot(numbers, np.zeros(len(numbers)), "|", color="black", markersize=9)
        names = ["values"]
        for row, n_bits in enumerate(sorted(thresholds), start=1):
            colour = style.SERIES_COLOURS[(row - 1) % len(style.SERIES_COLOURS)]
            axes.vlines(thresholds[n_bits], row - 0.5, len(thresholds) + 0.5, color=colour)
            axes.plot(levels[n_bits], np.full(len(levels[n_bits]), row), "o", color=colour)
            names.append(f"{n_bits} bits")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.6, len(thresholds) + 0.6)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_xlabel("weight")
        axes.set_title(title)
    return figure


def bit_planes(planes: Sequence[npt.NDArray[Any]], *, title: str) -> Figure:
    """Planes side by side, most significant first; a filled cell is a one."""
    with style.context():
        figure, (row,) = style.new_figure(1, len(planes), 2.3)
        for index, (axes, bits) in enumerate(zip(row, planes, strict=True)):
            cells = np.asarray(bits, dtype=np.int64)
            axes.pcolormesh(cells, cmap=_CELLS, vmin=0, vmax=1, edgecolors="#BBBBBB", linewidth=0.4)
            axes.invert_yaxis()
            axes.set_aspect("equal")
            axes.grid(visible=False)
            axes.tick_params(length=0)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_title(f"plane {index}" if index else f"{title}\nplane 0")
    return figure
