"""Tables with typed cells, as fixed-width text for notebooks and as HTML for the report.

One idea: every row says where it comes from.  Our rows and the papers' rows never share a
row or a column: they stand in blocks below each other, each with a head of its own, and a
paper row carries its status code and its look.  "No published value" is a legal cell, and
an empty one is not.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_HALF_UP, Decimal
from typing import Literal

Origin = Literal["ours", "bound", "paper", "corrected"]
ORIGIN_LABEL: dict[str, str] = {
    "ours": "ours",
    "bound": "bound",
    "paper": "paper",
    "corrected": "paper, corrected",
}
BLOCKS: dict[str, tuple[Origin, ...]] = {"ours": ("ours", "bound"), "paper": ("paper", "corrected")}
"""The blocks of a table in order, and the origins of the rows in each."""
_SHORT_CELL = 10  # letters; such a cell is never broken, however narrow the screen
NO_PUBLISHED = "no published value"
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Column:
    """A column: its heading, its unit, and whether its cells are numbers."""

    name: str
    unit: str = ""
    numeric: bool = True

    @property
    def heading(self) -> str:
        """Name with unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Row:
    """One row: its origin, its texts, and what is to be said about it."""

    origin: Origin
    cells: tuple[str, ...]
    note: str = ""
    mark: Literal["", "withdrawn", "unverified"] = ""  # by its own authors


@dataclass(frozen=True)
class Table:
    """A titled table; ``keys`` are the keys of the records behind our rows."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    keys: tuple[str, ...] = field(default=())
    paper_caption: str = ""  # what is to be said about the papers' rows only

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: a row of {len(row.cells)} cells under "
                    f"{len(self.columns)} columns: {row.cells}"
                )
            if not all(row.cells):
                raise ValueError(f"table {self.title!r}: an empty cell in {row.cells}")

    def part(self, block: str) -> Table:
        """The rows of one of :data:`BLOCKS`, with what is to be said about them."""
        rows = tuple(row for row in self.rows if row.origin in BLOCKS[block])
        if block == "paper":
            return replace(self, rows=rows, caption="", keys=())
        return replace(self, rows=rows, paper_caption="")

    def parts(self) -> list[Table]:
        """All blocks that have rows."""
        return [part for block in BLOCKS if (part := self.part(block)).rows]

    @property
    def has_numbers(self) -> bool:
        """Whether any numeric cell holds more than a dash."""
        return any(
            cell != "-"
            for row in self.rows
            for column, cell in zip(self.columns, row.cells, strict=True)
            if column.numeric
        )

    def to_text(self) -> str:
        """Fixed-width text; notes of rows stand below, numbered."""
        notes = _numbered(row.note for row in self.rows)
        heads = ["from", *(column.heading for column in self.columns)]
        blocks = [
            [
                [ORIGIN_LABEL[r.origin] + (f" [{notes[r.note]}]" if r.note else ""), *r.cells]
                for r in part.rows
            ]
            for part in self.parts()
        ]
        # One width for all blocks, so that the eye can compare them.
        lines = [heads, *(line for block in blocks for line in block)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
        numeric = [False, *(column.numeric for column in self.columns)]
        text = [self.title]
        for block in blocks or [[]]:
            text += ["", _text_line(heads, widths, numeric)]
            text.append("  ".join("-" * width for width in widths))
            text += [_text_line(line, widths, numeric) for line in block]
        said = [f"[{number}] {note}" for note, number in notes.items()]
        said += [caption for caption in (self.caption, self.paper_caption) if caption]
        return "\n".join([*text, "", *said] if said else text)

    def to_html(self) -> str:
        """HTML tables, one for each block; rows carry their origin as a class."""
        return "\n".join(part._html() for part in self.parts())

    def _html(self) -> str:
        escape = html.escape
        notes = _numbered(row.note for row in self.rows)
        told = bool(notes) or len({row.origin for row in self.rows}) > 1
        first = '<th scope="col">from</th>' if told else ""
        head = "".join(
            f'<th scope="col"{_html_class(column)}>{escape(column.heading)}</th>'
            for column in self.columns
        )
        body: list[str] = []
        for row in self.rows:
            mark = f"<sup>{notes[row.note]}</sup>" if row.note else ""
            classes = f"{row.origin} {row.mark}".strip()
            cells = "".join(
                f"<td{_html_class(column, cell)}>{escape(cell)}</td>"
                for column, cell in zip(self.columns, row.cells, strict=True)
            )
            label = f'<th scope="row">{escape(ORIGIN_LABEL[row.origin])}{mark}</th>' if told else ""
            body.append(f'<tr class="{classes}">{label}{cells}</tr>')
        items = "".join(
            f"<li><sup>{number}</sup> {escape(note)}</li>" for note, number in notes.items()
        )
        below = f'<ul class="notes">{items}</ul>' if items else ""
        captions = [text for text in (self.caption, self.paper_caption) if text]
        said = "".join(f'<p class="caption">{escape(text)}</p>' for text in captions)
        return (
            f'<div class="scroll"><table><thead><tr>{first}{head}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div>{below}{said}"
        )

    def __str__(self) -> str:
        return self.to_text()


def _numbered(notes: Iterable[str]) -> dict[str, int]:
    distinct = dict.fromkeys(note for note in notes if note)
    return {note: number for number, note in enumerate(distinct, start=1)}


def _text_line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if is_number else cell.ljust(width)
        for cell, width, is_number in zip(cells, widths, numeric, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _html_class(column: Column, cell: str = "-") -> str:
    if not column.numeric:
        return ' class="short"' if len(cell) <= _SHORT_CELL else ""
    return ' class="number"' if cell == "-" else ' class="number value"'


def fixed(value: float | int | None, digits: int, absent: str = NOT_MEASURED) -> str:
    """A number with a fixed count of decimals (halves up), or the word for its absence."""
    if value is None:
        return absent
    step = Decimal(1).scaleb(-digits)
    return str(Decimal(repr(value)).quantize(step, rounding=ROUND_HALF_UP))


def grouped(value: float | int | None, absent: str = NO_PUBLISHED) -> str:
    """A count with thousands separated."""
    return absent if value is None else f"{value:,.0f}"
