"""Several policies under the same cap, traffic and kernels: one row each.

The one idea: a comparison is fair if only the policy differs, so all rows share everything else
and state what they used: bytes of weights (the cap is no measure of them), active experts, and
that the numbers are simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from repro.simulate.device import DeviceProfile
from repro.simulate.model import SimulatedModel
from repro.simulate.result import Result
from repro.simulate.routing import Routing
from repro.simulate.server import SimulatedRequest, simulate
from repro.simulate.setup import Setup


def compare(
    setups: Mapping[str, Setup],
    model: SimulatedModel,
    device: DeviceProfile,
    routing: Routing,
    requests: Sequence[SimulatedRequest],
    *,
    cache_passes: int = 32,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """A row per setup, see :func:`row_of`; options as :class:`repro.simulate.server.Server`."""
    return {
        name: row_of(
            simulate(setup, model, device, routing, requests, **options), cache_passes=cache_passes
        )
        for name, setup in setups.items()
    }


def row_of(result: Result, *, cache_passes: int = 32) -> dict[str, Any]:
    """The numbers that a comparison shows, flat and JSON-able; times in seconds.

    ``of_frequency_oracle`` and ``of_damage_oracle`` are means over phases (None for a cache),
    ``adaptation_s`` by phase (None: never).
    """
    report = result.report
    metrics, mechanism = report["metrics"], report["mechanism"]
    row: dict[str, Any] = {"status": report["status"], "device": report["device"]}
    for name in ("ttft_s", "tpot_s", "e2e_s", "step_s"):
        row[name] = {key: metrics[name].get(key) for key in ("mean", "p50", "p99")}
    row |= {
        "prefill_tokens_per_s": metrics["prefill_tokens_per_s"],
        "decode_tokens_per_s": metrics["decode_tokens_per_s"],
        "weight_wait_s": metrics["weight_wait_s"],
        "kv_stall_s": metrics["kv_stall_s"].get("mean"),
        "end_s": report["end_s"],
        "bytes_moved": mechanism["bytes_moved"],
        "weight_bytes": mechanism["weight_bytes"],
        "capacity_bytes": mechanism["capacity_bytes"],
        "active_share": report["active_share"],
        "high_share": report["high_share"],
        "damage_per_use": report["damage_per_use"],
        "hit_rate": mechanism.get("cache", {}).get("hit_rate"),
    }
    if not result.trail:
        return row
    bounds = result.bounds(cache_passes=cache_passes)
    for name in ("of_frequency_oracle", "of_damage_oracle"):
        row[name] = _mean(phase[name] for phase in bounds["phases"])
    row["adaptation_s"] = [phase["adaptation_s"] for phase in bounds["phases"]]
    row["uniform"] = bounds["uniform"]
    row["of_clairvoyant"] = bounds.get("cache", {}).get("of_clairvoyant")
    return row


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
