"""Between policy and mechanism: statistics in, wishes out.

The one idea: at a step boundary the policy is shown arrays and answers with wishes, which the
mechanism grants, defers or refuses.  Nothing here decides; what was asked and what became of
it is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from repro.contract import FloatArray, IntArray, Outcome, PolicyState
from repro.integration.paged_experts import StepContext
from repro.policies import ServingPolicy
from repro.residency import ExpertResidency


@dataclass(frozen=True)
class Pressure:
    """What KV memory looks like at a step boundary."""

    free_blocks: int
    needed_blocks: int  # that requests lack which could not take part


@dataclass
class Control:
    """Asks the policy and submits what it wants.

    Args:
        policy: see ``repro.policies``.
        residency: the mechanism.
        context: holds the statistics: what routers chose since the last decision.
        clock: of the policy.
        sensitivity: ``[L, E, B, W]``; None if the policy needs none.
        layer_block_bytes: ``[L, B, W]`` whole pages.
        kv_block_bytes: whole pages of one KV block.
        kv_held: KV blocks that each running request holds, by its number.
    """

    policy: ServingPolicy
    residency: ExpertResidency
    context: StepContext
    clock: Any
    sensitivity: FloatArray | None
    layer_block_bytes: IntArray
    kv_block_bytes: int
    kv_held: Callable[[], dict[int, float]] = dict
    outcomes: Counter[str] = field(default_factory=Counter)
    n_decisions: int = 0
    decision_s: float = 0.0  # wall time of all decisions, statistics and submission included
    frozen: bool = False  # no decisions: the map of widths stays

    def state(self, pressure: Pressure) -> PolicyState:
        """What the policy may look at now."""
        residency = self.residency
        assert self.context.statistics is not None
        read = self.context.statistics.read()
        n_bits = residency.n_bits
        coming = n_bits.copy()
        for owner, widths in residency.targets().items():
            coming[owner] = widths
        sensitivity = self.sensitivity
        if sensitivity is None:
            sensitivity = np.zeros((*n_bits.shape, len(residency.widths)))
        shared = residency.layout == "planes"
        signals = self.context.signals
        return PolicyState(
            now=self.clock.now(),
            counts=read.counts,
            mass=read.mass,
            n_bits=n_bits,
            in_transition=residency.in_transition,
            widths=residency.widths,
            block_bytes=residency.block_bytes,
            sensitivity=sensitivity,
            budget_bytes=residency.weight_budget_bytes,
            kv_free_blocks=pressure.free_blocks,
            kv_needed_blocks=pressure.needed_blocks if shared else 0,
            kv_block_bytes=self.kv_block_bytes if shared else 0,
            target_bits=coming,
            reclaiming_bytes=residency.reclaiming_bytes(),
            layer_block_bytes=self.layer_block_bytes,
            features=None if signals is None else signals.merged(self.kv_held()),
        )

    def tick(self, pressure: Pressure, *, force: bool = False) -> int:
        """Decide if it is time to, or if forced; returns how many wishes were granted."""
        due = self.policy.due(self.clock.now(), pressure.free_blocks, pressure.needed_blocks)
        if self.frozen or not (force or due):
            return 0
        start = time.perf_counter()
        actions = self.policy.decide(self.state(pressure))
        self.n_decisions += 1
        assert self.context.statistics is not None
        self.context.statistics.reset()
        granted = 0
        for action in actions:
            outcome = self.residency.submit(action)
            self.outcomes[outcome.value] += 1
            granted += outcome is Outcome.ACCEPTED
        self.decision_s += time.perf_counter() - start
        return granted

    def report(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "n_decisions": self.n_decisions,
            "decision_s": self.decision_s,
            "wishes": dict(self.outcomes),
            **self.policy.report(),
        }
