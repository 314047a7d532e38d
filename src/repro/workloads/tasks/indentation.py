"""Indentation: a nested outline like Python's; write the closing line of one named block.

The comment names the block to finish; the answer is ``end(NAME)`` at exactly the
indentation of that block's body, so both the name and the leading spaces must be right.
Blocks may be empty, which Python itself would not allow.
"""

from __future__ import annotations

import random

from repro.workloads.tasks.base import Task, TaskItem

_NAMES = "a b c d e f g h k m n p q r s t u v w x y z".split()
_HEADS = ("for {0} in data:", "while {0}:", "if {0}:", "with {0}:", "def {0}():")
# level -> (headers, deepest nesting)
_LEVELS = {1: (3, 3), 2: (6, 4), 3: (10, 6), 4: (18, 8)}


def make(rng: random.Random, level: int) -> TaskItem:
    """One outline; the asked block is open at the end of it."""
    n_blocks, deepest = _LEVELS[level]
    names = rng.sample(_NAMES, n_blocks)
    stack: list[str] = []
    lines: list[str] = []
    for i, name in enumerate(names):
        if i:
            leave = rng.randint(0, len(stack) - 1) if rng.random() < 0.4 else 0
            leave = max(leave, len(stack) + 1 - deepest)
            if leave:
                del stack[-leave:]
        lines.append("    " * len(stack) + rng.choice(_HEADS).format(name))
        stack.append(name)
        if rng.random() < 0.3:
            lines.append("    " * len(stack) + "step()")
    depth = rng.randrange(len(stack))
    answer = "    " * (depth + 1) + f"end({stack[depth]})"
    prompt = "\n".join(lines) + f"\n# now end {stack[depth]}"
    return TaskItem("indentation", level, prompt, f"\n{answer}\n", "\n")


TASK = Task(
    name="indentation",
    levels={k: f"{n} blocks, {d} deep" for k, (n, d) in _LEVELS.items()},
    make=make,
    max_new_tokens=24,
    domain="code",
)
