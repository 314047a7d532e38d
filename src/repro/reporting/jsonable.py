"""Values as JSON knows them, the one text of each, and an order over them.

One idea: keys and file order must not depend on how a value was made (a NumPy scalar, a
tuple, a dictionary filled in another order), so every value goes through here first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def plain(value: Any, where: str = "value") -> Any:
    """``value`` as JSON knows it (NumPy and torch scalars unwrapped, tuples as lists)."""
    if hasattr(value, "tolist") and not isinstance(value, (str, bytes)):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: give None for an undefined value")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item, where) for item in value]
    raise ValueError(f"{where} is a {type(value).__name__}, which no record can hold")


def canonical(value: Any) -> str:
    """The one JSON text of ``value``: sorted names, no spaces."""
    return json.dumps(
        plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def order_key(value: Any) -> tuple[Any, ...]:
    """A key that sorts any JSON value: numbers by size, not by their digits."""
    if value is None:
        return (0,)
    if isinstance(value, (bool, int, float)):
        return (1, value)
    if isinstance(value, str):
        return (2, value)
    if isinstance(value, Mapping):
        return (4, tuple((name, order_key(value[name])) for name in sorted(value)))
    return (3, tuple(order_key(item) for item in value))
