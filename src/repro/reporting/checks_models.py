"""Checks of the claims on sizes: Table 3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from repro.reporting import paper
from repro.reporting.checks import Case
from repro.reporting.grouping import number, select
from repro.reporting.records import Record

_BYTES = {
    "expert_bytes_fp16": "bytes_fp16",
    "expert_bytes_int4_g128": "bytes_int4_g128_fp16scale",
    "expert_bytes_int2_g64": "bytes_int2_g64_fp16scale",
}


def expert_bytes(records: Sequence[Record]) -> Iterator[Case]:
    """Bytes of one expert at three tiers against the table computed beforehand."""
    rows = paper.load_table("model_bytes_computed")
    for record in select(records, claim="DynaExq Table 3"):
        column = _BYTES.get(record.metric)
        model = str(record.config.get("model"))
        row = next((row for row in rows if str(row["model"]).startswith(model)), None)
        if column is None or row is None:
            continue
        gap = number(record) - row[column]
        name = f"{model} {record.metric.removeprefix('expert_bytes_')}"
        found = f"{number(record):,.0f} bytes, table {row[column]:,}"
        yield Case(name, gap == 0, found, -abs(gap))


def printed_fraction(records: Sequence[Record]) -> Iterator[Case]:
    """The printed expert share of the weights against the counted one."""
    shares = {
        str(record.config.get("model")): number(record)
        for record in select(records, claim="DynaExq Table 3", metric="routed_share_percent")
        if record.config.keys() <= {"profile", "model", "model_config_digest"}
    }
    for row in paper.load_table("table3_models"):
        model = next((name for name in shares if str(row["model"]).startswith(name)), None)
        if model is None:
            continue
        gap = abs(shares[model] - row["expert_weight_fraction_pct"])
        found = f"counted {shares[model]:.2f} %, printed {row['expert_weight_fraction_pct']} %"
        yield Case(model, gap <= 0.5, found, 0.5 - gap)
