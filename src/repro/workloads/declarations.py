"""What a workload is made of: documents, and the declaration of where they come from.

A data set is declared once (``DataSet``): its name and domain, the rule that turns one
row into one document, and its place at each source.  These are plain frozen records;
``base`` finds and loads them, ``rows`` applies the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from repro.workloads.rows import ItemRule

Domain = Literal["text", "math", "code"]


@dataclass(frozen=True)
class Document:
    """One document; prompt and answer are already joined as the data set's rule says."""

    name: str
    text: str


@dataclass(frozen=True)
class Workload:
    """Documents of one domain.

    Attributes:
        provenance: JSON-able: source, versions or revision, counts, ``n_bytes`` and the
            ``sha256`` of the text (documents joined by a zero byte).  No folder of the
            machine is in it.
    """

    name: str
    domain: Domain
    source: str
    documents: tuple[Document, ...]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class WorkloadInfo:
    """What ``list_workloads`` says of one workload; ``choices`` names the sources with items."""

    name: str
    domain: Domain
    sources: tuple[str, ...]
    title: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class MultipleChoiceItem:
    """One question; ``answer`` is the index of the right choice."""

    question: str
    context: str
    choices: tuple[str, ...]
    answer: int

    def text(self) -> str:
        """The item as one document: context, question, lettered choices, right letter."""
        letters = [chr(ord("A") + i) for i in range(len(self.choices))]
        lines = [part for part in (self.context, self.question) if part]
        lines += [f"{letter}. {c}" for letter, c in zip(letters, self.choices, strict=True)]
        return "\n".join([*lines, f"Answer: {letters[self.answer]}"])


@dataclass(frozen=True)
class ChoiceSet:
    """Multiple-choice items with their provenance; iterates over the items."""

    name: str
    source: str
    items: tuple[MultipleChoiceItem, ...]
    provenance: dict[str, Any]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[MultipleChoiceItem]:
        return iter(self.items)

    def __getitem__(self, index: int) -> MultipleChoiceItem:
        return self.items[index]


# --- declarations -----------------------------------------------------------------------


@dataclass(frozen=True)
class FolderFile:
    """A file below the data folder, named without ``.xz`` (both forms are read).

    Attributes:
        path: ``*.jsonl`` for rows, ``*.txt`` for one whole document.
        item: how a row becomes a multiple-choice item, if it does.
    """

    path: str
    item: ItemRule | None = None


@dataclass(frozen=True)
class HubFile:
    """A file of a Hugging Face data set repository.

    Naming the file instead of a configuration downloads that file only, works with
    repositories whose loading script ``datasets`` no longer runs, and reads the same
    from a local copy of the repository.

    Attributes:
        repo: repository id.
        file: path in the repository.
        format: the ``datasets`` builder that reads it.
        member: the file inside ``file`` when that is a zip archive.
        join: joins all rows into one document, when rows are lines of a text.
        item: how a row becomes a multiple-choice item, if it does.
        gated: the owner asks for accepted terms; only used in messages.
    """

    repo: str
    file: str
    format: Literal["parquet", "json", "csv"]
    member: str | None = None
    join: str | None = None
    item: ItemRule | None = None
    gated: bool = False


@dataclass(frozen=True)
class Extract:
    """What a source hands back: documents or items, and what there is to say about them."""

    documents: tuple[Document, ...]
    provenance: dict[str, Any]
    items: tuple[MultipleChoiceItem, ...] = ()


@dataclass(frozen=True)
class DataSet:
    """One declared data set.

    Attributes:
        rule: template that makes a document of a row; its fields are the needed columns.
        label: template for the document's name; empty numbers the documents.
        embedded: ``embedded(seed) -> Extract``, for text made from the environment.
        folder: where the data folder has it.
        hub: where the hub has it.
    """

    name: str
    domain: Domain
    title: str
    rule: str = "{text}"
    label: str = ""
    embedded: Callable[[int], Extract] | None = None
    folder: FolderFile | None = None
    hub: HubFile | None = None

    def place(self, source: str) -> Any:
        """Where ``source`` has it, or None."""
        return getattr(self, source)

    def has_choices(self, source: str) -> bool:
        """Whether ``source`` gives multiple-choice items."""
        return getattr(self.place(source), "item", None) is not None


@dataclass(frozen=True)
class Request:
    """How much of a data set is wanted, and the parameters of its source."""

    seed: int = 0
    limit: int | None = None
    data_dir: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """One kind of place data sets are read from.

    Attributes:
        options: names of its own parameters.
        defaults: the workload that stands for each domain.
    """

    options: frozenset[str]
    defaults: ClassVar[dict[Domain, str]]

    def read(self, data_set: DataSet, request: Request) -> Extract:
        """Read ``data_set``."""
        ...
