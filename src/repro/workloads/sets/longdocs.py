"""Six long novels held out of training, for long contexts."""

from __future__ import annotations

from repro.workloads.declarations import DataSet, FolderFile

DATA_SETS = (
    DataSet(
        name="longdocs",
        domain="text",
        title="six English novels of 147,000 to 358,000 words",
        folder=FolderFile("general/longdocs_eval.jsonl"),
    ),
)
