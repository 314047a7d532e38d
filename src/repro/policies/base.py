"""What the engine asks of every policy, and what it must know before it builds one.

The one idea: a policy answers three questions.  At which widths do we start (``initial_bits``),
is it time to decide (``due``), and what should change (``decide``).  It decides from the state
it is shown and never from what it wished before, so a wish that was deferred or refused is
simply wished again if it is still right.

``due`` must be cheap: it is asked at every step boundary.  Whoever calls ``decide`` resets the
statistics afterwards: counts and mass of a state are those since the last decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from repro.contract import Action, PolicyState
from repro.errors import unknown_name
from repro.policies.inventory import Bits, Inventory, PolicyInputError


class ServingPolicy(Protocol):
    """Decisions only: arrays in, wishes out."""

    @property
    def name(self) -> str:
        """As in the registry."""
        ...

    def initial_bits(self, budget_bytes: int) -> Bits:
        """Widths ``[L, E, B]`` to start with, within ``budget_bytes``.

        Raises:
            PolicyBudgetError: the budget holds not even the narrowest widths.
        """
        ...

    def due(self, now: float, kv_free_blocks: int, kv_needed_blocks: int = 0) -> bool:
        """Whether to call :meth:`decide` at this step boundary; asking changes nothing."""
        ...

    def decide(self, state: PolicyState) -> list[Action]:
        """What to change now, most important first; the mechanism may refuse or defer each."""
        ...

    def report(self) -> dict[str, Any]:
        """JSON-able statistics."""
        ...


Layout = Literal["versions", "planes", "any"]
TRAIT_NAMES = (
    "shares_kv_pages",
    "uses_routing",
    "uses_sensitivity",
    "uses_features",
    "changes",
    "chooses_per_step",
)


@dataclass(frozen=True)
class Traits:
    """What a policy needs of the mechanism; known before it is built."""

    layout: Layout  # how payloads are stored
    n_widths: int | None  # how many it chooses among; None: as many as there are
    shares_kv_pages: bool  # pages it gives up become KV memory; else borders are frozen
    uses_routing: bool  # counts and mass per expert
    uses_sensitivity: bool
    uses_features: bool  # prompt norms for residual heads
    changes: bool  # whether decide() ever wishes anything
    chooses_per_step: bool  # has more to say inside a step: step_bits, or demand and prefetch


def actions_between(
    inventory: Inventory,
    before: Bits,
    after: Bits,
    order: Sequence[int] | np.ndarray | None = None,
) -> list[Action]:
    """An action for every expert whose widths differ; ``order`` lists flat experts, first first.

    Experts that ``order`` does not name come after the others, by number.
    """
    n_experts = inventory.shape[1]
    changed = (before != after).any(axis=2).reshape(-1)
    flat = np.flatnonzero(changed)
    if order is not None and len(flat):
        ranked = np.asarray(order, dtype=np.int64)
        rank = np.full(changed.size, changed.size, dtype=np.int64)
        # the first mention counts: later ones are written first
        rank[ranked[::-1]] = np.arange(len(ranked))[::-1]
        flat = flat[np.argsort(rank[flat], kind="stable")]
    bits = map(tuple, after.reshape(changed.size, -1)[flat].tolist())
    layers, experts = np.divmod(flat, n_experts)
    rows = zip(layers.tolist(), experts.tolist(), bits, strict=True)
    return list(map(Action._make, rows))


def interval_of(defaults: Mapping[str, float], interval: float | None, clock_unit: str) -> float:
    """The interval asked for, or the default for the unit of the clock.

    Raises:
        UnknownNameError: no such unit.
        PolicyInputError: a negative interval.
    """
    if clock_unit not in defaults:
        raise unknown_name("clock unit", clock_unit, defaults)
    found = defaults[clock_unit] if interval is None else float(interval)
    if found < 0:
        raise PolicyInputError(f"an interval of {found} {clock_unit} is negative: give 0 or more")
    return found
