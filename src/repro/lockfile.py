"""requirements.lock and environment.yml, both made from pyproject.toml.

The one idea: a version is decided in one place.  ``pyproject.toml`` says which ranges work;
``requirements.lock`` holds the exact versions of one environment that was really resolved from
them; ``environment.yml`` repeats the lock for conda.  ``python -m repro.lockfile`` writes both
(``make lock``); a test keeps the three equal.

Left out on purpose: hashes and per-platform locks.  The lock must install from a CPU build of
torch as from a CUDA build, so it carries no local version such as ``+cpu``.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from repro.errors import ReproError
from repro.files import write_text

LOCK = "requirements.lock"
CONDA = "environment.yml"
PROJECT = "pyproject.toml"
CONDA_PYTHON = "3.12"

#: Packages that only exist for some systems; elsewhere the lock must still resolve.
MARKERS = {"triton": "platform_system == 'Linux'"}
#: Kept at their locked version by ``make lock`` unless another is named: which torch and which
#: triton belong together is decided by torch's release on the package index, and a range would
#: pull the newest of each.
HELD = ("torch", "triton")

#: Part of every environment, or this package itself.
NOT_LOCKED = {"pip", "expert-precision-repro"}

HEADER = """\
# Exact versions of one environment resolved from pyproject.toml on {python}.
# Written by `make lock`; environment.yml repeats it for conda.
"""


def normalized(name: str) -> str:
    """The name by which the package index compares (lower case, one dash)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement: str) -> str:
    """``transformers`` of ``transformers>=5.17,<6; marker``."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    if match is None:
        raise ReproError(f"{requirement!r} is no requirement: correct it in {PROJECT}")
    return normalized(match.group())


def direct_requirements(root: Path) -> list[str]:
    """What pyproject.toml asks for: the dependencies and the developer's tools."""
    project = tomllib.loads((root / PROJECT).read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["dev"]]


def locked_lines(root: Path) -> list[str]:
    """The lines of the lock without comments."""
    lines = (root / LOCK).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def locked_versions(root: Path) -> dict[str, str]:
    """Exact version by normalized name."""
    pins = (line.partition(";")[0].strip().split("==") for line in locked_lines(root))
    return {normalized(name): version for name, version in pins}


def lock_text(frozen: list[str], python: str) -> str:
    """The lock made of ``pip freeze --all`` lines."""
    pins = {}
    for line in frozen:
        name, _, version = line.strip().partition("==")
        if line.startswith(("#", "-")) or not version or normalized(name) in NOT_LOCKED:
            continue
        marker = MARKERS.get(normalized(name))
        pin = f"{name}=={version.partition('+')[0]}"
        pins[normalized(name)] = f"{pin}; {marker}" if marker else pin
    return HEADER.format(python=python) + "".join(f"{pins[name]}\n" for name in sorted(pins))


def conda_text(locked: list[str]) -> str:
    """environment.yml: Python from conda, everything else exactly as locked, then the package."""
    entries = "".join(
        f'      - "{line}"\n' if ";" in line else f"      - {line}\n" for line in locked
    )
    return (
        "# Written by `make lock` from requirements.lock.\n"
        "# Use: conda env create -f environment.yml && conda activate expert-precision-repro\n"
        "name: expert-precision-repro\n"
        "channels:\n"
        "  - conda-forge\n"
        "dependencies:\n"
        f"  - python={CONDA_PYTHON}\n"
        "  - pip\n"
        "  - pip:\n"
        f"{entries}"
        "      - -e .\n"
    )


def resolve(requirements: list[str], held: dict[str, str]) -> list[str]:
    """Install ``requirements`` into a new environment; what pip then finds in it."""
    with tempfile.TemporaryDirectory(prefix="lock-") as folder:
        environment = Path(folder) / "env"
        _run(sys.executable, "-m", "venv", str(environment))
        python = str(environment / "bin" / "python")
        pip = (python, "-m", "pip", "install", "--quiet", "--no-compile")
        _run(*pip, "--upgrade", "pip")
        pins = Path(folder) / "held.txt"
        pins.write_text("".join(f"{name}=={version}\n" for name, version in held.items()))
        # First, alone: a range would let pip choose another build than the held release.
        _run(*pip, f"torch=={held['torch']}")
        _run(*pip, "--constraint", str(pins), *requirements)
        return _run(python, "-m", "pip", "freeze", "--all").splitlines()


def _run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ReproError(
            f"{' '.join(command[1:5])} ... failed (see above): "
            f"check the network and the ranges in {PROJECT}"
        )
    return done.stdout


def write_conda(root: Path) -> None:
    """Write environment.yml from the lock as it stands."""
    write_text(root / CONDA, conda_text(locked_lines(root)))


def main(arguments: list[str] | None = None) -> int:
    """Resolve anew, or with ``--conda-only`` repeat the present lock."""
    parser = argparse.ArgumentParser(prog="python -m repro.lockfile", description=main.__doc__)
    parser.add_argument("--conda-only", action="store_true", help="write environment.yml only")
    for name in HELD:
        parser.add_argument(f"--{name}", help=f"version of {name} (default: the locked one)")
    options = parser.parse_args(arguments)
    root = Path.cwd()
    try:
        if not options.conda_only:
            present = locked_versions(root)
            held = {name: getattr(options, name) or present[name] for name in HELD}
            python = f"Python {sys.version_info.major}.{sys.version_info.minor}, {sys.platform}"
            frozen = resolve(direct_requirements(root), held)
            write_text(root / LOCK, lock_text(frozen, python))
            print(f"{LOCK}: {len(locked_lines(root))} packages")
        write_conda(root)
        print(f"{CONDA}: follows {LOCK}")
    except ReproError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
