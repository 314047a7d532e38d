"""``static_mixed``: each block its own width, chosen once from offline statistics.

The one idea (MxMoE-like): the allocation that minimises the calibrated damage under the budget
is computed before serving and never changed.  MxMoE solves an integer program that also weighs
kernel time; here bytes are the only constraint, solved exactly or with a proved gap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from repro.contract import Action, PolicyState
from repro.policies.allocation import Allocation, allocate_inventory
from repro.policies.inventory import Bits, Inventory, PolicyInputError


class StaticMixedPolicy:
    """A fixed map.

    Args:
        inventory: with sensitivities.
        method: ``auto``, ``exact`` or ``greedy``, see :func:`repro.policies.allocation.allocate`.

    Raises:
        PolicyInputError: no sensitivities.
    """

    name = "static_mixed"

    def __init__(self, inventory: Inventory, *, method: str = "auto") -> None:
        if inventory.sensitivity is None:
            raise PolicyInputError(
                "static_mixed chooses widths by sensitivity and has none: calibrate the model first"
            )
        self._inventory = inventory
        self._method = method
        self._found: Allocation | None = None

    def initial_bits(self, budget_bytes: int) -> Bits:
        """The allocation.

        Raises:
            PolicyBudgetError: the narrowest widths do not fit.
        """
        inventory = self._inventory
        damage = np.asarray(inventory.sensitivity, dtype=np.float64)
        self._found = allocate_inventory(inventory, damage, budget_bytes, self._method)
        return inventory.bits(self._found.columns)

    def due(self, now: float, kv_free_blocks: int, kv_needed_blocks: int = 0) -> bool:
        """Never."""
        return False

    def decide(self, state: PolicyState) -> list[Action]:
        """Nothing."""
        return []

    def report(self) -> dict[str, Any]:
        """JSON-able."""
        found = self._found
        if found is None:
            return {"policy": self.name}
        return {
            "policy": self.name,
            "predicted_damage": found.damage,
            "lower_bound": found.lower_bound,
            "exact": found.exact,
            "n_bytes": found.n_bytes,
        }
