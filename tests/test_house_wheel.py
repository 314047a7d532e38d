"""A wheel built from this tree holds every package and imports without the tree."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy, offline, with the installed setuptools."""
    root = Path(__file__).resolve().parents[1]
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tree)
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "kernels"):
        shutil.copytree(root / name, tree / name, symlinks=True, ignore=leave)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = out.glob("*.whl")
    return built


def _sources(root: Path) -> set[str]:
    """Where each source file must be found in the wheel."""
    package, kernels = root / "src" / "repro", root / "kernels"
    inside = {f"repro/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    return inside | {
        f"repro/kernels/{path.relative_to(kernels).as_posix()}" for path in kernels.rglob("*.py")
    }


def test_every_module_is_in_the_wheel(root: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = sorted(_sources(root) - names)
    assert not missing, f"not in the wheel (no __init__.py beside them?): {missing}"
    assert "repro/py.typed" in names


def test_every_source_folder_is_a_package(root: Path) -> None:
    """A folder without __init__.py imports from the tree and is left out of a wheel."""
    for top in (root / "src" / "repro", root / "kernels"):
        for path in top.rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), (
                f"{path.parent.name}/ has no __init__.py"
            )


def test_nothing_but_the_package_is_in_the_wheel(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"repro"}


def test_the_wheel_imports_without_the_tree(wheel: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); import repro.kernels, repro.cli; "
        "print(repro.kernels.__file__)"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(wheel))
