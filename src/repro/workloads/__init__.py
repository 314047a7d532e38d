"""Text to route: three domains (text, mathematics, code) behind one small interface.

``load_workload(name, source=...)`` gives documents with their provenance; the default
source ``embedded`` needs no network and no text in the repository.  ``base`` says how
to add a workload; ``tokens`` turns documents into token windows; ``tasks`` generates
questions with exact answers.
"""

from __future__ import annotations

from repro.workloads.base import (
    domain_workloads,
    list_workloads,
    load_choices,
    load_workload,
)
from repro.workloads.declarations import (
    ChoiceSet,
    Document,
    Domain,
    MultipleChoiceItem,
    Workload,
    WorkloadInfo,
)

__all__ = [
    "ChoiceSet",
    "Document",
    "Domain",
    "MultipleChoiceItem",
    "Workload",
    "WorkloadInfo",
    "domain_workloads",
    "list_workloads",
    "load_choices",
    "load_workload",
]
