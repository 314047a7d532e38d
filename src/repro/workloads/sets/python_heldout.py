"""Python packages held out of training, a document per source file."""

from __future__ import annotations

from repro.workloads.declarations import DataSet, FolderFile

DATA_SETS = (
    DataSet(
        name="python-heldout",
        domain="code",
        title="ten whole Python packages that training did not see",
        label="{path}",
        folder=FolderFile("code/python_heldout.jsonl"),
    ),
)
