"""The folder kernels/ is ``repro.kernels``, never the ``kernels`` that Transformers looks for."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import nbformat


def _python(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if k not in ("PYTHONSAFEPATH",)}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**base, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_transformers_does_not_find_our_folder(root: Path) -> None:
    code = (
        "import sys, transformers, transformers.integrations.hub_kernels\n"
        "said = getattr(sys.modules.get('kernels'), '__doc__', None) or ''\n"
        "print('ours' if said.startswith('Triton kernels') else 'clean')"
    )
    done = _python(code, root, PYTHONSAFEPATH="1")
    assert done.stdout.strip() == "clean", done.stderr[-2000:]


def test_the_hazard_is_real_without_the_safe_path(root: Path) -> None:
    """The control of the test above: without the flag the root is on the path, and we are found."""
    code = (
        "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else 'none')"
    )
    assert _python(code, root).stdout.strip() == str(root / "kernels" / "__init__.py")
    assert str(root) not in _python(code, root, PYTHONSAFEPATH="1").stdout


def test_kernels_resolve_from_the_source_path_alone(root: Path, tmp_path: Path) -> None:
    """A machine that runs the tree uninstalled, from PYTHONPATH=src, sees them as well."""
    code = "import repro.kernels; print(repro.kernels.__path__[0])"
    done = _python(code, tmp_path, PYTHONPATH=str(root / "src"), PYTHONSAFEPATH="1")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == root / "kernels"


def test_package_file_holds_a_docstring_only(root: Path) -> None:
    body = ast.parse((root / "kernels" / "__init__.py").read_text(encoding="utf-8")).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


def _names_kernels(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        if any(name.partition(".")[0] == "kernels" for name in names):
            return True
    return False


def test_nothing_imports_the_bare_name(root: Path) -> None:
    assert _names_kernels("import kernels.x")
    assert _names_kernels("def f():\n    from kernels import y")
    assert not _names_kernels("from repro.kernels import y")
    for folder in ("src", "kernels", "tests", "notebooks"):
        for path in (root / folder).rglob("*.py"):
            assert not _names_kernels(path.read_text(encoding="utf-8")), path.name
    for path in (root / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                assert not _names_kernels(cell.source), path.name
