"""The training corpora: which files, which rows, in what proportion.

One declarative table.  A source is read from a folder in the layout the table names
(JSONL or plain text, ``.xz`` or not); rows under licences that ask derived works to carry
the licence (GFDL) are left out.  Generated sources (word problems, tasks) need no file.
The text stays where it is: training keeps token streams in a cache outside the repository.
"""

from __future__ import annotations

import json
import lzma
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.errors import DataUnavailableError
from repro.workloads.folder import ENVIRONMENT_NAME
from repro.workloads.tasks import TASKS
from repro.workloads.tasks.recall import LENGTHS
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


def training_folder(named: Path | None) -> Path:
    """The folder of the corpora: ``named``, else ``REPRO_DATA_DIR``.

    Raises:
        DataUnavailableError: none is named, or it is no folder.
    """
    chosen = named or os.environ.get(ENVIRONMENT_NAME)
    if not chosen:
        raise DataUnavailableError(
            f"training needs the folder of the corpora: give --data or set {ENVIRONMENT_NAME}"
        )
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise DataUnavailableError(
            f"data folder {str(folder)!r} does not exist: correct --data or {ENVIRONMENT_NAME}"
        )
    return folder


def source_file(source: Source, data_dir: Path) -> Path:
    """Where ``source`` lies below ``data_dir``.

    Raises:
        DataUnavailableError: it is not there.
    """
    assert source.file is not None, f"{source.name} is generated"
    path = data_dir / source.file
    if not path.is_file():
        raise DataUnavailableError(
            f"training source {source.name!r} is missing: expected {source.file!r} below "
            f"{str(data_dir)!r}, give --data or set {ENVIRONMENT_NAME} to the folder that holds it"
        )
    return path


def _open(path: Path) -> Any:
    opener = lzma.open if path.suffix == ".xz" else open
    return opener(path, "rt", encoding="utf-8")


def read_documents(source: Source, data_dir: Path) -> Iterator[str]:
    """Documents of a file source, in file order.

    Raises:
        DataUnavailableError: the file is missing, truncated or has other fields.
    """
    path = source_file(source, data_dir)
    skip = None if source.fields else _overlap_lines(data_dir)
    number = 0
    try:
        with _open(path) as handle:
            if skip is not None:
                lines = enumerate(handle.read().split("\n"))
                yield "\n".join(line for i, line in lines if i not in skip)
                return
            for line in handle:
                number += 1
                row = json.loads(line)
                if str(row.get("license", "")).startswith(COPYLEFT_DOCUMENT_LICENCES):
                    continue
                yield "\n".join(_plain(row[field]) for field in source.fields)
    except (EOFError, lzma.LZMAError, OSError, ValueError, LookupError, AttributeError) as error:
        where = f" at line {max(1, number)}" if source.fields else ""
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise DataUnavailableError(
            f"training source {source.file!r} cannot be read{where} "
            f"({type(error).__name__}: {reason}): copy the file again"
        ) from error


def _plain(value: Any) -> str:
    """A field as text; numbers that are whole without the ``.0`` that JSON gave them."""
    if not isinstance(value, str | int | float):
        raise ValueError(f"a field holds {type(value).__name__}, not text")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _overlap_lines(data_dir: Path) -> set[int]:
    """Numbers of WikiText's training lines that share text with an evaluation file.

    Raises:
        DataUnavailableError: the list is missing or is none.
    """
    listing = data_dir / SKIP_LINES
    try:
        found = json.loads(listing.read_text(encoding="utf-8"))
        if not isinstance(found, list) or not all(isinstance(n, int) for n in found):
            raise ValueError("no list of line numbers")
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DataUnavailableError(
            f"{SKIP_LINES!r} below {str(data_dir)!r} cannot be read ({reason}): restore it, "
            "without it training would see lines of the test sets"
        ) from error
    return set(found)


def task_documents(seed: int, n_characters: int, longest: int) -> Iterator[str]:
    """Training texts of all tasks at all levels whose prompts fit ``longest`` tokens.

    Ends with the first document that reaches ``n_characters`` in all.
    """
    rng = random.Random(f"task-training-{seed}")
    levels = {
        task.name: [k for k in task.levels if task.name != "recall" or LENGTHS[k] <= longest]
        for task in TASKS.values()
    }
    tasks = [task for task in TASKS.values() if levels[task.name]]
    weights = [task.training_weight for task in tasks]
    done = 0
    while done < n_characters:
        (task,) = rng.choices(tasks, weights)
        # Several short items in one document, so that a window shows the pattern more than once.
        n_items = 1 if task.name == "recall" else rng.randint(1, 6)
        text = "".join(
            task.training_text(rng, rng.choice(levels[task.name])) for _ in range(n_items)
        )
        done += len(text)
        yield text


def word_problem_documents(seed: int, n: int) -> Iterator[str]:
    """Training word problems as ``question\\nanswer`` documents."""
    for problem in generate(n, seed, (1, 5)):
        yield f"{problem.question}\n{problem.answer}"
