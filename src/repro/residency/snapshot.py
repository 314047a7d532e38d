"""What residency looks like from outside: bytes by pool, widths, states, transitions, as JSON.

The one idea: every number is read from the books that serving itself uses, none is kept for the
report; so the bytes of a snapshot equal the allocator's.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.contract import State

if TYPE_CHECKING:
    from repro.residency.residency import ExpertResidency

_KINDS = ("promotion", "demotion", "cancellation", "unchanged")
_OUTCOMES = ("accepted", "deferred", "refused")


def take_snapshot(residency: ExpertResidency) -> dict[str, Any]:
    """A JSON-able picture of this instant."""
    transitions, memory = residency.transitions, residency.memory
    # These bring the books up to date; nothing below does, so all numbers are of one instant.
    health, lendable_bytes = residency.health(), residency.lendable_bytes()
    page = residency.page_bytes
    pools = {
        name: {
            "quota_bytes": memory.budget[name].quota * page,
            "used_bytes": memory.budget[name].used * page,
            "free_bytes": memory.budget[name].free * page,
        }
        for name in memory.budget.names
    }
    counts = transitions.counts
    store = residency.store
    return {
        "layout": residency.layout,
        "device": str(residency.arena.device),
        "capacity_bytes": residency.capacity_bytes,
        "used_bytes": memory.budget.used * page,
        "peak_used_bytes": memory.budget.peak * page,
        "page_bytes": page,
        "fragmentation": residency.placement.fragmentation(),
        "pools": pools,
        "weight_bytes": residency.placement.resident_pages() * page,
        "weight_budget_bytes": residency.weight_budget_bytes,
        "lendable_bytes": lendable_bytes,
        "n_bits": _histogram(residency),
        "states": _states(residency),
        "transitions": {
            kind: {outcome: counts[f"{kind}_{outcome}"] for outcome in _OUTCOMES} for kind in _KINDS
        },
        "published": {"promotions": counts["promotions"], "demotions": counts["demotions"]},
        "bytes_moved": transitions.supervisor.bytes_moved(),
        "refusals": {
            "submit": sum(counts[f"{kind}_refused"] for kind in _KINDS),
            "reserve": residency.n_refused_reserves,
        },
        "host": {
            "mode": store.mode,
            "pinned": store.pinned,
            "bytes": store.nbytes,
            "held_bytes": store.held_bytes,
        },
        "worker": {
            "threaded": transitions.driver.threaded,
            "jobs": transitions.worker.n_jobs,
            "copy_errors": counts["copy_errors"],
            "restarts": transitions.supervisor.n_restarts,
            "last_error": transitions.last_error,
            "ok": health.ok,
            "message": health.message,
        },
        "staging": {
            "slots": residency.plan.staging_slots,
            "slot_bytes": residency.plan.slot_pages * page,
        },
        "slack": _slack(residency),
        "table": residency.placement.table.stats(),
        "steps": {"begun": residency.n_steps, "under_way": residency.n_running_steps},
    }


def _histogram(residency: ExpertResidency) -> dict[str, dict[str, int]]:
    """Blocks by width: ``{"gate_up": {"4": 12, ...}, "down": ...}``."""
    found = {}
    for block, name in enumerate(("gate_up", "down")[: residency.n_bits.shape[2]]):
        widths, counts = np.unique(residency.n_bits[:, :, block], return_counts=True)
        found[name] = {str(int(w)): int(n) for w, n in zip(widths, counts, strict=True)}
    return found


def _states(residency: ExpertResidency) -> dict[str, int]:
    """Experts by state."""
    layers, experts = np.nonzero(residency.in_transition)
    found = Counter(
        residency.state(int(layer), int(expert)).value
        for layer, expert in zip(layers, experts, strict=True)
    )
    found[State.RESIDENT.value] = residency.n_layers * residency.n_experts - len(layers)
    return {state.value: found[state.value] for state in State}


def _slack(residency: ExpertResidency) -> dict[str, int]:
    """Bytes kept for transitions."""
    plan, page = residency.plan, residency.page_bytes
    if residency.layout == "planes":
        slack = residency.memory.budget["slack"]
        return {"quota_bytes": slack.quota * page, "used_bytes": slack.used * page}
    at_rest = plan.n_high * plan.high_pages + plan.n_low * plan.low_pages
    return {
        "high_blocks": plan.high_blocks - plan.n_high,
        "low_blocks": plan.low_blocks - plan.n_low,
        "quota_bytes": (plan.weight_pages - at_rest) * page,
    }
