"""Sentences about sensitivity and prompt heads, computed from their records.

One idea: as in ``sentences``, only the words between the numbers are typed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repro.reporting.checks_sensitivity import BEST, DAMAGE, RANK, head_rows, ranks
from repro.reporting.grids import FloatArray, column, grid
from repro.reporting.grouping import panels, select
from repro.reporting.records import Record
from repro.reporting.sentences import NOTHING, span


def _span(values: FloatArray) -> str:
    low, high = f"{values.min():.2f}", f"{values.max():.2f}"
    return low if low == high else f"{low} to {high}"


def sensitivity(records: Sequence[Record]) -> str:
    """Rank correlation of predictions with measured damage, and what limits it."""
    parts = []
    for title, of_panel in panels(select(records, claim=DAMAGE)):
        found = {
            str(record.config["target"]): record
            for record in select(of_panel, metric="rank_correlation")
        }
        if set(found) != {"divergence", "loss"}:
            continue
        plain, best = (ranks(found["divergence"], name)[:, 0] for name in ("fisher", BEST))
        loss = ranks(found["loss"], BEST)[:, 0]
        text = (
            f"in {title} Fisher information alone orders single blocks with rank correlation "
            f"{_span(plain)} over the transitions, with the text's routing mass and a factor per "
            f"layer {_span(best)} (wanted: {RANK}), against the increase of the loss {_span(loss)}"
        )
        noise = select(of_panel, metric="loss_noise")
        if noise:
            shares = [100 * row[2] for row in grid(noise[0])]
            spreads = column(noise[0], "ratio")
            text += (
                f", where {span(shares)} of the blocks stand out of sampling noise and loss and "
                f"divergence lie {_span(spreads)} times as far apart as that noise explains"
            )
        hot = select(of_panel, metric="mass_vs_per_token")
        if hot and hot[0].value is not None:
            text += f"; routing mass and damage per token correlate by {float(hot[0].value):.2f}"
        parts.append(text)
    if not parts:
        return NOTHING
    joined = ". I".join(part[1:] for part in parts)
    return f"I{joined}."


def heads(records: Sequence[Record]) -> str:
    """What the prompt heads add on held-out prompts."""
    found: dict[str, list[str]] = {}
    for title, record in head_rows(records):
        before, after = column(record, "r2_g_mass"), column(record, "r2_g_mass_eta")
        seen = ~(np.isnan(before) | np.isnan(after))
        if not seen.any():
            continue
        found.setdefault(title, []).append(
            f"{record.config['block']} {before[seen].mean():.2f} to {after[seen].mean():.2f}"
        )
    if not found:
        return NOTHING
    parts = "; ".join(f"{title} {', '.join(texts)}" for title, texts in found.items())
    return (
        "Mean over transitions of the R2 of one block's log damage on a held-out prompt, from "
        f"g x mass to g x mass x head: {parts}."
    )
