"""Tables of serving: one promotion, KV pressure with and without relief, changes on and off.

One idea: what a reader compares stands in one row or under one head: the same requests on the
same bytes, the same batch with and without changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from repro.reporting.records import Record
from repro.reporting.serving_records import (
    LAYOUTS,
    Point,
    copy_span,
    label,
    pressures,
    promotions,
    servings,
    value,
)
from repro.reporting.tables import Column, Row, Table, fixed, grouped


def promotion(records: Sequence[Record]) -> Table:
    """Step times around one slow copy."""
    columns = (
        Column("layout", numeric=False),
        Column("device", numeric=False),
        Column("bytes copied"),
        Column("copy", "ms"),
        Column("steps on the old version"),
        Column("step before", "ms"),
        Column("during", "ms"),
        Column("after", "ms"),
        Column("waited", "ms"),
    )
    rows, keys = [], []
    for device, layout, point in promotions(records):
        began, ended = copy_span(point)
        steps = [_spread(point[f"step_s_{when}"]) for when in ("before", "during", "after")]
        rows.append(
            Row(
                "ours",
                (
                    LAYOUTS[layout],
                    device,
                    grouped(value(point, "bytes_moved")),
                    _ms(ended - began, 0),
                    fixed(int(value(point, "steps_on_old_version")), 0),
                    *steps,
                    _ms(value(point, "weight_wait_s")),
                ),
            )
        )
        keys += [record.key for record in point.values()]
    caption = (
        "The link is throttled until the copy of one expert takes as long as some twenty steps. "
        "Steps: median, and the 10th to 90th percentile."
    )
    title = "One promotion on a slow link, while a batch decodes"
    return Table(title, columns, tuple(rows), caption, tuple(sorted(set(keys))))


def _spread(record: Record) -> str:
    low, middle, high = (1000 * float(x or 0.0) for x in (record.p10, record.p50, record.p90))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def _ms(seconds: float, digits: int = 1) -> str:
    return fixed(1000 * seconds, digits)


def pressure(records: Sequence[Record]) -> Table:
    """The same requests on the same bytes, with weights that give way and with static ones."""
    columns = (
        Column("policy", numeric=False),
        Column("device", numeric=False),
        Column("requests finished"),
        Column("running together at least"),
        Column("KV blocks, start"),
        Column("KV blocks, peak"),
        Column("expert bytes lent", "%"),
        Column("mean bits, lowest"),
        Column("mean bits, at the end"),
        Column("preemptions"),
        Column("stalled request steps"),
        Column("steps"),
    )
    rows, keys = [], []
    for device, policy, point in pressures(records):
        counts = ("requests_finished", "concurrent_throughout", "kv_blocks_at_start")
        rows.append(
            Row(
                "ours",
                (
                    policy,
                    device,
                    *(fixed(int(value(point, name)), 0) for name in counts),
                    fixed(int(value(point, "peak_kv_blocks")), 0),
                    fixed(100 * value(point, "lent_share_at_peak"), 1),
                    fixed(value(point, "lowest_mean_bits"), 2),
                    fixed(value(point, "final_mean_bits"), 2),
                    *(
                        fixed(int(value(point, name)), 0)
                        for name in ("preemptions", "kv_stalls", "steps")
                    ),
                ),
            )
        )
        keys += [record.key for record in point.values()]
    caption = (
        "All requests are there from the beginning and grow to four times the KV blocks of the "
        "start. Both policies begin with all experts at 8 bits and have the same arena."
    )
    title = "KV pressure: weights that give way, and weights that do not"
    return Table(title, columns, tuple(rows), caption, tuple(sorted(set(keys))))


def on_off(records: Sequence[Record]) -> Table:
    """Step times with changes and without; what the layout's own policy serves."""
    columns = (
        Column("model", numeric=False),
        Column("layout", numeric=False),
        Column("device", numeric=False),
        Column("step, no changes", "ms"),
        Column("step, changes", "ms"),
        Column("ratio"),
        Column("P99, no changes", "ms"),
        Column("P99, changes", "ms"),
        Column("published"),
        Column("moved", "MB"),
        Column("waited", "ms"),
    )
    rows, keys = [], []
    for device, model, layout, point in servings(records):
        rows.append(
            Row(
                "ours",
                (
                    model,
                    LAYOUTS[layout],
                    device,
                    *(_ms(float(point[f"step_s {kind}"].p50 or 0.0)) for kind in ("off", "on")),
                    fixed(value(point, "step_ratio_on_off"), 3),
                    *(_ms(label(point, f"step_s {kind}", "p99")) for kind in ("off", "on")),
                    grouped(value(point, "changes_published")),
                    fixed(value(point, "forced_bytes_moved") / 1e6, 1),
                    _ms(value(point, "weight_wait_s")),
                ),
            )
        )
        keys += [record.key for record in point.values()]
    caption = (
        "Decode steps of one batch on the reference kernels; phases in which two experts change "
        "at every step (forced, seeded) alternate with phases in which none does. Medians."
    )
    title = "Serving while experts change"
    return Table(title, columns, tuple(rows), caption, tuple(sorted(set(keys))))


def served(records: Sequence[Record]) -> Table:
    """Latency, throughput and memory under the layout's own policy."""
    columns = (
        Column("model", numeric=False),
        Column("layout", numeric=False),
        Column("device", numeric=False),
        Column("TTFT", "ms"),
        Column("TPOP", "ms"),
        Column("end to end", "ms"),
        Column("prefill", "tokens/s"),
        Column("decode", "tokens/s"),
        Column("arena", "MB"),
        Column("arena, peak", "MB"),
        Column("device, peak", "MB"),
        Column("host", "MB"),
    )
    rows, keys = [], []
    for device, model, layout, point in servings(records):
        rows.append(
            Row(
                "ours",
                (
                    model,
                    LAYOUTS[layout],
                    device,
                    *(_latency(point, name) for name in ("ttft_s", "tpot_s", "e2e_s")),
                    grouped(value(point, "prefill_tokens_per_s")),
                    grouped(value(point, "decode_tokens_per_s")),
                    *(
                        _mb(point, name)
                        for name in (
                            "budget_bytes", "peak_used_bytes", "device_peak_bytes", "host_bytes",
                        )
                    ),
                ),
            )
        )  # fmt: skip
        keys += [record.key for record in point.values()]
    caption = (
        "Latencies: mean, and the 99th percentile in brackets, over the requests of one batch. "
        "Device: the peak that the allocator counted, dense weights and workspace included; on a "
        "CPU there is no such count."
    )
    title = "Serving under the layout's own policy, reference kernels"
    return Table(title, columns, tuple(rows), caption, tuple(sorted(set(keys))))


def _latency(point: Point, name: str) -> str:
    mean, p99 = value(point, name), float(label(point, name, "p99"))
    return f"{1000 * mean:,.1f} ({1000 * p99:,.1f})"


def _mb(point: Point, name: str) -> str:
    return fixed(value(point, name) / 1e6, 1) if name in point else "-"
