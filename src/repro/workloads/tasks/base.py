"""What a generated task is: a prompt, what should follow it, and the exact answer.

Tasks measure what perplexity hides: whether a model at some precision still gets a
whole answer right.  Each is a pure function of ``(seed, level)``; level 1 is the
easiest.  ``completion`` is what training shows after the prompt, working included;
``answer`` is the part of it that counts.

Training and evaluation draw from differently seeded generators.  Where a level has few
possible prompts they meet all the same: of the 200 prompts at ``EVAL_SEED``, 172 of
arithmetic level 1, 11 of arithmetic level 2, 109 of lists level 1 and 83 of brackets
level 1 stand in the text that the bundled models' two training stages drew from; none of
any other level (a test looks at a sample).  It is no memory: on 200 prompts of each level 1
that do not stand there both models are as exact (arithmetic 100 %, lists 97 %, brackets
100 %) as on those that do.

To add a task, copy one file of this folder and list its ``TASK`` in ``__init__.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from repro.errors import UnknownNameError, unknown_name

EVAL_SEED = 1_000_000_000


@dataclass(frozen=True)
class TaskItem:
    """One question with what should follow it; ``prompt + completion`` is a training text.

    ``mark`` stands before the answer in the completion (``Answer: ``); empty when the first
    line of the completion is the answer.  A prompt never ends in white space: a tokenizer
    may join it with what follows, and the model would be asked in tokens it never saw.
    """

    task: str
    level: int
    prompt: str
    completion: str
    mark: str = ""

    @property
    def answer(self) -> str:
        """The part of ``completion`` that is compared."""
        return extract_answer(self.completion, self.mark)


@dataclass(frozen=True)
class Task:
    """A family of items.

    Attributes:
        name: how it is called on the command line and in records.
        levels: what each level means, e.g. ``{1: "2 steps"}``.
        make: ``make(rng, level) -> TaskItem``.
        max_new_tokens: enough for the longest completion of the hardest level (bundled
            tokenizer).
        domain: the workload domain it belongs to (text, math or code).
        make_training: a denser training text, if one item teaches too little per token.
        training_weight: share in the task mixture of the training recipe.
    """

    name: str
    levels: dict[int, str]
    make: Callable[[random.Random, int], TaskItem]
    max_new_tokens: int
    domain: str
    make_training: Callable[[random.Random, int], str] | None = None
    training_weight: float = 1.0

    def items(self, n: int, *, level: int, seed: int = EVAL_SEED) -> list[TaskItem]:
        """``n`` different items of one level.

        Raises:
            UnknownNameError: the task has no such level, or not so many different items.
        """
        if level not in self.levels:
            raise unknown_name(f"level of task {self.name!r}", level, map(str, self.levels))
        rng = random.Random(f"{self.name}-{level}-{seed}")
        found: dict[str, TaskItem] = {}
        repeats = 0
        while n > 0 and repeats <= 50 + 10 * len(found):
            item = self.make(rng, level)
            repeats = repeats + 1 if item.prompt in found else 0
            found.setdefault(item.prompt, item)
            if len(found) == n:
                return list(found.values())
        raise UnknownNameError(
            f"n={n} items of task {self.name!r} level {level} are not possible: give a number "
            f"from 1{f' to {len(found)}' if found else ''}"
        )

    def training_text(self, rng: random.Random, level: int) -> str:
        """One training document of this task."""
        if self.make_training is not None:
            return self.make_training(rng, level)
        item = self.make(rng, level)
        return item.prompt + item.completion


def extract_answer(generated: str, mark: str) -> str:
    """The answer in a generated completion; empty when the mark never comes.

    What follows the first ``mark`` on its line, without a mark the first line; leading
    spaces count.  A model may go on with another question, so later text does not.
    """
    rest = generated.partition(mark)[2] if mark else generated
    return rest.split("\n", 1)[0].rstrip()


def is_correct(item: TaskItem, generated: str) -> bool:
    """Exact match of the extracted answer."""
    return extract_answer(generated, item.mark) == item.answer
