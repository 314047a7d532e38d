"""Word problems as a task: the stories of ``repro.workloads.word_problems`` by length."""

from __future__ import annotations

import random

from repro.workloads.tasks.base import Task, TaskItem
from repro.workloads.word_problems import make_problem

# level -> (steps, largest operand)
_LEVELS = {1: (1, 20), 2: (2, 50), 3: (3, 50), 4: (5, 90)}


def make(rng: random.Random, level: int) -> TaskItem:
    """One story; the completion is its worked answer."""
    problem = make_problem(rng, *_LEVELS[level])
    return TaskItem("problems", level, problem.question, f"\n{problem.answer}\n", "#### ")


TASK = Task(
    name="problems",
    levels={k: f"{s} steps, operands to {m}" for k, (s, m) in _LEVELS.items()},
    make=make,
    max_new_tokens=220,
    domain="math",
    training_weight=2.0,
)
