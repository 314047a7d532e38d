"""Finding notebooks, reading their parameters, executing one of them headlessly.

One idea: an executed copy is whole or absent.  papermill runs the cells in a kernel of
this very interpreter, in the notebooks' folder; the result is written under a temporary
name and moved.  A parameter the notebook does not have is an error, not a warning.
"""

from __future__ import annotations

import ast
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from repro import paths
from repro.errors import DataUnavailableError, ReproError, unknown_name
from repro.files import write_text

NAME = re.compile(r"\d\d_\w+")
PARAMETERS = "parameters"
INJECTED = "injected-parameters"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
Progress = Callable[[int, int, float], None]


class NotebookError(ReproError):
    """A notebook that could not be executed to its end."""


@dataclass(frozen=True)
class Chapter:
    """One notebook: its name, its file, and the names its parameters cell assigns."""

    name: str
    path: Path

    def read(self) -> nbformat.NotebookNode:
        """The stored notebook.

        Raises:
            DataUnavailableError: the file is no notebook.
        """
        try:
            return nbformat.read(self.path, as_version=4)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise DataUnavailableError(
                f"{paths.relative(self.path)!r} cannot be read as a notebook ({error}): "
                "restore it from git"
            ) from error

    def parameters(self) -> list[str]:
        """Names assigned in the cell tagged ``parameters``, in order."""
        return parameter_names(self.read())


def parameter_names(notebook: nbformat.NotebookNode) -> list[str]:
    """Names that the cells tagged ``parameters`` assign."""
    names: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type != "code" or PARAMETERS not in cell.metadata.get("tags", []):
            continue
        for statement in ast.parse(cell.source).body:
            targets: list[ast.expr] = []
            if isinstance(statement, ast.Assign):
                targets = statement.targets
            elif isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def chapters() -> list[Chapter]:
    """The project's notebooks in order of their numbers."""
    found = sorted(paths.notebooks_dir().glob("*.ipynb"))
    return [Chapter(path.stem, path) for path in found if NAME.fullmatch(path.stem)]


def chapter(name: str) -> Chapter:
    """One notebook by its number (``01``), its name or its file name.

    Raises:
        UnknownNameError: no such notebook.
    """
    wanted = Path(name).name.removesuffix(".ipynb")
    known = chapters()
    for candidate in known:
        if wanted in (candidate.name, candidate.name.split("_")[0]):
            return candidate
    raise unknown_name("notebook", name, [candidate.name for candidate in known])


def execute(
    notebook: Chapter,
    parameters: Mapping[str, Any],
    *,
    env: Mapping[str, str],
    log: Path,
    progress: Progress | None = None,
) -> nbformat.NotebookNode:
    """Run all cells and return the executed notebook; nothing is written but the log.

    Raises:
        UnknownNameError: a parameter the notebook does not have.
        NotebookError: a cell failed or the kernel died; the log has the details.
    """
    known = notebook.parameters()
    for name in parameters:
        if name not in known:
            raise unknown_name(f"parameter of {notebook.name}", name, known)
    # Imported here: skipping a notebook must not cost the import.
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    from repro.pipeline.kernel import kernel_manager

    watch = _Watch(notebook.read(), progress)
    try:
        return papermill.execute_notebook(
            str(notebook.path),
            None,
            parameters=dict(parameters),
            kernel_name="python3",
            language="python",
            cwd=str(paths.notebooks_dir()),
            progress_bar=False,
            start_timeout=120,
            kernel_manager_class=kernel_manager(env),
            on_cell_start=watch.cell_started,
        )
    except PapermillExecutionError as error:
        text = _ANSI.sub("", "\n".join(error.traceback))
        _write_log(log, notebook, watch, error.source, text)
        raise NotebookError(
            f"{notebook.name}: {watch.where()} raised {error.ename}: {_one_line(error.evalue)}: "
            f"see {paths.relative(log)!r}"
        ) from None
    except DeadKernelError as error:
        _write_log(log, notebook, watch, watch.source, str(error))
        raise NotebookError(
            f"{notebook.name}: the kernel died in {watch.where()}, which usually means that "
            f"memory ran out: see {paths.relative(log)!r}, free memory and run it again"
        ) from None


class _Watch:
    """Which cell runs, counted as the reader of the stored notebook counts."""

    def __init__(self, stored: nbformat.NotebookNode, progress: Progress | None) -> None:
        self.n_cells = len(stored.cells)
        self.progress = progress
        self.started = time.perf_counter()
        self.index = 0
        self.source = ""
        self.n_injected = 0

    def cell_started(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        """Called by the client before each cell, markdown included."""
        if INJECTED in cell.metadata.get("tags", []):
            self.n_injected += 1
        self.index = cell_index - self.n_injected
        self.source = cell.source
        if self.progress is not None:
            self.progress(self.index + 1, self.n_cells, time.perf_counter() - self.started)

    def where(self) -> str:
        """``cell 12 of 31 (`first line`)``."""
        lines = [line for line in self.source.splitlines() if line.strip()]
        first = lines[0].strip()[:60] if lines else ""
        return f"cell {self.index + 1} of {self.n_cells} (`{first}`)"


def _one_line(text: str) -> str:
    return " ".join(_ANSI.sub("", text).split())


def _write_log(log: Path, notebook: Chapter, watch: _Watch, source: str, traceback: str) -> None:
    text = f"{notebook.name}: {watch.where()}\n\n{source}\n\n{traceback}\n"
    # Home and environment folders say nothing to the reader and name the machine.
    write_text(log, text.replace(str(Path(sys.prefix)), "<environment>"))


def text_of(notebook: nbformat.NotebookNode) -> str:
    """A notebook as the text of its file."""
    return str(nbformat.writes(notebook, version=4, indent=1, ensure_ascii=False)).rstrip() + "\n"
