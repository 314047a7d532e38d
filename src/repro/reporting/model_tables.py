"""Tables and the sentence about the bundled models: size, quality, tasks, use of experts.

One idea: a target stands in a column of its own beside what was reached, and the stages
that the committed weights came from stand beside them, so that nobody has to believe that
the last step helped.
"""

from __future__ import annotations

from collections.abc import Sequence

from repro.reporting.checks_quality import (
    EASIEST_LEVEL,
    EFFECTIVE_HIGH,
    EFFECTIVE_LOW,
    TARGET_BITS_PER_BYTE,
    TASK_ACCURACY,
    TEST_SETS,
    final,
)
from repro.reporting.grouping import distinct, number, select
from repro.reporting.model_records import QUALITY, STAGES, TRAINING
from repro.reporting.records import Record
from repro.reporting.tables import NOT_MEASURED, Column, Row, Table, fixed, grouped

NOTHING = "No bundled model with a recipe is here."


def shapes(records: Sequence[Record]) -> Table:
    """Size of each model and what it was trained on."""
    columns = (
        Column("model", numeric=False),
        Column("parameters"),
        Column("layers"),
        Column("experts per layer"),
        Column("top-k"),
        Column("expert width"),
        Column("shared expert width"),
        Column("tokens trained on", "M"),
        Column("training", "min"),
    )
    names = (
        *("total_params", "layers", "experts", "top_k", "expert_width", "shared_expert_width"),
        *("trained_tokens", "trained_time"),
    )
    scale = {"trained_tokens": 1e-6, "trained_time": 1 / 60}
    rows = []
    for model in distinct(records, "model"):
        found = {record.metric: record for record in select(records, model=model)}
        cells = [_count(found.get(name), scale.get(name, 1.0)) for name in names]
        rows.append(Row("ours", (model, *cells)))
    return Table("Size and training", columns, tuple(rows), keys=_keys(records))


def _count(record: Record | None, scale: float) -> str:
    if record is None or record.value is None:
        return NOT_MEASURED
    return grouped(number(record) * scale) if number(record) else "none"


def quality(records: Sequence[Record]) -> Table:
    """Bits per byte of the public test sets against the targets."""
    chosen = select(records, claim=QUALITY, metric="bits_per_byte")
    columns = (
        Column("model", numeric=False),
        Column("test set", numeric=False),
        Column("target, at most"),
        *(Column(stage) for stage in STAGES),
        Column("scored tokens"),
    )
    rows = []
    for model in distinct(chosen, "model"):
        for name, title in TEST_SETS.items():
            of_set = select(chosen, model=model, workload=name)
            if not of_set:
                continue
            by_stage = {record.config["stage"]: record for record in of_set}
            target = TARGET_BITS_PER_BYTE.get(model, {}).get(name)
            cells = [fixed(_value(by_stage.get(stage)), 4) for stage in STAGES]
            n_tokens = grouped(of_set[0].n)
            head = (model, title, fixed(target, 2, "none"))
            rows.append(Row("ours", (*head, *cells, n_tokens)))
    mixed = {
        f"{record.config['model']} {100 * (1 - number(record)):.0f} % stage 1 and "
        f"{100 * number(record):.0f} % stage 2"
        for record in select(records, metric="share_of_second_stage")
    }
    made = f" Final: the committed weights, a mean of {', '.join(sorted(mixed))}." if mixed else ""
    caption = (
        "Whole test sets, disjoint windows of 1,024 tokens, the first token of each unscored; "
        f"smaller is better.{made} The targets are of the fine model."
    )
    return Table("Bits per byte of public test sets", columns, tuple(rows), caption, _keys(chosen))


def tasks(records: Sequence[Record]) -> Table:
    """Exact answers on the generated tasks by level."""
    chosen = final(records, "task_accuracy")
    levels = sorted(distinct(chosen, "level"))
    columns = (
        Column("model", numeric=False),
        Column("task", numeric=False),
        *(Column(f"level {level}", "%") for level in levels),
    )
    rows = []
    for model in distinct(chosen, "model"):
        for task in distinct(select(chosen, model=model), "task"):
            of_task = select(chosen, model=model, task=task)
            found = {record.config["level"]: 100 * number(record) for record in of_task}
            rows.append(Row("ours", (model, task, *(fixed(found.get(x), 1, "-") for x in levels))))
    items = dict.fromkeys(f"{record.n} items for {record.config['model']}" for record in chosen)
    caption = (
        f"Greedy answers, exact match; in each cell {' and '.join(items) or 'none'}. Target: at "
        f"least {100 * TASK_ACCURACY:.0f} % at level {EASIEST_LEVEL}. Where a level has few "
        "possible prompts, training has seen many of them. '-': the task has no such level."
    )
    return Table("Generated tasks", columns, tuple(rows), caption, _keys(chosen))


def routing(records: Sequence[Record]) -> Table:
    """How evenly experts are used on mixed traffic, layer by layer."""
    chosen = final(records, "effective_experts_fraction")
    layers = sorted(distinct(chosen, "layer"))
    columns = (
        Column("model", numeric=False),
        Column("what", numeric=False),
        *(Column(f"layer {layer}") for layer in layers),
    )
    rows = []
    for model in distinct(chosen, "model"):
        for metric, name, factor, digits in (
            ("effective_experts_fraction", "effective experts, % of E", 100.0, 1),
            ("unused_experts", "unused experts", 1.0, 0),
        ):
            found = {
                record.config["layer"]: factor * number(record)
                for record in final(records, metric, model=model)
            }
            cells = [fixed(found.get(layer), digits, "-") for layer in layers]
            rows.append(Row("ours", (model, name, *cells)))
    n = ", ".join(sorted({f"{record.n:,}" for record in chosen}))
    caption = (
        f"Text, mathematics, code and tasks in equal parts, {n or 'no'} tokens. Effective experts: "
        f"exp of the entropy of the traffic; target {100 * EFFECTIVE_LOW:.0f} to "
        f"{100 * EFFECTIVE_HIGH:.0f} % in every layer, and no unused expert. '-': no such layer."
    )
    return Table("Use of experts", columns, tuple(rows), caption, _keys(chosen))


def sentence(records: Sequence[Record]) -> str:
    """What the committed weights reach, against the targets."""
    parts = []
    for model in distinct(final(records, "bits_per_byte"), "model"):
        targets = TARGET_BITS_PER_BYTE.get(model, {})
        reached = []
        for name, title in TEST_SETS.items():
            for record in final(records, "bits_per_byte", model=model, workload=name):
                target = f" (target {targets[name]})" if name in targets else ""
                reached.append(f"{title} {number(record):.4f}{target}")
        easiest = [
            number(record)
            for record in final(records, "task_accuracy", model=model, level=EASIEST_LEVEL)
        ]
        shares = [number(r) for r in final(records, "effective_experts_fraction", model=model)]
        unused = sum(number(r) for r in final(records, "unused_experts", model=model))
        text = f"{model}: bits per byte {', '.join(reached)}"
        if easiest:
            text += f"; at least {100 * min(easiest):.1f} % of each task's easiest level"
        if shares:
            text += (
                f"; effective experts {100 * min(shares):.0f} to {100 * max(shares):.0f} % of E "
                f"by layer, {unused:.0f} unused"
            )
        parts.append(f"{text}.")
    if parts:
        return " ".join(parts)
    if select(records, claim=TRAINING):
        return "The quality of the committed weights is not recorded; the stages before them are."
    return NOTHING


def _value(record: Record | None) -> float | None:
    return None if record is None else number(record)


def _keys(records: Sequence[Record]) -> tuple[str, ...]:
    return tuple(sorted({record.key for record in records}))
