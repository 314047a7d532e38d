"""Findings on the published memory figures: pools, and what can be resident in them."""

from __future__ import annotations

from repro.reporting import paper
from repro.reporting.findings import Item, decide

_PHI = "Phi-3.5-MoE"
_PRINTED_STEP_GB = 0.01  # pools are printed with two decimals


def phi_pool() -> Item:
    """The expert pool of Phi-3.5-MoE, the migrations through it, and the tiers it can hold."""
    stated = {
        row["metric"]: row["value"]
        for row in paper.load_table("figures_stated")
        if row["figure"] == "overhead (later draft)" and str(row["model"]).startswith(_PHI)
    }
    sizes = next(
        row
        for row in paper.load_table("model_bytes_computed")
        if str(row["model"]).startswith(_PHI)
    )
    n_experts = int(sizes["routed_expert_count"])
    high, low = int(sizes["bytes_fp16"]), int(sizes["bytes_int4_g128_scale_and_zero"])
    all_low_gb = n_experts * low / 1e9
    pool_gb = float(stated["resident_expert_pools"])
    n_high = round((pool_gb - all_low_gb) * 1e9 / (high - low))
    migrations = int(stated["migration_count"])
    moved_gb = float(stated["transferred"])
    per_migration = moved_gb * 1e9 / migrations / high
    mixed = (high + low) / 2 / high
    fits = abs(pool_gb - all_low_gb) <= _PRINTED_STEP_GB
    return Item(
        "B1",
        f"The resident pool of {_PHI} leaves no room for a high-precision expert",
        f"The pool is printed as {pool_gb:.2f} GB; all {n_experts} experts at INT4 with scale and "
        f"zero take {all_low_gb:.2f} GB, so {n_high} experts can be FP16. The same table states "
        f"{migrations} migrations that moved {moved_gb:.2f} GB, on average {per_migration:.2f} of "
        f"an FP16 expert; half promotions and half demotions would be {mixed:.2f}.",
        decide(fits and n_high == 0 and migrations > 0, "contradiction"),
        "either the pool is that of the low tier alone, or nothing could have been promoted",
        ("figures_stated", "model_bytes_computed"),
        {
            "pool_gb": pool_gb,
            "all_low_gb": all_low_gb,
            "n_high": n_high,
            "migrations": migrations,
            "experts_per_migration": per_migration,
        },
    )
