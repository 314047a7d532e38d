"""Notebooks are checked strictly: facts must agree, noise must not matter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4 as make

QUIET = "import os; print(os.environ['HF_HUB_OFFLINE'], os.environ['OMP_NUM_THREADS'])"
NOISY = "import sys; print('a fresh warning', file=sys.stderr); print(43)"


def _stored(source: str, count: int, text: str) -> nbformat.NotebookNode:
    output = make.new_output("stream", name="stdout", text=text)
    return make.new_code_cell(source, execution_count=count, outputs=[output])


@pytest.fixture
def check(root: Path, tmp_path: Path):
    """Runs nbval on a notebook of these cells, with the project's own settings."""
    for name in ("notebooks", "tests"):
        (tmp_path / name).mkdir()
    shutil.copy(root / "notebooks" / "conftest.py", tmp_path / "notebooks")
    shutil.copy(root / "tests" / "nbval_sanitize.cfg", tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(*cells: nbformat.NotebookNode) -> subprocess.CompletedProcess[str]:
        nbformat.write(make.new_notebook(cells=list(cells)), tmp_path / "notebooks" / "x.ipynb")
        command = [
            *(sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env"),
            *("--nbval-sanitize-with", "tests/nbval_sanitize.cfg"),
            *("-p", "no:xdist", "-p", "no:cacheprovider", "notebooks"),
        ]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "HF_"))}
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    return run


def test_noise_passes_and_a_changed_fact_fails(check) -> None:
    done = check(
        _stored(QUIET, 1, "1 2\n"),
        _stored(NOISY, 2, "43\n"),
        _stored("print('took 0.31 s')", 3, "took 12 s\n"),
        _stored("print(86)", 4, "85\n"),
    )
    assert "1 failed, 3 passed" in done.stdout, done.stdout[-3000:]


def test_a_stored_output_without_its_run_fails(check) -> None:
    never_run = _stored("print(1)", 1, "1\n")
    never_run.execution_count = None
    assert check(never_run).returncode != 0
