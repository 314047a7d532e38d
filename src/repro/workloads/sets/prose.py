"""Documentation prose from the installed Python: the embedded text workload."""

from __future__ import annotations

from repro.workloads.declarations import DataSet
from repro.workloads.embedded import prose

DATA_SETS = (
    DataSet(
        name="prose",
        domain="text",
        title="Python language reference and standard-library docstrings, prose paragraphs only",
        embedded=prose,
    ),
)
