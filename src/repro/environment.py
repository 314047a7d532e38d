"""Make the environment that the Makefile's targets run in.

The one idea: a target never asks the reader to install something first.  Without an active
environment it gets its own, ``.venv``, from ``requirements.lock``; an active virtualenv or
conda environment is used as it is, and added to only when it lacks something, with the reason
printed.

``.venv`` is ready when it holds a stamp named after the content of requirements.lock and
pyproject.toml (a clone has no useful times); an interrupted set-up goes on where pip left off.

Standard library only: this runs before anything is installed, with ``PYTHONPATH=src``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

from repro.errors import OutputError, ReproError
from repro.files import output_error
from repro.lockfile import LOCK

DISTRIBUTION = "expert-precision-repro"

#: Imported once after installing, in two processes: proves that the environment works, and leaves
#: compiled files of what is really used (compiling all 20,000 modules takes twice as long).
WARM_UP = (
    ("torch", "transformers", "transformers.models.qwen3_moe", "transformers.models.qwen2_moe"),
    (
        "datasets",
        "matplotlib.pyplot",
        "seaborn",
        "papermill",
        "ipykernel.kernelapp",
        "nbval.plugin",
    ),
)

SIZE = " (about 2 GB on disk; minutes on a slow line)"

#: Asks the active environment what it lacks; prints one reason or nothing.
PROBE = """
import json, sys, tomllib
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

def reason():
    try:
        found = metadata.distribution({name!r})
    except metadata.PackageNotFoundError:
        return "the package is not installed in it"
    origin = json.loads(found.read_text("direct_url.json") or "{{}}")
    if Path(unquote(urlparse(origin.get("url", "")).path)).resolve() != Path.cwd().resolve():
        return "it holds the package of another folder"
    if not origin.get("dir_info", {{}}).get("editable"):
        return "it holds a copy of the package that does not follow this folder"
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return "it lacks packaging"
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate():
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            return f"it lacks {{wanted.name}}"
        if not wanted.specifier.contains(version, prereleases=True):
            return f"it has {{wanted.name}} {{version}}, needed is {{wanted.specifier}}"
    return ""

print(reason())
"""


class SetupError(ReproError):
    """The environment could not be made."""


class Steps:
    """Runs the steps of a set-up: one line each, the tools' own words in a log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.start_s = time.monotonic()

    def say(self, text: str) -> None:
        """One line of progress, with the seconds since the start."""
        print(f"set-up [{time.monotonic() - self.start_s:4.0f} s] {text}", flush=True)

    def run(self, *commands: Sequence[str | Path], what: str, hint: str = "") -> None:
        """Run ``commands`` at the same time and wait for all of them."""
        self.say(f"{what}{hint}")
        # The result must be importable code with compiled files, whatever the caller's shell says.
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        env.pop("PYTHONPATH", None)
        with self.log.open("a", encoding="utf-8") as log:
            running = [
                subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, env=env)
                for command in commands
            ]
            try:
                codes = [process.wait() for process in running]
            except KeyboardInterrupt:
                for process in running:
                    process.terminate()
                raise
        if any(codes):
            raise SetupError(
                f"set-up failed while {what} ({self._last_words()}): check the network or package "
                f"index and the free disk space, then run make again (log: {self._log_name()})"
            )

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        errors = [line for line in said if line.startswith(("ERROR:", "error:"))]
        return (errors or said or ["no output"])[-1][:200]

    def _log_name(self) -> str:
        try:
            return self.log.relative_to(Path.cwd()).as_posix()
        except ValueError:
            return str(self.log)


def pip(python: Path, *arguments: str) -> list[str | Path]:
    """A pip command that neither compiles (done later, in parallel) nor asks."""
    return [python, "-m", "pip", "install", "--no-compile", "--no-input", *arguments]


def is_usable(python: Path) -> bool:
    """Whether this interpreter starts and has pip; an interrupted ``venv`` leaves one without."""
    try:
        done = subprocess.run(
            [python, "-c", "import pip"], check=False, capture_output=True, timeout=60
        )
    except OSError:
        return False
    return done.returncode == 0


def make_venv(folder: Path, stamp: Path) -> None:
    """Create ``folder`` from the running Python, install the lock and this package into it."""
    python = folder / "bin" / "python"
    steps = Steps(folder.with_name(f"{folder.name}-setup.log"))
    steps.log.unlink(missing_ok=True)
    if not is_usable(python):
        version = ".".join(map(str, sys.version_info[:3]))
        steps.say(f"creating {folder.name} with Python {version}")
        try:
            venv.create(folder, clear=True, with_pip=True, symlinks=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SetupError(
                f"cannot create {folder.name} ({error}): make its folder writable, and see that "
                "Python has the venv module (Debian: apt install python3-venv), or use conda"
            ) from error
    for old in folder.glob("ready-*"):
        old.unlink()
    steps.run(pip(python, "--upgrade", "pip"), what="updating pip")
    # One command with the exact release of torch in it: a range could pull a CUDA build of 3 GB.
    steps.run(pip(python, "-r", LOCK), what=f"installing {LOCK}", hint=SIZE)
    install_package(python, steps)
    warm_up(python, steps)
    stamp.touch()
    steps.log.unlink(missing_ok=True)
    steps.say("ready")


def install_package(python: Path, steps: Steps) -> None:
    """This package, editable; its requirements are there already."""
    command = pip(python, "--no-build-isolation", "--no-deps", "-e", ".")
    steps.run(command, what="installing the package")


def warm_up(python: Path, steps: Steps) -> None:
    """Import what will be used, see ``WARM_UP``."""
    commands: list[list[str | Path]] = [
        [python, "-c", f"import {', '.join(modules)}"] for modules in WARM_UP
    ]
    steps.run(*commands, what="importing everything once")


def use_active(python: Path) -> None:
    """Add to an environment that the user made only what it lacks."""
    probe = [str(python), "-c", PROBE.format(name=DISTRIBUTION)]
    done = subprocess.run(
        probe, stdout=subprocess.PIPE, text=True, check=False, env=_without_path()
    )
    reason = done.stdout.strip() if done.returncode == 0 else "it cannot be examined"
    if not reason:
        return
    steps = Steps(Path(".setup.log").resolve())
    steps.log.unlink(missing_ok=True)
    steps.say(f"installing into the active environment, because {reason}")
    has_torch = subprocess.run(
        [python, "-c", "import torch"], check=False, capture_output=True, env=_without_path()
    )
    if has_torch.returncode == 0:
        # Keep the torch that fits this machine's GPU; the ranges decide about the rest.
        steps.run(pip(python, "-e", ".[dev]"), what="installing the package and what it needs")
    else:
        steps.run(pip(python, "-r", LOCK), what=f"installing {LOCK}", hint=SIZE)
        install_package(python, steps)
    steps.log.unlink(missing_ok=True)
    steps.say("ready")


def _without_path() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def main(arguments: Iterable[str] | None = None) -> int:
    """``--stamp`` for the project's own .venv, ``--active`` for the user's environment."""
    parser = argparse.ArgumentParser(prog="python -m repro.environment", description=main.__doc__)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--stamp", type=Path, help="make .venv; this file in it says that it is done")
    kind.add_argument("--active", type=Path, metavar="PYTHON", help="use this Python's environment")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        if options.active is not None:
            use_active(options.active)
        else:
            make_venv(options.stamp.resolve().parent, options.stamp.resolve())
    except ReproError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a read-only or full folder, wherever it shows first
        print(f"error: {output_error(Path(error.filename or '.venv'), error)}", file=sys.stderr)
        return OutputError.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted: run make again to go on with the set-up", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
