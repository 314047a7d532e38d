"""Seeded word problems with worked steps: the embedded mathematics workload."""

from __future__ import annotations

from repro.workloads.declarations import DataSet
from repro.workloads.embedded import word_problems

DATA_SETS = (
    DataSet(
        name="word-problems",
        domain="math",
        title="generated arithmetic word problems with worked steps",
        embedded=word_problems,
    ),
)
