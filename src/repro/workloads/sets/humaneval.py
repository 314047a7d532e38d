"""HumanEval: 164 function signatures with their reference bodies."""

from __future__ import annotations

from repro.workloads.declarations import DataSet, FolderFile, HubFile

DATA_SETS = (
    DataSet(
        name="humaneval",
        domain="code",
        title="HumanEval, prompt and canonical solution",
        rule="{prompt}{canonical_solution}",
        label="{task_id}",
        folder=FolderFile("code/HumanEval.jsonl"),
        hub=HubFile(
            "openai/openai_humaneval",
            "openai_humaneval/test-00000-of-00001.parquet",
            "parquet",
        ),
    ),
)
