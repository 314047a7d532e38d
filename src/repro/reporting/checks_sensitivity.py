"""Checks of the claims on sensitivity and on prompt heads (codes S).

One idea: a prediction is worth what it says about blocks and prompts that it was not fitted to,
and every transition counts for itself: a predictor that orders all of them together well may
only know that two bits are worse than four.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from repro.reporting.checks import Case
from repro.reporting.grids import FloatArray, column, row, row_names
from repro.reporting.grouping import panels, select
from repro.reporting.records import Record

DAMAGE = "PagedWeight sensitivity"
HEADS = "PagedWeight prompt residual"
BEST = "fisher x mass x layer"
RANK = 0.8  # of the best predictor, in every transition
ENOUGH_BLOCKS = 100  # fewer cannot tell 0.8 from 0.6
HOT = 0.5  # a correlation of mass with sensitivity per token that would make hot fragile
HEAD_LOSS = 0.05  # of R2, what a head may lose against g x mass on held-out prompts


def transitions(record: Record) -> list[str]:
    """The transitions of a record of rank correlations."""
    return [str(name) for name in record.config["columns"][::3]]


def ranks(record: Record, predictor: str) -> FloatArray:
    """Rank correlation, low and high of every transition, ``[T, 3]``."""
    return row(record, predictor).reshape(-1, 3)


def rank_agrees(records: Sequence[Record]) -> Iterator[Case]:
    """The best predictor orders the measured blocks, in every transition."""
    yield from _ranks(records, "divergence")


def loss_rank_agrees(records: Sequence[Record]) -> Iterator[Case]:
    """The same of the increase of the loss."""
    yield from _ranks(records, "loss")


def _ranks(records: Sequence[Record], target: str) -> Iterator[Case]:
    chosen = select(records, claim=DAMAGE, metric="rank_correlation", target=target)
    for title, of_panel in panels(chosen):
        for record in of_panel:
            if (record.n or 0) < ENOUGH_BLOCKS:
                continue  # the interval would be wider than the question
            values = zip(transitions(record), ranks(record, BEST), strict=True)
            for transition, (value, low, high) in values:
                yield Case(
                    f"{title} {transition}",
                    bool(value >= RANK),
                    f"rank correlation {value:.2f} (interval {low:.2f} to {high:.2f}) over "
                    f"{record.n} blocks",
                    float(value) - RANK,
                )


def damage_grows(records: Sequence[Record]) -> Iterator[Case]:
    """Fewer bits, more damage, on average over the measured blocks."""
    chosen = select(records, claim=DAMAGE, metric="mean_damage")
    for title, of_panel in panels(chosen):
        for record in of_panel:
            bits, means = row_names(record), column(record, "divergence")
            for before, after, a, b in zip(bits, bits[1:], means, means[1:], strict=False):
                yield Case(
                    f"{title} {before}->{after}",
                    bool(b > a > 0),
                    f"mean divergence {a:.2g} at {before} bits, {b:.2g} at {after}",
                    float(b / a - 1) if a > 0 else -1.0,
                )


def inputs_matter(records: Sequence[Record]) -> Iterator[Case]:
    """Fisher information orders blocks better than the plain error of their weights."""
    chosen = select(records, claim=DAMAGE, metric="rank_correlation", target="divergence")
    for title, of_panel in panels(chosen):
        for record in of_panel:
            means = {name: float(ranks(record, name)[:, 0].mean()) for name in ("weight", "fisher")}
            yield Case(
                title,
                means["fisher"] > means["weight"],
                f"mean rank correlation {means['fisher']:.2f} with Fisher information, "
                f"{means['weight']:.2f} with the error of the weights",
                means["fisher"] - means["weight"],
            )


def hot_is_not_fragile(records: Sequence[Record]) -> Iterator[Case]:
    """Experts with much traffic are not those that suffer most for each token."""
    for title, of_panel in panels(select(records, claim=DAMAGE, metric="mass_vs_per_token")):
        for record in of_panel:
            value = float(record.value)  # type: ignore[arg-type]
            yield Case(
                title,
                value < HOT,
                f"rank correlation of mass and damage per token {value:.2f} (mean of layers)",
                HOT - value,
            )


def heads_do_no_harm(records: Sequence[Record]) -> Iterator[Case]:
    """On held-out prompts a head predicts log damage no worse than g x mass alone."""
    for title, record in head_rows(records):
        without, with_head = column(record, "r2_g_mass"), column(record, "r2_g_mass_eta")
        block = record.config["block"]
        for name, before, after in zip(row_names(record), without, with_head, strict=True):
            if np.isnan(before) or np.isnan(after):
                continue
            yield Case(
                f"{title} {block} {name}",
                bool(after >= before - HEAD_LOSS),
                f"held-out R2 {after:.2f} with the head, {before:.2f} without",
                float(after - before + HEAD_LOSS),
            )


def head_rows(records: Sequence[Record]) -> list[tuple[str, Record]]:
    """Records of prompt heads, titled by model."""
    chosen = select(records, claim=HEADS, metric="prompt_heads")
    return [(title, record) for title, of_panel in panels(chosen) for record in of_panel]
