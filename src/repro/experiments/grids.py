"""Many numbers of one kind in one record: a grid.

The one idea: a record names what it is about in some hundred bytes, so numbers that differ only
in row and column share one: ``series`` holds them row by row, the labels ``rows`` and
``columns`` name them.  A label that is a word instead of a list says what they are numbers of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from repro.reporting.records import Kind, Measurement


def grid_record(
    claim: str,
    metric: str,
    rows: Sequence[str] | str,
    columns: Sequence[str] | str,
    grid: Any,
    *,
    value: float | None = None,
    n: int,
    unit: str = "rank correlation",
    kind: Kind = "measured",
    digits: int = 6,
    **labels: Any,
) -> Measurement:
    """Numbers of rows x columns in one record; a name instead of a list numbers them."""
    series = [significant(x, digits) for row in grid for x in row]
    return Measurement(
        claim,
        kind,
        metric,
        None if value is None else significant(value),
        unit,
        n=n,
        series=series,
        labels={"rows": rows, "columns": columns, **labels},
    )


def significant(value: Any, digits: int = 6) -> Any:
    """Rounded to significant digits; None where undefined."""
    if value is None or not np.isfinite(value):
        return None
    if isinstance(value, (int, np.integer)):
        return int(value)
    return float(f"{float(value):.{digits}g}")
