"""Setting up: what an active environment lacks is found, and failures are sentences."""

import subprocess
import sys
from pathlib import Path

import pytest

from repro import environment


def _reason(root: Path, *flags: str, cwd: Path | None = None) -> str:
    """What the probe says about this Python."""
    code = environment.PROBE.format(name=environment.DISTRIBUTION)
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, cwd=cwd or root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_environment_without_packages_lacks_ours(root: Path) -> None:
    assert _reason(root, "-S", "-I") == "the package is not installed in it"


def _fake_install(folder: Path, origin: Path, editable: str) -> None:
    info = folder / "expert_precision_repro-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: expert-precision-repro\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(
        f'{{"url": "{origin.as_uri()}", "dir_info": {{"editable": {editable}}}}}'
    )


@pytest.mark.parametrize(
    ("elsewhere", "editable", "reason"),
    [
        (True, "true", "it holds the package of another folder"),
        (False, "false", "it holds a copy of the package that does not follow this folder"),
        (False, "true", ""),
    ],
)
def test_an_installed_package_must_follow_this_folder(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: bool,
    editable: str,
    reason: str,
) -> None:
    _fake_install(tmp_path / "site", tmp_path if elsewhere else root, editable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert _reason(root) == reason


def test_a_version_outside_its_range_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_install(tmp_path / "site", tmp_path, "true")
    project = '[project]\ndependencies = ["pytest<1"]\n[project.optional-dependencies]\ndev = []\n'
    (tmp_path / "pyproject.toml").write_text(project)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    reason = _reason(root, cwd=tmp_path)
    assert reason == f"it has pytest {pytest.__version__}, needed is <1"


def test_a_missing_requirement_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_install(tmp_path / "site", tmp_path, "true")
    project = (
        '[project]\ndependencies = ["no-such-package-here", "x; python_version < \'3\'"]\n'
        "[project.optional-dependencies]\ndev = []\n"
    )
    (tmp_path / "pyproject.toml").write_text(project)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert _reason(root, cwd=tmp_path) == "it lacks no-such-package-here"


def test_a_failing_step_is_one_sentence_with_its_last_words(tmp_path: Path) -> None:
    steps = environment.Steps(tmp_path / "log")
    fails = [sys.executable, "-c", "print('ERROR: no route'); print('later'); raise SystemExit(1)"]
    works = [sys.executable, "-c", "pass"]
    with pytest.raises(environment.SetupError) as caught:
        steps.run(works, fails, what="trying")
    sentence = str(caught.value)
    assert sentence.startswith("set-up failed while trying (ERROR: no route): ")
    assert "\n" not in sentence
    assert "run make again" in sentence


def test_steps_run_side_by_side(tmp_path: Path) -> None:
    """Each of two steps waits for the other's file: one after the other would never end."""
    code = (
        "import pathlib, sys, time\n"
        "mine, other = map(pathlib.Path, sys.argv[1:])\n"
        "mine.touch()\n"
        "end = time.monotonic() + 20\n"
        "while not other.exists():\n"
        "    assert time.monotonic() < end\n"
        "    time.sleep(0.01)\n"
    )
    a, b = tmp_path / "a", tmp_path / "b"
    environment.Steps(tmp_path / "log").run(
        [sys.executable, "-c", code, a, b], [sys.executable, "-c", code, b, a], what="meeting"
    )


def test_an_unfinished_environment_is_not_usable(tmp_path: Path) -> None:
    assert environment.is_usable(Path(sys.executable))
    assert not environment.is_usable(tmp_path / "bin" / "python")
    without_pip = tmp_path / "python"
    without_pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    without_pip.chmod(0o755)
    assert not environment.is_usable(without_pip)


def test_a_folder_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    code = environment.main(["--stamp", str(tmp_path / "file" / "env" / "ready")])
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
