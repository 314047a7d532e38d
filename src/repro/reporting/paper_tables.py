"""DynaExq's Tables 1, 2, 3 and the numbers of Figure 2: our rows, bounds and the paper's.

One idea: a table is built from records and from the CSV tables alone, so it can be built
again anywhere; it shows every published row, the withdrawn ones included and marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from repro.reporting import paper
from repro.reporting.grouping import (
    SeriesId,
    distinct,
    group_series,
    number,
    panels,
    select,
    values,
    workload_label,
)
from repro.reporting.heavy_tail_figures import (
    CLAIM as FIGURE2,
)
from repro.reporting.heavy_tail_figures import chance_overlap, layer_records, n_experts, pair_of
from repro.reporting.records import Record
from repro.reporting.tables import (
    NO_PUBLISHED,
    NOT_MEASURED,
    Column,
    Row,
    Table,
    fixed,
    grouped,
)

MIXED = f"{FIGURE2} (mixed traffic)"
BATCHES = (1, 2, 4, 8, 16, 32)
_VERSIONS = {
    "v3_text": "v3, text",
    "authors_raw_json": "authors' raw files",
    "authors_draft_8e92d414": "re-collected draft",
    "authors_draft_14f231a7": "re-collected draft",
}
_CODES = "Codes of the papers' rows: R read in the named place, C computed from R."
_SAMPLED = {"decode_mean": "mean of steps", "next_token": "next token", "prefill": "prompt"}


def table1(records: Sequence[Record]) -> Table:
    """Activated experts in one decode step."""
    chosen = select(records, claim="DynaExq Table 1")
    return _activation_table(
        chosen, "decode", "Table 1: experts activated in one decode step (%), by batch size"
    )


def table2(records: Sequence[Record]) -> Table:
    """Activated experts in one prefill."""
    chosen = select(records, claim="DynaExq Table 2")
    return _activation_table(
        chosen, "prefill", "Table 2: experts activated in one prefill (%), by batch size"
    )


def table2_length(records: Sequence[Record]) -> Table:
    """Activated experts in one prefill by prompt length; nothing was published for it."""
    chosen = select(records, claim="DynaExq Table 2 (length)")
    ours = select(chosen, metric="activation_ratio")
    lengths = sorted(distinct(ours, "prompt_tokens"))
    columns = (
        Column("model", numeric=False),
        Column("workload", numeric=False),
        Column("batch"),
        *(Column(str(length)) for length in lengths),
    )
    rows: list[Row] = []
    bounds: dict[tuple[str, int], Row] = {}
    for batch in sorted(distinct(ours, "batch_size")):
        for identity, series in group_series(select(ours, batch_size=batch)).items():
            points = values(series, "prompt_tokens")
            head = (identity.model, workload_label(identity, ours), str(batch))
            rows.append(Row("ours", (*head, *_cells(points, lengths))))
            bound = _bound(chosen, identity, "prompt_tokens", batch_size=batch)
            head = (identity.model, "uniform routing", str(batch))
            bounds[identity.model, batch] = Row("bound", (*head, *_numbers(bound, lengths)))
    rows += bounds.values()
    head = ("every published model", NO_PUBLISHED, "-")
    rows.append(Row("paper", (*head, *("-" for _ in lengths))))
    return Table(
        "Table 2 by prompt length: experts activated in one prefill (%), by tokens per prompt",
        columns,
        tuple(rows),
        keys=_keys(chosen),
    )


def _activation_table(records: Sequence[Record], stage: str, title: str) -> Table:
    ours = select(records, metric="activation_ratio")
    columns = (
        Column("model", numeric=False),
        Column("workload or version", numeric=False),
        Column("sampled", numeric=False),
        *(Column(str(batch)) for batch in BATCHES),
    )
    rows: list[Row] = []
    bounds: dict[str, Row] = {}
    for identity, series in group_series(ours).items():
        points = values(series, "batch_size")
        sampled = _SAMPLED.get(identity.protocol, identity.protocol)
        head = (identity.model, workload_label(identity, ours), sampled)
        rows.append(Row("ours", (*head, *_cells(points, BATCHES))))
        if identity.model not in bounds:
            bound = _bound(records, identity, "batch_size")
            head = (identity.model, "any", "uniform routing")
            bounds[identity.model] = Row("bound", (*head, *_numbers(bound, BATCHES)))
    rows += bounds.values()
    for entry in paper.activation_rows(stage, end_points_only=True):
        # The text's end points stand in full, corrected rows once and spot checks not at all.
        is_text = entry["version"] == "v3_text"
        if len(entry["values"]) > 2 or (is_text and not entry["corrected"]):
            rows.append(_paper_row(entry))
    tokens = sorted(distinct(ours, "prompt_tokens"))
    prompts = f"Our prompts have {', '.join(map(str, tokens))} tokens. " if tokens else ""
    caption = (
        f"{prompts}Mean over layers and draws, with the larger half of the 95 % interval. "
        "Sampled: the single next token after the prompt, the mean of the decode steps, or the "
        "whole prompt. Uniform routing: every token draws its experts independently and evenly."
    )
    return Table(title, columns, tuple(rows), caption, _keys(records), _CODES)


def _paper_row(entry: dict[str, Any]) -> Row:
    status = "as printed" if not entry["corrected"] else "x 27/26"
    sampled = f"{status}, {entry['status']}"
    notes: list[str] = []
    if entry["withdrawn"]:
        notes.append("withdrawn by its authors and replaced by the re-collected row")
    if entry["unverified"]:
        notes.append("marked as unverified by its authors")
    if entry["base_model"] == "DeepSeek-V2-Lite" and not entry["corrected"]:
        notes.append("averages over 27 layers of which 26 have experts")
    if entry["corrected"]:
        notes.append("computed here: the phantom layer taken out of the mean")
    cells = tuple(fixed(entry["values"].get(batch), 1, "-") for batch in BATCHES)
    head = (entry["base_model"], _VERSIONS.get(entry["version"], entry["version"]), sampled)
    if "-" in cells:
        notes.append(f"'-': {NO_PUBLISHED}")
    return Row(
        "corrected" if entry["corrected"] else "paper",
        (*head, *cells),
        note="; ".join(notes),
        mark="withdrawn" if entry["withdrawn"] else "unverified" if entry["unverified"] else "",
    )


def _cells(points: dict[int, Record], places: Sequence[int]) -> list[str]:
    cells: list[str] = []
    for place in places:
        record = points.get(place)
        if record is None:
            cells.append(NOT_MEASURED)
        elif record.ci_low is None or record.ci_high is None or record.ci_low == record.ci_high:
            cells.append(fixed(number(record), 1))
        else:
            half = max(record.ci_high - number(record), number(record) - record.ci_low)
            cells.append(f"{fixed(number(record), 1)} ±{fixed(half, 1)}")
    return cells


def _bound(
    records: Sequence[Record], identity: SeriesId, axis: str, **config: Any
) -> dict[int, float]:
    uniform = select(records, metric="activation_ratio_uniform", model=identity.model, **config)
    return {record.config[axis]: number(record) for record in uniform}


def _numbers(points: dict[int, float], places: Sequence[int]) -> list[str]:
    return [fixed(points.get(place), 1) for place in places]


def _keys(records: Sequence[Record]) -> tuple[str, ...]:
    return tuple(sorted({record.key for record in records}))


_TABLE3 = (
    ("total_params", Column("parameters")),
    ("active_params_per_token", Column("active")),
    ("moe_layers", Column("layers")),
    ("routed_experts_per_layer", Column("experts")),
    ("top_k", Column("top-k")),
    ("routed_share_percent", Column("routed", "%")),
    ("expert_bytes_fp16", Column("FP16", "B")),
    ("expert_bytes_int4_g128", Column("INT4 g128", "B")),
    ("expert_bytes_int2_g64", Column("INT2 g64", "B")),
)


def table3(records: Sequence[Record]) -> Table:
    """Models and the bytes of one expert at each tier."""
    chosen = select(records, claim="DynaExq Table 3")
    columns = (Column("model", numeric=False), *(column for _, column in _TABLE3))
    rows: list[Row] = []
    for model in distinct(chosen, "model"):
        found = {record.metric: record for record in select(chosen, model=model)}
        cells = [_table3_cell(metric, found.get(metric)) for metric, _ in _TABLE3]
        rows.append(Row("ours", (model, *cells)))
    for row in paper.load_table("table3_models"):
        cells = [
            f"{row['total_params_B']}e9",
            f"{row['activated_params_B']}e9",
            grouped(row["layers"]),
            grouped(row["routed_experts_per_layer"]),
            grouped(row["top_k"]),
            fixed(row["expert_weight_fraction_pct"], 0),
            *("-" for _ in range(3)),
        ]
        note = f"authors' draft ({row['status']}); '-': {NO_PUBLISHED}"
        rows.append(Row("paper", (row["model"], *cells), note=note))
    return Table(
        "Table 3: models, and the bytes of one expert at each precision",
        columns,
        tuple(rows),
        "Computed from the configurations. Active: parameters per token. Routed: share of all "
        "parameters that is in routed experts. B: bytes of one routed expert, FP16 group scales "
        "counted.",
        _keys(chosen),
        "The body of Table 3 in version 3 itself was not available: these rows are the authors' "
        "draft.",
    )


def _table3_cell(metric: str, record: Record | None) -> str:
    if record is None or record.value is None:
        return "-"
    return fixed(number(record), 2) if metric.endswith("percent") else grouped(number(record))


def heavy_tail(records: Sequence[Record]) -> Table:
    """Skew per model and workload, mean over layers with the range of layers.

    Mixed traffic (all workloads together) stands beside the workloads it is made of.
    """
    chosen = [record for record in records if record.claim in (FIGURE2, MIXED)]
    columns = (
        Column("model", numeric=False),
        Column("workload", numeric=False),
        Column("layers"),
        Column("top-10 share", "%"),
        Column("Gini"),
        Column("effective experts", "%"),
        Column("Hill index"),
    )
    rows: list[Row] = []
    for identity, series in group_series(layer_records(select(chosen, metric="gini"))).items():

        def spread(metric: str, factor: float, digits: int, who: SeriesId = identity) -> str:
            of_metric = layer_records(select(chosen, metric=metric))
            found = group_series(of_metric).get(who, [])
            return _spread([r.value for r in found], factor, digits)

        rows.append(
            Row(
                "ours",
                (
                    identity.model,
                    workload_label(identity, chosen),
                    str(len(series)),
                    spread("top10_share", 100.0, 1),
                    spread("gini", 1.0, 2),
                    spread("effective_experts_fraction", 100.0, 0),
                    spread("hill_index", 1.0, 2),
                ),
            )
        )
    head = ("Qwen3-30B-A3B, layer 15", "WikiText, GSM8K, HumanEval")
    rows.append(
        Row("paper", (*head, *("-" for _ in range(5))), note="Figure 2 is known by its text alone")
    )
    return Table(
        "Figure 2 in numbers: how unevenly experts are used",
        columns,
        tuple(rows),
        "Mean over layers [smallest, largest layer]. Effective experts: exp of the entropy of "
        "the traffic, as a share of the layer's experts. A uniform layer has Gini 0 and 100 %.",
        keys=_keys(chosen),
    )


def overlap(records: Sequence[Record]) -> Table:
    """Experts that the top-10 sets of two workloads share."""
    chosen = select(records, claim=FIGURE2)
    columns = (
        Column("model", numeric=False),
        Column("workloads", numeric=False),
        Column("shared, mean of layers", "of 10"),
        Column("fewest"),
        Column("most"),
        Column("by chance"),
    )
    rows: list[Row] = []
    for title, of_panel in panels(chosen):
        overlaps = layer_records(select(of_panel, metric="top10_overlap"))
        chance = fixed(chance_overlap(n_experts(of_panel)), 1)
        for pair in dict.fromkeys(pair_of(record) for record in overlaps):
            shared = [number(record) for record in overlaps if pair_of(record) == pair]
            cells = (
                title,
                " / ".join(pair),
                fixed(float(np.mean(shared)), 1),
                fixed(min(shared), 0),
                fixed(max(shared), 0),
                chance,
            )
            rows.append(Row("ours", cells))
    text = ("Qwen3-30B-A3B, layer 15", "WikiText / GSM8K / HumanEval", "0", "0", "0")
    chance = fixed(chance_overlap(paper.model_config("Qwen3-30B-A3B")["routed_experts"]), 1)
    rows.append(
        Row("paper", (*text, chance), note="stated as completely disjoint; counts are not printed")
    )
    return Table(
        "Figure 2 in numbers: how far the hot sets of two workloads overlap",
        columns,
        tuple(rows),
        keys=_keys(chosen),
    )


def _spread(found: Sequence[Any], factor: float, digits: int) -> str:
    numbers = [factor * float(value) for value in found if value is not None]
    if not numbers:
        return NOT_MEASURED
    mean, low, high = float(np.mean(numbers)), min(numbers), max(numbers)
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
