"""AIME 2025: 30 competition problems with an integer answer and no worked solution."""

from __future__ import annotations

from repro.workloads.declarations import DataSet, HubFile

DATA_SETS = (
    DataSet(
        name="aime25",
        domain="math",
        title="AIME 2025, I and II",
        rule="{problem}\n{answer}",
        hub=HubFile("math-ai/aime25", "test.jsonl", "json"),
    ),
)
