"""What part of the traffic a choice of experts serves.

The one idea: precision is given to a few experts of a layer, so a placement is a set of
experts per layer, and its worth is the share of all selections that fall into the set.
Chosen from one workload's counts and asked of another's, the same function says how far a
static map is off; asked step by step, how fast a map that follows the traffic catches up.

Left out: what a selection at low precision costs (that needs a model, not counts).

Letters: L layers, E experts, n experts in the set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.experiments.statistics import top_experts


def captured_share(
    counts: npt.NDArray[Any], placement: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.float64]:
    """Share of the selections ``counts[..., L, E]`` that go to ``placement[L, n]``: ``[..., L]``.

    Raises:
        ValueError: an expert is named twice in a layer, or a layer has no selections.
    """
    chosen = np.sort(np.asarray(placement), axis=-1)
    if (np.diff(chosen, axis=-1) == 0).any():
        raise ValueError("an expert stands twice in the placement of a layer")
    numbers = np.asarray(counts, dtype=np.float64)
    total = numbers.sum(axis=-1)
    if (total <= 0).any():
        raise ValueError("counts that are all zero have no distribution")
    shape = (*numbers.shape[:-1], chosen.shape[-1])
    inside = np.take_along_axis(numbers, np.broadcast_to(chosen, shape), axis=-1)
    return np.asarray(inside.sum(axis=-1) / total)


def captured_matrix(
    chosen_on: Mapping[str, npt.NDArray[Any]], serving: Mapping[str, npt.NDArray[Any]], n_high: int
) -> npt.NDArray[np.float64]:
    """Share served by the busiest ``n_high`` experts of one traffic when another comes.

    Args:
        chosen_on: traffic by which experts are chosen, name to counts ``[L, E]``.
        serving: traffic that is asked, name to counts ``[L, E]``.
        n_high: experts chosen per layer.

    Returns:
        Means over layers, ``[len(chosen_on), len(serving)]`` in the order of the names.
    """
    placements = [top_experts(counts, n_high) for counts in chosen_on.values()]
    rows = [[captured_share(c, p).mean() for c in serving.values()] for p in placements]
    return np.array(rows, dtype=np.float64)
