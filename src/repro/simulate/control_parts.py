"""What stands around serving's control in a simulation: counts.

The one idea: :class:`repro.serving.control.Control` is used as it is, so its surroundings must
look like serving's.

Letters: L layers, E experts.
"""

from __future__ import annotations

import numpy as np

from repro.contract import IntArray, RoutingStatistics


class StepCounts:
    """Satisfies what Control asks of :class:`repro.contract.Statistics`.

    Traces hold no routing weights, so a choice counts as one k-th of a token's mass.
    """

    def __init__(self, n_layers: int, n_experts: int, top_k: int) -> None:
        self._counts: IntArray = np.zeros((n_layers, n_experts), dtype=np.int64)
        self._top_k = top_k

    def add_counts(self, counts: IntArray) -> None:
        """Of one pass, ``[L, E]``."""
        self._counts += counts

    def read(self) -> RoutingStatistics:
        """Since the last reset."""
        n_layers = len(self._counts)
        tokens = self._counts.sum(axis=1) // self._top_k
        zero = np.zeros(n_layers, dtype=np.int64)
        counts = self._counts.copy()
        return RoutingStatistics(tuple(range(n_layers)), counts, counts / self._top_k, tokens, zero)

    def reset(self) -> None:
        """Count from zero."""
        self._counts[...] = 0
