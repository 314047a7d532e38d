"""Who leaves and who enters the high set of each layer: top n with hysteresis.

The one idea (DynaExq 3.5): the hottest outsider is matched with the coldest insider, the second
hottest with the second coldest, and so on; a pair changes places only if the outsider leads by
the margin.  The margin is additive (on shares of the layer's traffic) or a slack in ranks: an
insider stays as long as it is among the top ``n + slack``, an outsider must be among the top n.
Each pair leaves the number of high experts as it is, so no budget is ever exceeded on the way.

Ties stay as they are, and among equals the lower number comes first.

Letters: L layers, E experts, P changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro.contract import FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]
NOBODY = -1


@dataclass(frozen=True)
class Changes:
    """Pairs in order of importance; :data:`NOBODY` where a change has one half only."""

    layer: IntArray  # [P]
    leaves: IntArray  # [P] expert that goes low
    enters: IntArray  # [P] expert that goes high
    gain: FloatArray  # [P] lead of the outsider; inf for a demotion that the budget forces

    def first(self, n: int | None) -> Changes:
        """The ``n`` most important ones."""
        return Changes(self.layer[:n], self.leaves[:n], self.enters[:n], self.gain[:n])


def select(
    score: FloatArray,
    inside: BoolArray,
    movable: BoolArray,
    n_high: int,
    *,
    margin: float = 0.0,
    rank_slack: int | None = None,
) -> Changes:
    """What to change in each layer.

    Args:
        score: ``[L, E]`` shares.
        inside: ``[L, E]`` high, or on the way there.
        movable: ``[L, E]`` experts that exist and are not changing already.
        n_high: high experts of a layer.
        margin: lead that a pair needs; ties never change places.
        rank_slack: instead of the margin.

    Returns:
        Demotions that a smaller ``n_high`` forces, then free places filled (never by experts
        without traffic) and pairs, by gain.
    """
    free = n_high - inside.sum(axis=1)
    insiders, outsiders = inside & movable, ~inside & movable
    coldest = np.argsort(np.where(insiders, score, np.inf), axis=1, kind="stable")
    hottest = np.argsort(np.where(outsiders, -score, np.inf), axis=1, kind="stable")
    place = np.arange(score.shape[1])[None]
    n_in, n_out = insiders.sum(axis=1)[:, None], outsiders.sum(axis=1)[:, None]
    forced = place < np.minimum(n_in, np.maximum(0, -free)[:, None])
    hot = np.take_along_axis(score, hottest, axis=1)
    filled = (place < np.minimum(n_out, np.maximum(0, free)[:, None])) & (hot > 0)

    # Pairs: outsiders that fill no free place against insiders that no budget forces out.
    n_forced, n_filled = forced.sum(axis=1)[:, None], filled.sum(axis=1)[:, None]
    last = score.shape[1] - 1
    inner = np.take_along_axis(coldest, np.minimum(place + n_forced, last), axis=1)
    outer = np.take_along_axis(hottest, np.minimum(place + n_filled, last), axis=1)
    lead = np.take_along_axis(score, outer, axis=1) - np.take_along_axis(score, inner, axis=1)
    paired = (place < np.minimum(n_in - n_forced, n_out - n_filled)) & (lead > 0)
    if rank_slack is None:
        paired &= lead > margin
    else:
        # Residents win ties, as they do in the comparison of scores.
        by_rank = np.lexsort((~inside, -score), axis=1)
        rank = np.empty_like(by_rank)
        np.put_along_axis(rank, by_rank, np.broadcast_to(place, rank.shape), axis=1)
        paired &= np.take_along_axis(rank, outer, axis=1) < n_high
        paired &= np.take_along_axis(rank, inner, axis=1) >= n_high + rank_slack

    found = [
        _changes(forced, coldest, None, np.full_like(score, np.inf)),
        _changes(filled, None, hottest, hot),
        _changes(paired, inner, outer, lead),
    ]
    together = Changes(
        *(
            np.concatenate([getattr(c, name) for c in found])
            for name in ("layer", "leaves", "enters", "gain")
        )
    )
    order = np.argsort(-together.gain, kind="stable")
    return Changes(
        together.layer[order], together.leaves[order], together.enters[order], together.gain[order]
    )


def _changes(
    chosen: BoolArray,
    leaves: npt.NDArray[np.intp] | None,
    enters: npt.NDArray[np.intp] | None,
    gain: FloatArray,
) -> Changes:
    layer, place = np.nonzero(chosen)
    nobody = np.full(len(layer), NOBODY, dtype=np.int64)
    return Changes(
        layer.astype(np.int64),
        nobody if leaves is None else leaves[layer, place].astype(np.int64),
        nobody if enters is None else enters[layer, place].astype(np.int64),
        gain[layer, place],
    )


def top_n(score: FloatArray, n_high: int, present: BoolArray) -> BoolArray:
    """The ``n_high`` experts of each layer with the highest scores, ``[L, E]``."""
    order = np.argsort(np.where(present, -score, np.inf), axis=1, kind="stable")[:, :n_high]
    chosen = np.zeros(score.shape, dtype=bool)
    np.put_along_axis(chosen, order, True, axis=1)
    return np.asarray(chosen & present)


def n_high_of(budget_bytes: int, low_bytes: IntArray, high_bytes: IntArray, n: IntArray) -> int:
    """High experts per layer that a budget holds, the same number in every layer.

    Args:
        budget_bytes: for all experts.
        low_bytes: ``[L]`` of one expert.
        high_bytes: ``[L]``.
        n: ``[L]`` experts of the layer.
    """
    spare = budget_bytes - int((low_bytes * n).sum())
    each = int((high_bytes - low_bytes).sum())
    if spare < 0:
        return 0
    return int(n.min()) if each <= 0 else min(int(n.min()), spare // each)
