"""Records that hold a grid: ``series`` row by row, rows and columns named by labels.

One idea: whoever shows such a record asks for a row or a column by its name, so a changed order
cannot turn one number into another.  What was undefined comes back as NaN.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from repro.reporting.records import Record

FloatArray = npt.NDArray[np.float64]


def grid(record: Record) -> FloatArray:
    """The numbers, ``[rows, columns]``; a label that is a word stands for numbered ones.

    Raises:
        ValueError: the series does not fill rows and columns.
    """
    rows, columns = record.config["rows"], record.config["columns"]
    values = np.array([np.nan if x is None else x for x in record.series or ()], dtype=np.float64)
    n_rows = len(rows) if isinstance(rows, list | tuple) else -1
    n_columns = len(columns) if isinstance(columns, list | tuple) else -1
    if n_rows > 0 and n_columns > 0 and values.size != n_rows * n_columns:
        raise ValueError(
            f"{record.metric!r} holds {values.size} numbers for {n_rows} x {n_columns}: "
            "measure it again"
        )
    return values.reshape(n_rows, n_columns)


def row_names(record: Record) -> list[str]:
    """Names of the rows."""
    return [str(name) for name in record.config["rows"]]


def row(record: Record, name: str) -> FloatArray:
    """The numbers of one row, by column."""
    return np.asarray(grid(record)[row_names(record).index(name)])


def column(record: Record, name: str) -> FloatArray:
    """The numbers of one column, by row."""
    return np.asarray(grid(record)[:, list(record.config["columns"]).index(name)])
