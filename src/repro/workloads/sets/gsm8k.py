"""GSM8K test: grade-school word problems with worked answers."""

from __future__ import annotations

from repro.workloads.declarations import DataSet, FolderFile, HubFile

DATA_SETS = (
    DataSet(
        name="gsm8k",
        domain="math",
        title="GSM8K test",
        rule="{question}\n{answer}",
        folder=FolderFile("math/gsm8k_test.jsonl"),
        hub=HubFile("openai/gsm8k", "main/test-00000-of-00001.parquet", "parquet"),
    ),
)
