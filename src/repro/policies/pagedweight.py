"""``pagedweight``: expert weights give bits to the KV cache, and get them back.

The one idea: when free KV blocks fall under a watermark, just as many bytes are taken from the
weights as are missing, where it hurts least; above a second watermark they are given back where
they help most.  Between the two, bits may change places if the gain is clear.

    bytes to release   D = max(0, T_blk + 1 + needed - F_blk) * B_KV - bytes on their way
    damage of a step   mu * g * eta

The rule for D without ``needed`` (blocks that requests lack right now), the three factors and
greedy selection are PagedWeight's; its constants are not known to us.  Exchange is ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from repro.contract import Action, FloatArray, PolicyState
from repro.policies.base import actions_between, interval_of
from repro.policies.buckets import Buckets, mass_ratio
from repro.policies.damage import per_block, step_bytes, step_eta, step_gain
from repro.policies.exchange import exchange
from repro.policies.hotness import shares_of
from repro.policies.inventory import Bits, Inventory, PolicyInputError
from repro.policies.planner import BoolArray, Columns, Plan, fill, plan_down, segments

# Our choice: a step of a batch of eight that cross block borders together still finds room.
LOW_WATERMARK = 8
# Our choice: three times as many, so that one admitted prompt does not turn bits down and up.
HIGH_WATERMARK = 24
# Our choice: a plan takes milliseconds and so does a step; every 16th keeps it under a few percent.
INTERVAL_STEPS = 16.0
INTERVAL_S = 0.5
# Our choice: routing mass after which old traffic counts half; a few prompts' worth of tokens.
HALF_LIFE = 2048.0
# Our choice: an exchange must recover so many times the damage it does, or near-equals swap for
# ever: predicted damages of single blocks are wrong by more than that.
EXCHANGE_MARGIN = 2.0
# Our choice: experts that one decision lets change places; bounds what is moved for it.
MAX_EXCHANGE = 64

INTERVALS = {"steps": INTERVAL_STEPS, "s": INTERVAL_S}


class PagedWeightPolicy:
    """Greedy by damage per net byte.

    Args:
        inventory: with sensitivities, and heads if residuals are used.
        low_watermark: T_blk: free KV blocks that are kept.
        high_watermark: free KV blocks above which bits go up again.
        interval: between plans without pressure, in units of the clock.
        clock_unit: ``steps`` or ``s``, for the default interval.
        buckets: hotness buckets.
        half_life: routing mass per layer after which old traffic counts half.
        use_routing: mu and floors by traffic; else 1 and none.
        use_sensitivity: g from the table; else the same curve for all blocks.
        use_residual: eta from heads and features; else 1.
        exchange_margin: what an exchange must recover, times what it costs; None: no exchange.
        yield_floors: whether floors give way when requests would stand still.

    Raises:
        UnknownNameError: no such clock unit.
        PolicyInputError: watermarks or numbers that do not belong together.
    """

    name = "pagedweight"

    def __init__(
        self,
        inventory: Inventory,
        *,
        low_watermark: int = LOW_WATERMARK,
        high_watermark: int = HIGH_WATERMARK,
        interval: float | None = None,
        clock_unit: str = "steps",
        buckets: Buckets | None = None,
        half_life: float = HALF_LIFE,
        use_routing: bool = True,
        use_sensitivity: bool = True,
        use_residual: bool = True,
        exchange_margin: float | None = EXCHANGE_MARGIN,
        yield_floors: bool = False,
    ) -> None:
        if not 0 <= low_watermark < high_watermark:
            raise PolicyInputError(
                f"watermarks {low_watermark} and {high_watermark}: the high one must be larger, "
                "or bits go up and down with every block"
            )
        if half_life <= 0 or (exchange_margin is not None and exchange_margin < 1):
            raise PolicyInputError("half_life must be positive and exchange_margin at least 1")
        self._inventory = inventory
        self._low, self._high = low_watermark, high_watermark
        self._interval = interval_of(INTERVALS, interval, clock_unit)
        self._buckets = buckets or Buckets()
        self._half_life = half_life
        self._use = (use_routing, use_sensitivity, use_residual)
        self._margin = exchange_margin
        self._yield_floors = yield_floors
        self._bytes = step_bytes(inventory)
        self._gain: FloatArray | None = None
        self._traffic = np.zeros(inventory.shape)
        self._last = 0.0
        self._stuck_at: int | None = None  # free blocks when there was nothing left to give
        self._report: dict[str, Any] = {}
        self._totals = {"plans": 0, "down": 0, "up": 0, "exchanged": 0}

    # start ----------------------------------------------------------------------------------

    def initial_bits(self, budget_bytes: int) -> Bits:
        """From all at the widest, greedy down to the budget; traffic and prompts unknown.

        Raises:
            PolicyBudgetError: the narrowest widths do not fit.
        """
        inventory = self._inventory
        inventory.check_budget(budget_bytes)
        widest = inventory.columns(inventory.filled(inventory.widths[-1])).reshape(-1)
        target = inventory.uniform_bytes(len(inventory.widths) - 1) - budget_bytes
        damage = step_gain(inventory, self._use[1])
        plan = plan_down(damage, self._bytes, widest, np.zeros_like(widest), target)
        return inventory.bits(plan.columns)

    # when -----------------------------------------------------------------------------------

    def due(self, now: float, kv_free_blocks: int, kv_needed_blocks: int = 0) -> bool:
        """Every interval; at once under pressure, unless nothing was left to give."""
        if now - self._last >= self._interval:
            return True
        free = kv_free_blocks - kv_needed_blocks
        if free > self._low:
            return False
        return self._stuck_at is None or free < self._stuck_at

    # what -----------------------------------------------------------------------------------

    def decide(self, state: PolicyState) -> list[Action]:
        """Demotions, cheapest first; or promotions, best first; or pairs that change places."""
        self._last = state.now
        inventory = self._inventory
        if self._gain is None:
            self._gain = step_gain(inventory.of_state(state), self._use[1])
        shares = self._remember(state)
        ratio = mass_ratio(shares, inventory.calibration_mass, inventory.n_present)
        coming = state.n_bits if state.target_bits is None else state.target_bits
        columns = inventory.columns(coming)
        then = inventory.bytes_of(columns)
        used, released = int(then.sum()), 0
        if not np.array_equal(state.n_bits, coming):
            now = inventory.bytes_of(inventory.columns(state.n_bits))
            released = int(np.maximum(0, now - then).sum())
        column = columns.reshape(-1)
        stays = state.in_transition | ~inventory.present
        held = np.repeat(stays.reshape(-1), inventory.n_blocks)

        free = state.kv_free_blocks - state.kv_needed_blocks
        on_its_way = released + state.reclaiming_bytes
        missing = byte_target(free, self._low, state.kv_block_bytes, on_its_way)
        target = max(missing, used - state.budget_bytes, 0)
        room = state.budget_bytes - used
        if state.kv_block_bytes:
            room = min(room, (free - self._high) * state.kv_block_bytes)
        damage = self._damage(state, ratio)
        floor = self._floor(shares, column, held)
        if target > 0:
            plan, kind = plan_down(damage, self._bytes, column, floor, target), "down"
            if plan.n_bytes < target and self._yield_floors and state.kv_needed_blocks:
                bottom = np.where(held, column, 0)
                plan = plan_down(damage, self._bytes, column, bottom, target)
        else:
            plan, kind = self._upward(damage, column, floor, held, max(0, room))
        order = plan.order // inventory.n_blocks
        actions = actions_between(
            inventory, np.asarray(coming), inventory.bits(plan.columns), order
        )
        given = plan.n_bytes if kind == "down" else 0
        self._totals["plans"] += 1
        self._totals[kind] += len(actions)
        self._report = {
            "last_plan": kind,
            "last_actions": len(actions),
            "last_target_bytes": target,
            "last_released_bytes": given,
            "last_shortfall_bytes": max(0, target - given),
            "last_on_its_way_bytes": on_its_way,
            "last_predicted_damage": plan.damage,
        }
        self._stuck_at = free if given < target and not actions else None
        return actions

    def _upward(
        self, damage: FloatArray, column: Columns, floor: Columns, held: BoolArray, room: int
    ) -> tuple[Plan, str]:
        """Spend the room; if nothing fits into it, let bits change places."""
        top = np.where(held, column, len(self._inventory.widths) - 1)
        up = segments(damage, self._bytes, column, top, up=True)
        plan = fill(up, column, room)
        if len(plan.order) or self._margin is None:
            return plan, "up"
        plan = exchange(
            up, damage, self._bytes, column, floor,
            margin=self._margin, room=room, limit=MAX_EXCHANGE,
        )  # fmt: skip
        return plan, "exchanged"

    def _damage(self, state: PolicyState, ratio: FloatArray) -> FloatArray:
        use_routing, _, use_residual = self._use
        assert self._gain is not None
        damage = self._gain
        if use_routing:
            damage = damage * per_block(self._buckets.multiplier(ratio), self._inventory.n_blocks)
        if use_residual:
            eta = step_eta(self._inventory, state.features, ratio)
            if eta is not None:
                damage = damage * eta
        return damage

    def _floor(self, shares: FloatArray, column: Columns, held: BoolArray) -> Columns:
        """Where blocks may fall to; not above where they are."""
        inventory = self._inventory
        floor = np.zeros_like(column)
        if self._use[0]:
            relative = shares * inventory.n_present[:, None]
            steps = self._buckets.floor(relative, len(inventory.widths))
            floor = np.repeat(steps.reshape(-1), inventory.n_blocks)
        return np.where(held, column, np.minimum(floor, column))

    def _remember(self, state: PolicyState) -> FloatArray:
        """Traffic that fades with new traffic, not with time; returns its shares."""
        new = np.asarray(state.mass, dtype=np.float64)
        if new.shape != self._traffic.shape or not np.isfinite(new).all():
            raise PolicyInputError("routing mass of another shape, or not finite")
        keep = 0.5 ** (new.sum(axis=1, keepdims=True) / self._half_life)
        self._traffic *= keep
        self._traffic += new
        return shares_of(self._traffic)

    def report(self) -> dict[str, Any]:
        """JSON-able."""
        use_routing, use_sensitivity, use_residual = self._use
        return {
            "policy": self.name,
            "low_watermark": self._low,
            "high_watermark": self._high,
            "interval": self._interval,
            "use_routing": use_routing,
            "use_sensitivity": use_sensitivity,
            "use_residual": use_residual,
            **self._totals,
            **self._report,
        }


def byte_target(free_blocks: int, low_watermark: int, kv_block_bytes: int, on_its_way: int) -> int:
    """``D = max(0, T_blk + 1 - F_blk) * B_KV`` less what earlier plans are still releasing.

    Args:
        free_blocks: F_blk, less the blocks that requests lack right now.
        low_watermark: T_blk.
        kv_block_bytes: B_KV.
        on_its_way: bytes of demotions under way, and of versions not yet reclaimed.
    """
    return max(0, max(0, low_watermark + 1 - free_blocks) * kv_block_bytes - on_its_way)
