"""Imports between the rooms point one way; modules stay small; no path of one machine."""

import ast
import graphlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Small modules at the bottom that every room may use.
GROUND = {"contract", "errors", "files", "paths", "profiles"}

#: What each room may import besides itself and the ground.  A new room is added here on purpose:
#: that is the moment to think about where it stands.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "contract": set(),
    "files": {"errors"},
    "paths": {"errors"},
    "profiles": {"errors"},
    "kernels": set(),
    "formats": {"kernels"},
    "policies": set(),
    "residency": {"formats", "kernels"},
    "integration": {"formats", "kernels", "residency"},
    "workloads": set(),
    "models": {"formats", "integration", "workloads"},
    "calibration": {"formats", "integration", "models", "workloads"},
    "serving": {
        "calibration", "formats", "integration", "kernels", "models", "policies", "residency",
    },
    # The same scheduler, control and KV pool that serve, at recorded routing and published sizes;
    # none of these rooms knows the simulator.
    "simulate": {"formats", "integration", "models", "policies", "residency", "serving"},
    "reporting": set(),
    "experiments": {
        "calibration", "formats", "integration", "kernels", "models", "policies", "reporting",
        "residency", "serving", "simulate", "workloads",
    },
    "lockfile": {"errors", "files"},
    "environment": {"errors", "files", "lockfile"},
    "doctor": GROUND,
    "pipeline": {"experiments", "models", "reporting", "workloads"},
    "cli": {
        "calibration", "doctor", "experiments", "formats", "models", "pipeline", "reporting",
        "workloads",
    },
    "__main__": {"cli"},
}  # fmt: skip

MAX_LINES = 400


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    """Every module with its room; ``repro/__init__`` is the public surface and has none."""
    package = root / "src" / "repro"
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if room not in ("__init__", "kernels"):
            yield room, path
    for path in sorted((root / "kernels").rglob("*.py")):
        yield "kernels", path


def _imports(path: Path, room: str) -> Iterator[tuple[str, str]]:
    """(what is imported, room or package it belongs to), also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = [f"repro.{room}"]  # relative: cannot leave a room of one level
        elif isinstance(node, ast.ImportFrom) and node.module == "repro":
            names = [f"repro.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield name, parts[1] if parts[0] == "repro" and len(parts) > 1 else parts[0]


def _offences(room: str, path: Path) -> list[str]:
    allowed = {room} | MAY_IMPORT[room] | (GROUND if room not in GROUND else set())
    public = {"Engine", "repro", "__version__", "list_models", "load_model"}
    return [
        f"{path.name}: {name}"
        for name, target in _imports(path, room)
        if name.split(".")[0] == "repro" and target not in allowed | public
    ]


def test_every_room_has_its_place(root: Path) -> None:
    unknown = {room for room, _ in _sources(root)} - set(MAY_IMPORT)
    assert not unknown, f"say in MAY_IMPORT what {sorted(unknown)} may import"


def test_the_arrows_have_no_cycle() -> None:
    assert list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())


def test_imports_follow_the_arrows(root: Path) -> None:
    offences = [text for room, path in _sources(root) for text in _offences(room, path)]
    assert not offences


def test_an_import_against_the_arrows_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("def f():\n    from repro import experiments\nimport repro.serving.engine\n")
    assert len(_offences("reporting", path)) == 2
    path.write_text("from repro.reporting import records\nfrom repro import paths\nimport repro\n")
    assert _offences("experiments", path) == []


def test_policies_know_no_torch_and_no_clock(root: Path) -> None:
    for room, path in _sources(root):
        if room == "policies":
            targets = {target for _, target in _imports(path, room)}
            assert not targets & {"torch", "time", "datetime", "triton"}, path.name


def test_modules_stay_small(root: Path) -> None:
    lengths = {path.name: path.read_text("utf-8").count("\n") for _, path in _sources(root)}
    long = {name: n_lines for name, n_lines in lengths.items() if n_lines > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines, two ideas? {long}"


def _repository_files(root: Path) -> list[Path]:
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("not a git clone")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := root / name).is_file()]


MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:work|root|tmp|home|Users|mnt|scratch)/[\w.]")


def test_no_path_of_one_machine(root: Path) -> None:
    assert MACHINE_PATH.search("open('/" + "home/me/x')")
    found = []
    for path in _repository_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.name}: {m.group()}" for m in MACHINE_PATH.finditer(text)]
    assert not found


def test_the_tree_stays_small_enough_to_travel(root: Path) -> None:
    # A link counts as a link: what it names is in the tree once.
    n_bytes = sum(path.lstat().st_size for path in _repository_files(root))
    assert n_bytes < 60 * 2**20
