"""Tables with typed cells, as fixed-width text for notebooks and as HTML for the report.

One idea: every row says where it comes from.  Our rows and the papers' rows never share a
row, and a paper row is set apart by its origin, its status code and its look.  "No
published value" is a legal cell, and an empty one is not.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from typing import Literal

Origin = Literal["ours", "bound", "paper", "corrected"]
ORIGIN_LABEL: dict[str, str] = {
    "ours": "ours",
    "bound": "bound",
    "paper": "paper",
    "corrected": "paper, corrected",
}
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

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: a row of {len(row.cells)} cells under "
                    f"{len(self.columns)} columns: {row.cells}"
                )
            if not all(row.cells):
                raise ValueError(f"table {self.title!r}: an empty cell in {row.cells}")

    def to_text(self) -> str:
        """Fixed-width text; notes of rows stand below, numbered."""
        notes = _numbered(row.note for row in self.rows)
        heads = ["from", *(column.heading for column in self.columns)]
        lines: list[list[str]] = []
        for row in self.rows:
            mark = f" [{notes[row.note]}]" if row.note else ""
            lines.append([f"{ORIGIN_LABEL[row.origin]}{mark}", *row.cells])
        widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
        numeric = [False, *(column.numeric for column in self.columns)]
        text = [self.title, _text_line(heads, widths, numeric)]
        text.append("  ".join("-" * width for width in widths))
        text += [_text_line(line, widths, numeric) for line in lines]
        text += [f"[{number}] {note}" for note, number in notes.items()]
        if self.caption:
            text.append(self.caption)
        return "\n".join(text)

    def to_html(self) -> str:
        """An HTML table whose rows carry their origin as a class."""
        escape = html.escape
        notes = _numbered(row.note for row in self.rows)
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
            label = escape(ORIGIN_LABEL[row.origin])
            body.append(f'<tr class="{classes}"><th scope="row">{label}{mark}</th>{cells}</tr>')
        items = "".join(
            f"<li><sup>{number}</sup> {escape(note)}</li>" for note, number in notes.items()
        )
        below = f'<ul class="notes">{items}</ul>' if items else ""
        caption = f'<p class="caption">{escape(self.caption)}</p>' if self.caption else ""
        return (
            f'<div class="scroll"><table><thead><tr><th scope="col">from</th>{head}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div>{below}{caption}"
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
        return ""
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
