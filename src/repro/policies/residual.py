"""Prompt residual heads as arrays: what a prompt's input norms say about its damage.

The one idea (PagedWeight's eta): per (block, transition) a line over three standardised log
norms predicts the logarithm of the damage that average and mass leave unexplained; clipped,
scaled by its confidence, exponentiated.  Training lives elsewhere; here the coefficients are
stacked so that all transitions of a block are one matrix product.

Letters: n blocks of one kind, F features, T transitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.contract import FloatArray

N_NORMS = 3  # mean, root mean square, maximum; a fourth feature is the mass ratio


@dataclass(frozen=True)
class HeadCoefficients:
    """``eta = exp(confidence * clip(intercept + weights . (log x - center) / scale))``."""

    center: tuple[float, ...]  # [F] of the log features
    scale: tuple[float, ...]  # [F]
    weights: tuple[float, ...]  # [F]
    intercept: float
    clip: tuple[float, float]
    confidence: float


@dataclass(frozen=True)
class ResidualHeads:
    """Heads by (block, bits before, bits after)."""

    heads: Mapping[tuple[int, int, int], HeadCoefficients]

    @classmethod
    def of(cls, trained: Any) -> ResidualHeads:
        """From trained heads: a mapping ``.heads`` to objects with a ``.fit`` of the same fields.

        (:class:`repro.calibration.heads.Heads` is one; this room does not import it.)
        """
        found = {}
        for (block, n_from, n_to), head in trained.heads.items():
            fit = head.fit
            found[int(block), int(n_from), int(n_to)] = HeadCoefficients(
                tuple(fit.center),
                tuple(fit.scale),
                tuple(fit.weights),
                float(fit.intercept),
                (float(fit.clip[0]), float(fit.clip[1])),
                float(fit.confidence),
            )
        return cls(found)

    @property
    def n_features(self) -> int:
        """F: 3, or 4 with the mass ratio."""
        return max((len(head.weights) for head in self.heads.values()), default=N_NORMS)

    def _nearest(self, block: int, n_from: int, n_to: int) -> HeadCoefficients | None:
        """The head of a transition; else one of the same block, nearest in its end, then start."""
        if (block, n_from, n_to) in self.heads:
            return self.heads[block, n_from, n_to]
        same = sorted(key for key in self.heads if key[0] == block)
        if not same:
            return None
        return self.heads[min(same, key=lambda k: (abs(k[2] - n_to), abs(k[1] - n_from), k))]

    def log_eta(
        self, block: int, transitions: Sequence[tuple[int, int]], features: FloatArray
    ) -> FloatArray:
        """``features[n, F] -> [T, n]``; a feature that is zero counts as its average."""
        chosen = [self._nearest(block, i, j) for i, j in transitions]
        result = np.zeros((len(transitions), len(features)))
        rows = [t for t, head in enumerate(chosen) if head is not None]
        if not rows:
            return result
        heads = [head for head in chosen if head is not None]
        x = np.asarray(features, dtype=np.float64)[:, : len(heads[0].weights)].T  # [F, n]
        known = x > 0
        logs = np.log(np.where(known, x, 1.0))
        slope = np.array([np.divide(h.weights, h.scale) for h in heads])  # [T, F]
        offset = np.array([h.center for h in heads]) * slope
        line = slope @ logs
        line -= offset @ known
        line += np.array([[h.intercept] for h in heads])
        low, high = np.array([h.clip for h in heads]).T[..., None]
        np.clip(line, low, high, out=line)
        line *= np.array([[h.confidence] for h in heads])
        result[rows] = line
        return result
