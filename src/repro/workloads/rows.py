"""Rows to documents: the one place where a data set's rule meets a row of a file.

A row is a mapping read from JSON, CSV or Parquet; ``where`` says in words which row of
which file it is, so that a wrong one can be found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from string import Formatter
from typing import Any

from repro.errors import DataUnavailableError
from repro.workloads.declarations import DataSet, Document, Extract, MultipleChoiceItem, Request

Row = Mapping[str, Any]
ItemRule = Callable[[Row, random.Random], MultipleChoiceItem]


class WrongRowError(ValueError):
    """A row without what the rule needs; the message says what."""


def text_field(row: Row, column: str) -> str:
    """The text in ``column``; numbers are written out.

    Raises:
        WrongRowError: no such column, or no text in it.
    """
    if column not in row:
        raise WrongRowError(
            f"has no column {column!r} (it has {', '.join(map(str, row)) or 'none'})"
        )
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise WrongRowError(f"has no text in column {column!r} but {type(value).__name__}")
    return str(value)


def fill(template: str, row: Row) -> str:
    """``template`` with the row's columns in place of its fields (``{answers[0]}`` works)."""
    parts = []
    for literal, name, _, _ in Formatter().parse(template):
        parts.append(literal)
        if name is None:
            continue
        column, _, index = name.removesuffix("]").partition("[")
        if index:
            values = row.get(column)
            if not isinstance(values, list | tuple) or len(values) <= int(index):
                raise WrongRowError(f"has no entry {index} in a list column {column!r}")
            parts.append(text_field({name: values[int(index)]}, name))
        else:
            parts.append(text_field(row, column))
    return "".join(parts)


def choice_item(
    question: str, context: str, choices: Iterable[Any], answer: Any
) -> MultipleChoiceItem:
    """A checked item.

    Raises:
        WrongRowError: fewer than two choices, or an answer that is none of them.
    """
    if isinstance(choices, str) or not isinstance(choices, list | tuple):
        raise WrongRowError("has no list of choices")
    if len(choices) < 2 or not all(isinstance(c, str | int | float) for c in choices):
        raise WrongRowError(f"needs two or more choices of text, it has {choices!r}")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise WrongRowError(f"has answer {answer!r}, which is no index of its choices")
    if not question and not context:
        raise WrongRowError("has neither a question nor a context")
    return MultipleChoiceItem(question, context, tuple(map(str, choices)), answer)


def folder_item(row: Row, _: random.Random) -> MultipleChoiceItem:
    """The row form of the data folder: question and/or context, choices, answer index."""
    question, context = (
        text_field(row, column) if row.get(column) is not None else ""
        for column in ("question", "context")
    )
    return choice_item(question, context, row.get("choices", ()), row.get("answer"))


def read_rows(
    data_set: DataSet,
    rows: Iterable[tuple[str, Any]],
    request: Request,
    *,
    item: ItemRule | None = None,
    join: str | None = None,
    remedy: str,
) -> Extract:
    """Documents or items of ``rows`` (pairs of where and row), at most ``request.limit``.

    Raises:
        DataUnavailableError: a row does not fit the rule, or there is no row at all.
    """
    documents: list[Document] = []
    items: list[MultipleChoiceItem] = []
    # A joined text is one document, so the limit does not count its lines.
    wanted: Iterator[tuple[str, Any]] = islice(rows, None if join is not None else request.limit)
    for index, (where, row) in enumerate(wanted):
        try:
            if not isinstance(row, Mapping):
                raise WrongRowError(f"is no JSON object but {type(row).__name__}")
            if item is not None:
                rng = random.Random(f"{data_set.name}-{request.seed}-{index}")
                items.append(item(row, rng))
            else:
                label = fill(data_set.label, row) if data_set.label else f"{data_set.name}-{index}"
                documents.append(Document(label, fill(data_set.rule, row)))
        except WrongRowError as error:
            raise DataUnavailableError(
                f"{where} {error}, which is not what workload {data_set.name!r} needs: {remedy}"
            ) from error
    if not documents and not items:
        raise DataUnavailableError(f"workload {data_set.name!r} has no rows: {remedy}")
    provenance: dict[str, Any] = {"rule": "multiple choice" if item else data_set.rule}
    if join is not None:
        documents = [Document(data_set.name, join.join(d.text for d in documents))]
        provenance["join"] = join
    return Extract(tuple(documents), provenance, tuple(items))
