"""Which workloads there are, and how one is loaded.

A *data set* is declared once, with its rule for turning a row into a document and with
the places it can come from.  A *source* (``embedded``, ``folder``, ``hub``) knows how to
read one kind of place.  So the same rule makes the documents wherever the rows lie, and
every workload says in its provenance which source it came from.

How to add a workload
    Copy one file of ``repro/workloads/sets/`` under a new name and change its
    ``DATA_SETS``: a name, a domain, a rule such as ``"{question}\\n{answer}"``, and
    where the rows are (a file below the data folder, a file of a hub repository, a
    function for text made on the spot).  Files of that folder are found by
    themselves; nothing else needs to change.

How to add a source
    Copy ``folder.py``, change its ``SOURCE``, list it in ``_SOURCE_MODULES`` and give
    ``declarations.DataSet`` a field of that name for the place.

Left out on purpose: training corpora (``repro.models.corpus``) and anything that
needs a tokenizer (``repro.workloads.tokens``).
"""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from repro.errors import UnknownNameError, unknown_name
from repro.workloads.declarations import (
    ChoiceSet,
    DataSet,
    Document,
    Domain,
    Extract,
    Request,
    Source,
    Workload,
    WorkloadInfo,
)

_SOURCE_MODULES = {
    "embedded": "repro.workloads.embedded",
    "folder": "repro.workloads.folder",
    "hub": "repro.workloads.hub",
}


# --- registry ---------------------------------------------------------------------------


def data_sets() -> dict[str, DataSet]:
    """Every declared data set by name: the ``DATA_SETS`` of each file in ``sets``."""
    package = import_module("repro.workloads.sets")
    found: dict[str, DataSet] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
        for data_set in import_module(f"{package.__name__}.{info.name}").DATA_SETS:
            if data_set.name in found:
                raise UnknownNameError(
                    f"workload {data_set.name!r} is declared twice, the second time in "
                    f"{info.name}.py: give one of them another name"
                )
            found[data_set.name] = data_set
    return found


def get_source(name: str) -> Source:
    """The source called ``name``.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if name not in _SOURCE_MODULES:
        raise unknown_name("workload source", name, _SOURCE_MODULES)
    source: Source = import_module(_SOURCE_MODULES[name]).SOURCE
    return source


def list_workloads(source: str | None = None) -> list[WorkloadInfo]:
    """All workloads, or those of one source, by name."""
    if source is not None:
        get_source(source)
    found = []
    for data_set in sorted(data_sets().values(), key=lambda d: d.name):
        sources = tuple(s for s in _SOURCE_MODULES if data_set.place(s) is not None)
        if source is None or source in sources:
            choices = tuple(s for s in sources if data_set.has_choices(s))
            found.append(
                WorkloadInfo(data_set.name, data_set.domain, sources, data_set.title, choices)
            )
    return found


def domain_workloads(source: str = "embedded") -> dict[Domain, str]:
    """The workload that stands for each of the three domains at ``source``."""
    return dict(get_source(source).defaults)


# --- loading ----------------------------------------------------------------------------


def load_workload(
    name: str,
    *,
    source: str = "embedded",
    data_dir: str | Path | None = None,
    seed: int = 0,
    max_documents: int | None = None,
    **options: Any,
) -> Workload:
    """Load a workload.

    Args:
        name: one of ``list_workloads(source)``.
        source: ``embedded`` (made from what is installed), ``folder`` (a local data
            folder) or ``hub`` (Hugging Face; the only one that may use the network).
        data_dir: the data folder of source ``folder``; default ``REPRO_DATA_DIR``.
        seed: chooses and orders embedded text, and shuffles choices where a set's
            correct answer always comes first; files keep their order.
        max_documents: keep the first so many.
        **options: parameters of the source (hub: ``revision``, ``local_root``,
            ``cache_dir``).

    Raises:
        UnknownNameError: no such workload, source or parameter.
        DataUnavailableError: it cannot be read from here.
    """
    data_set, extract = _read(name, source, data_dir, seed, max_documents, options, "max_documents")
    documents = extract.documents or tuple(
        Document(f"{name}-{i}", item.text()) for i, item in enumerate(extract.items)
    )
    provenance = _provenance(source, extract, [d.text for d in documents], "n_documents")
    return Workload(name, data_set.domain, source, documents, provenance)


def load_choices(
    name: str,
    *,
    source: str = "folder",
    data_dir: str | Path | None = None,
    seed: int = 0,
    max_items: int | None = None,
    **options: Any,
) -> ChoiceSet:
    """Load a multiple-choice set; the arguments are those of ``load_workload``.

    Raises:
        UnknownNameError: no such set, source or parameter.
        DataUnavailableError: it cannot be read from here.
    """
    get_source(source)
    known = [n for n, d in data_sets().items() if d.has_choices(source)]
    if name not in known:
        if not known:
            raise UnknownNameError(
                f"source {source!r} has no multiple-choice sets: use source='folder' or 'hub'"
            )
        raise unknown_name(f"multiple-choice set of source {source!r}", name, known)
    _, extract = _read(name, source, data_dir, seed, max_items, options, "max_items")
    provenance = _provenance(source, extract, [i.text() for i in extract.items], "n_items")
    return ChoiceSet(name, source, extract.items, provenance)


def _read(
    name: str,
    source: str,
    data_dir: str | Path | None,
    seed: int,
    limit: int | None,
    options: Mapping[str, Any],
    limit_name: str,
) -> tuple[DataSet, Extract]:
    reader = get_source(source)
    everything = data_sets()
    if name not in everything:
        raise unknown_name("workload", name, [i.name for i in list_workloads(source)])
    if everything[name].place(source) is None:
        sources = [s for s in _SOURCE_MODULES if everything[name].place(s) is not None]
        names = ", ".join(i.name for i in list_workloads(source))
        raise UnknownNameError(
            f"workload {name!r} does not exist at source {source!r}: "
            f"use source={' or '.join(map(repr, sources))}, or choose one of {names}"
        )
    for option in options:
        if option not in reader.options:
            allowed = sorted(reader.options | {"data_dir", "seed", limit_name, "source"})
            raise unknown_name(f"parameter of source {source!r}", option, allowed)
    if data_dir is not None and source != "folder":
        raise UnknownNameError(
            f"data_dir={str(data_dir)!r} has no meaning for source {source!r}: "
            "drop it, or use source='folder'"
        )
    if limit is not None and limit < 1:
        raise UnknownNameError(f"{limit_name}={limit} keeps nothing: give at least 1, or None")
    request = Request(seed, limit, None if data_dir is None else Path(data_dir), options)
    return everything[name], reader.read(everything[name], request)


def _provenance(source: str, extract: Extract, texts: list[str], count: str) -> dict[str, Any]:
    digest = hashlib.sha256()
    n_bytes = 0
    for i, text in enumerate(texts):
        data = text.encode("utf-8")
        n_bytes += len(data)
        digest.update(b"\0" + data if i else data)
    return {
        "source": source,
        **extract.provenance,
        count: len(texts),
        "n_bytes": n_bytes,
        "sha256": digest.hexdigest(),
    }
