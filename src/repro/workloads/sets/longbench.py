"""LongBench v1, a workload per task.

The repository's loading script is no longer run by ``datasets`` (4.0 and later), so
the rows come straight from the archive that script would have read: ``data.zip`` of
the authors' repository, one JSON-lines file a task.  A document is context, input and
the first reference answer; LongBench's own instruction around them is left out.
"""

from __future__ import annotations

from repro.workloads.declarations import DataSet, HubFile

_CODE_TASKS = ("lcc", "repobench-p")
_TASKS = (
    *("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    *("hotpotqa", "2wikimqa", "musique", "dureader"),
    *("gov_report", "qmsum", "multi_news", "vcsum"),
    *("trec", "triviaqa", "samsum", "lsht"),
    *("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    *_CODE_TASKS,
)

_TEXT_RULE = "{context}\n\n{input}\n{answers[0]}"
_CODE_RULE = "{context}{input}{answers[0]}"

DATA_SETS = tuple(
    DataSet(
        name=f"longbench-{task}",
        domain="code" if task in _CODE_TASKS else "text",
        title=f"LongBench task {task}",
        rule=_CODE_RULE if task in _CODE_TASKS else _TEXT_RULE,
        hub=HubFile("zai-org/LongBench", "data.zip", "json", member=f"data/{task}.jsonl"),
    )
    for task in _TASKS
)
