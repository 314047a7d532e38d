"""One or two sentences per table and figure, computed from the numbers they comment on.

One idea: a sentence beside a figure goes stale when the figure changes, unless it is made
from the same records.  Nothing here is typed except the words between the numbers.  What
was measured and what was published are sentences of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repro.reporting import paper
from repro.reporting.checks_heavy_tail import FIFTH, share_of_busiest
from repro.reporting.findings_activation import activation
from repro.reporting.grouping import distinct, group_series, number, panels, select
from repro.reporting.heavy_tail_figures import (
    CLAIM as FIGURE2,
)
from repro.reporting.heavy_tail_figures import (
    TOP,
    chance_overlap,
    layer_records,
    mean_curve,
    n_experts,
)
from repro.reporting.records import Record
from repro.reporting.tables import fixed

LARGE = 32
NOTHING = "Not measured in this profile yet."


def span(numbers: Sequence[float], unit: str = "%") -> str:
    """``"64 to 77 %"``, or one number where both ends print alike."""
    low, high = f"{min(numbers):.0f}", f"{max(numbers):.0f}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def _at(records: Sequence[Record], **config: object) -> list[float]:
    return [number(record) for record in select(records, **config)]  # type: ignore[arg-type]


def table1(records: Sequence[Record]) -> str:
    """Decode activation at batch 32, both protocols, against the bound."""
    chosen = select(records, claim="DynaExq Table 1", batch_size=LARGE)
    parts: list[str] = []
    for model in distinct(chosen, "model"):
        of_model = select(chosen, model=model)
        mean = _at(of_model, metric="activation_ratio", protocol="decode_mean")
        single = _at(of_model, metric="activation_ratio", protocol="next_token")
        bound = _at(of_model, metric="activation_ratio_uniform")
        if mean and single and bound:
            parts.append(
                f"{model} {span(mean)} averaged over decode steps and {span(single)} at the "
                f"single next token (independent uniform routing: {bound[0]:.0f} %)"
            )
    if not parts:
        return NOTHING
    return f"At batch {LARGE} one decode step activates, over the workloads: {'; '.join(parts)}."


def table1_paper() -> str:
    """The printed value of Table 1 and the one that replaced it."""
    old = activation("decode", "v3_text", "Qwen3-30B-A3B")[LARGE]
    new = activation("decode", paper.RECOLLECTED, "Qwen3-30B-A3B")[LARGE]
    return (
        f"The paper printed {old:.1f} % at batch {LARGE} for Qwen3-30B-A3B; its authors later "
        f"replaced it by {new:.1f} %, sampled at the next token only."
    )


def table2(records: Sequence[Record]) -> str:
    """Prefill activation at batch 1 and 32."""
    chosen = select(records, claim="DynaExq Table 2", metric="activation_ratio")
    if not chosen:
        return NOTHING
    parts = []
    for model in distinct(chosen, "model"):
        first = _at(chosen, model=model, batch_size=1)
        last = _at(chosen, model=model, batch_size=LARGE)
        if first and last:
            parts.append(f"{model} {span(first)} with one prompt and {span(last)} with {LARGE}")
    tokens = ", ".join(str(n) for n in sorted(distinct(chosen, "prompt_tokens")))
    return (
        f"Prompts of {tokens} tokens activate {'; '.join(parts)}. Few experts saturate sooner: how "
        "many tokens fill a layer is shown against prompt length below."
    )


def table2_paper() -> str:
    """What the published rows of Table 2 reach."""
    published = [
        row["values"][LARGE]
        for row in paper.activation_rows("prefill")
        if not row["corrected"] and LARGE in row["values"]
    ]
    return f"The published rows reach {span(published)} at batch {LARGE}."


def table2_length(records: Sequence[Record]) -> str:
    """From which prompt length on one prompt touches 90 % of the experts."""
    chosen = select(
        records, claim="DynaExq Table 2 (length)", metric="activation_ratio", batch_size=1
    )
    if not chosen:
        return NOTHING
    parts = []
    for model in distinct(chosen, "model"):
        dense = {}
        for length in sorted(distinct(chosen, "prompt_tokens")):
            reached = _at(chosen, model=model, prompt_tokens=length)
            if reached:
                dense[length] = min(reached)
        first = next((length for length, low in dense.items() if low >= 90), None)
        found = "never within the lengths measured" if first is None else f"from {first} tokens on"
        parts.append(f"{model} {found}")
    return (
        f"A single prompt activates at least 90 % of the experts on every workload: "
        f"{'; '.join(parts)}."
    )


def table2_length_paper() -> str:
    """There is none."""
    return "No value was published for this sweep."


def table3(records: Sequence[Record]) -> str:
    """How many models, and the byte ratio of the tiers."""
    chosen = select(records, claim="DynaExq Table 3")
    fp16 = {r.config.get("model"): number(r) for r in select(chosen, metric="expert_bytes_fp16")}
    int4 = {
        r.config.get("model"): number(r) for r in select(chosen, metric="expert_bytes_int4_g128")
    }
    ratios = [fp16[model] / int4[model] for model in fp16 if int4.get(model)]
    if not ratios:
        return NOTHING
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return (
        f"{len(fp16)} models. With its group scales counted an INT4 expert is "
        f"{low if low == high else f'{low} to {high}'} times smaller than FP16, not 4 times; the "
        "bytes of one expert range from "
        f"{min(fp16.values()) / 1e6:,.1f} to {max(fp16.values()) / 1e6:,.1f} MB at FP16."
    )


def figure2(records: Sequence[Record]) -> str:
    """Share of the busiest fifth, and overlap against chance."""
    chosen = select(records, claim=FIGURE2)
    parts = []
    for title, of_panel in panels(chosen):
        curves = layer_records(select(of_panel, metric="cumulative_share"))
        overlaps = layer_records(select(of_panel, metric="top10_overlap"))
        if not curves or not overlaps:
            continue
        fifths = [
            100 * share_of_busiest(mean_curve(series)[0], FIFTH)
            for series in group_series(curves).values()
        ]
        shared = float(np.mean([number(record) for record in overlaps]))
        chance = chance_overlap(n_experts(of_panel))
        parts.append(
            f"in {title} the busiest fifth of the experts takes {span(fifths)} of all selections, "
            f"and two workloads share {fixed(shared, 1)} of their top {TOP} "
            f"(by chance {fixed(chance, 1)})"
        )
    if not parts:
        return NOTHING
    return f"Averaged over layers, {'; '.join(parts)}."


def figure2_paper() -> str:
    """What is known of Figure 2."""
    n = paper.model_config("Qwen3-30B-A3B")["routed_experts"]
    return (
        f"The paper states disjoint top-{TOP} sets for one layer of a model with {n} experts; no "
        "value of its Figure 2 is published."
    )
