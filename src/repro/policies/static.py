"""``dense`` and ``static``: one width for all experts, for ever.

The one idea: what every other policy has to beat.  ``dense`` is the model as it is; ``static``
is uniform post-training quantisation at the width asked for, or at the widest that fits.
"""

from __future__ import annotations

from typing import Any

from repro.contract import Action, PolicyState
from repro.policies.inventory import Bits, Inventory, PolicyBudgetError


class StaticPolicy:
    """All experts at ``n_bits``; the widest width that fits if None.

    Raises:
        UnknownNameError: a width there is not.
    """

    name = "static"

    def __init__(self, inventory: Inventory, *, n_bits: int | None = None) -> None:
        self._inventory = inventory
        self._column = None if n_bits is None else inventory.width_column(n_bits)
        self._started: int | None = None

    def initial_bits(self, budget_bytes: int) -> Bits:
        """See :class:`~repro.policies.base.ServingPolicy`."""
        inventory = self._inventory
        inventory.check_budget(budget_bytes)
        column = self._column
        if column is None:
            column = best_uniform_column(inventory, budget_bytes)
        n_bytes = inventory.uniform_bytes(column)
        if n_bytes > budget_bytes:
            raise PolicyBudgetError(
                f"all experts at {inventory.widths[column]} bits need {n_bytes:,} bytes, "
                f"{n_bytes - budget_bytes:,} more than the budget: raise it, or take a narrower "
                "width"
            )
        self._started = inventory.widths[column]
        return inventory.filled(self._started)

    def due(self, now: float, kv_free_blocks: int, kv_needed_blocks: int = 0) -> bool:
        """Never."""
        return False

    def decide(self, state: PolicyState) -> list[Action]:
        """Nothing."""
        return []

    def report(self) -> dict[str, Any]:
        """JSON-able."""
        return {"policy": self.name, "n_bits": self._started}


class DensePolicy(StaticPolicy):
    """All experts at the widest width: the model as it is."""

    name = "dense"

    def __init__(self, inventory: Inventory) -> None:
        super().__init__(inventory, n_bits=inventory.widths[-1])


def best_uniform_column(inventory: Inventory, budget_bytes: int) -> int:
    """The widest width at which all experts fit: the opponent that costs nothing.

    Raises:
        PolicyBudgetError: none fits.
    """
    inventory.check_budget(budget_bytes)
    return max(
        column
        for column in range(len(inventory.widths))
        if inventory.uniform_bytes(column) <= budget_bytes
    )
