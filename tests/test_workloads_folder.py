"""The data folder: every set in small files of the same layout, and files that are wrong."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from repro.errors import DataUnavailableError
from repro.workloads import list_workloads, load_choices, load_workload

CHOICE_ROWS = [
    {"id": 0, "question": "Two and two?", "choices": ["3", "4", "5"], "answer": 1},
    {"id": 1, "context": "A cat sat.", "choices": ["It slept.", "It flew."], "answer": 0},
    {"id": 2, "context": "C", "question": "q", "choices": ["no", "yes"], "answer": 1},
]
TEXT = " = Title = \n \n A first line with \u00e9 \u2013 and <unk> . \r\n A second . \n"
ROWS: dict[str, list[dict[str, Any]]] = {
    "math/gsm8k_test.jsonl": [{"question": "Q0?", "answer": "1\n#### 1"}] * 2,
    "math/math500_test.jsonl": [{"problem": "$x$?", "solution": "$\\frac{1}{2}$", "level": 3}] * 2,
    "math/textbooks_heldout.jsonl": [{"source": "s", "license": "CC", "text": "Section."}] * 2,
    "general/longdocs_eval.jsonl": [{"source": "s", "year": 1853, "text": "Long text."}] * 2,
    "code/HumanEval.jsonl": [
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    return {}\n"}
    ]
    * 2,
    "code/mbpp.jsonl": [{"text": "Write it.", "code": "x = 1\r\n", "task_id": 7}] * 2,
    "code/python_heldout.jsonl": [{"package": "p", "path": "p/a.py", "text": "import os\n"}] * 2,
    "eval_mc/arc_challenge_test.jsonl": CHOICE_ROWS,
    "eval_mc/arc_easy_test.jsonl": CHOICE_ROWS,
    "eval_mc/boolq_val.jsonl": CHOICE_ROWS,
    "eval_mc/hellaswag_val.jsonl": CHOICE_ROWS,
    "eval_mc/mmlu_test.jsonl": CHOICE_ROWS,
    "eval_mc/mmlu_pro_test.jsonl": CHOICE_ROWS,
    "eval_mc/piqa_valid.jsonl": CHOICE_ROWS,
}
FIRST_TEXT = {
    "gsm8k": "Q0?\n1\n#### 1",
    "math500": "$x$?\n$\\frac{1}{2}$",
    "textbooks-math": "Section.",
    "longdocs": "Long text.",
    "humaneval": "def f():\n    return {}\n",
    "mbpp": "Write it.\nx = 1\r\n",
    "python-heldout": "import os\n",
    "wikitext2": TEXT,
    "wikitext2-valid": TEXT,
}


def write_folder(root: Path, *, packed: bool) -> Path:
    files = {
        path: "".join(json.dumps(row) + "\n" for row in rows).encode()
        for path, rows in ROWS.items()
    }
    files["general/wikitext2_test.txt"] = files["general/wikitext2_valid.txt"] = TEXT.encode()
    for name, data in files.items():
        path = root / (name + ".xz" if packed else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(data) if packed else data)
    return root


@pytest.fixture(scope="module", params=["plain", "xz"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data"), packed=request.param == "xz")


@pytest.mark.parametrize("info", list_workloads("folder"), ids=lambda info: info.name)
def test_every_set_loads(info: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_DATA_DIR", str(folder))
    workload = load_workload(info.name, source="folder")
    assert workload.domain == info.domain
    if info.choices:
        choices = load_choices(info.name)
        assert len(choices) == len(CHOICE_ROWS) == len(workload.documents)
        assert choices[1].choices == ("It slept.", "It flew.")
        assert choices[1].question == ""
        assert choices[2].context == "C"
        assert [item.answer for item in choices] == [1, 0, 1]
        assert [d.text for d in workload.documents] == [item.text() for item in choices]
        assert choices.provenance["n_items"] == len(choices)
    else:
        assert workload.documents[0].text == FIRST_TEXT[info.name]
        assert len(workload.documents) == (1 if info.name.startswith("wikitext2") else 2)


def test_labels_come_from_the_row(folder: Path) -> None:
    names = {
        name: load_workload(name, source="folder", data_dir=folder).documents[0].name
        for name in ("humaneval", "mbpp", "python-heldout", "gsm8k")
    }
    assert names == {
        "humaneval": "HumanEval/0",
        "mbpp": "mbpp/7",
        "python-heldout": "p/a.py",
        "gsm8k": "gsm8k-0",
    }


def test_packing_does_not_change_the_workload(tmp_path: Path) -> None:
    plain = write_folder(tmp_path / "plain", packed=False)
    packed = write_folder(tmp_path / "packed", packed=True)
    for name in ("gsm8k", "wikitext2", "mmlu"):
        assert load_workload(name, source="folder", data_dir=plain) == load_workload(
            name, source="folder", data_dir=str(packed)
        )


def expect_sentence(name: str, root: Path, *parts: str, **options: Any) -> None:
    """Loading fails with one line that has every part, the name of the file among them."""
    with pytest.raises(DataUnavailableError) as caught:
        load_workload(name, source="folder", data_dir=root, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence


def put(root: Path, name: str, data: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return root


def test_missing_folder_and_file(tmp_path: Path) -> None:
    expect_sentence("gsm8k", tmp_path / "nowhere", "nowhere", "does not exist", "source='embedded'")
    expect_sentence("gsm8k", put(tmp_path, "afile", b"x") / "afile", "afile", "does not exist")
    expect_sentence("gsm8k", tmp_path, "math/gsm8k_test.jsonl", ".xz", "add the file")


GOOD_LINE = json.dumps(ROWS["math/gsm8k_test.jsonl"][0]).encode() + b"\n"


def test_truncated_xz(tmp_path: Path) -> None:
    rows = b"".join(GOOD_LINE.replace(b"Q0", str(i).encode()) for i in range(2000))
    packed = lzma.compress(rows)
    put(tmp_path, "math/gsm8k_test.jsonl.xz", packed[: len(packed) // 2])
    expect_sentence("gsm8k", tmp_path, "math/gsm8k_test.jsonl", "truncated", "copy the file again")
    put(tmp_path, "general/wikitext2_test.txt.xz", lzma.compress(TEXT.encode())[:-20])
    expect_sentence("wikitext2", tmp_path, "general/wikitext2_test.txt", "truncated")


def test_not_xz_at_all(tmp_path: Path) -> None:
    put(tmp_path, "math/gsm8k_test.jsonl.xz", b"plain text under a wrong name")
    expect_sentence("gsm8k", tmp_path, "math/gsm8k_test.jsonl", "not valid .xz")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (b'{"question": "half of a\n', "not valid JSON"),
        (b'{"question": "\xff", "answer": "1"}\n', "not valid JSON"),
        (b"[1, 2]\n", "is no JSON object"),
        (b'{"question": "Q?"}\n', "no column 'answer' (it has question)"),
        (b'{"question": "Q?", "answer": null}\n', "no text in column 'answer' but NoneType"),
        (b'{"question": "Q?", "answer": ["1"]}\n', "no text in column 'answer' but list"),
    ],
)
def test_a_wrong_line_is_named_by_number(tmp_path: Path, second: bytes, said: str) -> None:
    put(tmp_path, "math/gsm8k_test.jsonl", GOOD_LINE + b"\n" + second + GOOD_LINE)
    expect_sentence("gsm8k", tmp_path, "line 3 of 'math/gsm8k_test.jsonl'", said, "source=")
    # What lies before the wrong line can still be read.
    assert load_workload("gsm8k", source="folder", data_dir=tmp_path, max_documents=1).documents


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "answer 2"),
        ({"question": "q", "choices": ["a", "b"], "answer": "A"}, "answer 'A'"),
        ({"question": "q", "choices": ["a", "b"], "answer": True}, "answer True"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "two or more choices"),
        ({"question": "q", "choices": "ab", "answer": 0}, "no list of choices"),
        ({"question": "q", "answer": 0}, "two or more choices"),
        ({"choices": ["a", "b"], "answer": 0}, "neither a question nor a context"),
    ],
)
def test_a_wrong_choice_row_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    put(tmp_path, "eval_mc/mmlu_test.jsonl", json.dumps(row).encode() + b"\n")
    with pytest.raises(DataUnavailableError, match="line 1 of 'eval_mc/mmlu_test.jsonl'") as caught:
        load_choices("mmlu", data_dir=tmp_path)
    assert said in str(caught.value)


def test_empty_files(tmp_path: Path) -> None:
    put(tmp_path, "math/gsm8k_test.jsonl", b"\n\n")
    expect_sentence("gsm8k", tmp_path, "'gsm8k' has no rows")
    put(tmp_path, "general/wikitext2_test.txt", b" \n")
    expect_sentence("wikitext2", tmp_path, "general/wikitext2_test.txt", "no text")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    put(tmp_path, "general/wikitext2_test.txt", b"caf\xe9 au lait")
    expect_sentence("wikitext2", tmp_path, "general/wikitext2_test.txt", "not UTF-8", "byte 3")
