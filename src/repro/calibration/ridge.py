"""Ridge regression of the log residual, everything in it chosen on prompts it has not seen.

The one idea: a correction that multiplies a damage may do harm, so it has to earn its size.
The strength of the ridge, the bounds of the clip and the confidence (how much of the predicted
log residual is used) are those with the smallest squared error on held-out folds, and a fold
holds whole prompts: examples of one prompt share its text.

Features are positive; they enter as logarithms, standardised by the training examples.

Letters: n examples, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

ALPHAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 1e6)  # times n; the last leaves the mean alone
CLIP_QUANTILES = (0.0, 0.01, 0.05, 0.1)  # of the residuals, cut off at both ends
CONFIDENCES = tuple(round(0.05 * i, 2) for i in range(21))


@dataclass(frozen=True)
class Fit:
    """A fitted line and how far it is trusted."""

    center: tuple[float, ...]  # [F] of the log features
    scale: tuple[float, ...]  # [F]
    weights: tuple[float, ...]  # [F]
    intercept: float
    clip: tuple[float, float]
    confidence: float
    alpha: float

    def log_residual(self, features: FloatArray) -> FloatArray:
        """The line alone, ``[..., F] -> [...]``; a feature that is zero counts as its mean."""
        z = _standardise(features, np.asarray(self.center), np.asarray(self.scale))
        return np.asarray(z @ np.asarray(self.weights) + self.intercept)

    def log_eta(self, features: FloatArray) -> FloatArray:
        """Clipped and scaled by the confidence."""
        return self.confidence * np.clip(self.log_residual(features), *self.clip)


def fit_ridge(
    features: FloatArray,
    residual: FloatArray,
    prompts: npt.NDArray[np.int64],
    *,
    n_folds: int = 5,
    seed: int = 0,
    alphas: Sequence[float] = ALPHAS,
) -> Fit:
    """Fit ``residual[n]`` on ``features[n, F]``, validated on held-out ``prompts[n]``.

    With one prompt nothing can be validated and the confidence is 0; without examples the
    line is zero.
    """
    n, n_features = features.shape
    zeros = (0.0,) * n_features
    if n == 0:
        return Fit(zeros, (1.0,) * n_features, zeros, 0.0, (0.0, 0.0), 0.0, alphas[-1])
    folds = list(_folds(prompts, n_folds, seed))
    if not folds:
        alpha, quantile, confidence = alphas[-1], 0.0, 0.0
    else:
        unseen = np.empty((len(alphas), n))
        for train, test in folds:
            for row, a in enumerate(alphas):
                line = _line(features[train], residual[train], a)
                unseen[row, test] = line.log_residual(features[test])
        row = int(np.argmin(((unseen - residual) ** 2).mean(axis=1)))
        alpha = alphas[row]
        quantile, confidence = _trust(unseen[row], residual, folds)
    line = _line(features, residual, alpha)
    low, high = np.quantile(residual, [quantile, 1 - quantile])
    return Fit(
        line.center,
        line.scale,
        line.weights,
        line.intercept,
        (float(low), float(high)),
        confidence,
        alpha,
    )


def _trust(
    unseen: FloatArray, residual: FloatArray, folds: list[tuple[BoolArray, BoolArray]]
) -> tuple[float, float]:
    """Clip quantile and confidence with the smallest held-out error; ties go to the first."""
    best = (np.inf, 0.0, 0.0)
    for quantile in CLIP_QUANTILES:
        clipped = unseen.copy()
        for train, test in folds:
            low, high = np.quantile(residual[train], [quantile, 1 - quantile])
            clipped[test] = np.clip(unseen[test], low, high)
        for confidence in CONFIDENCES:
            error = float(((residual - confidence * clipped) ** 2).mean())
            if error < best[0]:
                best = (error, quantile, confidence)
    return best[1], best[2]


def _folds(
    prompts: npt.NDArray[np.int64], n_folds: int, seed: int
) -> Iterator[tuple[BoolArray, BoolArray]]:
    """(train, test) masks; every prompt is in one test fold."""
    names = np.random.default_rng(seed).permutation(np.unique(prompts))
    if len(names) < 2:
        return
    for chosen in np.array_split(names, min(n_folds, len(names))):
        test = np.isin(prompts, chosen)
        yield ~test, test


def _line(features: FloatArray, residual: FloatArray, alpha: float) -> Fit:
    logs = _logs(features)
    center, scale = np.nanmean(logs, axis=0), np.nanstd(logs, axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    z = _standardise(features, center, scale)
    intercept = float(residual.mean())
    gram = z.T @ z + alpha * len(z) * np.eye(z.shape[1])
    z_mean = z.mean(axis=0)
    weights = np.linalg.solve(gram, z.T @ (residual - intercept))
    return Fit(
        tuple(map(float, center)),
        tuple(map(float, scale)),
        tuple(map(float, weights)),
        intercept - float(z_mean @ weights),
        (-np.inf, np.inf),
        1.0,
        alpha,
    )


def _logs(features: FloatArray) -> FloatArray:
    """Logarithms; NaN where a feature is zero."""
    return np.log(features, out=np.full(features.shape, np.nan), where=features > 0)


def _standardise(features: FloatArray, center: FloatArray, scale: FloatArray) -> FloatArray:
    z = (_logs(np.asarray(features, dtype=np.float64)) - center) / scale
    return np.where(np.isfinite(z), z, 0.0)
