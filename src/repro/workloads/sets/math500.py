"""MATH-500: competition problems with full solutions."""

from __future__ import annotations

from repro.workloads.declarations import DataSet, FolderFile, HubFile

DATA_SETS = (
    DataSet(
        name="math500",
        domain="math",
        title="MATH-500",
        rule="{problem}\n{solution}",
        folder=FolderFile("math/math500_test.jsonl"),
        hub=HubFile("HuggingFaceH4/MATH-500", "test.jsonl", "json"),
    ),
)
