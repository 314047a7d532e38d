"""List operations: reverse, sort, largest, smallest, last, length, without doubles."""

from __future__ import annotations

import random
from collections.abc import Callable

from repro.workloads.tasks.base import Task, TaskItem

# level -> (shortest, longest, largest value)
_LEVELS = {1: (3, 4, 9), 2: (5, 7, 9), 3: (8, 12, 99), 4: (14, 20, 99)}
_OPERATIONS: dict[str, Callable[[list[int]], object]] = {
    "reverse": lambda v: v[::-1],
    "sort": sorted,
    "largest": max,
    "smallest": min,
    "last": lambda v: v[-1],
    "length": len,
    "unique": lambda v: list(dict.fromkeys(v)),
}


def make(rng: random.Random, level: int) -> TaskItem:
    """One operation on one list of integers."""
    shortest, longest, largest = _LEVELS[level]
    values = [rng.randint(0, largest) for _ in range(rng.randint(shortest, longest))]
    name = rng.choice(list(_OPERATIONS))
    answer = str(_OPERATIONS[name](values))
    return TaskItem("lists", level, f"{name} {values} =>", f" {answer}\n")


TASK = Task(
    name="lists",
    levels={k: f"{a} to {b} values to {m}" for k, (a, b, m) in _LEVELS.items()},
    make=make,
    max_new_tokens=90,
    domain="code",
)
