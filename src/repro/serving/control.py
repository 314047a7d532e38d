"""Between policy and mechanism: statistics in, wishes out.

The one idea: at a step boundary the policy is shown arrays and answers with wishes, which the
mechanism grants, defers or refuses.  Nothing here decides; what was asked and what became of
it is counted.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from repro.contract import Action, FloatArray, IntArray, Outcome, PolicyState
from repro.integration.paged_experts import StepContext
from repro.policies import ServingPolicy
from repro.residency import ExpertResidency

_ASKED_AGAIN = 64  # waiting wishes at one boundary: bounds its time


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
        update_queue: wishes that were not granted wait (DynaExq's update queue) and are asked
            again at every boundary, until the next decision; by default where pools are frozen.
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
    update_queue: bool | None = None
    waiting: deque[Action] = field(default_factory=deque)
    n_granted_late: int = 0

    def __post_init__(self) -> None:
        if self.update_queue is None:
            # Pages shared with the KV cache belong to whoever needs them first; a wish of some
            # steps ago must not take them.
            self.update_queue = self.residency.layout == "versions"

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
        if self.frozen:
            return 0
        due = self.policy.due(self.clock.now(), pressure.free_blocks, pressure.needed_blocks)
        if not (force or due):
            return self._ask_again()
        start = time.perf_counter()
        actions = self.policy.decide(self.state(pressure))
        self.n_decisions += 1
        assert self.context.statistics is not None
        self.context.statistics.reset()
        granted = 0
        self.waiting.clear()
        for action in actions:
            outcome = self.residency.submit(action)
            self.outcomes[outcome.value] += 1
            granted += outcome is Outcome.ACCEPTED
            if outcome is not Outcome.ACCEPTED and self.update_queue:
                self.waiting.append(action)
        self.decision_s += time.perf_counter() - start
        return granted

    def _ask_again(self) -> int:
        """Each waiting wish once, in order: one that lacks room holds up nobody."""
        granted, left = 0, []
        for _ in range(min(len(self.waiting), _ASKED_AGAIN)):
            action = self.waiting.popleft()
            if self.residency.submit(action) is Outcome.ACCEPTED:
                granted += 1
            else:
                left.append(action)
        self.waiting.extendleft(reversed(left))
        self.n_granted_late += granted
        return granted

    def report(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "n_decisions": self.n_decisions,
            "decision_s": self.decision_s,
            "wishes": dict(self.outcomes),
            "granted_late": self.n_granted_late,
            "waiting": len(self.waiting),
            **self.policy.report(),
        }
