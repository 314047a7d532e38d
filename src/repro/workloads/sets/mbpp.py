"""MBPP: short programming problems in one sentence, with a solution."""

from __future__ import annotations

from repro.workloads.declarations import DataSet, FolderFile

DATA_SETS = (
    DataSet(
        name="mbpp",
        domain="code",
        title="MBPP, description and code",
        rule="{text}\n{code}",
        label="mbpp/{task_id}",
        folder=FolderFile("code/mbpp.jsonl"),
    ),
)
