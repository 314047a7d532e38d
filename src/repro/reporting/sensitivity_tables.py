"""Tables of sensitivity: predictors by transition, noise of the loss, prompt heads.

One idea: what was tried stands beside what is used, in the order of what a predictor knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from repro.reporting.checks_sensitivity import BEST, DAMAGE, head_rows, ranks, transitions
from repro.reporting.grids import column, grid, row_names
from repro.reporting.grouping import panels, select
from repro.reporting.records import Record
from repro.reporting.tables import Column, Row, Table, fixed

_TARGETS = {"divergence": "divergence", "loss": "increase of the loss"}


def _cell(value: float, digits: int = 2) -> str:
    return "-" if np.isnan(value) else fixed(float(value), digits)


def rank_correlations(records: Sequence[Record]) -> Table:
    """Every predictor against the measured divergence and the increase of the loss."""
    chosen = select(records, claim=DAMAGE, metric="rank_correlation")
    names = transitions(chosen[0]) if chosen else []
    columns = (
        Column("model", numeric=False),
        Column("measured", numeric=False),
        Column("predicted from", numeric=False),
        *(Column(name, "bits") for name in names),
        Column("blocks"),
    )
    rows = []
    for title, of_panel in panels(chosen):
        for target, label in _TARGETS.items():
            for record in select(of_panel, target=target):
                for name in row_names(record):
                    cells = [_cell(value) for value in ranks(record, name)[:, 0]]
                    rows.append(Row("ours", (title, label, name, *cells, str(record.n))))
    caption = (
        "Spearman's rank correlation over single blocks within one transition. mass: the routing "
        "mass of the measured text over that of calibration; layer: one factor per layer and "
        "width from the other measured blocks; curvature: the second order along the error of "
        "the block, on the measured text itself; slope: the first order of its loss."
    )
    keys = tuple(sorted({record.key for record in chosen}))
    return Table("What predicts the damage of a block", columns, tuple(rows), caption, keys)


def loss_noise(records: Sequence[Record]) -> Table:
    """How much of the increase of the loss is noise."""
    chosen = select(records, claim=DAMAGE, metric="loss_noise")
    columns = (
        Column("model", numeric=False),
        Column("transition", "bits", numeric=False),
        Column("median divergence", "micronats"),
        Column("median noise", "micronats"),
        Column("blocks above two of noise", "%"),
        Column("rank at best"),
        Column("rank reached"),
        Column("spread over noise"),
        Column("scored tokens"),
    )
    rows = []
    for title, of_panel in panels(chosen):
        for record in of_panel:
            ranks = _reached(records, title)
            for name, values in zip(row_names(record), grid(record), strict=True):
                kl, noise, share, best, spread = values
                cells = (
                    _cell(1e6 * kl, 1), _cell(1e6 * noise, 1), _cell(100 * share, 0), _cell(best),
                    _cell(ranks.get(name, np.nan)), _cell(spread), f"{record.n:,}",
                )  # fmt: skip
                rows.append(Row("ours", (title, name, *cells)))
    caption = (
        "Noise: standard deviation sqrt(2 D / n) of the first-order part of the loss, with D the "
        "divergence and n scored tokens, of a text that the model itself could have written. Rank "
        "at best: what a predictor that knew every divergence would reach against a loss with that "
        f"noise; reached: {BEST}. Spread over noise: how far loss and divergence really lie "
        "apart, 1 if the noise explains it; more on a text whose loss has a slope of its own, on "
        "which lowering a block may help as well as hurt, however many tokens are scored."
    )
    keys = tuple(sorted({record.key for record in chosen}))
    return Table("Why the loss of one block is hard to see", columns, tuple(rows), caption, keys)


def _reached(records: Sequence[Record], title: str) -> dict[str, float]:
    chosen = select(records, claim=DAMAGE, metric="rank_correlation", target="loss")
    for name, of_panel in panels(chosen):
        if name == title and of_panel:
            values = ranks(of_panel[0], BEST)[:, 0]
            return dict(zip(transitions(of_panel[0]), map(float, values), strict=True))
    return {}


_HEAD_CELLS = (
    ("residual", "r2_log_residual"),
    ("g", "r2_g"),
    ("g x mass", "r2_g_mass"),
    ("g x mass x head", "r2_g_mass_eta"),
    ("with mass as a feature", "extended_r2_g_mass_eta"),
)
_WITHIN = (
    ("same block, without", "within_block_g_mass"),
    ("with head", "within_block_g_mass_eta"),
    ("same prompt, without", "within_prompt_g_mass"),
    ("with head ", "within_prompt_g_mass_eta"),
)


def heads(records: Sequence[Record]) -> Table:
    """Prompt heads on held-out prompts."""
    columns = (
        Column("model", numeric=False),
        Column("block", numeric=False),
        Column("transition", "bits", numeric=False),
        *(Column(f"R2 {label}") for label, _ in _HEAD_CELLS),
        *(Column(label) for label, _ in _WITHIN),
        Column("confidence"),
        Column("alpha"),
        Column("clip", numeric=False),
        Column("trained on"),
        Column("left out"),
    )
    rows, keys = [], set()
    for title, record in head_rows(records):
        keys.add(record.key)
        found = {name: column(record, name) for name in record.config["columns"]}
        for i, name in enumerate(row_names(record)):
            scores = [_cell(found[key][i]) for _, key in (*_HEAD_CELLS, *_WITHIN)]
            clip = f"{_cell(found['clip_low'][i], 1)} to {_cell(found['clip_high'][i], 1)}"
            rest = (_cell(found["confidence"][i]), f"{found['alpha'][i]:g}", clip)
            counts = [f"{found[key][i]:,.0f}" for key in ("n_train", "n_excluded")]
            cells = (title, str(record.config["block"]), name, *scores, *rest, *counts)
            rows.append(Row("ours", cells))
    caption = (
        "Scores are of the logarithm of the damage of one block on one prompt, on a quarter of "
        "the prompts that nothing was fitted to. Residual: what g x mass leaves unexplained. "
        "Same block: correlation between prompts with each block's mean taken out; same prompt: "
        "between blocks with each prompt's mean taken out, which is what a planner compares. "
        "Left out: pairs of block and prompt without damage or without a token."
    )
    title = "Prompt heads on held-out prompts"
    return Table(title, columns, tuple(rows), caption, tuple(sorted(keys)))
