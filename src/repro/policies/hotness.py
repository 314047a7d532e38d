"""How hot an expert is: a moving average of its traffic, as a share of its layer's.

The one idea (DynaExq 3.5): at every decision ``S <- alpha S + (1 - alpha) c``, c the selections
or the routing mass since the last one.  Scores are compared as shares of their layer, so that
a margin means the same at any traffic and the average's start at zero cancels out.  An interval
without traffic changes no share.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from repro.contract import FloatArray, PolicyState
from repro.errors import unknown_name
from repro.policies.inventory import PolicyInputError

Signal = Literal["counts", "mass"]
SIGNALS: tuple[Signal, ...] = ("counts", "mass")


class Hotness:
    """The moving average ``[L, E]``.

    Args:
        shape: ``(L, E)``.
        alpha: weight of the past, in [0, 1).
        signal: ``counts`` (v3 of DynaExq) or ``mass`` (its later drafts).

    Raises:
        UnknownNameError: no such signal.
        PolicyInputError: alpha outside [0, 1).
    """

    def __init__(self, shape: tuple[int, int], alpha: float, signal: str) -> None:
        if signal not in SIGNALS:
            raise unknown_name("signal", signal, SIGNALS)
        if not 0 <= alpha < 1:
            raise PolicyInputError(f"alpha={alpha} must be at least 0 and less than 1")
        self.alpha = alpha
        self.signal = signal
        self.score: FloatArray = np.zeros(shape)

    def update(self, state: PolicyState) -> FloatArray:
        """Take the state's traffic in; returns the shares.

        Raises:
            PolicyInputError: traffic of another shape, or not finite.
        """
        raw = state.counts if self.signal == "counts" else state.mass
        new = np.asarray(raw, dtype=np.float64)
        if new.shape != self.score.shape:
            raise PolicyInputError(f"traffic of shape {new.shape}: it must be {self.score.shape}")
        if not np.isfinite(new).all():
            raise PolicyInputError("routing mass that is not finite: check the model's routers")
        self.score *= self.alpha
        self.score += (1 - self.alpha) * new
        return self.shares()

    def shares(self) -> FloatArray:
        """``[L, E]``, each layer's sum is 1, or 0 before any traffic."""
        return shares_of(self.score)


def shares_of(traffic: FloatArray) -> FloatArray:
    """Traffic ``[L, E]`` as shares of the layer; zeros where there was none."""
    total = traffic.sum(axis=1, keepdims=True)
    return np.asarray(traffic / np.where(total > 0, total, 1.0))
