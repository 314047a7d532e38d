"""Python sources that training did not see: the embedded code workload."""

from __future__ import annotations

from repro.workloads.declarations import DataSet
from repro.workloads.embedded import python_code

DATA_SETS = (
    DataSet(
        name="python",
        domain="code",
        title="source files of requests, seaborn, tornado and the standard library",
        embedded=python_code,
    ),
)
