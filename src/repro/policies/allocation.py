"""One width per block under a byte budget, once and for all: the knapsack behind static maps.

The one idea: minimise the sum of damages subject to the sum of bytes.  Small problems are solved
exactly by dynamic programming over pages; large ones greedily on convex hulls, together with the
bound of the linear relaxation, so that the gap to the best allocation is known for every answer
(at most the damage of one segment, whatever the size of the problem).  No solver needed.

Letters: n blocks, W widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from repro.contract import FloatArray, IntArray
from repro.errors import unknown_name
from repro.policies.inventory import Inventory, PolicyBudgetError
from repro.policies.planner import Columns, fill, segments

# Our choice: table cells (blocks x units of bytes x widths) up to which the exact solution takes
# about a second.
MAX_CELLS = 100_000_000
METHODS = ("auto", "exact", "greedy")


@dataclass(frozen=True)
class Allocation:
    """Widths of all blocks."""

    columns: Columns  # [n]
    damage: float  # sum
    n_bytes: int
    lower_bound: float  # no allocation within the budget does less damage
    exact: bool

    @property
    def gap(self) -> float:
        """Damage above the lower bound: how much better the best allocation could be."""
        return self.damage - self.lower_bound


def allocate(
    damage: FloatArray, sizes: IntArray, budget_bytes: int, method: str = "auto"
) -> Allocation:
    """Best widths under a budget.

    Args:
        damage: ``[n, W]`` of reading a block at a width.
        sizes: ``[n, W]`` bytes, not falling with the width.
        budget_bytes: for all of them.
        method: ``exact``, ``greedy``, or whichever the size of the problem allows.

    Raises:
        UnknownNameError: no such method.
        PolicyBudgetError: the narrowest widths do not fit, or too large for ``exact``.
    """
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    missing = int(sizes[:, 0].sum()) - budget_bytes
    if missing > 0:
        raise PolicyBudgetError(
            f"the narrowest widths need {missing:,} bytes more than {budget_bytes:,}: raise the "
            "budget"
        )
    if method != "greedy":
        unit, room = _units(sizes, budget_bytes)
        if (len(sizes) * (room + 1) * sizes.shape[1]) <= MAX_CELLS:
            return _exact(damage, sizes, unit, room)
        if method == "exact":
            raise PolicyBudgetError(
                f"{len(sizes):,} blocks times {room:,} units of {unit:,} bytes are too many for an "
                "exact allocation: use method='greedy'"
            )
    return _greedy(damage, sizes, budget_bytes)


def _units(sizes: IntArray, budget_bytes: int) -> tuple[int, int]:
    """Common divisor of all differences, and how many of it the budget spares."""
    above = sizes - sizes[:, :1]
    unit = max(1, int(np.gcd.reduce(above, axis=None)))
    spare = min(budget_bytes - int(sizes[:, 0].sum()), int(above[:, -1].sum()))
    return unit, spare // unit


def _exact(damage: FloatArray, sizes: IntArray, unit: int, room: int) -> Allocation:
    n, n_widths = damage.shape
    steps = (sizes - sizes[:, :1]) // unit
    best = np.zeros(room + 1)  # least damage of the blocks so far within so many units
    chosen = np.zeros((n, room + 1), dtype=np.int8)
    for i in range(n):
        found = best + damage[i, 0]
        for column in range(1, n_widths):
            step = int(steps[i, column])
            if step > room:
                continue
            with_it = best[: room + 1 - step] + damage[i, column]
            better = with_it < found[step:]
            found[step:][better] = with_it[better]
            chosen[i, step:][better] = column
        best = found
    columns, left = np.zeros(n, dtype=np.intp), room
    for i in range(n - 1, -1, -1):
        columns[i] = chosen[i, left]
        left -= int(steps[i, columns[i]])
    total = float(damage[np.arange(n), columns].sum())
    return Allocation(columns, total, int(sizes[np.arange(n), columns].sum()), total, True)


def _greedy(damage: FloatArray, sizes: IntArray, budget_bytes: int) -> Allocation:
    n = len(sizes)
    rows = np.arange(n)
    # A width that does more damage than a narrower one is never worth its bytes.
    least = np.minimum.accumulate(damage, axis=1)
    start = np.zeros(n, dtype=np.intp)
    steps = np.ascontiguousarray((least[:, :-1] - least[:, 1:]).T)
    step_bytes = np.ascontiguousarray(np.diff(sizes, axis=1).T, dtype=np.float64)
    found = segments(steps, step_bytes, start, np.full(n, sizes.shape[1] - 1), up=True)
    room = budget_bytes - int(sizes[:, 0].sum())
    plan = fill(found, start, room)
    total = np.cumsum(found.n_bytes)
    whole = int(np.searchsorted(total, room, side="right"))
    recovered = -float(found.damage[:whole].sum())
    if whole < len(total):
        left = room - (float(total[whole - 1]) if whole else 0.0)
        recovered -= float(found.damage[whole] / found.n_bytes[whole]) * left
    bound = float(damage[:, 0].sum()) - recovered
    columns = plan.columns
    # Where damage rises with the width, take the narrowest width that is as good.
    columns = np.argmax(least <= least[rows, columns][:, None], axis=1)
    value = float(damage[rows, columns].sum())
    return Allocation(columns, value, int(sizes[rows, columns].sum()), min(bound, value), False)


def allocate_inventory(
    inventory: Inventory,
    damage: FloatArray,
    budget_bytes: int,
    method: str = "auto",
) -> Allocation:
    """All blocks of an inventory; ``damage[L, E, B, W]``.  Blocks that do not exist take nothing.

    Raises:
        PolicyBudgetError: as :func:`allocate`.
    """
    n_widths = len(inventory.widths)
    shape = (*inventory.shape, inventory.n_blocks, n_widths)
    sizes = np.broadcast_to(inventory.sizes[:, None], shape) * inventory.present[..., None, None]
    real = damage * inventory.present[..., None, None]
    return allocate(
        np.ascontiguousarray(real.reshape(-1, n_widths), dtype=np.float64),
        np.ascontiguousarray(sizes.reshape(-1, n_widths)),
        budget_bytes,
        method,
    )
