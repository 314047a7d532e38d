"""WikiText-2, the perplexity text of both papers.  The two sources are not the same text.

The folder holds the tokenised form (``<unk>`` for rare words) as one file; the hub has
the raw form as rows of one line each, joined here by blank lines as quantisation
papers do.  So compare bits per byte within one source only.
"""

from __future__ import annotations

from repro.workloads.declarations import DataSet, FolderFile, HubFile


def _wikitext(name: str, split: str, folder_split: str, hub_split: str) -> DataSet:
    return DataSet(
        name=name,
        domain="text",
        title=f"WikiText-2 {split}, one document (folder: tokenised; hub: raw)",
        folder=FolderFile(f"general/wikitext2_{folder_split}.txt"),
        hub=HubFile(
            "Salesforce/wikitext",
            f"wikitext-2-raw-v1/{hub_split}-00000-of-00001.parquet",
            "parquet",
            join="\n\n",
        ),
    )


DATA_SETS = (
    _wikitext("wikitext2", "test", "test", "test"),
    _wikitext("wikitext2-valid", "validation", "valid", "validation"),
)
