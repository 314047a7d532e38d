"""What does not hold together in the published numbers, computed from the CSV tables.

Codes A1 to A15 are those of the list of findings that came with the tables; L, Q, B and P are
further checks on latency, quality, bytes and PagedWeight.  What is only said in words, with no
number in the tables to compute with, is listed apart as such.
"""

from __future__ import annotations

from collections.abc import Callable

from repro.reporting import findings_activation as activation
from repro.reporting import findings_memory as memory
from repro.reporting import findings_pagedweight as pagedweight
from repro.reporting import findings_results as results
from repro.reporting.findings import Item
from repro.reporting.tables import Column, Row, Table

CHECKS: tuple[Callable[[], Item], ...] = (
    activation.phantom_layer,
    activation.raw_files,
    activation.replaced_row,
    activation.stated_reason,
    activation.beyond_uniform,
    results.figure3,
    results.replay_tiers,
    results.impossible_accuracies,
    results.unsupported_rows,
    results.throughput,
    results.resident_share,
    results.tensor_parallel,
    results.expert_fraction,
    results.latency_formula,
    results.five_task_means,
    memory.phi_pool,
    pagedweight.memory_saved,
    pagedweight.half_the_score,
    pagedweight.score_against_memory,
    pagedweight.throughput_loss,
)

WORDS_ONLY: tuple[tuple[str, str], ...] = (
    (
        "A9",
        "The authors' own provenance note says that no registered result supports any DynaExq "
        "accuracy row, the ablation or the budget sweep.",
    ),
    (
        "A14",
        "Copying a 9 MB expert is said to take about 0.9 ms, while a later replay on the same "
        "card reports a copy rate that would need less than half of it.",
    ),
    (
        "A15",
        "The INT2 tier of the 80B model is quantised again from its INT4 checkpoint, so its "
        "error is compounded.",
    ),
    ("text", "Version 3 announces four residency states and lists five."),
    (
        "text",
        "Version 3 prints no value for the smoothing factor, the update interval, the "
        "hysteresis margin or the block size.",
    ),
)


def items() -> list[Item]:
    """All checks, computed now."""
    return [check() for check in CHECKS]


def table() -> Table:
    """The section as a table."""
    columns = tuple(
        Column(name, numeric=False) for name in ("item", "what", "computed", "verdict", "so")
    )
    rows = tuple(
        Row("paper", (item.code, item.title, item.evidence, item.verdict, item.conclusion))
        for item in items()
    )
    return Table("What does not hold together in the published numbers", columns, rows)
