"""GPQA Diamond: 198 graduate questions; gated, so the owner's terms must be accepted.

The rows name the right answer first; its place among the four is drawn here, once per
row and seed.
"""

from __future__ import annotations

import random

from repro.workloads.declarations import DataSet, HubFile, MultipleChoiceItem
from repro.workloads.rows import Row, choice_item, text_field

_COLUMNS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def _hub_item(row: Row, rng: random.Random) -> MultipleChoiceItem:
    choices = [text_field(row, column).strip() for column in _COLUMNS]
    order = rng.sample(range(len(choices)), len(choices))
    question = text_field(row, "Question").strip()
    return choice_item(question, "", [choices[i] for i in order], order.index(0))


DATA_SETS = (
    DataSet(
        name="gpqa_diamond",
        domain="text",
        title="GPQA Diamond (gated)",
        hub=HubFile("Idavidrein/gpqa", "gpqa_diamond.csv", "csv", item=_hub_item, gated=True),
    ),
)
