"""The training corpora: which files, which rows, in what proportion.

One declarative table.  A source is read from a folder in the public layout described
in the model cards (JSONL or plain text, ``.xz`` or not); rows under licences that ask
derived works to carry the licence (GFDL) are left out.  Generated sources (word
problems, tasks) need no file.  Nothing of the text is kept: training turns it into
token streams in a cache folder that git ignores.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.errors import DataUnavailableError
from repro.workloads.tasks import TASKS
from repro.workloads.word_problems import generate

COPYLEFT_DOCUMENT_LICENCES = ("GFDL",)
SKIP_LINES = "general/wikitext2_train_overlap_lines.json"


@dataclass(frozen=True)
class Source:
    """One stream of training text.

    Attributes:
        name: of the stream.
        domain: ``text``, ``math``, ``code`` or ``tasks``.
        file: path below the data folder; None when generated.
        weight: share of the training tokens drawn from it (all weights add up to 1).
        fields: JSON fields joined by a newline into one document.
        licence: as the source states it, for the model card.
    """

    name: str
    domain: str
    file: str | None
    weight: float
    fields: tuple[str, ...] = ("text",)
    licence: str = ""


SOURCES: tuple[Source, ...] = (
    Source("wikitext2", "text", "general/wikitext2_train.txt.xz", 0.045, (), "CC BY-SA 3.0"),
    Source("novels", "text", "general/novels_train.jsonl.xz", 0.12, licence="public domain"),
    Source("textbooks", "text", "general/textbooks_train.jsonl.xz", 0.145, licence="CC BY 4.0"),
    Source("speeches", "text", "general/speeches_train.jsonl.xz", 0.01, licence="public domain"),
    Source("gsm8k", "math", "math/gsm8k_train.jsonl.xz", 0.018, ("question", "answer"), "MIT"),
    Source(
        "math4500", "math", "math/math4500_train.jsonl.xz", 0.02, ("problem", "solution"), "MIT"
    ),
    Source("mawps", "math", "math/mawps_train.jsonl", 0.002, ("input", "target"), "MIT"),
    Source(
        "dm-mathematics",
        "math",
        "math/dm_mathematics_train.jsonl.xz",
        0.018,
        ("question", "answer"),
        "Apache-2.0",
    ),
    Source(
        "math-textbooks",
        "math",
        "math/textbooks_train.jsonl.xz",
        0.075,
        licence="CC BY 4.0, CC BY-SA 4.0 (GFDL rows left out)",
    ),
    Source("word-problems", "math", None, 0.047, licence="generated here"),
    Source("python", "code", "code/python_train.jsonl.xz", 0.38, licence="permissive, per package"),
    Source("tasks", "tasks", None, 0.12, licence="generated here"),
)


def _open(path: Path) -> Any:
    opener = lzma.open if path.suffix == ".xz" else open
    return opener(path, "rt", encoding="utf-8")


def read_documents(source: Source, data_dir: Path) -> Iterator[str]:
    """Documents of a file source, in file order.

    Raises:
        DataUnavailableError: the file is missing, truncated or has other fields.
    """
    assert source.file is not None, f"{source.name} is generated"
    path = data_dir / source.file
    if not path.is_file():
        raise DataUnavailableError(
            f"training source {source.name!r} is missing: expected {source.file!r} below "
            f"{str(data_dir)!r}; set REPRO_DATA_DIR or --data to the folder that holds it"
        )
    number = 0
    try:
        with _open(path) as handle:
            if not source.fields:
                yield _without_overlap(handle.read(), data_dir)
                return
            for line in handle:
                number += 1
                row = json.loads(line)
                if str(row.get("license", "")).startswith(COPYLEFT_DOCUMENT_LICENCES):
                    continue
                parts = [row[field] for field in source.fields]
                yield "\n".join(
                    str(int(p)) if isinstance(p, float) and p.is_integer() else str(p)
                    for p in parts
                )
    except (EOFError, lzma.LZMAError, json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
        where = f" near line {max(1, number)}" if source.fields else ""
        raise DataUnavailableError(
            f"training source {source.file!r} cannot be read{where} "
            f"({type(error).__name__}: {error}): copy the file again"
        ) from error


def _without_overlap(text: str, data_dir: Path) -> str:
    """Drop the lines that share text with an evaluation file, if the list is there."""
    listing = data_dir / SKIP_LINES
    if not listing.is_file():
        raise DataUnavailableError(
            f"{SKIP_LINES!r} is missing below {str(data_dir)!r}: without it training would see "
            "lines of the test sets; restore the file"
        )
    found = json.loads(listing.read_text(encoding="utf-8"))
    if not isinstance(found, list):
        raise DataUnavailableError(f"{SKIP_LINES!r} holds no list of line numbers: restore it")
    skip = set(found)
    return "\n".join(line for i, line in enumerate(text.split("\n")) if i not in skip)


def task_documents(seed: int, n_characters: int, longest: int) -> Iterator[str]:
    """Training texts of all tasks at all levels whose prompts fit ``longest`` tokens."""
    from repro.workloads.tasks.recall import LENGTHS

    rng = random.Random(f"task-training-{seed}")
    tasks = list(TASKS.values())
    weights = [t.training_weight for t in tasks]
    done = 0
    while done < n_characters:
        (task,) = rng.choices(tasks, weights)
        levels = [k for k in task.levels if task.name != "recall" or LENGTHS[k] <= longest]
        # Several short items in one document, so that a window shows the pattern more than once.
        n_items = 1 if task.name == "recall" else rng.randint(1, 6)
        text = "".join(task.training_text(rng, rng.choice(levels)) for _ in range(n_items))
        done += len(text)
        yield text


def word_problem_documents(seed: int, n: int) -> Iterator[str]:
    """Training word problems as ``question\\nanswer`` documents."""
    for problem in generate(n, seed, (1, 5)):
        yield f"{problem.question}\n{problem.answer}"
