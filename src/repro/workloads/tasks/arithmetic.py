"""Multi-step arithmetic with the working shown: a running total, one operation a line."""

from __future__ import annotations

import random

from repro.workloads.tasks.base import Task, TaskItem

_MARK = "Answer: "
# level -> (steps, largest operand, largest factor; 0 = no multiplication)
_LEVELS = {1: (2, 20, 0), 2: (3, 50, 5), 3: (5, 99, 9), 4: (8, 500, 9)}


def make(rng: random.Random, level: int) -> TaskItem:
    """One chain of additions, subtractions and (from level 2) multiplications."""
    n_steps, limit, factor = _LEVELS[level]
    value = rng.randint(1, limit)
    orders, lines = [f"Start with {value}."], []
    for _ in range(n_steps):
        kinds = ["add", "subtract"] + (["multiply"] if factor and value < 1000 else [])
        kind = rng.choice(kinds)
        if kind == "subtract" and value < 2:
            kind = "add"
        if kind == "add":
            n = rng.randint(1, limit)
            orders.append(f"Add {n}.")
            lines.append(f"{value} + {n} = {value + n}")
            value += n
        elif kind == "subtract":
            n = rng.randint(1, min(limit, value))
            orders.append(f"Subtract {n}.")
            lines.append(f"{value} - {n} = {value - n}")
            value -= n
        else:
            n = rng.randint(2, factor)
            orders.append(f"Multiply by {n}.")
            lines.append(f"{value} * {n} = {value * n}")
            value *= n
    prompt = " ".join(orders)
    completion = "\n" + "\n".join([*lines, f"{_MARK}{value}"]) + "\n"
    return TaskItem("arithmetic", level, prompt, completion, _MARK)


TASK = Task(
    name="arithmetic",
    levels={k: f"{s} steps, operands to {m}" for k, (s, m, _) in _LEVELS.items()},
    make=make,
    max_new_tokens=160,
    domain="math",
    training_weight=1.5,
)
