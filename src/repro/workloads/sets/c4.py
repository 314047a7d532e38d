"""C4 English validation, first of eight shards: some 45,600 web pages, a document each.

One shard (about 40 MB) is downloaded and its rows are streamed, as quantisation papers
do; give ``max_documents``.
"""

from __future__ import annotations

from repro.workloads.declarations import DataSet, HubFile

DATA_SETS = (
    DataSet(
        name="c4",
        domain="text",
        title="C4 (en) validation, first shard",
        hub=HubFile("allenai/c4", "en/c4-validation.00000-of-00008.json.gz", "json"),
    ),
)
