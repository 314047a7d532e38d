"""Seeded task generators with exact answers (see ``base`` for how to add one)."""

from __future__ import annotations

from repro.errors import unknown_name
from repro.workloads.tasks import arithmetic, brackets, indentation, lists, problems, recall
from repro.workloads.tasks.base import EVAL_SEED, Task, TaskItem, extract_answer, is_correct

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK
    for module in (arithmetic, problems, recall, brackets, indentation, lists)
}


def get_task(name: str) -> Task:
    """The task called ``name``.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return TASKS[name]


__all__ = ["EVAL_SEED", "TASKS", "Task", "TaskItem", "extract_answer", "get_task", "is_correct"]
