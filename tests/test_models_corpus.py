"""Corpora, token streams and the sampler: what training sees, and what it must not see."""

import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_training import STREAMS, small_tokenizer, write_corpora

from repro.errors import DataUnavailableError
from repro.models import streams
from repro.models.corpus import (
    SKIP_LINES,
    SOURCES,
    Source,
    read_documents,
    task_documents,
    training_folder,
    word_problem_documents,
)
from repro.models.specs import EOS_ID
from repro.models.streams import Sampler, Stream, encode_documents, load_source, pack_blocks

BY_NAME = {source.name: source for source in SOURCES}
ROWS = Source("rows", "math", "rows.jsonl", 1.0, ("question", "answer"))


def write_rows(folder: Path, *rows: Any) -> Path:
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
    return folder


# --- the table


def test_the_mixture_adds_up_and_says_its_licences() -> None:
    assert sum(source.weight for source in SOURCES) == pytest.approx(1.0, abs=1e-9)
    assert len(BY_NAME) == len(SOURCES)
    assert all(source.weight > 0 and source.licence for source in SOURCES)
    assert {s.domain for s in SOURCES} == {"text", "math", "code", "tasks"}
    assert {s.name for s in SOURCES if s.file is None} == {"word-problems", "tasks"}
    for source in SOURCES:
        if source.file:
            assert "train" in source.file, "evaluation files are never trained on"


# --- reading


def test_fields_are_joined_and_whole_numbers_lose_their_point(tmp_path: Path) -> None:
    write_rows(
        tmp_path,
        {"question": "How many?", "answer": 12.0, "other": "unused"},
        {"question": "é 漢", "answer": 2.5},
        {"question": "n", "answer": 3},
    )
    assert list(read_documents(ROWS, tmp_path)) == ["How many?\n12", "é 漢\n2.5", "n\n3"]


def test_rows_under_copyleft_document_licences_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"license": licence, "question": licence, "answer": "x"}
        for licence in ("CC BY 4.0", "GFDL 1.2", "GFDL 1.3+", "CC BY-SA 4.0")
    ]
    kept = [text.split("\n")[0] for text in read_documents(ROWS, write_rows(tmp_path, *rows))]
    assert kept == ["CC BY 4.0", "CC BY-SA 4.0"]


def test_compressed_and_plain_files_read_the_same(tmp_path: Path) -> None:
    write_rows(tmp_path, {"question": "q", "answer": "a"})
    packed = replace(ROWS, file="rows.jsonl.xz")
    (tmp_path / "rows.jsonl.xz").write_bytes(lzma.compress((tmp_path / "rows.jsonl").read_bytes()))
    assert list(read_documents(packed, tmp_path)) == list(read_documents(ROWS, tmp_path))


def wikitext(folder: Path, lines: list[str], skip: str) -> Path:
    path = folder / str(BY_NAME["wikitext2"].file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress("\n".join(lines).encode()))
    (folder / SKIP_LINES).write_text(skip)
    return folder


def test_lines_shared_with_test_sets_are_left_out(tmp_path: Path) -> None:
    lines = ["zero", "one", "", "three", "four"]
    wikitext(tmp_path, lines, "[1, 3]")
    assert list(read_documents(BY_NAME["wikitext2"], tmp_path)) == ["zero\n\nfour"]


@pytest.mark.parametrize(
    ("skip", "said"),
    [
        ("{}", "no list of line numbers"),
        ('["1", "3"]', "no list of line numbers"),
        ("[1,", "Expecting value"),
        (None, "No such file"),
    ],
)
def test_without_the_list_of_shared_lines_nothing_is_read(
    skip: str | None, said: str, tmp_path: Path
) -> None:
    wikitext(tmp_path, ["a", "b"], skip or "")
    if skip is None:
        (tmp_path / SKIP_LINES).unlink()
    with pytest.raises(DataUnavailableError, match=f"overlap_lines.*{said}.*restore it") as caught:
        list(read_documents(BY_NAME["wikitext2"], tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"question": "q", "answer": "a"}, '{"question": "q", "ans'], "at line 2 .JSONDecodeErr"),
        ([{"question": "q"}], "at line 1 .KeyError: no field 'answer'"),
        (["[1, 2]"], "at line 1 .AttributeError"),
        (["", {"question": "q", "answer": "a"}], "at line 1 .JSONDecodeError"),
        ([{"question": "q", "answer": None}], "at line 1 .ValueError: a field holds NoneType"),
        ([{"question": "q", "answer": ["a"]}], "at line 1 .ValueError: a field holds list"),
    ],
)
def test_a_damaged_row_is_one_sentence_with_its_line(
    rows: list[Any], said: str, tmp_path: Path
) -> None:
    write_rows(tmp_path, *rows)
    pattern = f"training source 'rows.jsonl' cannot be read {said}.*copy the file again"
    with pytest.raises(DataUnavailableError, match=pattern) as caught:
        list(read_documents(ROWS, tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 10, -20, "text"])
def test_a_truncated_archive_is_one_sentence(keep: int | str, tmp_path: Path) -> None:
    packed = replace(ROWS, file="rows.jsonl.xz")
    row = json.dumps({"question": "q" * 50, "answer": "a"}) + "\n"
    whole = lzma.compress((row * 500).encode())
    data = b"no archive at all" if keep == "text" else whole[:keep]
    (tmp_path / "rows.jsonl.xz").write_bytes(data)
    with pytest.raises(DataUnavailableError, match=r"'rows\.jsonl\.xz' cannot be read at line \d+"):
        list(read_documents(packed, tmp_path))


def test_text_in_another_encoding_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "\xff", "answer": "a"}\n')
    with pytest.raises(DataUnavailableError, match="UnicodeDecodeError"):
        list(read_documents(ROWS, tmp_path))


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match=r"'rows' is missing: expected 'rows\.jsonl'"):
        list(read_documents(ROWS, tmp_path))


def test_the_folder_comes_from_the_argument_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPRO_DATA_DIR", str(tmp_path))
    assert training_folder(None) == tmp_path
    with pytest.raises(DataUnavailableError, match="'absent' does not exist: correct --data"):
        training_folder(Path("absent"))
    monkeypatch.delenv("REPRO_DATA_DIR")
    with pytest.raises(DataUnavailableError, match="give --data or set REPRO_DATA_DIR"):
        training_folder(None)


# --- generated text


def test_generated_text_follows_its_seed_and_its_size() -> None:
    texts = list(task_documents(0, 30_000, 1024))
    assert texts == list(task_documents(0, 30_000, 1024))
    assert texts != list(task_documents(1, 30_000, 1024))
    assert 30_000 <= sum(map(len, texts)) < 30_000 + max(map(len, texts)) + 1
    problems = list(word_problem_documents(0, 20))
    assert len(problems) == 20
    assert problems == list(word_problem_documents(0, 20)) != list(word_problem_documents(1, 20))
    assert all("\n#### " in text for text in problems)


@pytest.mark.parametrize("longest", [64, 300, 1024])
def test_no_list_of_facts_is_longer_than_a_window(longest: int) -> None:
    lists = [t for t in task_documents(0, 200_000, longest) if t.startswith("Facts:")]
    assert bool(lists) == (longest >= 256)
    for text in lists[:20]:
        assert text.count(" is ") * 10 <= longest  # ten tokens of the bundled tokenizer a line


# --- streams


def test_every_document_ends_with_the_end_of_text() -> None:
    tokenizer = small_tokenizer()
    texts = ["the cat", "", "12 birds near"]
    for text, ids in zip(texts, encode_documents(tokenizer, texts, batch=2), strict=True):
        assert ids.dtype == np.uint16
        assert ids[-1] == EOS_ID
        assert tokenizer.decode(ids[:-1]) == text


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=30), block=st.integers(1, 10))
def test_blocks_begin_with_a_document_and_hold_whole_ones(sizes: list[int], block: int) -> None:
    # Document i is the number i, repeated, so that its origin can be seen.
    documents = [np.full(size, i, np.uint16) for i, size in enumerate(sizes)]
    if sum(sizes) < block:
        with pytest.raises(DataUnavailableError, match="do not fill one block"):
            pack_blocks(documents, block)
        return
    packed = pack_blocks(documents, block).reshape(-1, block)
    begun: list[int] = []
    for row in packed:
        parts = [int(x) for x in dict.fromkeys(row.tolist())]
        begun += parts
        for part in parts[:-1]:
            assert (row == part).sum() == sizes[part]  # whole, and only the last one is cut
        assert (row == parts[-1]).sum() <= sizes[parts[-1]]
    assert begun == list(range(len(begun)))  # in order, none twice: a cut rest is dropped


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


def load(name: str, data: Path, cache: Path, **changes: int) -> Stream:
    settings = {"seq_tokens": 32, "seed": 0, **STREAMS, **changes}
    return load_source(BY_NAME[name], small_tokenizer(), data, cache, **settings)


def test_a_stream_is_its_documents_split_in_two(data: Path, tmp_path: Path) -> None:
    stream = load("gsm8k", data, tmp_path)
    documents = encode_documents(small_tokenizer(), read_documents(BY_NAME["gsm8k"], data))
    assert np.array_equal(
        np.concatenate([stream.train, stream.validation]), np.concatenate(documents)
    )
    whole = stream.train.size + stream.validation.size
    assert stream.validation.size == whole // 20
    assert stream.block_tokens == 0


def test_task_blocks_stay_whole_in_both_parts(data: Path, tmp_path: Path) -> None:
    stream = load("tasks", data, tmp_path)
    assert stream.block_tokens == 33
    assert stream.train.size % 33 == stream.validation.size % 33 == 0
    assert stream.validation.size >= 33


@pytest.mark.parametrize("name", ["gsm8k", "tasks", "word-problems", "wikitext2"])
def test_the_cache_is_used_and_holds_the_same(name: str, data: Path, tmp_path: Path) -> None:
    first = load(name, data, tmp_path)
    (path,) = tmp_path.glob("*.npy")
    stamp = path.stat().st_mtime_ns
    again = load(name, data, tmp_path)
    assert path.stat().st_mtime_ns == stamp
    assert np.array_equal(first.train, again.train)


def test_whatever_decides_a_stream_names_its_cache_file(data: Path, tmp_path: Path) -> None:
    load("tasks", data, tmp_path)
    for changes in ({"seed": 1}, {"seq_tokens": 48}, {"task_characters": 21_000}):
        before = len(list(tmp_path.iterdir()))
        load("tasks", data, tmp_path, **changes)
        assert len(list(tmp_path.iterdir())) == before + 1, changes


def test_a_changed_corpus_is_tokenised_anew(tmp_path: Path) -> None:
    data = write_corpora(tmp_path / "data")
    cache = tmp_path / "cache"
    first = load("mawps", data, cache)
    path = data / str(BY_NAME["mawps"].file)
    path.write_text(path.read_text().replace("cat", "dog"))
    assert not np.array_equal(load("mawps", data, cache).train, first.train)
    shared = load("wikitext2", data, cache)
    (data / SKIP_LINES).write_text("[0, 3, 5]")
    assert load("wikitext2", data, cache).train.size < shared.train.size


def test_a_changed_generator_is_tokenised_anew(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("word-problems", data, tmp_path)
    monkeypatch.setattr(streams, "word_problem_documents", lambda seed, n: iter(["other"] * n * 9))
    load("word-problems", data, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_cache_is_one_sentence(data: Path, tmp_path: Path) -> None:
    load("mawps", data, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataUnavailableError, match=r"mawps-.*\.npy' is damaged: remove it"):
        load("mawps", data, tmp_path)


def test_too_small_a_source_is_one_sentence(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match=r"'mawps' holds .* too few for one sequence of"):
        load("mawps", data, tmp_path, seq_tokens=100_000)


def test_an_empty_source_is_one_sentence(tmp_path: Path) -> None:
    data = write_corpora(tmp_path)
    (data / str(BY_NAME["mawps"].file)).write_text("")
    with pytest.raises(DataUnavailableError, match="'mawps' holds no document"):
        load("mawps", data, tmp_path / "cache")


def test_validation_windows_begin_with_documents_where_blocks_do() -> None:
    ids = np.arange(40, dtype=np.uint16)
    blocks = Stream(BY_NAME["tasks"], ids, ids, block_tokens=10).validation_windows(3, 6)
    assert blocks.tolist() == [list(range(i, i + 6)) for i in (0, 10, 20)]
    plain = Stream(BY_NAME["gsm8k"], ids, ids).validation_windows(9, 6)
    assert plain.tolist() == [list(range(i, i + 6)) for i in range(0, 36, 6)]
    assert len(Stream(BY_NAME["gsm8k"], ids, ids[:3]).validation_windows(9, 6)) == 0


# --- the sampler


def numbered(weights_and_sizes: list[tuple[float, int, int]]) -> list[Stream]:
    """Streams whose ids tell source (thousands) and place (rest)."""
    return [
        Stream(
            Source(f"s{i}", "text", None, weight),
            np.arange(size, dtype=np.uint16) + 1000 * i,
            np.zeros(1, np.uint16),
            block,
        )
        for i, (weight, size, block) in enumerate(weights_and_sizes)
    ]


@given(
    sizes=st.lists(st.integers(5, 60), min_size=1, max_size=6),
    seq_tokens=st.integers(1, 4),
    n=st.integers(1, 40),
    seed=st.integers(0, 50),
)
def test_windows_stay_within_one_source(
    sizes: list[int], seq_tokens: int, n: int, seed: int
) -> None:
    sampler = Sampler(
        numbered([(1.0 + i, size, 0) for i, size in enumerate(sizes)]),
        seq_tokens,
        torch.device("cpu"),
    )
    batch = sampler.batch(n, torch.Generator().manual_seed(seed))
    assert batch.shape == (n, seq_tokens + 1)
    assert (batch.diff(dim=1) == 1).all()  # consecutive: never over a border
    source = batch // 1000
    assert (source == source[:, :1]).all()
    assert (batch % 1000 < torch.tensor(sizes)[source]).all()


def test_every_start_of_a_source_is_drawn_also_the_last() -> None:
    sampler = Sampler(numbered([(1.0, 12, 0)]), 4, torch.device("cpu"))
    batch = sampler.batch(4000, torch.Generator().manual_seed(0))
    counts = torch.bincount(batch[:, 0], minlength=8)
    assert counts.numel() == 8  # 12 ids have 8 windows of 5
    assert (counts - 500).abs().max() < 100


def test_block_windows_begin_where_blocks_do() -> None:
    sampler = Sampler(numbered([(1.0, 50, 5), (1.0, 50, 0)]), 4, torch.device("cpu"))
    batch = sampler.batch(2000, torch.Generator().manual_seed(0))
    aligned, free = batch[batch[:, 0] < 1000, 0], batch[batch[:, 0] >= 1000, 0] - 1000
    assert set(aligned.tolist()) == set(range(0, 50, 5))
    assert set(free.tolist()) == set(range(46))


def test_the_mixture_has_the_weights_of_the_table() -> None:
    streams_ = numbered([(source.weight, 900, 0) for source in SOURCES])
    sampler = Sampler(streams_, 4, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(len(SOURCES))
    n_batches, n = 400, 24
    for _ in range(n_batches):
        drawn = torch.bincount(sampler.batch(n, generator)[:, 0] // 1000, minlength=len(SOURCES))
        counts += drawn
        for source, found in zip(SOURCES, drawn, strict=True):
            # Stratified: every single batch is within one sequence of the mixture, or two.
            assert abs(found - n * source.weight) < 2
    shares = counts / counts.sum()
    for source, share in zip(SOURCES, shares, strict=True):
        spread = (source.weight * (1 - source.weight) / (n * n_batches)) ** 0.5
        assert abs(share - source.weight) < 4 * spread


def test_batches_follow_the_seed() -> None:
    sampler = Sampler(numbered([(1.0, 50, 0), (3.0, 60, 0)]), 4, torch.device("cpu"))

    def batches(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([sampler.batch(6, generator) for _ in range(3)])

    assert torch.equal(batches(0), batches(0))
    assert not torch.equal(batches(0), batches(1))
    assert not torch.equal(batches(0)[0], batches(0)[1])


@pytest.mark.parametrize("stream", [(1.0, 4, 0), (1.0, 50, 7)])
def test_a_stream_that_does_not_fit_the_windows_is_refused(stream: tuple[float, int, int]) -> None:
    with pytest.raises(AssertionError):
        Sampler(numbered([stream]), 4, torch.device("cpu"))
