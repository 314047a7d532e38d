"""The registry of workloads: names, sources, parameters, provenance, and adding one."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from repro.errors import DataUnavailableError, UnknownNameError
from repro.workloads import (
    MultipleChoiceItem,
    base,
    domain_workloads,
    list_workloads,
    load_choices,
    load_workload,
)
from repro.workloads import sets as sets_package

SOURCES = ("embedded", "folder", "hub")

GSM8K_ROWS = [
    {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"}
    for i in range(5)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "math").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in GSM8K_ROWS)
    (tmp_path / "math" / "gsm8k_test.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


def test_every_source_has_a_default_for_each_domain() -> None:
    for source in SOURCES:
        infos = {info.name: info for info in list_workloads(source)}
        defaults = domain_workloads(source)
        assert set(defaults) == {"text", "math", "code"}
        for domain, name in defaults.items():
            assert infos[name].domain == domain
            assert source in infos[name].sources


def test_expected_names_are_there() -> None:
    names = {source: {i.name for i in list_workloads(source)} for source in SOURCES}
    assert names["embedded"] == {"prose", "python", "word-problems"}
    assert names["folder"] >= {
        *("wikitext2", "wikitext2-valid", "longdocs", "gsm8k", "math500", "textbooks-math"),
        *("humaneval", "mbpp", "python-heldout", "mmlu_pro", "mmlu", "arc_challenge"),
        *("arc_easy", "boolq", "hellaswag", "piqa"),
    }
    assert names["hub"] >= {
        *("wikitext2", "c4", "gsm8k", "math500", "humaneval", "mmlu_pro", "gpqa_diamond"),
        *("aime25", "longbench-hotpotqa"),
    }
    everything = list_workloads()
    assert {i.name for i in everything} == set().union(*names.values())
    assert [i.name for i in everything] == sorted(i.name for i in everything)


def test_choice_sets_are_marked() -> None:
    infos = {i.name: i for i in list_workloads()}
    assert infos["mmlu_pro"].choices == ("folder", "hub")
    assert infos["gsm8k"].choices == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "gsm8"}, "choose one of"),
        ({"name": "gsm8k", "source": "fold"}, "did you mean 'folder'"),
        ({"name": "gsm8k", "source": "embedded"}, "use source='folder' or 'hub'"),
        ({"name": "prose", "revision": "main"}, "parameter of source 'embedded' 'revision'"),
        ({"name": "gsm8k", "source": "hub", "revison": "x"}, "did you mean 'revision'"),
        ({"name": "prose", "data_dir": "somewhere"}, "use source='folder'"),
        ({"name": "prose", "max_documents": 0}, "give at least 1"),
    ],
)
def test_unknown_names_say_what_to_do(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(UnknownNameError, match=said) as caught:
        load_workload(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_choices_of_a_set_or_source_without_them() -> None:
    with pytest.raises(UnknownNameError, match="arc_challenge"):
        load_choices("gsm8k")
    with pytest.raises(UnknownNameError, match="source='folder' or 'hub'"):
        load_choices("prose", source="embedded")
    with pytest.raises(UnknownNameError, match="workload source 'web'"):
        load_choices("mmlu", source="web")


def test_provenance_describes_the_text_and_no_folder(folder: Path) -> None:
    workload = load_workload("gsm8k", source="folder", data_dir=folder)
    texts = [f"{r['question']}\n{r['answer']}" for r in GSM8K_ROWS]
    assert [d.text for d in workload.documents] == texts
    joined = "\0".join(texts).encode()
    assert workload.provenance["sha256"] == hashlib.sha256(joined).hexdigest()
    assert workload.provenance["n_bytes"] == sum(len(t.encode()) for t in texts)
    assert workload.provenance["n_documents"] == len(GSM8K_ROWS)
    assert workload.provenance["source"] == workload.source == "folder"
    assert str(folder) not in json.dumps(workload.provenance)


def test_limit_keeps_the_first_documents(folder: Path) -> None:
    few = load_workload("gsm8k", source="folder", data_dir=folder, max_documents=2)
    everything = load_workload("gsm8k", source="folder", data_dir=folder)
    assert few.documents == everything.documents[:2]
    assert few.provenance["sha256"] != everything.provenance["sha256"]


def test_copying_one_file_adds_a_workload(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = tmp_path / "extra"
    extra.mkdir()
    original = Path(next(iter(sets_package.__path__))) / "gsm8k.py"
    text = original.read_text(encoding="utf-8").replace('name="gsm8k"', 'name="my-problems"')
    (extra / "my_problems.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sets_package, "__path__", [*sets_package.__path__, str(extra)])
    try:
        assert "my-problems" in {i.name for i in list_workloads("folder")}
        workload = load_workload("my-problems", source="folder", data_dir=folder)
        assert workload.documents[0].name == "my-problems-0"
        assert len(workload.documents) == len(GSM8K_ROWS)
    finally:
        sys.modules.pop("repro.workloads.sets.my_problems", None)


def test_a_name_cannot_be_taken_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path(next(iter(sets_package.__path__))) / "gsm8k.py"
    (tmp_path / "zzz_again.py").write_bytes(original.read_bytes())
    monkeypatch.setattr(sets_package, "__path__", [*sets_package.__path__, str(tmp_path)])
    try:
        with pytest.raises(UnknownNameError, match="declared twice"):
            base.data_sets()
    finally:
        sys.modules.pop("repro.workloads.sets.zzz_again", None)


def test_multiple_choice_item_as_text() -> None:
    item = MultipleChoiceItem("Which?", "Given this.", ("one", "two"), 1)
    assert item.text() == "Given this.\nWhich?\nA. one\nB. two\nAnswer: B"
    assert MultipleChoiceItem("", "Ends", ("a", "b"), 0).text().startswith("Ends\nA. a")


def test_listing_and_embedded_loading_import_nothing_heavy_and_touch_no_network() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise RuntimeError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from repro.workloads import list_workloads, load_workload\n"
        "list_workloads()\n"
        "for n in ('prose', 'python', 'word-problems'): assert load_workload(n).documents\n"
        "heavy = {'torch', 'datasets', 'transformers', 'seaborn', 'tornado', 'requests'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_folder_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    with pytest.raises(DataUnavailableError, match="REPRO_DATA_DIR"):
        load_workload("gsm8k", source="folder")
