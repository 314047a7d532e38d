"""Source ``embedded``: text made from what is installed, so no network and no text in git.

*Prose*: the language reference in ``pydoc_data.topics`` and docstrings of the standard
library.  *Code*: packages and standard-library modules that no bundled model saw in
training.  *Mathematics*: seeded word problems.  Sources are found by their module
specification and read as files; nothing is imported for its text, except the topics,
which are a plain dictionary.

The text follows the installed versions, so it differs between environments; versions
and a hash of the text are recorded, and two runs in one environment agree byte for
byte.  Lists of modules are fixed: those that a Python version lacks are left out and
counted.  Docstrings and code come from different modules, so the two do not share text.
"""

from __future__ import annotations

import ast
import platform
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import ClassVar

from repro.errors import DataUnavailableError
from repro.workloads.declarations import DataSet, Document, Domain, Extract, Request
from repro.workloads.tasks.base import EVAL_SEED
from repro.workloads.word_problems import generate

CAP_BYTES = 1_000_000
N_WORD_PROBLEMS = 2500

PROSE_MODULES = (
    "_pydecimal _pyio asyncio/events asyncio/tasks bdb codecs concurrent/futures/_base "
    "configparser contextlib difflib doctest email/_policybase email/charset email/header "
    "email/headerregistry email/message email/policy fileinput fractions ftplib functools "
    "http/client http/cookiejar http/server inspect ipaddress json/__init__ logging/__init__ "
    "logging/handlers optparse os pdb platform random re/__init__ shutil smtplib socket "
    "socketserver ssl statistics textwrap threading timeit traceback typing unittest/case "
    "unittest/mock urllib/parse uuid xml/etree/ElementTree xml/sax/handler xml/sax/xmlreader "
    "xmlrpc/server"
)

CODE_MODULES = (
    "asyncio/base_events asyncio/locks asyncio/queues asyncio/selector_events asyncio/streams "
    "base64 bz2 calendar cmd code codeop compileall concurrent/futures/process "
    "concurrent/futures/thread copy csv dataclasses dis email/feedparser email/generator "
    "filecmp getopt gettext glob graphlib gzip heapq hmac html/parser http/cookies "
    "importlib/metadata/__init__ json/decoder json/encoder linecache mailbox modulefinder "
    "multiprocessing/connection multiprocessing/managers multiprocessing/pool "
    "multiprocessing/queues multiprocessing/shared_memory netrc pickle pkgutil plistlib pprint "
    "profile pstats pyclbr queue reprlib sched selectors shelve shlex sqlite3/dump string "
    "tabnanny tarfile tempfile tokenize tomllib/_parser trace tracemalloc unittest/loader "
    "unittest/main unittest/runner unittest/suite wave weakref webbrowser wsgiref/handlers "
    "xml/dom/minidom zipapp zoneinfo/_zoneinfo"
)

CODE_PACKAGES = ("requests", "seaborn", "tornado")
# Tests, copies of other projects, and files that are tables rather than code.
_SKIPPED_FOLDERS = {"test", "tests", "external", "colors", "_vendor", "__pycache__"}
_SKIPPED_FILES = {"_locale_data.py", "locale_data.py", "_version.py", "version.py", "conftest.py"}
_CODE_FILE_BYTES = (400, 64_000)

_MIN_PARAGRAPH_WORDS = 8
_MIN_DOCUMENT_WORDS = 40
_MIN_LETTER_SHARE = 0.75
# Running English has about one of these in three words, a list of names has none.
_MIN_FUNCTION_WORD_SHARE = 0.15
_FUNCTION_WORD = re.compile(
    r"\b(a|an|and|are|as|at|be|by|can|for|from|has|if|in|is|it|its|may|no|not|of|on|or|that|the|"
    r"this|to|was|which|will|with|you)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z]+")
_NOT_LETTER = re.compile(r"[^A-Za-z ]")
_CODE_LINE = re.compile(r"^\s*(>>>|\.\.\.|\$ |\||[-=+*~^]{4,})|::=", re.MULTILINE)


# --- prose ------------------------------------------------------------------------------


def paragraphs(text: str) -> Iterator[str]:
    """The prose paragraphs of a docstring or topic, each unwrapped to one line.

    Left out: examples, grammar, tables, headings, lists of names, anything mostly not letters.
    """
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        if _CODE_LINE.search(block):
            continue
        joined = " ".join(block.split())
        words = _WORD.findall(joined)
        if len(words) < _MIN_PARAGRAPH_WORDS:
            continue
        n_function_words = len(_FUNCTION_WORD.findall(joined))
        n_letters = len(joined) - len(_NOT_LETTER.findall(joined))
        if n_function_words >= _MIN_FUNCTION_WORD_SHARE * len(
            words
        ) and n_letters >= _MIN_LETTER_SHARE * len(joined):
            yield joined


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module, its classes and functions, in file order."""
    # Definitions hide in statements only; skipping expressions makes this three times faster
    # than a full walk.
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
        inner = [
            child
            for field in ("body", "handlers", "orelse", "finalbody")
            for child in getattr(node, field, ())
        ]
        waiting.extend(reversed(inner))


def _stdlib_file(module: str) -> Path | None:
    folder = sysconfig.get_path("stdlib")
    for candidate in (Path(folder, f"{module}.py"), Path(folder, module, "__init__.py")):
        if candidate.is_file():
            return candidate
    return None


def _source_text(path: Path) -> str:
    """The text of a source file with ``\\n`` line ends."""
    return path.read_text(encoding="utf-8", errors="strict")


def _no_stdlib() -> DataUnavailableError:
    return DataUnavailableError(
        "this Python carries no source files of its standard library "
        f"({sysconfig.get_path('stdlib')!r}): install a complete Python, "
        "or use source='folder'"
    )


@lru_cache(maxsize=1)
def _prose_documents() -> tuple[tuple[Document, ...], int]:
    """All prose there is, sorted by name, and the number of listed modules that are missing."""
    texts: dict[str, Iterable[str]] = {}
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise _no_stdlib() from error
    for name, text in topics.items():
        texts[f"topics/{name}"] = paragraphs(text)
    missing = 0
    for module in PROSE_MODULES.split():
        path = _stdlib_file(module)
        if path is None:
            missing += 1
            continue
        found = docstrings(_source_text(path))
        texts[f"docstrings/{module}"] = [p for text in found for p in paragraphs(text)]
    if missing == len(PROSE_MODULES.split()):
        raise _no_stdlib()
    documents = []
    seen: set[str] = set()
    for name in sorted(texts):
        # Methods inherit wordings, and topics quote each other: keep each paragraph once.
        fresh = [p for p in texts[name] if not (p in seen or seen.add(p))]  # type: ignore[func-returns-value]
        text = "\n\n".join(fresh)
        if len(_WORD.findall(text)) >= _MIN_DOCUMENT_WORDS:
            documents.append(Document(name, text + "\n"))
    return tuple(documents), missing


def prose(seed: int) -> Extract:
    """Documentation prose in seeded order, up to the cap."""
    documents, missing = _prose_documents()
    kept = _choose(documents, f"prose-{seed}")
    n_modules = len(PROSE_MODULES.split()) - missing
    return Extract(kept, {**_about(seed), "n_modules": n_modules})


# --- code -------------------------------------------------------------------------------


def _package_folder(package: str) -> Path:
    try:
        spec = util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise DataUnavailableError(
            f"the embedded code workload reads the sources of {package!r}, which is not installed: "
            f"run `pip install {package}`, or use source='folder'"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _package_files(package: str) -> Iterator[tuple[str, Path]]:
    folder = _package_folder(package)
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if _SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or relative.name in _SKIPPED_FILES:
            continue
        yield f"{package}/{relative.as_posix()}", path


@lru_cache(maxsize=1)
def _code_documents() -> tuple[tuple[Document, ...], dict[str, str], int]:
    """All code there is, sorted by name; package versions; number of missing modules."""
    files = [found for package in CODE_PACKAGES for found in _package_files(package)]
    stdlib = [(f"stdlib/{module}.py", _stdlib_file(module)) for module in CODE_MODULES.split()]
    files += [(name, path) for name, path in stdlib if path is not None]
    low, high = _CODE_FILE_BYTES
    documents = []
    for name, path in sorted(files):
        text = _source_text(path)
        if low <= len(text.encode("utf-8")) <= high:
            documents.append(Document(name, text))
    if not documents:
        raise _no_stdlib()
    versions = {package: metadata.version(package) for package in CODE_PACKAGES}
    return tuple(documents), versions, sum(path is None for _, path in stdlib)


def python_code(seed: int) -> Extract:
    """Python source files in seeded order, up to the cap."""
    documents, versions, missing = _code_documents()
    kept = _choose(documents, f"python-{seed}")
    n_modules = len(CODE_MODULES.split()) - missing
    return Extract(kept, {**_about(seed), "packages": versions, "n_modules": n_modules})


# --- mathematics ------------------------------------------------------------------------


def word_problems(seed: int) -> Extract:
    """Generated word problems with worked steps, with a seed that training never uses."""
    problems = generate(N_WORD_PROBLEMS, EVAL_SEED + seed)
    documents = tuple(
        Document(f"word-problem-{i}", f"{p.question}\n{p.answer}") for i, p in enumerate(problems)
    )
    return Extract(documents, {"seed": seed, "generator_seed": EVAL_SEED + seed})


# --- common -----------------------------------------------------------------------------


def _about(seed: int) -> dict[str, object]:
    return {"seed": seed, "python": platform.python_version(), "cap_bytes": CAP_BYTES}


def _choose(documents: tuple[Document, ...], seed: str) -> tuple[Document, ...]:
    """``documents`` in seeded order, as many from the front as fit into the cap."""
    order = list(documents)
    random.Random(seed).shuffle(order)
    kept = []
    total = 0
    for document in order:
        total += len(document.text.encode("utf-8"))
        if total > CAP_BYTES:
            break
        kept.append(document)
    return tuple(kept)


class EmbeddedSource:
    """Calls the ``embedded`` function of a data set."""

    options: frozenset[str] = frozenset()
    defaults: ClassVar[dict[Domain, str]] = {
        "text": "prose",
        "math": "word-problems",
        "code": "python",
    }

    def read(self, data_set: DataSet, request: Request) -> Extract:
        """Make the text of ``data_set``."""
        assert data_set.embedded is not None, data_set.name
        extract = data_set.embedded(request.seed)
        return Extract(extract.documents[: request.limit], extract.provenance)


SOURCE = EmbeddedSource()
