"""Running notebooks in place: the only way their stored outputs change.

One idea: what is stored must be the same whoever refreshes it.  Outputs, execution counts
and cell ids stay (without counts a checker refuses outputs); time stamps, durations and
the kernel's version go.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import nbformat

from repro import paths
from repro.files import write_text
from repro.pipeline.environment import kernel_env
from repro.pipeline.notebooks import chapter, chapters, execute, text_of

VOLATILE_NOTEBOOK = ("papermill", "language_info", "widgets")
VOLATILE_CELL = ("papermill", "execution")


def strip(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove what differs from run to run; keep outputs, counts and ids (in place)."""
    for name in VOLATILE_NOTEBOOK:
        notebook.metadata.pop(name, None)
    for cell in notebook.cells:
        for name in VOLATILE_CELL:
            cell.metadata.pop(name, None)
        if cell.metadata.get("tags") == []:
            del cell.metadata["tags"]
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: Sequence[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Consecutive pieces of one stream as one: how they are cut depends on timing."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and output.output_type == last.output_type == "stream"
            and output.name == last.name
        ):
            last.text += output.text
        else:
            joined.append(output)
    return joined


def refresh(names: Sequence[str]) -> int:
    """Execute the named notebooks (all when none is named) with their defaults, in place.

    Raises:
        UnknownNameError: no such notebook.
        NotebookError: a notebook failed; its file is left as it was.
    """
    chosen = [chapter(name) for name in names] if names else chapters()
    for notebook in chosen:
        started = time.perf_counter()
        log = paths.runs_dir("refresh") / f"{notebook.name}.log"
        executed = execute(notebook, {}, env=kernel_env(), log=log)
        write_text(notebook.path, text_of(strip(executed)))
        print(f"{notebook.name}: refreshed in {time.perf_counter() - started:.0f} s", flush=True)
    return 0
