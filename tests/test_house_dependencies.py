"""pyproject.toml, requirements.lock and environment.yml say the same."""

import ast
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from repro import lockfile
from repro.errors import ReproError


def _wanted(root: Path) -> list[Requirement]:
    return [Requirement(text) for text in lockfile.direct_requirements(root)]


def test_every_direct_dependency_is_locked_within_its_range(root: Path) -> None:
    locked = lockfile.locked_versions(root)
    for wanted in _wanted(root):
        name = lockfile.normalized(wanted.name)
        assert name in locked, f"{name} is not in {lockfile.LOCK}: run make lock"
        assert wanted.specifier.contains(locked[name]), f"{name} {locked[name]} is outside {wanted}"


def test_lock_holds_exact_public_versions_only(root: Path) -> None:
    lines = lockfile.locked_lines(root)
    names = []
    for line in lines:
        pin = Requirement(line)
        (specifier,) = pin.specifier
        assert specifier.operator == "==", line
        assert Version(specifier.version).local is None, line
        names.append(lockfile.normalized(pin.name))
    assert names == sorted(set(names))
    assert "lm-eval" not in names
    assert "expert-precision-repro" not in names


def test_lock_pairs_torch_with_its_triton(root: Path) -> None:
    pins = {Requirement(line).name: Requirement(line) for line in lockfile.locked_lines(root)}
    assert str(pins["torch"].specifier) == "==2.13.0"
    assert pins["torch"].marker is None
    assert str(pins["triton"].specifier) == "==3.7.1"
    marker = pins["triton"].marker
    assert marker is not None
    assert marker.evaluate({"platform_system": "Linux"})
    assert not marker.evaluate({"platform_system": "Darwin"})


def test_lock_is_closed_under_requirements(root: Path) -> None:
    """What the locked packages themselves need is locked too: nothing is left to chance."""
    locked = lockfile.locked_versions(root)
    for name in locked:
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # a marker excludes it here
            continue
        for text in needs:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                assert lockfile.normalized(need.name) in locked, f"{name} needs {need.name}"


def test_conda_environment_repeats_the_lock(root: Path) -> None:
    found = yaml.safe_load((root / lockfile.CONDA).read_text(encoding="utf-8"))
    assert found["name"] == "expert-precision-repro"
    python, pip, section = found["dependencies"]
    assert (python, pip) == ("python=3.12", "pip")
    assert section == {"pip": [*lockfile.locked_lines(root), "-e ."]}


def test_conda_file_is_what_make_lock_writes(root: Path) -> None:
    text = (root / lockfile.CONDA).read_text(encoding="utf-8")
    assert text == lockfile.conda_text(lockfile.locked_lines(root))


def test_lock_text_drops_local_versions_and_the_package_itself() -> None:
    frozen = [
        "# Editable install with no version control (expert-precision-repro==0.1.0)",
        "-e /somewhere/expert-precision-repro",
        "expert-precision-repro==0.1.0",
        "pip==26.0",
        "Torch==2.13.0+cpu",
        "triton==3.7.1",
        "A_b.c==1",
    ]
    pins = lockfile.lock_text(frozen, "Python 3.11").splitlines()[2:]
    assert pins == ["A_b.c==1", "Torch==2.13.0", "triton==3.7.1; platform_system == 'Linux'"]


def test_a_broken_requirement_is_named() -> None:
    with pytest.raises(ReproError, match=r"'>=3' is no requirement"):
        lockfile.requirement_name(">=3")


def _imported(root: Path) -> dict[str, set[str]]:
    """Top-level modules imported anywhere, each with the files that do."""
    found: dict[str, set[str]] = {}
    sources = {}
    for folder in ("src", "kernels", "tests", "notebooks"):
        for path in (root / folder).rglob("*.py"):
            sources[path] = path.read_text(encoding="utf-8")
    for path in (root / "notebooks").glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        sources[path] = "\n".join(c.source for c in cells if c.cell_type == "code")
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(path.name)
    return found


def test_everything_imported_is_declared(root: Path) -> None:
    """Also what happens to come along with another package: that can change any day."""
    project = tomllib.loads((root / lockfile.PROJECT).read_text(encoding="utf-8"))["project"]
    declared = {
        lockfile.requirement_name(text)
        for texts in (project["dependencies"], *project["optional-dependencies"].values())
        for text in texts
    }
    providers = metadata.packages_distributions()
    own = {"repro", "conftest"} | {path.stem for path in (root / "tests").glob("*.py")}
    undeclared = {}
    for module, files in _imported(root).items():
        if module in sys.stdlib_module_names or module in own:
            continue
        names = {lockfile.normalized(name) for name in providers.get(module, [module])}
        if module == "lm_eval":
            names.add("lm-eval")
        if not names & declared:
            undeclared[module] = sorted(files)
    assert not undeclared, f"add to pyproject.toml, then make lock: {undeclared}"
