"""A mathematics textbook held out of training."""

from __future__ import annotations

from repro.workloads.declarations import DataSet, FolderFile

DATA_SETS = (
    DataSet(
        name="textbooks-math",
        domain="math",
        title="OpenStax Contemporary Mathematics, one document a section",
        folder=FolderFile("math/textbooks_heldout.jsonl"),
    ),
)
