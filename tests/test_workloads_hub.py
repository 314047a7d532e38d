"""The hub source, offline: real files in the hub's schema through the real libraries.

Three ways lead to a file and all are walked here: a local copy of the repository, the
Hugging Face cache on an offline machine, and a small server on this machine that
answers like the hub.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from repro.errors import DataUnavailableError
from repro.workloads import hub, list_workloads, load_choices, load_workload
from repro.workloads.base import data_sets

pytest.importorskip("datasets")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def gpqa_csv() -> bytes:
    sink = io.StringIO()
    columns = ["Record ID", "Question", "Correct Answer", "Explanation"]
    columns += [f"Incorrect Answer {i}" for i in (1, 2, 3)]
    writer = csv.DictWriter(sink, columns)
    writer.writeheader()
    for i in range(6):
        row = {"Record ID": f"r{i}", "Question": f'Line one,\n"line" {i}?', "Explanation": ""}
        row |= {f"Incorrect Answer {j}": f"{j}.50" for j in (1, 2, 3)}
        writer.writerow({**row, "Correct Answer": "NA "})
    return sink.getvalue().encode()


def longbench_zip() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in LONGBENCH_TASKS:
            row = {
                "input": f"{name}?",
                "context": "Long context.",
                "answers": ["first", "second"],
                "length": 2,
                "dataset": name,
                "language": "en",
                "all_classes": None,
                "_id": "x",
            }
            archive.writestr(f"data/{name}.jsonl", json_lines([row, row]))
    return sink.getvalue()


WIKI_ROWS = [{"text": t} for t in ("", " = Title = \n", "", " A line with \u00e9 . \n")]
HUMANEVAL_ROW = {
    "task_id": "HumanEval/0",
    "prompt": "def f():\n",
    "canonical_solution": "    return 1\n",
    "test": "assert f()",
    "entry_point": "f",
}
MMLU_PRO_ROW = {
    "question_id": 70,
    "question": "Which?",
    "options": [f"option {i}" for i in range(10)],
    "answer": "I",
    "answer_index": 8,
    "cot_content": "",
    "category": "business",
    "src": "ori_mmlu-business_ethics",
}
C4_ROW = {"text": "A page.", "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}
MATH_ROW = {
    "problem": "$1+1$?",
    "solution": "It is $\\boxed{2}$.",
    "answer": "2",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "test/algebra/1.json",
}
LONGBENCH_TASKS = [n.removeprefix("longbench-") for n in data_sets() if n.startswith("longbench-")]

FILES: dict[tuple[str, str], bytes] = {
    ("Salesforce/wikitext", "wikitext-2-raw-v1/test-00000-of-00001.parquet"): parquet(WIKI_ROWS),
    ("Salesforce/wikitext", "wikitext-2-raw-v1/validation-00000-of-00001.parquet"): parquet(
        WIKI_ROWS
    ),
    ("allenai/c4", "en/c4-validation.00000-of-00008.json.gz"): gzip.compress(
        json_lines([{**C4_ROW, "text": f"Page {i}."} for i in range(50)])
    ),
    ("openai/gsm8k", "main/test-00000-of-00001.parquet"): parquet(
        [{"question": f"Q{i}?", "answer": f"#### {i}"} for i in range(4)]
    ),
    ("HuggingFaceH4/MATH-500", "test.jsonl"): json_lines([MATH_ROW] * 3),
    ("math-ai/aime25", "test.jsonl"): json_lines(
        [{"problem": "Find $n$.", "answer": "070", "id": "0"}] * 3
    ),
    (
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
    ): parquet([HUMANEVAL_ROW] * 3),
    ("TIGER-Lab/MMLU-Pro", "data/test-00000-of-00001.parquet"): parquet([MMLU_PRO_ROW] * 3),
    ("Idavidrein/gpqa", "gpqa_diamond.csv"): gpqa_csv(),
    ("zai-org/LongBench", "data.zip"): longbench_zip(),
}
FIRST_TEXT = {
    "wikitext2": "\n\n = Title = \n\n\n\n\n A line with \u00e9 . \n",
    "wikitext2-valid": "\n\n = Title = \n\n\n\n\n A line with \u00e9 . \n",
    "c4": "Page 0.",
    "gsm8k": "Q0?\n#### 0",
    "math500": "$1+1$?\nIt is $\\boxed{2}$.",
    "aime25": "Find $n$.\n070",
    "humaneval": "def f():\n    return 1\n",
    "longbench-hotpotqa": "Long context.\n\nhotpotqa?\nfirst",
    "longbench-lcc": "Long context.lcc?first",
}


@pytest.fixture(scope="module")
def local_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repositories")
    for (repo, name), data in FILES.items():
        path = root / repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def in_cache(cache: Path, repo: str, name: str, data: bytes, revision: str = "main") -> None:
    """Put a file where ``huggingface_hub`` keeps what it downloaded."""
    folder = cache / f"datasets--{repo.replace('/', '--')}"
    path = folder / "snapshots" / COMMIT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / revision).write_text(COMMIT)


# --- every set, from a local copy of the repository -------------------------------------


@pytest.mark.parametrize("info", list_workloads("hub"), ids=lambda info: info.name)
def test_every_set_loads_from_a_local_copy(info: Any, local_root: Path) -> None:
    workload = load_workload(info.name, source="hub", local_root=local_root)
    assert workload.domain == info.domain
    assert len(workload.documents) >= 1
    if info.name in FIRST_TEXT:
        assert workload.documents[0].text == FIRST_TEXT[info.name]
    declared = data_sets()[info.name].hub
    assert declared is not None
    assert workload.provenance["repo"] == declared.repo
    assert workload.provenance["local_copy"] is True
    assert str(local_root) not in json.dumps(workload.provenance)


def test_wikitext_rows_are_joined_by_blank_lines_whatever_the_limit(local_root: Path) -> None:
    workload = load_workload("wikitext2", source="hub", local_root=local_root, max_documents=1)
    assert [d.text for d in workload.documents] == [FIRST_TEXT["wikitext2"]]


def test_the_stream_stops_at_the_limit(local_root: Path) -> None:
    workload = load_workload("c4", source="hub", local_root=local_root, max_documents=7)
    assert [d.text for d in workload.documents] == [f"Page {i}." for i in range(7)]


def test_mmlu_pro_items(local_root: Path) -> None:
    choices = load_choices("mmlu_pro", source="hub", local_root=local_root, max_items=2)
    assert len(choices) == 2
    assert choices[0].answer == 8
    assert choices[0].choices[8] == "option 8"


def test_gpqa_places_the_right_answer_by_seed(local_root: Path) -> None:
    first = load_choices("gpqa_diamond", source="hub", local_root=local_root, seed=42)
    again = load_choices("gpqa_diamond", source="hub", local_root=local_root, seed=42)
    other = load_choices("gpqa_diamond", source="hub", local_root=local_root, seed=43)
    assert first.items == again.items
    assert first.provenance["seed"] == 42
    for item in first:
        # Cells stay text: "NA" is no missing value and 1.50 keeps its zero.
        assert item.choices[item.answer] == "NA"
        assert sorted(item.choices) == ["1.50", "2.50", "3.50", "NA"]
    assert first[0].question == 'Line one,\n"line" 0?'
    assert [i.answer for i in first] != [i.answer for i in other]
    assert len({i.answer for i in first}) > 1


def test_reading_local_files_reports_nothing_to_a_server(
    local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # datasets sends a download count for local files too, unless it is offline.
    import datasets.config

    asked: list[Any] = []

    def record(*arguments: Any, **_: Any) -> Any:
        asked.append(arguments[:2])
        raise OSError("no network in tests")

    online(monkeypatch)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr(socket, "getaddrinfo", record)
    load_workload("gsm8k", source="hub", local_root=local_root)
    assert asked == []
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS is True


def test_reading_leaves_nothing_in_the_datasets_cache(
    local_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    for name in ("gsm8k", "math500", "gpqa_diamond", "longbench-trec", "c4"):
        assert load_workload(name, source="hub", local_root=local_root).documents
    assert list(tmp_path.iterdir()) == []


# --- the cache --------------------------------------------------------------------------


def test_an_offline_machine_reads_its_cache(tmp_path: Path) -> None:
    for (repo, name), data in FILES.items():
        in_cache(tmp_path, repo, name, data)
    for name in ("gsm8k", "longbench-hotpotqa", "c4"):
        workload = load_workload(name, source="hub", cache_dir=tmp_path)
        assert workload.documents[0].text == FIRST_TEXT[name]
        assert workload.provenance["commit"] == COMMIT
        assert workload.provenance["revision"] == "main"


def test_a_pinned_commit_needs_no_network_once_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ("openai/gsm8k", "main/test-00000-of-00001.parquet")
    in_cache(tmp_path, *key, FILES[key])
    online(monkeypatch)
    monkeypatch.setattr(hub, "why_unreachable", lambda endpoint: pytest.fail("asked the network"))
    workload = load_workload("gsm8k", source="hub", revision=COMMIT, cache_dir=tmp_path)
    assert workload.provenance["revision"] == COMMIT


def expect_sentence(name: str, *parts: str, **options: Any) -> float:
    """Loading fails within seconds, in one line that has every part; returns the seconds."""
    begin = time.perf_counter()
    with pytest.raises(DataUnavailableError) as caught:
        load_workload(name, source="hub", **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in (f"'{name}'", *parts):
        assert part in sentence
    return time.perf_counter() - begin


def test_offline_without_a_cache_fails_at_once(tmp_path: Path) -> None:
    for name in ("gsm8k", "c4", "gpqa_diamond"):
        repo = data_sets()[name].hub.repo  # type: ignore[union-attr]
        parts = (repo, "HF_HUB_OFFLINE is set", "source='embedded'")
        assert expect_sentence(name, *parts, cache_dir=tmp_path) < 2
    expect_sentence("gsm8k", "REPRO_DATA_DIR", cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_other_offline_switches_count(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online(monkeypatch)
    assert not hub.is_offline()
    monkeypatch.setenv(name, "1")
    assert hub.is_offline()
    expect_sentence("gsm8k", "HF_HUB_OFFLINE is set", cache_dir=tmp_path)


# --- a server that answers like the hub -------------------------------------------------


def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the offline switches of the test run, in this test only."""
    import huggingface_hub.constants

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


class HubLike(BaseHTTPRequestHandler):
    """``/datasets/<repo>/resolve/<revision>/<file>`` with the headers the client wants."""

    asked: list[str]

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, *, body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        if self.path == "/":
            self._refuse(404, "EntryNotFound")
            return
        repo, _, rest = self.path.removeprefix("/datasets/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repo == "Idavidrein/gpqa":
            self._refuse(403, "GatedRepo")
        elif repo == "allenai/c4":
            self._refuse(401, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif (repo, name) not in FILES or repo == "math-ai/aime25":
            self._refuse(404, "EntryNotFound")
        else:
            data = FILES[repo, name]
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[HubLike]]:
    handler = type("Handler", (HubLike,), {"asked": []})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    online(monkeypatch)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{running.server_address[1]}")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield handler
    running.shutdown()
    running.server_close()


def test_a_set_is_downloaded_once_and_then_read_from_the_cache(
    server: type[HubLike], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = load_workload("gsm8k", source="hub", cache_dir=tmp_path)
    assert workload.documents[0].text == FIRST_TEXT["gsm8k"]
    assert workload.provenance["commit"] == COMMIT
    got = [line for line in server.asked if line.startswith("GET")]
    assert len(got) == 1
    assert got[0].endswith("/main/test-00000-of-00001.parquet")
    again = load_workload("gsm8k", source="hub", cache_dir=tmp_path)
    assert again == workload
    assert [line for line in server.asked if line.startswith("GET")] == got
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    server.asked.clear()
    assert load_workload("gsm8k", source="hub", cache_dir=tmp_path) == workload
    assert server.asked == []


def test_gated_missing_and_renamed(server: type[HubLike], tmp_path: Path) -> None:
    expect_sentence(
        "gpqa_diamond", "is gated", "accept its terms", "hf auth login", cache_dir=tmp_path
    )
    expect_sentence("c4", "allenai/c4", "does not exist or is not open", cache_dir=tmp_path)
    expect_sentence("gsm8k", "no revision 'v9'", revision="v9", cache_dir=tmp_path)
    expect_sentence("aime25", "does not have the file", "revision=", cache_dir=tmp_path)


def test_an_unreachable_hub_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_root: Path
) -> None:
    online(monkeypatch)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    parts = ("unreachable", "refused", "source='folder'")
    assert expect_sentence("gsm8k", *parts, cache_dir=tmp_path) < 3
    key = ("openai/gsm8k", "main/test-00000-of-00001.parquet")
    in_cache(tmp_path, *key, FILES[key])
    assert load_workload("gsm8k", source="hub", cache_dir=tmp_path).documents


# --- files that are wrong ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("gsm8k", b"no parquet", "cannot be read"),
        ("gsm8k", parquet([{"question": "Q?", "reply": "A"}]), "no column 'answer'"),
        ("gsm8k", parquet([{"question": "Q?", "answer": None}]), "no text in column 'answer'"),
        ("math500", b'{"problem": "p", "solution": \n', "cannot be read"),
        ("c4", b"no gzip", "cannot be read"),
        ("longbench-lcc", b"no zip", "cannot be read"),
        ("mmlu_pro", parquet([{**MMLU_PRO_ROW, "answer_index": 10}]), "answer 10"),
        ("gpqa_diamond", b"Question,Answer\nq,a\n", "no column 'Correct Answer'"),
    ],
)
def test_wrong_files(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    place = data_sets()[name].hub
    assert place is not None
    path = tmp_path / place.repo / place.file
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    expect_sentence(name, said, local_root=tmp_path)


def test_a_task_missing_from_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "zai-org/LongBench/data.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/trec.jsonl", "{}\n")
    expect_sentence("longbench-lcc", "cannot be read", "lcc.jsonl", local_root=tmp_path)
    expect_sentence("longbench-trec", "has no", local_root=tmp_path)


def test_a_local_copy_without_the_file(tmp_path: Path) -> None:
    expect_sentence("gsm8k", "openai/gsm8k/main/test-", "drop local_root", local_root=tmp_path)


def test_without_datasets_the_remedy_is_named(
    local_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    expect_sentence("gsm8k", "pip install datasets", local_root=local_root)
