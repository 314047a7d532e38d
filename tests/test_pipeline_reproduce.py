"""The pipeline on small notebooks: what runs, what is skipped and why, what an error leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat import v4 as make
from test_reporting_samples import add_activation, add_models, project

from repro import pipeline
from repro.errors import DataUnavailableError, OutputError, UnknownNameError
from repro.pipeline import driver, notebooks, stamps
from repro.pipeline.notebooks import NotebookError
from repro.reporting.records import RecordStore

PARAMETERS = 'profile = "tiny"\nseed = 0\nforce = False'
MEASURE = """
from repro.reporting.records import Measurement, RecordStore
def measure():
    return [Measurement("T", "measured", "x", 1.0, "1")]
store = RecordStore(profile)
print(len(store.measure_or_load("demo", {"a": 1}, measure, force=force)))
"""
WHERE = """
import os, sys
print(sys.executable)
print(os.path.basename(os.getcwd()), os.environ["PYTHONSAFEPATH"], os.environ["HF_HUB_OFFLINE"])
profile
"""


def write(root: Path, name: str, *cells: str, parameters: str | None = PARAMETERS) -> Path:
    head = [make.new_markdown_cell(f"# {name}")]
    if parameters is not None:
        head.append(make.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    body = [make.new_code_cell(source.strip()) for source in cells]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = make.new_notebook(cells=head + body, metadata={"kernelspec": kernel})
    path = root / "notebooks" / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def outputs(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for cell in cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("MPLBACKEND", raising=False)
    return project(tmp_path, monkeypatch)


@pytest.fixture
def executed(monkeypatch) -> list[str]:
    """Names of the notebooks that really ran."""
    ran: list[str] = []
    real = driver.execute

    def noted(notebook, *args, **kwargs):
        ran.append(notebook.name)
        return real(notebook, *args, **kwargs)

    monkeypatch.setattr(driver, "execute", noted)
    return ran


def test_from_nothing_to_unchanged_and_back(home, executed, capsys):
    first = write(home, "00_start", WHERE)
    second = write(home, "01_measure", MEASURE)

    # Nothing of DynaExq is measured here, so the verdicts do not pass: status 1, steps done.
    assert pipeline.reproduce("tiny") == 1
    assert executed == ["00_start", "01_measure"]
    text = capsys.readouterr().out
    assert "[1/2] 00_start: running (never run here)" in text
    assert "01_measure  done" in text
    copy = home / "data" / "runs" / "tiny" / "00_start.ipynb"
    assert outputs(copy) == f"{sys.executable}\nnotebooks 1 1\n'tiny'"
    assert (home / "figures" / "report.html").is_file()
    assert not list((home / "data" / "runs" / "tiny").glob("*.log"))
    assert (home / "data" / "records" / "tiny" / "demo.jsonl").is_file()

    # Nothing changed: nothing runs, and every line says so.
    executed.clear()
    pipeline.reproduce("tiny")
    assert executed == []
    assert capsys.readouterr().out.count("unchanged") == 8  # four lines, four rows of the table

    # Prose and comments are no inputs; code is.
    edit(first, "# 00_start", "# A better title")
    edit(second, "import Measurement, RecordStore", "import Measurement, RecordStore  # why")
    pipeline.reproduce("tiny")
    assert executed == []
    edit(second, '\\"a\\": 1', '\\"a\\": 2')
    pipeline.reproduce("tiny")
    assert executed == ["01_measure"]
    assert "running (changed: notebook code" in capsys.readouterr().out

    # A result that was removed is made again, and only that.
    executed.clear()
    copy.unlink()
    pipeline.reproduce("tiny")
    assert executed == ["00_start"]
    assert "missing or changed: data/runs/tiny/00_start.ipynb" in capsys.readouterr().out

    # Records that somebody damaged count as changed; a mere new time stamp does not.
    executed.clear()
    records = home / "data" / "records" / "tiny" / "demo.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    for line in lines:
        line["provenance"]["time"]["wall_s"] = 99.0
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pipeline.reproduce("tiny")
    assert executed == []
    records.write_text(records.read_text().replace('"value": 1.0', '"value": 2.0'))
    pipeline.reproduce("tiny")
    assert executed == ["01_measure"]
    assert "records of demo" in capsys.readouterr().out


def test_status_says_what_would_run_and_runs_nothing(home, executed, capsys):
    write(home, "00_start", "1 + 1")
    write(home, "01_next", "2 + 2")
    before = sorted(home.rglob("*"))
    assert pipeline.status("tiny") == 0
    text = capsys.readouterr().out
    assert executed == []
    assert sorted(home.rglob("*")) == before
    assert text.count("would run") == 4
    assert text.count("never run here") == 4


def test_committed_records_of_other_profiles_are_inputs_of_the_page(home, capsys):
    write(home, "00_start", "1 + 1")
    add_activation(RecordStore("public"))
    add_models(home)
    assert pipeline.reproduce("tiny") == 1  # nothing of the profile's own is measured
    drawn = {path.relative_to(home).as_posix() for path in home.rglob("*.png")}
    assert "figures/models_training.png" in drawn
    assert "figures/public/table1_decode_activation.png" in drawn
    capsys.readouterr()
    pipeline.status("tiny")
    assert "would run" not in capsys.readouterr().out
    store = RecordStore("public")
    store.path("activation").write_text(store.path("activation").read_text() + "\n")
    quality = home / "data" / "models" / "moe-fine" / "quality.json"
    quality.write_text(quality.read_text() + "\n")
    pipeline.status("tiny")
    text = capsys.readouterr().out
    assert text.count("would run") == 3
    assert "changed: model moe-fine\n" in text  # the notebook; it cannot see the other records
    changed = "data/models/moe-fine/quality.json, data/records/public/activation.jsonl"
    assert f"changed: {changed}" in text


def test_skipping_needs_no_heavy_import(home, root):
    write(home, "00_start", "1 + 1")
    for step in ("00_start", "figures", "report"):
        stamps.write_stamp("tiny", step, stamps.Stamp({}, {}, 1.0, "then"))
    code = (
        "import sys; from repro import pipeline; pipeline.status('tiny');"
        "sys.exit(any(m in sys.modules for m in ('torch', 'papermill', 'matplotlib', 'IPython')))"
    )
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def test_a_failing_cell_is_named_and_leaves_nothing_half(home, capsys):
    write(home, "00_start", "x = 1", "# a comment\n\nprint('before')\n1 / 0")
    write(home, "01_next", "1")
    assert pipeline.reproduce("tiny") == 2
    said = capsys.readouterr()
    assert said.err.startswith(
        "error: 00_start: cell 4 of 4 (`# a comment`) raised ZeroDivisionError: division by zero:"
        " see 'data/runs/tiny/00_start.log'"
    )
    assert said.err.count("\n") == 1
    assert "01_next   not reached" in said.out
    runs = home / "data" / "runs" / "tiny"
    log = (runs / "00_start.log").read_text()
    assert "1 / 0" in log
    assert "ZeroDivisionError" in log
    assert [path.name for path in runs.iterdir()] == ["00_start.log"]
    # Mended, it runs and the log goes.
    edit(home / "notebooks" / "00_start.ipynb", "1 / 0", "1 / 1")
    driver.run_notebook("tiny", notebooks.chapter("00"), {})
    assert not (runs / "00_start.log").exists()
    assert (runs / "00_start.ipynb").is_file()


def test_a_dead_kernel_is_said(home):
    write(home, "00_start", "import os\nos._exit(9)")
    with pytest.raises(NotebookError, match=r"00_start: the kernel died in cell 3 of 3"):
        driver.run_notebook("tiny", notebooks.chapter("00"), {})


def test_an_interruption_leaves_neither_stamp_nor_copy(home, root):
    write(home, "00_start", "import time\nopen('ready', 'w').close()\ntime.sleep(60)")
    code = (
        "from repro.pipeline import driver, notebooks;"
        "driver.run_notebook('tiny', notebooks.chapter('00'), {})"
    )
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(300):
            if (home / "notebooks" / "ready").exists():
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in error
    assert stamps.read_stamp("tiny", "00_start") is None
    assert not [path for path in home.rglob("*") if path.suffix in (".part",)]
    assert not (home / "data" / "runs" / "tiny" / "00_start.ipynb").exists()


def test_parameters_must_exist(home):
    write(home, "00_start", "profile")
    chapter = notebooks.chapter("00_start")
    assert chapter.parameters() == ["profile", "seed", "force"]
    with pytest.raises(UnknownNameError, match="unknown parameter of 00_start 'sead'.*'seed'"):
        notebooks.execute(chapter, {"sead": 1}, env={}, log=home / "log")
    with pytest.raises(UnknownNameError, match="'source'"):
        pipeline.reproduce("tiny", source="folder")
    with pytest.raises(UnknownNameError, match="profile 'tinny'.*'tiny'"):
        pipeline.reproduce("tinny")
    with pytest.raises(UnknownNameError, match="unknown notebook '07'"):
        notebooks.chapter("07")


def test_source_and_force_reach_the_notebook(home, executed):
    write(
        home,
        "00_start",
        "print(source, force)",
        parameters=PARAMETERS + '\nsource: str = "embedded"',
    )
    write(home, "01_next", "print(force)")
    pipeline.reproduce("tiny", source="folder", force=True)
    runs = home / "data" / "runs" / "tiny"
    assert outputs(runs / "00_start.ipynb") == "folder True\n"
    assert outputs(runs / "01_next.ipynb") == "True\n"
    executed.clear()
    pipeline.reproduce("tiny", source="folder")
    assert executed == []
    inputs = stamps.notebook_inputs(notebooks.chapter("00"), stamps.common_inputs("tiny", None))
    stamp = stamps.read_stamp("tiny", "00_start")
    assert stamps.reason_to_run("tiny", stamp, inputs) == "changed: source"


def test_no_notebook_at_all(home):
    with pytest.raises(DataUnavailableError, match="no notebook in 'notebooks'"):
        pipeline.reproduce("tiny")


def test_a_file_that_is_no_notebook(home):
    (home / "notebooks" / "00_start.ipynb").write_text("{")
    with pytest.raises(DataUnavailableError, match=r"notebooks/00_start\.ipynb.*restore it"):
        pipeline.status("tiny")


def test_a_runs_folder_that_cannot_be_written(home):
    write(home, "00_start", "1")
    (home / "data" / "runs").write_text("in the way")
    with pytest.raises(OutputError, match="cannot write"):
        pipeline.reproduce("tiny")


def test_no_room_is_said_before_the_work(home, monkeypatch):
    write(home, "00_start", "1")
    monkeypatch.setattr(driver, "FREE_BYTES_NEEDED", 10**18)
    with pytest.raises(OutputError, match="MB are free"):
        pipeline.reproduce("tiny")


def test_a_model_that_changes_is_an_input(home):
    write(home, "00_start", "1")
    before = stamps.common_inputs("tiny", None)
    (home / "data" / "models" / "small").mkdir(parents=True)
    (home / "data" / "models" / "small" / "config.json").write_text("{}")
    after = stamps.common_inputs("tiny", None)
    assert set(after) - set(before) == {"model small"}
    stamp = stamps.Stamp(before, {}, 1.0, "then")
    assert stamps.reason_to_run("tiny", stamp, after) == "changed: model small"
    assert stamps.reason_to_run("tiny", stamp, before) is None
    (home / "data" / "models" / "small" / "README.md").write_text("prose")
    assert stamps.common_inputs("tiny", None) == after


def test_an_unreadable_stamp_counts_as_none(home):
    path = stamps.stamp_path("tiny", "00_start")
    path.parent.mkdir(parents=True)
    path.write_text('{"inputs": {}}')
    assert stamps.read_stamp("tiny", "00_start") is None
