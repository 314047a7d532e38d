"""What the report page consists of: one section for each table or figure, in order.

To add a table or figure to the page, add a :class:`Section`: which claims its records
carry, its sentence, its pictures and its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from repro.reporting import (
    demotion_sentences,
    demotion_tables,
    format_sentences,
    format_tables,
    model_tables,
    paper_tables,
    sensitivity_sentences,
    sensitivity_tables,
    sentences,
    serving_sentences,
    serving_tables,
)
from repro.reporting.checks_sensitivity import DAMAGE, HEADS
from repro.reporting.format_records import BYTES, CURVE, NESTING, PAGES, SPEED
from repro.reporting.model_records import EXPERIMENT, QUALITY, TRAINING
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
from repro.reporting.tables import Table


@dataclass(frozen=True)
class Section:
    """One table or figure: its pictures, tables, and the sentences about them.

    ``sentence`` speaks of one set of records, ``published`` of what the papers say.
    """

    id: str
    title: str
    claims: tuple[str, ...]
    experiment: str
    sentence: Callable[[Sequence[Record]], str]
    figures: tuple[str, ...] = ()
    tables: tuple[Callable[[Sequence[Record]], Table], ...] = ()
    published: Callable[[], str] | None = None
    paper: tuple[str, ...] = ()  # tables of data/paper that the rows come from

    def records(self, records: Sequence[Record]) -> list[Record]:
        """Those this section is about."""
        return [record for record in records if record.claim in self.claims]


SECTIONS: tuple[Section, ...] = (
    Section(
        "models",
        "The models measured",
        (QUALITY, TRAINING),
        EXPERIMENT,
        model_tables.sentence,
        ("models_training",),
        (model_tables.shapes, model_tables.quality, model_tables.tasks, model_tables.routing),
    ),
    Section(
        "table1",
        "DynaExq Table 1: experts activated in decode",
        ("DynaExq Table 1",),
        "activation",
        sentences.table1,
        ("table1_decode_activation",),
        (paper_tables.table1,),
        sentences.table1_paper,
        ("table1_decode_activation",),
    ),
    Section(
        "table2",
        "DynaExq Table 2: experts activated in prefill",
        ("DynaExq Table 2",),
        "activation",
        sentences.table2,
        ("table2_prefill_activation",),
        (paper_tables.table2,),
        sentences.table2_paper,
        ("table2_prefill_activation",),
    ),
    Section(
        "table2-length",
        "Beside Table 2: prefill by prompt length",
        ("DynaExq Table 2 (length)",),
        "activation",
        sentences.table2_length,
        ("activation_vs_prompt_length",),
        (paper_tables.table2_length,),
        sentences.table2_length_paper,
    ),
    Section(
        "figure2",
        "DynaExq Figure 2: heavy tail and shifting hot sets",
        ("DynaExq Figure 2", paper_tables.MIXED),
        "heavy-tail",
        sentences.figure2,
        ("figure2_heavy_tail", "figure2_top10"),
        (paper_tables.heavy_tail, paper_tables.overlap),
        sentences.figure2_paper,
    ),
    Section(
        "sensitivity",
        "PagedWeight: sensitivity of single blocks",
        (DAMAGE,),
        "sensitivity",
        sensitivity_sentences.sensitivity,
        ("sensitivity_scatter", "sensitivity_predictors", "sensitivity_hot"),
        (sensitivity_tables.rank_correlations, sensitivity_tables.loss_noise),
    ),
    Section(
        "prompt-heads",
        "PagedWeight: prompt residual heads",
        (HEADS,),
        "sensitivity",
        sensitivity_sentences.heads,
        ("prompt_heads",),
        (sensitivity_tables.heads,),
    ),
    Section(
        "figure3",
        "DynaExq Figure 3: perplexity as experts are demoted",
        ("DynaExq Figure 3",),
        "demotion",
        demotion_sentences.figure3,
        ("figure3_demotion", "figure3_normalised"),
        (demotion_tables.perplexity, demotion_tables.controls, demotion_tables.reached),
        demotion_sentences.figure3_paper,
        ("figures_stated",),
    ),
    Section(
        "formats-quality",
        "Formats: quality against bytes",
        (CURVE,),
        "format-curve",
        format_sentences.quality,
        ("formats_quality",),
        (format_tables.equal_bytes, format_tables.quality),
    ),
    Section(
        "formats-nesting",
        "Formats: what nesting costs",
        (NESTING,),
        "nesting",
        format_sentences.nesting,
        ("formats_nesting",),
        (format_tables.nesting,),
    ),
    Section(
        "formats-bytes",
        "Formats: bytes, pages and speed",
        (BYTES, PAGES, SPEED),
        "format-curve",
        format_sentences.sizes,
        (),
        (
            format_tables.published_bytes,
            format_tables.published_integers,
            format_tables.pages,
            format_tables.speed,
        ),
    ),
    Section(
        "figure4",
        "DynaExq Figure 4: the architecture, from a running engine",
        (ENGINE,),
        TRANSITIONS,
        serving_sentences.engine,
        ("figure4_engine",),
        (),
        serving_sentences.engine_paper,
    ),
    Section(
        "transitions",
        "DynaExq: a promotion while serving",
        (PROMOTION,),
        TRANSITIONS,
        serving_sentences.promotion,
        ("serving_promotion",),
        (serving_tables.promotion,),
    ),
    Section(
        "serving",
        "DynaExq C1 to C3: serving while experts change",
        (CHANGING,),
        SERVING,
        serving_sentences.serving,
        ("serving_on_off",),
        (serving_tables.on_off, serving_tables.served),
    ),
    Section(
        "kv-pressure",
        "PagedWeight: weights give memory to the KV cache",
        (LENDING,),
        PRESSURE,
        serving_sentences.pressure,
        ("serving_pressure",),
        (serving_tables.pressure,),
    ),
    Section(
        "table3",
        "DynaExq Table 3: models and bytes per expert",
        ("DynaExq Table 3",),
        "model-table",
        sentences.table3,
        (),
        (paper_tables.table3,),
        None,
        ("table3_models", "model_configs"),
    ),
)

OPEN_POINTS: tuple[tuple[str, str], ...] = (
    ("DynaExq Figures 5, 8 and 11", "not described in any text available to us; content unknown"),
    ("DynaExq Table 3, body in version 3", "not available; the rows shown are the authors' draft"),
    ("DynaExq Table 4", "accuracy under a memory cap: not yet reproduced"),
    ("DynaExq Figure 1", "GPU wait under offloading: not yet reproduced"),
    (
        "DynaExq Figures 6, 7, 9 and 10",
        "latency and throughput: not yet reproduced; the text gives no curve values",
    ),
    (
        "PagedWeight, all tables",
        "not yet reproduced; the paper itself was not available, its numbers are second-hand",
    ),
    (
        "Qwen3-30B-A3B and the other published models",
        "their weights are not part of this package; the rows measured here are of small models "
        "trained for it, so percentages are compared in kind, not in value",
    ),
)
