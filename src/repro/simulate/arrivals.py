"""What arrives at a simulated server, and when.

The one idea: a request is lengths, a time, and a workload whose routing it follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SimulatedRequest:
    """What arrives.

    Args:
        arrival_s: virtual time.
        n_prompt: tokens.
        n_new: tokens to make.
        workload: names the routing it follows, where that has several.
    """

    arrival_s: float
    n_prompt: int
    n_new: int
    workload: str = ""


def batch_of(
    n: int, n_prompt: int, n_new: int, workload: str = "", every_s: float = 0.0
) -> list[SimulatedRequest]:
    """``n`` equal requests, one every ``every_s`` seconds (0: all at once)."""
    return [SimulatedRequest(i * every_s, n_prompt, n_new, workload) for i in range(n)]


def phases(
    workloads: Sequence[str], n_each: int, n_prompt: int, n_new: int
) -> list[SimulatedRequest]:
    """Text, then mathematics, then code, say: all are there from the start, served in order."""
    return [SimulatedRequest(0.0, n_prompt, n_new, w) for w in workloads for _ in range(n_each)]
