"""Refreshing in place, and one environment for refreshing, reproducing and checking."""

import sys
from pathlib import Path

import nbformat
import pytest
from test_pipeline_reproduce import outputs, write
from test_reporting_samples import project

from repro import pipeline
from repro.errors import UnknownNameError
from repro.pipeline.environment import KERNEL_ENV, kernel_env
from repro.pipeline.notebooks import NotebookError, text_of
from repro.pipeline.refreshing import strip

SHOWN = """
import sys
print("one"); sys.stdout.flush()
print("two")
print(profile)
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    return project(tmp_path, monkeypatch)


def test_refresh_twice_gives_the_same_bytes(home, capsys):
    path = write(home, "00_start", SHOWN, "from IPython.display import Markdown; Markdown('x')")
    ids = [cell.id for cell in nbformat.read(path, as_version=4).cells]
    assert pipeline.refresh(["00"]) == 0
    first = path.read_bytes()
    assert pipeline.refresh([]) == 0
    assert path.read_bytes() == first
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell.id for cell in notebook.cells] == ids
    assert [c.execution_count for c in notebook.cells if c.cell_type == "code"] == [1, 2, 3]
    assert set(notebook.metadata) == {"kernelspec"}
    assert [dict(cell.metadata) for cell in notebook.cells] == [
        {},
        {"tags": ["parameters"]},
        {},
        {},
    ]
    assert outputs(path).startswith("one\ntwo\ntiny\n")
    assert len(notebook.cells[2].outputs) == 1
    assert str(home) not in first.decode()
    assert "00_start: refreshed" in capsys.readouterr().out


def test_a_failure_leaves_the_notebook_as_it_was(home):
    path = write(home, "00_start", "raise RuntimeError('no luck')")
    before = path.read_bytes()
    with pytest.raises(NotebookError, match="RuntimeError: no luck"):
        pipeline.refresh(["00_start.ipynb"])
    assert path.read_bytes() == before


def test_an_unknown_notebook_is_named(home):
    write(home, "00_start", "1")
    with pytest.raises(UnknownNameError, match="unknown notebook '09'"):
        pipeline.refresh(["09"])


def test_strip_joins_the_pieces_of_a_stream():
    new = nbformat.v4.new_output
    pieces = [
        new("stream", name="stdout", text="a"),
        new("stream", name="stdout", text="b"),
        new("stream", name="stderr", text="c"),
        new("stream", name="stdout", text="d"),
    ]
    cell = nbformat.v4.new_code_cell("x", outputs=pieces, metadata={"tags": [], "papermill": {}})
    notebook = strip(nbformat.v4.new_notebook(cells=[cell], metadata={"papermill": {}}))
    assert [(o.name, o.text) for o in notebook.cells[0].outputs] == [
        ("stdout", "ab"),
        ("stderr", "c"),
        ("stdout", "d"),
    ]
    assert notebook.cells[0].metadata == notebook.metadata == {}
    assert text_of(notebook).endswith("}\n")


def test_checking_uses_the_same_environment(root):
    text = (root / "notebooks" / "conftest.py").read_text()
    assert "from repro.pipeline.environment import kernel_env" in text
    assert "os.environ.update(kernel_env())" in text


def test_only_asking_for_the_hub_opens_the_network():
    assert kernel_env()["HF_HUB_OFFLINE"] == "1"
    assert kernel_env("folder")["HF_HUB_OFFLINE"] == "1"
    assert kernel_env("hub")["HF_HUB_OFFLINE"] == "0"
    assert kernel_env().items() >= KERNEL_ENV.items()


def test_the_kernel_is_this_interpreter_even_with_another_installed(home, monkeypatch, tmp_path):
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        '{"argv": ["/nonexistent/python", "-f", "{connection_file}"], '
        '"display_name": "other", "language": "python"}'
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    path = write(home, "00_start", "import sys; print(sys.executable)")
    pipeline.refresh(["00"])
    assert outputs(path) == f"{sys.executable}\n"
