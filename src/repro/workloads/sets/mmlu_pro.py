"""MMLU-Pro test: 3 to 10 choices a question."""

from __future__ import annotations

import random

from repro.workloads.declarations import DataSet, FolderFile, HubFile, MultipleChoiceItem
from repro.workloads.rows import Row, choice_item, folder_item, text_field


def _hub_item(row: Row, _: random.Random) -> MultipleChoiceItem:
    return choice_item(
        text_field(row, "question"), "", row.get("options", ()), row.get("answer_index")
    )


DATA_SETS = (
    DataSet(
        name="mmlu_pro",
        domain="text",
        title="MMLU-Pro test",
        folder=FolderFile("eval_mc/mmlu_pro_test.jsonl", item=folder_item),
        hub=HubFile(
            "TIGER-Lab/MMLU-Pro", "data/test-00000-of-00001.parquet", "parquet", item=_hub_item
        ),
    ),
)
