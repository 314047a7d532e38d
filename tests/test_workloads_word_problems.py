"""Every worked step of a generated story is true, and the story says what the steps compute."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.workloads.word_problems import MAX_VALUE, WordProblem, generate, make_problem

CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) = <<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}
FACTORS = {"twice": 2, "three times": 3, "four times": 4}


def calculations(problem: WordProblem) -> list[list[tuple[int, str, int, int]]]:
    """Per line of the answer: its calculations (a, operator, b, result), each one checked."""
    lines = problem.answer.split("\n")
    assert re.fullmatch(r"#### \d+", lines[-1])
    found = []
    for line in lines[:-1]:
        matches = CALCULATION.findall(line)
        assert matches and line.count("<<") == len(matches), line
        row = []
        for shown_a, shown_op, shown_b, a, op, b, result, shown in matches:
            assert (shown_a, shown_op, shown_b, shown) == (a, op, b, result)
            first, second, value = int(a), int(b), int(result)
            assert OPERATIONS[op](first, second) == value, line
            if op == "/":
                assert first % second == 0, f"shared with a remainder: {line}"
            assert 0 <= value <= MAX_VALUE
            row.append((first, op, second, value))
        found.append(row)
    return found


problems = st.builds(
    make_problem,
    st.integers(0, 10**9).map(random.Random),
    st.integers(1, 6),
    st.sampled_from([10, 20, 50, 90]),
)


@settings(max_examples=300)
@given(problem=problems)
def test_steps_are_true_and_follow_one_from_the_other(problem: WordProblem) -> None:
    rows = calculations(problem)
    assert len(rows) == problem.n_steps
    value = int(re.findall(r"\d+", problem.question)[0])  # what the story begins with
    for row in rows:
        if len(row) == 2:  # boxes: first their content, then the sum
            (_, op, _, content), (a, op2, b, result) = row
            assert (op, op2, a, b) == ("*", "+", value, content)
        else:
            ((a, _, _, result),) = row
            assert a == value
        value = result
    assert problem.result == value == int(problem.answer.rsplit(" ", 1)[1])


@settings(max_examples=300)
@given(problem=problems)
def test_the_question_says_every_number_that_is_used(problem: WordProblem) -> None:
    """In order; words for halves and multiples count as their numbers."""
    text = problem.question.replace("half of", "/2").replace("as many", "").replace("as large", "")
    for word, factor in FACTORS.items():
        text = text.replace(word, f"*{factor}")
    told = [int(n) for n in re.findall(r"\d+", text)][1:]
    used: list[int] = []
    for row in calculations(problem):
        used += [row[0][0], row[0][2]] if len(row) == 2 else [row[0][2]]
    assert told == used


@settings(max_examples=100)
@given(problem=problems)
def test_nobody_loses_what_they_do_not_have(problem: WordProblem) -> None:
    for row in calculations(problem):
        for a, op, b, result in row:
            if op == "-":
                assert b < a
            assert result > 0


def test_problems_follow_their_seed() -> None:
    assert generate(30, 5) == generate(30, 5)
    assert generate(30, 5) != generate(30, 6)
    assert generate(30, 5)[:10] == generate(10, 5)
    assert {p.n_steps for p in generate(200, 0, (1, 3))} == {1, 2, 3}


def test_stories_differ() -> None:
    many = generate(3000, 1)
    assert len({p.question for p in many}) > 2990
    assert len({re.sub(r"\d+", "N", p.question) for p in many}) > 2500


def test_every_kind_of_event_occurs() -> None:
    text = "\n".join(p.answer for p in generate(300, 2))
    for op in OPERATIONS:
        assert f" {op} " in text
    questions = " ".join(p.question for p in generate(300, 2))
    for phrase in ("evenly into", "shared equally", "half of", "as many", " in each ", "more "):
        assert phrase in questions


@pytest.mark.parametrize("word", ["shelfs", "boxs", "trayes"])
def test_plurals_are_english(word: str) -> None:
    text = " ".join(p.question + p.answer for p in generate(2000, 3))
    assert not re.search(rf"\b{word}\b", text)
    for right in ("shelves", "boxes", "trays"):
        assert right in text
