"""Multiple-choice sets in the row form of the data folder."""

from __future__ import annotations

from repro.workloads.declarations import DataSet, FolderFile
from repro.workloads.rows import folder_item

_FILES = {
    "arc_challenge": ("arc_challenge_test", "ARC-Challenge test"),
    "arc_easy": ("arc_easy_test", "ARC-Easy test"),
    "boolq": ("boolq_val", "BoolQ validation, with the passage as context"),
    "hellaswag": ("hellaswag_val", "HellaSwag validation"),
    "mmlu": ("mmlu_test", "MMLU test, 57 subjects"),
    "piqa": ("piqa_valid", "PIQA validation"),
}

DATA_SETS = tuple(
    DataSet(
        name=name,
        domain="text",
        title=title,
        folder=FolderFile(f"eval_mc/{file}.jsonl", item=folder_item),
    )
    for name, (file, title) in _FILES.items()
)
