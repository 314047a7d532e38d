"""``engine.snapshot()``: everything that can be asked of a running engine, as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro.serving.budget import device_report
from repro.serving.metrics import Metrics

if TYPE_CHECKING:
    from repro.serving.build import Parts


def snapshot(parts: Parts, metrics: Metrics, events: list[str]) -> dict[str, Any]:
    """The state between two steps; bytes from the ledger, which equals the allocator."""
    scheduler = parts.scheduler
    return {
        "policy": {"name": parts.policy_name, **parts.control.report()},
        "format": parts.format_name,
        "budget_bytes": parts.residency.capacity_bytes,
        "fixed_bytes": parts.fixed.report(),
        "residency": parts.residency.snapshot(),
        "kv": {
            "block_tokens": parts.cache.layout.block_tokens,
            "block_bytes": parts.control.kv_block_bytes,
            "free_blocks": scheduler.kv.free_blocks(),
            "blocks_in_use": parts.kv.blocks_in_use,
            "peak_blocks_in_use": parts.kv.peak_blocks,
        },
        "experts": {  # of all steps: uses, summed over layers, and matrices decoded for them
            "read": parts.context.experts_read,
            "matrices_decoded": parts.context.n_decoded,
        },
        "attention": parts.attention.report(),
        "requests": {"waiting": len(scheduler.waiting), "running": len(scheduler.running)},
        "metrics": metrics.report(),
        "events": list(events),
        "driver": device_report(parts.device),
    }
