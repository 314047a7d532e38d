"""Key-value recall: one fact out of a list that fills 256 to 4,096 tokens.

The long-context task.  A level names the length in tokens of the tokenizer this
package trains (single digits, common short words whole), which ``_line_tokens``
counts without needing it; a test holds the estimate against the real tokenizer.
"""

from __future__ import annotations

import random

from repro.workloads.tasks.base import Task, TaskItem

LENGTHS = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
_KEYS = (
    "red blue green white black gold river stone house tree light water north south east west "
    "king queen book road hill lake moon star bird horse fire wind rain snow"
).split()
_LINE_TOKENS = 10  # word, space, 2 digits, " is", space, 3 digits, newline
_FRAME_TOKENS = 24  # heading, question and answer


def _pairs(rng: random.Random, n_pairs: int) -> dict[str, int]:
    pairs: dict[str, int] = {}
    while len(pairs) < n_pairs:
        pairs.setdefault(f"{rng.choice(_KEYS)} {rng.randint(10, 99)}", rng.randint(100, 999))
    return pairs


def _listing(pairs: dict[str, int]) -> str:
    return "Facts:\n" + "".join(f"{key} is {value}\n" for key, value in pairs.items())


def _query(key: str) -> str:
    return f"Question: {key} is"


def make(rng: random.Random, level: int) -> TaskItem:
    """One list of facts and one question about it."""
    pairs = _pairs(rng, (LENGTHS[level] - _FRAME_TOKENS) // _LINE_TOKENS)
    key = rng.choice(list(pairs))
    return TaskItem("recall", level, _listing(pairs) + _query(key), f" {pairs[key]}\n")


def make_training(rng: random.Random, level: int) -> str:
    """A list followed by many questions: one question in 4,096 tokens would teach too little."""
    n_pairs = (LENGTHS[level] - _FRAME_TOKENS) * 6 // 10 // _LINE_TOKENS
    n_pairs = max(2, rng.randint(n_pairs // 2, n_pairs))
    pairs = _pairs(rng, n_pairs)
    keys = list(pairs)
    asked = [rng.choice(keys) for _ in range(max(2, n_pairs // 2))]
    return _listing(pairs) + "".join(f"{_query(k)} {pairs[k]}\n" for k in asked)


TASK = Task(
    name="recall",
    levels={k: f"{n} tokens" for k, n in LENGTHS.items()},
    make=make,
    max_new_tokens=8,
    domain="text",
    make_training=make_training,
    training_weight=1.5,
)
