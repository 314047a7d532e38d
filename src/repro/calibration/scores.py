"""How well one set of numbers predicts another.  NumPy only.

Letters: n examples.
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
