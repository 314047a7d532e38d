"""Generated tasks against solvers written here, from nothing but the prompt."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from repro.errors import UnknownNameError
from repro.models.corpus import task_documents, word_problem_documents
from repro.paths import models_dir
from repro.workloads.tasks import EVAL_SEED, TASKS, TaskItem, extract_answer, get_task, is_correct
from repro.workloads.tasks.recall import LENGTHS

LEVELS = [(name, level) for name, task in TASKS.items() for level in task.levels]
SMALL_SPACES = {("arithmetic", 1), ("arithmetic", 2), ("lists", 1), ("brackets", 1)}
seeds = st.integers(0, 10**6).map(random.Random)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(models_dir() / "moe-fine")


# --- solvers: prompt -> answer, sharing no code with the generators


def solve_arithmetic(prompt: str) -> str:
    value = None
    for order in prompt.split(". "):
        n = int(re.findall(r"\d+", order)[0])
        verb = order.split()[0]
        if verb == "Start":
            value = n
        elif verb == "Add":
            value += n
        elif verb == "Subtract":
            value -= n
        else:
            assert verb == "Multiply"
            value *= n
    assert value is not None and value >= 0
    return str(value)


def solve_brackets(prompt: str) -> str:
    symbols = prompt.removeprefix("Close the brackets: ").removesuffix(" =>").split(" ")
    closing = {"(": ")", "[": "]", "{": "}", "<": ">"}
    text = "".join(symbols)
    while True:  # cross out matched pairs until none is left
        shorter = re.sub(r"\(\)|\[\]|\{\}|<>", "", text)
        if shorter == text:
            break
        text = shorter
    assert text and set(text) <= set(closing)
    return " " + " ".join(closing[c] for c in text[::-1])


def solve_lists(prompt: str) -> str:
    name, rest = prompt.removesuffix(" =>").split(" ", 1)
    values = [int(x) for x in rest.strip("[]").split(", ")]
    if name == "reverse":
        result: Any = [values[-1 - i] for i in range(len(values))]
    elif name == "sort":
        result = []
        for value in values:
            place = sum(other <= value for other in result)
            result.insert(place, value)
    elif name == "unique":
        result = [v for i, v in enumerate(values) if v not in values[:i]]
    else:
        ordered = dict.fromkeys(values)
        largest = smallest = values[0]
        for value in ordered:
            largest = value if value > largest else largest
            smallest = value if value < smallest else smallest
        result = {
            "largest": largest,
            "smallest": smallest,
            "last": values[len(values) - 1],
            "length": sum(1 for _ in values),
        }[name]
    return f" {result}"


def solve_indentation(prompt: str) -> str:
    *lines, question = prompt.split("\n")
    name = question.removeprefix("# now end ")
    (head,) = [line for line in lines if re.search(rf"\b{name}\b", line.split(":")[0])]
    at = lines.index(head)
    depth = len(head) - len(head.lstrip(" "))
    # Open: nothing after it stands at its own indentation or less.
    assert all(len(x) - len(x.lstrip(" ")) > depth for x in lines[at + 1 :])
    return " " * (depth + 4) + f"end({name})"


def solve_recall(prompt: str) -> str:
    *facts, question = prompt.removeprefix("Facts:\n").split("\n")
    key = question.removeprefix("Question: ").removesuffix(" is")
    (value,) = [line.rsplit(" ", 1)[1] for line in facts if line.rsplit(" is ", 1)[0] == key]
    return f" {value}"


def solve_problems(prompt: str) -> str:
    """Reads the story sentence by sentence."""
    first, *sentences = re.split(r"(?<=[.?]) ", prompt)
    value = int(re.findall(r"\d+", first)[0])
    for sentence in sentences[:-1]:
        numbers = [int(n) for n in re.findall(r"\d+", sentence)]
        if re.search(r"evenly|equally", sentence):
            value //= numbers[0]
        elif "half of" in sentence:
            value //= 2
        elif factor := re.search(r"(twice|three times|four times) as", sentence):
            value *= {"twice": 2, "three times": 3, "four times": 4}[factor[1]]
        elif len(numbers) == 2:
            value += numbers[0] * numbers[1]
        elif re.search(r"\bto \w+\.$|get lost|\bsells\b|\buses\b", sentence):
            value -= numbers[0]
        else:
            assert re.search(r"buys|gives|finds|are added", sentence), sentence
            value += numbers[0]
    return str(value)


SOLVERS = {
    "arithmetic": solve_arithmetic,
    "brackets": solve_brackets,
    "lists": solve_lists,
    "indentation": solve_indentation,
    "recall": solve_recall,
    "problems": solve_problems,
}


def test_every_task_has_a_solver_here() -> None:
    assert set(SOLVERS) == set(TASKS)
    assert all(name == task.name for name, task in TASKS.items())


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_answers_are_exact(name: str, level: int) -> None:
    n = 40 if name == "recall" else 120
    for item in TASKS[name].items(n, level=level):
        assert item.answer == SOLVERS[name](item.prompt), item.prompt
        assert is_correct(item, item.completion)


@given(rng=seeds, level=st.sampled_from([1, 2, 3, 4]))
def test_worked_lines_of_arithmetic_are_true(rng: random.Random, level: int) -> None:
    item = TASKS["arithmetic"].make(rng, level)
    *lines, last = item.completion.strip().split("\n")
    value = int(re.findall(r"\d+", item.prompt)[0])
    for line in lines:
        a, op, b, equals, c = line.split(" ")
        assert (int(a), equals) == (value, "=")
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op]
        assert int(c) == value >= 0
    assert last == f"Answer: {value}"
    assert len(lines) == item.prompt.count(". ")


# --- text and tokens


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_the_prompt_is_a_prefix_also_in_tokens(name: str, level: int, tokenizer: Any) -> None:
    """Else the model would be asked in tokens that training never showed it."""
    for item in TASKS[name].items(12, level=level):
        assert item.prompt == item.prompt.rstrip()
        prompt = tokenizer(item.prompt)["input_ids"]
        both = tokenizer(item.prompt + item.completion)["input_ids"]
        assert both[: len(prompt)] == prompt
        assert item.completion.endswith("\n")


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_completions_fit_the_room_that_is_given(name: str, level: int, tokenizer: Any) -> None:
    task = TASKS[name]
    completions = [item.completion for item in task.items(150, level=level)]
    longest = max(len(ids) for ids in tokenizer(completions)["input_ids"])
    assert longest <= task.max_new_tokens


@pytest.mark.parametrize("level", sorted(LENGTHS))
def test_recall_fills_its_length(level: int, tokenizer: Any) -> None:
    for item in TASKS["recall"].items(5, level=level):
        n_tokens = len(tokenizer(item.prompt + item.completion)["input_ids"])
        assert 0.9 * LENGTHS[level] <= n_tokens <= LENGTHS[level]


@given(rng=seeds, level=st.sampled_from(sorted(LENGTHS)))
def test_training_lists_of_facts_are_shorter_than_their_level_and_true(
    rng: random.Random, level: int
) -> None:
    text = TASKS["recall"].training_text(rng, level)
    facts = dict(re.findall(r"^(\w+ \d\d) is (\d{3})$", text, re.MULTILINE))
    asked = re.findall(r"^Question: (\w+ \d\d) is (\d{3})$", text, re.MULTILINE)
    assert len(asked) >= 2
    assert all(facts[key] == value for key, value in asked)
    assert 10 * (len(facts) + len(asked)) <= LENGTHS[level] + 40


# --- seeds


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_items_follow_seed_and_level_and_differ(name: str, level: int) -> None:
    task, n = TASKS[name], 8 if name == "recall" else 60
    items = task.items(n, level=level)
    assert items == task.items(n, level=level)
    assert items[: n // 2] == task.items(n // 2, level=level)
    assert items != task.items(n, level=level, seed=EVAL_SEED + 1)
    assert len({item.prompt for item in items}) == n
    assert all((item.task, item.level) == (name, level) for item in items)


def test_harder_levels_are_longer(tokenizer: Any) -> None:
    for task in TASKS.values():
        lengths = [
            sum(len(item.prompt + item.completion) for item in task.items(20, level=level))
            for level in sorted(task.levels)
        ]
        assert lengths == sorted(lengths)


def test_evaluation_is_not_training_text() -> None:
    """But for the levels with few possible prompts, which the module's docstring counts."""
    text = "\n".join(
        part
        for seed in (0, 1)
        for part in (*task_documents(seed, 1_000_000, 4096), *word_problem_documents(seed, 2000))
    )
    overlaps = {
        (name, level): sum(item.prompt in text for item in TASKS[name].items(n, level=level))
        for name, level in LEVELS
        for n in ([10] if name == "recall" else [60])
    }
    assert {key for key, n in overlaps.items() if n} <= SMALL_SPACES
    assert overlaps["arithmetic", 1] > 0  # the search does find what is there


# --- judging answers


def item(completion: str, mark: str = "") -> TaskItem:
    return TaskItem("t", 1, "prompt", completion, mark)


@pytest.mark.parametrize(
    ("right", "mark", "generated", "correct"),
    [
        (" 42\n", "", " 42\n", True),
        (" 42\n", "", " 42", True),
        (" 42\n", "", " 42  \nQuestion: again is", True),
        (" 42\n", "", "42\n", False),  # leading spaces count
        (" 42\n", "", " 421\n", False),
        (" 42\n", "", " 4\n2", False),
        (" 42\n", "", "", False),
        (" 42\n", "", "\n 42\n", False),
        ("\n1 + 1 = 2\nAnswer: 2\n", "Answer: ", "\n1 + 1 = 3\nAnswer: 2\n", True),
        ("\n1 + 1 = 2\nAnswer: 2\n", "Answer: ", "Answer: 2", True),
        ("\n1 + 1 = 2\nAnswer: 2\n", "Answer: ", "\n1 + 1 = 2\n", False),
        ("\n1 + 1 = 2\nAnswer: 2\n", "Answer: ", "2", False),
        ("\n1 + 1 = 2\nAnswer: 2\n", "Answer: ", "Answer: 3\nAnswer: 2", False),
        ("\nx\n#### 7\n", "#### ", "x\n#### 7.0", False),
        ("\n    end(a)\n", "\n", "\n    end(a)\nmore", True),
        ("\n    end(a)\n", "\n", "\n        end(a)\n", False),
        ("\n    end(a)\n", "\n", "\n    end(b)\n", False),
        ("\n    end(a)\n", "\n", "    end(a)\n", False),
    ],
)
def test_an_answer_is_right_or_wrong(right: str, mark: str, generated: str, correct: bool) -> None:
    assert is_correct(item(right, mark), generated) is correct


def test_an_answer_that_never_comes_is_empty_and_wrong() -> None:
    assert extract_answer("no mark here", "Answer: ") == ""
    for name, level in LEVELS:
        one = TASKS[name].items(1, level=level)[0]
        assert one.answer
        assert not is_correct(one, "")


# --- names


def test_unknown_task_and_level() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown task 'list' \(did you mean 'lists'\?\)"):
        get_task("list")
    for level in (0, 6, "1", None):
        with pytest.raises(
            UnknownNameError, match="unknown level of task 'lists' .*choose one of 1"
        ):
            get_task("lists").items(3, level=level)


def test_more_items_than_there_are() -> None:
    few = replace(
        TASKS["lists"],
        make=lambda rng, level: TaskItem("few", level, str(rng.randint(1, 7)), " 1\n"),
    )
    assert len(few.items(7, level=1)) == 7
    for n in (8, 10**9):
        with pytest.raises(UnknownNameError, match=f"n={n} items of .* 1 are not possible: .*to 7"):
            few.items(n, level=1)
    for n in (0, -1):
        with pytest.raises(UnknownNameError, match=f"n={n} items of task 'lists' level 1 are not"):
            few.items(n, level=1)
