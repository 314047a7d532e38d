"""Seeded arithmetic word problems with worked steps and an exact answer.

The mathematics domain of the embedded workloads, part of the training mixture
(with other seeds), and a task for the quality tables.  A problem is a short story
around one running quantity: a beginning, then ``n_steps`` events, each with one
operation.  The answer follows GSM8K's public answer convention (a calculator note
``<<a+b=c>>`` in each step, ``#### N`` at the end; Cobbe et al., arXiv 2110.14168), so
that one checker serves both.  Stories and wordings are ours.

Left out on purpose: fractions, rates of change and anything whose answer is not a
non-negative integer.  Left as they are, because the bundled models were trained on these
very texts: "1 books", and one story in 300 whose hero gives something to themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

NAMES = (
    "Ada Amara Anton Bea Bram Carla Chen Dario Dina Elif Emeka Farah Felix Greta Hana Hugo "
    "Ines Ivo Jamal Jana Kofi Lara Leon Lina Malik Mara Mei Milo Nadia Nils Omar Pia Priya "
    "Rafa Rosa Sami Selma Tariq Tess Uma Viktor Wren Yara Yusuf Zoe Anna Ben Clara David Emma "
    "Jack Kate Lucy Mark Nina Oscar Paul Ruth Sarah Tom"
).split()
ITEMS = (
    "apples|books|marbles|stickers|pencils|coins|cards|shells|buttons|stamps|eggs|cookies|"
    "oranges|tickets|balloons|candles|plates|bricks|flowers|photos|beads|muffins|cups|pears|"
    "seeds|badges|ribbons|toy cars|notebooks|lemons"
).split("|")
PLACES = (
    "shop|market|school|library|farm|bakery|garden|station|office|museum|camp|workshop"
).split("|")
CONTAINERS = "box bag basket shelf tray crate jar packet drawer row".split()

MAX_VALUE = 2000


@dataclass(frozen=True)
class WordProblem:
    """One problem: ``answer`` holds the worked steps and ends in ``#### N``."""

    question: str
    answer: str
    n_steps: int

    @property
    def result(self) -> int:
        """The exact answer."""
        return int(self.answer.rsplit("#### ", 1)[1])


@dataclass
class _Story:
    """The quantity as it stands while the story is being told."""

    rng: random.Random
    name: str
    item: str
    value: int
    limit: int

    def small(self, low: int = 2, high: int | None = None) -> int:
        return self.rng.randint(low, max(low, high or self.limit))

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)


_Step = tuple[str, str, int]  # sentence of the question, sentence of the answer, new value
_Event = Callable[[_Story], "_Step | None"]


def _calc(a: int, operator: str, b: int) -> tuple[str, int]:
    """``(a+b = <<a+b=c>>c, c)`` in the calculator notation."""
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[operator]
    return f"{a} {operator} {b} = <<{a}{operator}{b}={result}>>{result}", result


def _gain(s: _Story) -> _Step:
    n = s.small()
    sentence = s.pick(
        f"Then {s.name} buys {n} more {s.item}.",
        f"A friend gives {s.name} {n} {s.item}.",
        f"{s.name} finds {n} more {s.item} at the {s.rng.choice(PLACES)}.",
        f"Later {n} {s.item} are added.",
    )
    calc, value = _calc(s.value, "+", n)
    return sentence, s.pick(f"Now {s.name} has {calc} {s.item}.", f"That makes {calc}."), value


def _lose(s: _Story) -> _Step | None:
    if s.value < 3:
        return None
    n = s.small(1, min(s.limit, s.value - 1))
    other = s.rng.choice(NAMES)
    sentence = s.pick(
        f"{s.name} gives {n} {s.item} to {other}.",
        f"Then {n} of the {s.item} get lost.",
        f"{s.name} sells {n} {s.item}.",
        f"{s.name} uses {n} of them.",
    )
    calc, value = _calc(s.value, "-", n)
    return sentence, s.pick(f"After that {calc} {s.item} are left.", f"{calc} remain."), value


def _times(s: _Story) -> _Step | None:
    factor = s.rng.randint(2, 4)
    if s.value * factor > MAX_VALUE:
        return None
    word = {2: "twice", 3: "three times", 4: "four times"}[factor]
    sentence = s.pick(
        f"The next day {s.name} has {word} as many {s.item}.",
        f"A week later the number of {s.item} is {word} as large.",
    )
    calc, value = _calc(s.value, "*", factor)
    return sentence, f"{word.capitalize()} as many is {calc}.", value


def _share(s: _Story) -> _Step | None:
    divisors = [d for d in range(2, 11) if s.value % d == 0 and s.value // d > 1]
    if not divisors:
        return None
    n = s.rng.choice(divisors)
    box = s.rng.choice(CONTAINERS)
    sentence = s.pick(
        f"{s.name} puts the {s.item} evenly into {n} {_plural(box)} and keeps only one {box}.",
        f"They are shared equally among {n} people, and {s.name} is one of them.",
    )
    calc, value = _calc(s.value, "/", n)
    return sentence, s.pick(f"One part is {calc} {s.item}.", f"Each gets {calc}."), value


def _boxes(s: _Story) -> _Step | None:
    n, each = s.rng.randint(2, 9), s.small(2, 12)
    if s.value + n * each > MAX_VALUE:
        return None
    box = s.rng.choice(CONTAINERS)
    calc, more = _calc(n, "*", each)
    calc2, value = _calc(s.value, "+", more)
    sentence = s.pick(
        f"{s.name} also gets {n} {_plural(box)} with {each} {s.item} in each {box}.",
        f"Then {n} {_plural(box)} of {each} {s.item} each arrive.",
    )
    return sentence, f"The {_plural(box)} hold {calc} {s.item}. In all that is {calc2}.", value


def _half(s: _Story) -> _Step | None:
    if s.value % 2 or s.value < 4:
        return None
    calc, value = _calc(s.value, "/", 2)
    return f"{s.name} gives away half of the {s.item}.", f"Half of them is {calc}.", value


def _plural(word: str) -> str:
    if word == "shelf":
        return "shelves"
    return word + ("es" if word.endswith(("x", "s")) else "s")


_EVENTS: tuple[_Event, ...] = (_gain, _lose, _gain, _lose, _times, _share, _boxes, _half)


def make_problem(rng: random.Random, n_steps: int, limit: int = 50) -> WordProblem:
    """One problem with ``n_steps`` events and operands up to ``limit``."""
    story = _Story(rng, rng.choice(NAMES), rng.choice(ITEMS), rng.randint(3, limit), limit)
    place = rng.choice(PLACES)
    question = [
        story.pick(
            f"{story.name} has {story.value} {story.item}.",
            f"At the {place} {story.name} counts {story.value} {story.item}.",
            f"There are {story.value} {story.item} in {story.name}'s {rng.choice(CONTAINERS)}.",
        )
    ]
    steps: list[str] = []
    while len(steps) < n_steps:
        step = rng.choice(_EVENTS)(story)
        if step is None or step[2] > MAX_VALUE:
            continue
        sentence, worked, story.value = step
        question.append(sentence)
        steps.append(worked)
    question.append(
        story.pick(
            f"How many {story.item} does {story.name} have now?",
            f"How many {story.item} are there in the end?",
            f"With how many {story.item} does {story.name} end up?",
        )
    )
    answer = "\n".join([*steps, f"#### {story.value}"])
    return WordProblem(" ".join(question), answer, n_steps)


def generate(n: int, seed: int, n_steps: tuple[int, int] = (2, 5)) -> list[WordProblem]:
    """``n`` problems with ``n_steps[0]`` to ``n_steps[1]`` steps, fixed by ``seed``."""
    rng = random.Random(f"word-problems-{seed}")
    return [make_problem(rng, rng.randint(*n_steps)) for _ in range(n)]
