"""``pagedweight`` without paging: a static map whose ceilings follow the traffic.

The one idea (what PagedWeight's authors advise where weights cannot be paged): widths come from
the layered damage once; monitored routing only moves each expert's ceiling, a step up for hot
experts and a step down for cold ones.  Steps down pay for steps up, so bytes never grow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from repro.contract import Action, PolicyState
from repro.policies.allocation import allocate_inventory
from repro.policies.base import actions_between
from repro.policies.buckets import mass_ratio
from repro.policies.hotness import Hotness
from repro.policies.inventory import Bits, Inventory, PolicyInputError

# Our choice: four times, and a quarter of, calibration's traffic; a factor of four in mass is what
# one bit is worth.
COLD, HOT = 0.25, 4.0
# Our choice: a fallback for operators who want few changes; DynaExq's rhythm.
ALPHA = 0.9
INTERVAL = 200.0


class CappedPolicy:
    """Static widths, moving caps.

    Args:
        inventory: with sensitivities.
        alpha: weight of the past in the traffic's moving average.
        interval: between looks, in units of the clock.
        cold: traffic relative to calibration below which the cap falls a step.
        hot: above which it rises a step.

    Raises:
        PolicyInputError: no sensitivities, or thresholds in the wrong order.
    """

    name = "pagedweight_caps"

    def __init__(
        self,
        inventory: Inventory,
        *,
        alpha: float = ALPHA,
        interval: float = INTERVAL,
        cold: float = COLD,
        hot: float = HOT,
    ) -> None:
        if inventory.sensitivity is None:
            raise PolicyInputError(
                "pagedweight_caps chooses widths by sensitivity and has none: calibrate first"
            )
        if not 0 <= cold < 1 < hot:
            raise PolicyInputError(f"cold={cold} must be under 1 and hot={hot} above it")
        self._inventory = inventory
        self._hotness = Hotness(inventory.shape, alpha, "mass")
        self._interval = float(interval)
        self._cold, self._hot = cold, hot
        self._base: np.ndarray | None = None
        self._last = 0.0
        self._n = {"updates": 0, "changes": 0}

    def initial_bits(self, budget_bytes: int) -> Bits:
        """The static map.

        Raises:
            PolicyBudgetError: the narrowest widths do not fit.
        """
        inventory = self._inventory
        damage = np.asarray(inventory.sensitivity, dtype=np.float64)
        found = allocate_inventory(inventory, damage, budget_bytes)
        self._base = found.columns.reshape(*inventory.shape, inventory.n_blocks)
        return inventory.bits(self._base)

    def due(self, now: float, kv_free_blocks: int, kv_needed_blocks: int = 0) -> bool:
        """Once per interval."""
        return now - self._last >= self._interval

    def decide(self, state: PolicyState) -> list[Action]:
        """Cold experts' steps down, then as many hot experts' steps up as those pay for."""
        self._last = state.now
        inventory = self._inventory
        if self._base is None:
            self.initial_bits(state.budget_bytes)
        assert self._base is not None
        shares = self._hotness.update(state)
        ratio = mass_ratio(shares, inventory.calibration_mass, inventory.n_present)
        lift = (ratio >= self._hot).astype(np.intp) - (ratio < self._cold)
        cap = np.clip(self._base + lift[..., None], 0, len(inventory.widths) - 1)
        coming = state.n_bits if state.target_bits is None else state.target_bits
        now = inventory.columns(coming)
        held = state.in_transition | ~inventory.present
        cap[held] = now[held]

        def expert_bytes(columns: np.ndarray) -> np.ndarray:
            return inventory.bytes_of(columns).sum(axis=2).reshape(-1)

        before, after = expert_bytes(now), expert_bytes(cap)
        left = state.budget_bytes - int(before.sum())
        left += int(np.maximum(0, before - after).sum())
        rising = np.flatnonzero(after > before)
        rising = rising[np.argsort(-ratio.reshape(-1)[rising], kind="stable")]
        chosen = now.copy().reshape(-1, inventory.n_blocks)
        wanted = cap.reshape(-1, inventory.n_blocks)
        falls = after <= before
        chosen[falls] = wanted[falls]
        for expert in rising.tolist():
            cost = int(after[expert] - before[expert])
            if cost <= left:
                chosen[expert] = wanted[expert]
                left -= cost
        order = np.concatenate([np.flatnonzero(after < before), rising])
        actions = actions_between(inventory, coming, inventory.bits(chosen), order)
        self._n["updates"] += 1
        self._n["changes"] += len(actions)
        return actions

    def report(self) -> dict[str, Any]:
        """JSON-able."""
        return {"policy": self.name, **self._n, "cold": self._cold, "hot": self._hot}
