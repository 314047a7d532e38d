"""The Makefile explains itself, sets the environment, and fails in one sentence."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

WANTED = {
    "help", "reproduce", "test", "notebooks", "lab", "figures", "report", "verify", "refresh",
    "status", "clean", "lint", "typecheck", "lock",
}  # fmt: skip


def _base() -> dict[str, str]:
    """The environment without what an outer make has put into it."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "HF_"))}


def _make(root: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=root,
        env={**_base(), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def _targets(root: Path) -> set[str]:
    text = (root / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (names,) = re.findall(r"^\.PHONY:(.*)$", text, flags=re.MULTILINE)
    return set(names.split()) - {"env"}


def test_make_alone_lists_every_target_with_its_time(root: Path) -> None:
    lines = _make(root).stdout.splitlines()
    listed = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert set(listed) == _targets(root)
    assert set(listed) >= WANTED
    for line in listed.values():
        assert re.search(r"\(.*(second|min|time).*\)$", line), f"no time estimate: {line}"


def _shown_environment(root: Path, *arguments: str, **env: str) -> dict[str, str]:
    shown = _make(root, "--eval=show: ; @env", "show", *arguments, **env).stdout
    return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)


def test_programs_see_a_fixed_environment(root: Path) -> None:
    seen = _shown_environment(root, PYTHONHASHSEED="7")
    assert seen["PYTHONSAFEPATH"] == "1"
    assert seen["PYTHONHASHSEED"] == "0"
    assert seen["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
    assert seen["HF_HUB_OFFLINE"] == "1"


def test_the_network_is_used_only_when_asked_for(root: Path) -> None:
    assert _shown_environment(root, HF_HUB_OFFLINE="0")["HF_HUB_OFFLINE"] == "0"
    assert _shown_environment(root, "SOURCE=hub")["HF_HUB_OFFLINE"] == "0"
    assert _shown_environment(root, "SOURCE=folder")["HF_HUB_OFFLINE"] == "1"


def test_a_python_that_does_not_fit_is_one_sentence(root: Path) -> None:
    done = _make(root, "status", "PYTHON=/nowhere/python")
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "/nowhere/python is no Python 3.11 to 3.13" in errors[0]


def test_clean_keeps_what_was_measured(root: Path) -> None:
    removed = _make(root, "--dry-run", "clean", "clean-cache").stdout
    assert "data/runs" in removed
    for kept in ("data/records", "data/traces", "data/models", "figures", "rm -rf data "):
        assert kept not in removed


def _readme_commands(root: Path) -> list[str]:
    """The first shell block of the README, less getting there."""
    text = (root / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```(?:bash|sh)\n(.*?)```", text, flags=re.DOTALL)
    assert block, "README.md shows no commands"
    lines = [line.partition("#")[0].strip() for line in block.group(1).splitlines()]
    return [line for line in lines if line and not line.startswith(("git clone", "cd "))]


def test_ci_runs_exactly_the_two_commands_of_the_readme(root: Path) -> None:
    script = (root / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    commands = re.findall(r"^run (.*)$", script, flags=re.MULTILINE)
    assert commands == ["make reproduce", "make test"]
    assert commands == _readme_commands(root)


def test_ci_fails_when_a_command_fails(root: Path, tmp_path: Path) -> None:
    """The script with a make that fails at its second target."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(root / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text("reproduce: ; @echo done\ntest: ; @exit 3\n")
    command = ["bash", str(tmp_path / ".ci" / "run")]
    done = subprocess.run(
        command, cwd="/", env=_base(), capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "==> make reproduce\ndone\n" in done.stdout
    assert "==> make test\n" in done.stdout
