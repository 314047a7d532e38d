"""Digests of texts, files and code.

One idea: a measurement is stale when the code behind it changed, not when its prose did.
Code is hashed by its tokens, without comments, docstrings and layout, and alike on every
supported Python.  A package stands for all modules in it.
"""

from __future__ import annotations

import hashlib
import io
import tokenize
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import repro

_SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_STATEMENT_START = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def digest(*parts: str | bytes) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of ``parts``, each ended by a zero byte."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.encode() if isinstance(part, str) else part)
        sha.update(b"\0")
    return sha.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Digest of the bytes of one file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()[:16]


@lru_cache(maxsize=1024)  # every point of an experiment asks for the same modules
def code_digest(source: str) -> str:
    """Digest of Python code that ignores comments, docstrings and blank lines.

    Text that is no valid Python (a notebook cell with a magic) is hashed as it stands.
    """
    try:
        return digest(*_significant_tokens(source))
    except (tokenize.TokenError, SyntaxError):
        return digest(source)


def _significant_tokens(source: str) -> list[str]:
    tokens = [token for token in _joined_fstrings(source) if token[0] not in _SKIPPED]
    kept: list[str] = []
    previous = tokenize.NEWLINE
    for index, (kind, text) in enumerate(tokens):
        following = tokens[index + 1][0] if index + 1 < len(tokens) else tokenize.NEWLINE
        is_bare_string = (
            kind == tokenize.STRING
            and previous in _STATEMENT_START
            and following == tokenize.NEWLINE
        )
        previous = kind
        if is_bare_string:
            continue
        if kind == tokenize.INDENT:
            text = ">"  # the width of an indentation is style
        elif kind == tokenize.DEDENT:
            text = "<"
        elif kind == tokenize.NEWLINE:
            text = ";"
            if not kept or kept[-1] in (";", ">", "<"):
                continue
        kept.append(text)
    return kept


def _joined_fstrings(source: str) -> list[tuple[int, str]]:
    """Tokens with every f-string as one piece, as Python 3.11 gives it and 3.12 does not."""
    start_kind = getattr(tokenize, "FSTRING_START", -1)
    end_kind = getattr(tokenize, "FSTRING_END", -1)
    lines = source.splitlines(keepends=True)
    pieces: list[tuple[int, str]] = []
    depth = 0
    begin = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == start_kind:
            if depth == 0:
                begin = token.start
            depth += 1
        elif token.type == end_kind:
            depth -= 1
            if depth == 0:
                pieces.append((tokenize.STRING, _slice(lines, begin, token.end)))
        elif depth == 0:
            pieces.append((token.type, token.string))
    return pieces


def _slice(lines: list[str], begin: tuple[int, int], end: tuple[int, int]) -> str:
    (first, left), (last, right) = begin, end
    if first == last:
        return lines[first - 1][left:right]
    middle = lines[first : last - 1]
    return "".join([lines[first - 1][left:], *middle, lines[last - 1][:right]])


def _package_root() -> Path:
    return Path(repro.__file__).resolve().parent


def _kernels_root() -> Path | None:
    """Folder of ``repro.kernels``: inside the package in a wheel, top-level in a clone."""
    for folder in (_package_root() / "kernels", _package_root().parents[1] / "kernels"):
        if folder.is_dir():
            return folder.resolve()
    return None


def _files_of(module: ModuleType | str) -> list[Path]:
    """Python files of a module, or of a whole package; without importing anything."""
    name = module if isinstance(module, str) else module.__name__
    if name == "repro" or name.startswith("repro."):
        parts = name.split(".")[1:]
        root = _package_root()
        if parts[:1] == ["kernels"]:
            kernels = _kernels_root()
            if kernels is not None:
                root, parts = kernels, parts[1:]
        base = root.joinpath(*parts)
    elif isinstance(module, ModuleType) and module.__file__:
        file = Path(module.__file__)
        base = file.parent if file.name == "__init__.py" else file.with_suffix("")
    else:
        raise ValueError(f"source {name!r} is neither a module nor a name below 'repro'")
    if base.is_dir():
        return sorted(base.rglob("*.py"))
    file = base.with_suffix(".py")
    if not file.is_file():
        raise ValueError(f"source {name!r} has no file: name an existing module")
    return [file]


def source_digest(sources: Iterable[ModuleType | str]) -> str:
    """Digest of the code of the named modules (a package stands for all of its modules)."""
    parts: list[str] = []
    for name, module in sorted((_name(module), module) for module in sources):
        parts.append(name)
        for file in _files_of(module):
            parts.append(file.stem)
            parts.append(code_digest(file.read_text(encoding="utf-8")))
    return digest(*parts)


def _name(module: ModuleType | str) -> str:
    return module if isinstance(module, str) else module.__name__


def source_names(sources: Iterable[ModuleType | str]) -> list[str]:
    """Dotted names of ``sources``, sorted."""
    return sorted(_name(module) for module in sources)


@lru_cache(maxsize=1)
def package_digest() -> str:
    """Digest of all code of the package and its kernels, the same in a clone and a wheel."""
    root = _package_root()
    inside = {f"repro/{file.relative_to(root).as_posix()}": file for file in root.rglob("*.py")}
    # In a clone kernels/ stands outside the package, perhaps with a link to it inside.
    found = {name: file for name, file in inside.items() if not name.startswith("repro/kernels/")}
    kernels = _kernels_root()
    if kernels is not None:
        for file in kernels.rglob("*.py"):
            found[f"repro/kernels/{file.relative_to(kernels).as_posix()}"] = file
    parts: list[str] = []
    for name in sorted(found):
        parts += [name, code_digest(found[name].read_text(encoding="utf-8"))]
    return digest(*parts)
