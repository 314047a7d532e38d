"""Bracket completion: close what is still open, innermost first."""

from __future__ import annotations

import random

from repro.workloads.tasks.base import Task, TaskItem

_PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
# level -> (symbols in the prompt, smallest and largest number left open)
_LEVELS = {1: (8, 1, 4), 2: (16, 3, 8), 3: (32, 6, 12), 4: (64, 8, 20)}


def make(rng: random.Random, level: int) -> TaskItem:
    """A random prefix of a balanced string; the completion closes it."""
    n_symbols, low, high = _LEVELS[level]
    while True:
        stack: list[str] = []
        symbols: list[str] = []
        for _ in range(n_symbols):
            if stack and (len(stack) >= high or rng.random() < 0.42):
                symbols.append(_PAIRS[stack.pop()])
            else:
                stack.append(rng.choice(list(_PAIRS)))
                symbols.append(stack[-1])
        if low <= len(stack) <= high:
            break
    answer = " ".join(_PAIRS[s] for s in reversed(stack))
    prompt = f"Close the brackets: {' '.join(symbols)} =>"
    return TaskItem("brackets", level, prompt, f" {answer}\n")


TASK = Task(
    name="brackets",
    levels={k: f"{n} symbols, up to {d} open" for k, (n, _, d) in _LEVELS.items()},
    make=make,
    max_new_tokens=48,
    domain="code",
)
