"""Bad input on the command line is one sentence and exit code 2, an interruption is 130."""

import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from repro import doctor, profiles
from repro.cli import app
from repro.errors import UnknownNameError


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["measure", "activatoin"], "'activatoin'"),
        (["measure", "activation", "--profile", "tny"], "'tny' (did you mean 'tiny'?)"),
        (["measure", "activation", "--source", "cloud"], "'cloud'"),
        (["measure", "activation", "--device", "tpu"], "'tpu'"),
        (["reproduce", "--profile", "paper"], "'paper'"),
        (["reproduce", "--source", "cloud"], "'cloud'"),
        (["refresh", "99"], "'99'"),
        (["status", "--profile", "x"], "'x'"),
        (["figures", "--profile", "x"], "'x'"),
        (["report", "--profile", "x"], "'x'"),
        (["verify", "--profile", "x"], "'x'"),
        (["measure"], "experiment"),
        (["doctr"], "doctr"),
        (["--wrong"], "--wrong"),
        (["status", "--wrong"], "--wrong"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], named: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert named in result.stderr


def test_a_programming_mistake_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistake(*, as_json: bool) -> int:
        raise TypeError("ours")

    monkeypatch.setattr(doctor, "main", mistake)
    result = _run("doctor")
    assert isinstance(result.exception, TypeError)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def imports(*, as_json: bool) -> int:
        import_module("surely_not_installed")

        return 0

    monkeypatch.setattr(doctor, "main", imports)
    result = _run("doctor")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: Python package 'surely_not_installed' is not installed: run `repro doctor`\n"
    )


def test_an_interruption_ends_with_130_and_the_way_on(tmp_path: Path) -> None:
    """A real Ctrl-C while a command runs."""
    started = tmp_path / "started"
    code = (
        "import pathlib, sys, time\n"
        "from repro import cli, doctor\n"
        "started = pathlib.Path(sys.argv.pop())\n"
        "def wait(**_):\n"
        "    started.touch()\n"
        "    time.sleep(60)\n"
        "doctor.main = wait\n"
        "cli.main()\n"
    )
    command = [sys.executable, "-c", code, "doctor", str(started)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not started.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same command to go on" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("arguments", [["--help"], ["measure", "--help"]])
def test_help_needs_no_heavy_import(arguments: list[str]) -> None:
    code = (
        "import sys; from repro.cli import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit as end: print(end.code, {'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.stdout.splitlines()[-1] == "0 set()"


def test_module_and_command_are_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "repro", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: repro ")


def test_profiles_reject_unknown_names_and_parameters() -> None:
    assert profiles.get("tiny").device == "cpu"
    assert profiles.get("tiny", batch_sizes=[1, 2]).batch_sizes == (1, 2)
    with pytest.raises(UnknownNameError, match="unknown profile 'Tiny' .did you mean 'tiny'"):
        profiles.get("Tiny")
    with pytest.raises(UnknownNameError, match="unknown profile parameter 'batch_size'"):
        profiles.get("tiny", batch_size=3)
    with pytest.raises(UnknownNameError, match="unknown profile parameter 'name'"):
        profiles.get("tiny", name="x")


def test_every_profile_can_be_hashed_into_a_key() -> None:
    for name, profile in profiles.PROFILES.items():
        assert profile.name == name
        assert isinstance(hash(profile), int)
