"""Embedded text: prose that is prose, code that training did not see, the same every time."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from repro.errors import DataUnavailableError
from repro.workloads import embedded, load_workload
from repro.workloads.tasks.base import EVAL_SEED
from repro.workloads.word_problems import generate

NAMES = ("prose", "python", "word-problems")


@pytest.fixture
def fresh_caches() -> Iterator[None]:
    embedded._code_documents.cache_clear()
    embedded._prose_documents.cache_clear()
    yield
    embedded._code_documents.cache_clear()
    embedded._prose_documents.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_enough_text_and_not_too_much(name: str) -> None:
    workload = load_workload(name)
    assert 500_000 < workload.provenance["n_bytes"] <= embedded.CAP_BYTES
    assert all(d.text.strip() for d in workload.documents)
    assert len({d.name for d in workload.documents}) == len(workload.documents)
    assert not any("\r" in d.text for d in workload.documents)


def test_another_process_gives_the_same_text() -> None:
    code = (
        "import json\nfrom repro.workloads import load_workload\n"
        f"print(json.dumps({{n: load_workload(n).provenance for n in {NAMES}}}))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment,
    )
    assert json.loads(done.stdout) == {n: load_workload(n).provenance for n in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_seed_changes_the_text(name: str) -> None:
    first, second = load_workload(name, seed=0), load_workload(name, seed=1)
    assert first.provenance["sha256"] != second.provenance["sha256"]
    assert load_workload(name, seed=1, max_documents=3).documents == second.documents[:3]


def test_versions_are_recorded() -> None:
    assert load_workload("prose").provenance["python"] == platform.python_version()
    packages = load_workload("python").provenance["packages"]
    assert packages == {p: metadata.version(p) for p in ("requests", "seaborn", "tornado")}


def test_prose_reads_like_prose() -> None:
    # Thousands of paragraphs: a stray table or code block would lower these shares.
    text = "\n\n".join(d.text for d in load_workload("prose").documents)
    words = re.findall(r"[A-Za-z]+", text)
    assert len(words) > 80_000
    function_words = {"the", "a", "of", "to", "is", "and", "in", "or", "for", "that"}
    assert sum(w.lower() in function_words for w in words) / len(words) > 0.2
    assert ">>>" not in text
    assert "::=" not in text
    paragraphs = [p for p in text.split("\n\n") if p.strip()]
    assert len(set(paragraphs)) == len(paragraphs)


def test_code_is_code_that_training_did_not_see() -> None:
    documents = load_workload("python").documents
    origins = {d.name.split("/")[0] for d in documents}
    assert origins == {"requests", "seaborn", "tornado", "stdlib"}
    for document in documents:
        ast.parse(document.text)
        assert not re.search(r"/(tests?|external|colors|_vendor)/|locale_data", document.name)


def test_prose_and_code_share_no_module() -> None:
    assert not set(embedded.PROSE_MODULES.split()) & set(embedded.CODE_MODULES.split())


@pytest.mark.parametrize(
    ("block", "kept"),
    [
        ("This function returns the number of items that were removed from it.", True),
        ("This paragraph is wrapped\n    over two lines of the docstring and is kept.", True),
        (">>> function(1, 2)  # the result of this is an integer in the end\n3", False),
        ("stmt ::= the first part of a rule | and the other part of the same rule", False),
        ("Short heading of it", False),
        ("ERROR_ONE ERROR_TWO ERROR_THREE ERROR_FOUR ERROR_FIVE ERROR_SIX ERROR_SEVEN", False),
        ("a = 1; b = 2; c = {3: 4, 5: 6}; d = [7, 8, 9]; e = (10, 11); f = g(a, b)", False),
        ("| the left of a table and | the right of a table that is a table |", False),
    ],
)
def test_paragraph_rule(block: str, kept: bool) -> None:
    found = list(embedded.paragraphs(block))
    assert found == ([" ".join(block.split())] if kept else [])


def test_docstrings_are_those_of_a_full_walk() -> None:
    source = Path(embedded.__file__).read_text(encoding="utf-8")
    source += (
        "\nif True:\n    try:\n        pass\n    except ValueError:\n"
        "        class Hidden:\n            '''Hidden in a handler.'''\n"
        "            async def inner(self):\n                '''Inner one.'''\n"
    )
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    walked = [ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, kinds)]
    found = list(embedded.docstrings(source))
    assert sorted(found) == sorted(text for text in walked if text)
    assert found[-2:] == ["Hidden in a handler.", "Inner one."]


def test_a_missing_package_is_named_with_the_remedy(
    fresh_caches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "CODE_PACKAGES", ("requests", "no_such_package_here"))
    with pytest.raises(DataUnavailableError, match="pip install no_such_package_here") as caught:
        load_workload("python")
    assert "\n" not in str(caught.value)


def test_a_python_without_sources_is_named(
    fresh_caches: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataUnavailableError, match="no source files"):
        load_workload("prose")


def test_missing_modules_are_left_out_and_counted(
    fresh_caches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_workload("python").provenance["n_modules"]
    embedded._code_documents.cache_clear()
    monkeypatch.setattr(embedded, "CODE_MODULES", "no_such_module " + embedded.CODE_MODULES)
    assert load_workload("python").provenance["n_modules"] == before


def test_package_files_are_filtered_and_line_ends_normalised(
    fresh_caches: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "VALUE = 1\n" * 60
    for name in ("kept.py", "tests/left_out.py", "sub/test/left_out.py", "_version.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body.replace("\n", "\r\n").encode())
    (tmp_path / "tiny.py").write_text("x = 1\n")
    monkeypatch.setattr(embedded, "CODE_PACKAGES", ("requests",))
    monkeypatch.setattr(embedded, "CODE_MODULES", "")
    monkeypatch.setattr(embedded, "_package_folder", lambda package: tmp_path)
    documents = load_workload("python").documents
    assert [(d.name, d.text) for d in documents] == [("requests/kept.py", body)]


def test_word_problems_use_evaluation_seeds() -> None:
    workload = load_workload("word-problems", seed=3, max_documents=4)
    problems = generate(4, EVAL_SEED + 3)
    assert [d.text for d in workload.documents] == [f"{p.question}\n{p.answer}" for p in problems]
    assert workload.provenance["generator_seed"] == EVAL_SEED + 3
