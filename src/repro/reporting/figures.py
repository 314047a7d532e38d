"""The register of figures, and how one becomes a PNG with a note of what it shows.

One idea: drawing reads records and nothing else, so a figure can be drawn again on any
machine.  Beside each PNG stands a JSON with the keys of the records in it, the devices
they were measured on and the commits that measured them.

The default profile draws into ``figures/``; every other profile into a folder of its name
there, so that they do not overwrite each other.  One picture holds one set of records: a
picture of committed records says at its foot where and when they were measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from repro import paths, profiles
from repro.files import write_bytes, write_text
from repro.reporting import (
    activation_figures,
    demotion_figures,
    format_figures,
    heavy_tail_figures,
    model_figures,
    residency_diagram,
    sensitivity_figures,
    serving_figures,
    style,
)
from repro.reporting.checks_sensitivity import DAMAGE, HEADS
from repro.reporting.format_records import CURVE, NESTING
from repro.reporting.grouping import devices, distinct, select
from repro.reporting.model_records import TRAINING
from repro.reporting.record_sets import MODELS, footnote, record_sets
from repro.reporting.records import Record
from repro.reporting.serving_records import (
    CHANGING,
    ENGINE,
    LENDING,
    PRESSURE,
    PROMOTION,
    SERVING,
    TRANSITIONS,
)


@dataclass(frozen=True)
class FigureSpec:
    """One figure: who draws it, from which experiments and claims, under which title."""

    function: Callable[[Sequence[Record]], Figure]
    experiments: tuple[str, ...]
    claims: tuple[str, ...]
    title: str

    def records(self, records: Sequence[Record]) -> list[Record]:
        """The records this figure shows, of those given."""
        return [
            record
            for record in records
            if record.experiment in self.experiments and record.claim in self.claims
        ]


FIGURES: dict[str, FigureSpec] = {
    "table1_decode_activation": FigureSpec(
        activation_figures.table1_decode_activation,
        ("activation",),
        ("DynaExq Table 1",),
        "Experts activated in one decode step",
    ),
    "table2_prefill_activation": FigureSpec(
        activation_figures.table2_prefill_activation,
        ("activation",),
        ("DynaExq Table 2",),
        "Experts activated in one prefill",
    ),
    "activation_vs_prompt_length": FigureSpec(
        activation_figures.activation_vs_prompt_length,
        ("activation",),
        ("DynaExq Table 2 (length)",),
        "Experts activated in one prefill, by prompt length",
    ),
    "figure2_heavy_tail": FigureSpec(
        heavy_tail_figures.figure2_heavy_tail,
        ("heavy-tail",),
        ("DynaExq Figure 2",),
        "How unevenly experts are used, and how far hot sets overlap",
    ),
    "figure2_top10": FigureSpec(
        heavy_tail_figures.figure2_top10,
        ("heavy-tail",),
        ("DynaExq Figure 2",),
        "The ten busiest experts by layer and workload",
    ),
    "sensitivity_scatter": FigureSpec(
        sensitivity_figures.sensitivity_scatter,
        ("sensitivity",),
        (DAMAGE,),
        "Predicted and measured damage of lowering single blocks",
    ),
    "sensitivity_predictors": FigureSpec(
        sensitivity_figures.sensitivity_predictors,
        ("sensitivity",),
        (DAMAGE,),
        "What predicts the damage of a block",
    ),
    "sensitivity_hot": FigureSpec(
        sensitivity_figures.sensitivity_hot,
        ("sensitivity",),
        (DAMAGE,),
        "Hot experts and fragile experts",
    ),
    "prompt_heads": FigureSpec(
        sensitivity_figures.prompt_heads,
        ("sensitivity",),
        (HEADS,),
        "What prompt heads add on prompts they have not seen",
    ),
    "figure3_demotion": FigureSpec(
        demotion_figures.figure3_demotion,
        ("demotion",),
        ("DynaExq Figure 3",),
        "Perplexity against the share of experts demoted per layer",
    ),
    "figure3_normalised": FigureSpec(
        demotion_figures.figure3_normalised,
        ("demotion",),
        ("DynaExq Figure 3",),
        "Part of the whole increase reached at each share demoted",
    ),
    "formats_quality": FigureSpec(
        format_figures.formats_quality,
        ("format-curve",),
        (CURVE,),
        "What formats lose at their bytes",
    ),
    "formats_nesting": FigureSpec(
        format_figures.formats_nesting,
        ("nesting",),
        (NESTING,),
        "What nesting and shared tables cost",
    ),
    "serving_promotion": FigureSpec(
        serving_figures.serving_promotion,
        (TRANSITIONS,),
        (PROMOTION,),
        "One promotion while steps go on",
    ),
    "figure4_engine": FigureSpec(
        residency_diagram.figure4_engine,
        (TRANSITIONS,),
        (ENGINE,),
        "The architecture, drawn from a running engine",
    ),
    "serving_pressure": FigureSpec(
        serving_figures.serving_pressure,
        (PRESSURE,),
        (LENDING,),
        "KV pressure: blocks, bits, quality and latency on one axis",
    ),
    "serving_on_off": FigureSpec(
        serving_figures.serving_on_off,
        (SERVING,),
        (CHANGING,),
        "Decode steps with and without experts that change",
    ),
    "models_training": FigureSpec(
        model_figures.models_training,
        (MODELS,),
        (TRAINING,),
        "Validation loss of the bundled models while they were trained",
    ),
}


def folder(profile: str) -> Path:
    """Where the figures and the report of ``profile`` go."""
    base = paths.figures_dir()
    return base if profile == profiles.DEFAULT else base / profile


def set_folder(profile: str, name: str) -> Path:
    """Where the pictures of the set ``name`` on the page of ``profile`` are."""
    return folder(profile if name == MODELS else name)


def figure_facts(name: str, title: str, records: Sequence[Record]) -> dict[str, Any]:
    """What a reader needs to trace a figure: keys, devices, commits."""
    commits = {
        (git.get("commit"), git.get("dirty"))
        for record in records
        if (git := record.provenance.get("git")) is not None
    }
    return {
        "name": name,
        "title": title,
        "profiles": sorted(map(str, distinct(records, "profile"))),
        "experiments": sorted({record.experiment for record in records}),
        "devices": devices(records),
        "commits": [
            {"commit": commit, "dirty": dirty} for commit, dirty in sorted(commits, key=str)
        ],
        "n_records": len(records),
        "record_keys": sorted({record.key for record in records}),
    }


def save_figure(
    figure: Figure,
    name: str,
    records: Sequence[Record],
    *,
    title: str = "",
    target: Path | None = None,
) -> Path:
    """Write ``<name>.png`` and ``<name>.json`` to ``target``.

    By default the target is the folder of the records' profile.
    """
    if target is None:
        of_profile = distinct(records, "profile")
        target = folder(of_profile[0]) if len(of_profile) == 1 else paths.figures_dir()
    said = footnote(records)
    if said:
        with style.context():
            style.footnote(figure, said)
    facts = figure_facts(name, title, records)
    path = target / f"{name}.png"
    write_bytes(path, style.png_bytes(figure))
    write_text(path.with_suffix(".json"), json.dumps(facts, indent=1, sort_keys=True) + "\n")
    return path


def draw_all(profile: str) -> list[Path]:
    """Draw every figure of every set on the page of ``profile``; returns the PNG files."""
    drawn: list[Path] = []
    for item in record_sets(profile):
        for name, spec in FIGURES.items():
            chosen = spec.records(item.records)
            if not select(chosen, kind="measured"):
                continue
            target = set_folder(profile, item.name)
            figure = spec.function(chosen)
            drawn.append(save_figure(figure, name, chosen, title=spec.title, target=target))
    return drawn
