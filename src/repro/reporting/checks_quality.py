"""Checks of what the bundled models were to reach before anything is measured on them.

These are our own targets, not claims of a paper: a model that cannot read, cannot do the
tasks or does not use its experts would make every later table meaningless.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from repro.reporting.checks import Case
from repro.reporting.grouping import distinct, number, select
from repro.reporting.model_records import FINAL, QUALITY
from repro.reporting.records import Record

# A first try of this very specification, without the generated tasks and with 288 M tokens,
# reached 1.312, 0.881 and 1.137; a longer run that also learns the tasks must not be worse,
# and is asked to be about 0.02 better.
TARGET_BITS_PER_BYTE = {"moe-fine": {"wikitext2": 1.29, "gsm8k": 0.86, "humaneval": 1.12}}
TEST_SETS = {"wikitext2": "WikiText-2", "gsm8k": "GSM8K", "humaneval": "HumanEval"}
# Later tables compare accuracies under lower precision: there must be something to lose.
EASIEST_LEVEL = 1
TASK_ACCURACY = 0.80
# Of E.  Below, a few experts do all the work and the rest are hardly trained; above, the
# router has no preference and there is no heavy tail to measure.
EFFECTIVE_LOW, EFFECTIVE_HIGH = 0.45, 0.85


def final(records: Sequence[Record], metric: str, **config: object) -> list[Record]:
    """Records of the committed weights."""
    return select(records, claim=QUALITY, metric=metric, stage=FINAL, **config)  # type: ignore[arg-type]


def same_weights(records: Sequence[Record]) -> Iterator[Case]:
    """The quality file states the checksum of the weights beside it."""
    for record in final(records, "speaks_of_these_weights"):
        found = "checksums are equal" if record.value else "measured on other weights"
        yield Case(str(record.config["model"]), bool(record.value), found, 0.0)


def bits_per_byte(records: Sequence[Record]) -> Iterator[Case]:
    """Bits per byte of each public test set against its target."""
    for model, targets in TARGET_BITS_PER_BYTE.items():
        for name, target in targets.items():
            for record in final(records, "bits_per_byte", model=model, workload=name):
                gap = target - number(record)
                found = f"{number(record):.5f} bits per byte, target {target}"
                yield Case(f"{model} {TEST_SETS[name]}", gap >= 0, found, gap)


def easiest_tasks(records: Sequence[Record]) -> Iterator[Case]:
    """Exact answers of every task at its easiest level."""
    for record in final(records, "task_accuracy", level=EASIEST_LEVEL):
        name = f"{record.config['model']} {record.config['task']}"
        gap = number(record) - TASK_ACCURACY
        yield Case(name, gap >= 0, f"{100 * number(record):.1f} % of {record.n} items", gap)


def every_expert_used(records: Sequence[Record]) -> Iterator[Case]:
    """No expert without a single token of mixed traffic."""
    for record in final(records, "unused_experts"):
        name = f"{record.config['model']} layer {record.config['layer']}"
        unused = number(record)
        yield Case(name, unused == 0, f"{unused:.0f} unused in {record.n:,} tokens", -unused)


def effective_experts(records: Sequence[Record]) -> Iterator[Case]:
    """Effective number of experts of mixed traffic, as a share of E, in every layer."""
    for model in distinct(final(records, "effective_experts_fraction"), "model"):
        for record in final(records, "effective_experts_fraction", model=model):
            share = number(record)
            margin = min(share - EFFECTIVE_LOW, EFFECTIVE_HIGH - share)
            name = f"{model} layer {record.config['layer']}"
            yield Case(name, margin >= 0, f"{share:.3f} of E", margin)
