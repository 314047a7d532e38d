"""How well one set of numbers predicts another.  NumPy only.

Letters: n examples, R resamples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def ranks(values: FloatArray) -> FloatArray:
    """Ranks from 0, equal values sharing their mean rank."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts + 1) / 2)[index])


def correlation(a: FloatArray, b: FloatArray) -> float:
    """Pearson's correlation; NaN where one of them does not vary."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def rank_correlation(a: FloatArray, b: FloatArray) -> float:
    """Spearman's correlation; NaN where one of them does not vary."""
    return correlation(ranks(a), ranks(b))


def resampled_rank_correlation(
    a: FloatArray, b: FloatArray, counts: npt.NDArray[np.int64]
) -> FloatArray:
    """Spearman's correlation of resamples in which example i stands ``counts[R, n]`` times.

    The same as :func:`rank_correlation` of the repeated values, for all R at once: what was
    sorted once stays sorted.
    """
    x, y = _counted_ranks(a, counts), _counted_ranks(b, counts)
    weights = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    x = x - (weights * x).sum(axis=1, keepdims=True)
    y = y - (weights * y).sum(axis=1, keepdims=True)
    spread = np.sqrt((weights * x**2).sum(axis=1) * (weights * y**2).sum(axis=1))
    both = (weights * x * y).sum(axis=1)
    return np.divide(both, spread, out=np.full(len(counts), np.nan), where=spread > 1e-9)


def _counted_ranks(values: FloatArray, counts: npt.NDArray[np.int64]) -> FloatArray:
    """Ranks ``[R, n]`` of repeated values, equal ones sharing their mean rank."""
    _, index = np.unique(values, return_inverse=True)
    order = np.argsort(index, kind="stable")
    starts = np.searchsorted(index[order], np.arange(index.max() + 1))
    groups = np.add.reduceat(counts[:, order], starts, axis=1)
    ranks_of_groups = np.cumsum(groups, axis=1) - (groups + 1) / 2
    return np.asarray(ranks_of_groups[:, index])


def r_squared(truth: FloatArray, predicted: FloatArray, baseline: float | None = None) -> float:
    """Share of the variance explained, 1 at best, negative for worse than the baseline.

    Args:
        truth: what was measured.
        predicted: what was said before.
        baseline: the constant to beat; by default the mean of ``truth``.
    """
    if not len(truth):
        return float("nan")
    middle = float(truth.mean()) if baseline is None else baseline
    total = float(((truth - middle) ** 2).sum())
    return 1.0 - float(((truth - predicted) ** 2).sum()) / total if total > 0 else float("nan")
