"""Provenance: code by its meaning, git by its code, and nothing that names this machine's user."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.reporting import hashing, provenance

CODE = '''"""What it is."""
import os


def scale(x: float, name: str = "a") -> str:
    """Twice."""
    return f"{name}: {2 * x:.3f} {'nested'}"
'''


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("What it is.", "Better words."),
        CODE.replace("import os\n", "import os  # why\n\n\n"),
        CODE.replace('    """Twice."""\n', "    # said elsewhere\n"),
        CODE.replace("    ", "  "),
    ],
)
def test_prose_and_layout_are_no_code(same):
    assert hashing.code_digest(same) == hashing.code_digest(CODE)


@pytest.mark.parametrize(
    "other",
    [
        CODE.replace("2 * x", "3 * x"),
        CODE.replace(".3f", ".4f"),
        CODE.replace('name: str = "a"', 'name: str = "b"'),
        CODE + "x = 1\n",
        CODE.replace("{name}: ", "{name}. "),
    ],
)
def test_every_change_of_code_counts(other):
    assert other != CODE
    assert hashing.code_digest(other) != hashing.code_digest(CODE)


def test_a_block_is_not_its_neighbour():
    inside = "if a:\n    b()\n    c()\n"
    outside = "if a:\n    b()\nc()\n"
    assert hashing.code_digest(inside) != hashing.code_digest(outside)


@given(st.text(alphabet="abc {}'\"#\\\n", max_size=30))
def test_any_text_has_a_digest(text):
    assert len(hashing.code_digest(text)) == 16


def test_a_package_stands_for_its_modules(tmp_path, monkeypatch):
    whole = hashing.source_digest(["repro.reporting"])
    assert whole != hashing.source_digest(["repro.reporting.records"])
    with pytest.raises(ValueError, match="has no file"):
        hashing.source_digest(["repro.no_such_room"])
    with pytest.raises(ValueError, match="neither a module"):
        hashing.source_digest(["numpy"])


def test_kernels_are_found_from_the_clone():
    assert len(hashing.source_digest(["repro.kernels"])) == 16


def test_capture_is_json_and_keeps_time_apart():
    first = provenance.capture(sources=["repro.paths"], seed=3, wall_s=1.0, utc_start="then")
    second = provenance.capture(sources=["repro.paths"], seed=3, wall_s=2.0, utc_start="now")
    assert json.loads(json.dumps(first)) == first
    assert first.pop("time") != second.pop("time")
    assert first == second
    assert str(Path.home()) not in json.dumps(first)
    assert first["device"]["memory_bytes"] > 0
    assert first["cpu"]["threads"] >= 1


@pytest.fixture
def clone(tmp_path, monkeypatch):
    for name in ("notebooks", "data", "src"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    provenance.git_state.cache_clear()
    yield tmp_path
    provenance.git_state.cache_clear()


def git(folder: Path, *arguments: str) -> None:
    names = {
        f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        env={**os.environ, **names},
    )


def test_outside_a_clone_git_is_unknown(clone):
    assert provenance.git_state() == {"commit": None, "dirty": None}


def test_another_projects_clone_is_not_ours(clone, monkeypatch):
    inner = clone / "inner"
    for name in ("notebooks", "data"):
        (inner / name).mkdir(parents=True)
    git(clone, "init", "-q")
    monkeypatch.setenv("REPRO_ROOT", str(inner))
    assert provenance.git_state()["commit"] is None


def test_dirty_means_the_code(clone):
    (clone / "src" / "code.py").write_text("x = 1\n")
    git(clone, "init", "-q")
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "first")
    (clone / "data" / "records.jsonl").write_text("made by a run\n")
    state = provenance.git_state()
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    provenance.git_state.cache_clear()
    (clone / "src" / "code.py").write_text("x = 2\n")
    assert provenance.git_state()["dirty"] is True


def test_without_git_everything_still_works(clone, monkeypatch):
    monkeypatch.setenv("PATH", str(clone))
    assert provenance.git_state() == {"commit": None, "dirty": None}
