"""Prompt heads of a study: trained on most prompts, judged on the others.

The one idea: the same steps as ``repro calibrate`` takes (layers scaled by what the training
prompts measured, then heads), so that what is judged is what would be served.

Letters: P prompts.
"""

from __future__ import annotations

from typing import Any

from repro.calibration.heads import Heads
from repro.calibration.scaling import scale_by_layer
from repro.calibration.training import HELD_OUT, held_out_prompts, train_heads
from repro.contract import Block
from repro.experiments.grids import grid_record
from repro.experiments.sensitivity_study import Study
from repro.reporting.records import Measurement

HEADS_CLAIM = "PagedWeight prompt residual"
TRANSITIONS = ((16, 4), (6, 5), (5, 4), (4, 3), (3, 2), (16, 2))
HEAD_COLUMNS = (
    "r2_log_residual",
    "r2_g",
    "r2_g_mass",
    "r2_g_mass_eta",
    "rank_g",
    "rank_g_mass",
    "rank_g_mass_eta",
    "within_block_g_mass",
    "within_block_g_mass_eta",
    "within_prompt_g_mass",
    "within_prompt_g_mass_eta",
    "alpha",
    "confidence",
    "clip_low",
    "clip_high",
    "n_train",
    "n_test",
    "n_excluded",
    "extended_r2_g_mass_eta",
    "extended_confidence",
)


def heads_of(found: Study, seed: int, *, extended: bool = False) -> tuple[Heads, list[Any]]:
    """Heads as ``repro calibrate`` trains them, and their scores on held-out prompts."""
    judges = held_out_prompts(len(found.domains), HELD_OUT, seed, found.domains)
    scaled = scale_by_layer(found.tables["fisher"], found.damage, ~judges)
    return train_heads(
        scaled,
        found.damage,
        found.features,
        transitions=TRANSITIONS,
        held_out=judges,
        extended=extended,
        seed=seed,
    )


def head_records(found: Study, seed: int) -> list[Measurement]:
    """One record per block type: transitions x :data:`HEAD_COLUMNS`."""
    _, report = heads_of(found, seed)
    _, wider = heads_of(found, seed, extended=True)
    result = []
    for block in Block:
        grid, names = [], []
        for row, more in zip(report, wider, strict=True):
            if row["block"] != block.name.lower():
                continue
            low, high = row["clip"]
            cells = {
                **row,
                "clip_low": low,
                "clip_high": high,
                "n_excluded": sum(row["excluded"].values()),
                "extended_r2_g_mass_eta": more.get("r2_g_mass_eta"),
                "extended_confidence": more["confidence"],
            }
            grid.append([cells.get(name) for name in HEAD_COLUMNS])
            names.append(transition_name(row["from"], row["to"]))
        result.append(
            grid_record(
                HEADS_CLAIM, "prompt_heads", names, HEAD_COLUMNS, grid, n=len(found.domains),
                unit="see columns", block=block.name.lower(), digits=4,
            )
        )  # fmt: skip
    return result


def transition_name(n_from: int, n_to: int) -> str:
    """``"16->4"``."""
    return f"{n_from}->{n_to}"
