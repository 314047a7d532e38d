"""Token streams, windows, prompts, and the bytes that tokens stand for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.errors import CheckpointError, DataUnavailableError, UnknownNameError
from repro.workloads import Document, Workload
from repro.workloads.tokens import (
    bits_per_byte,
    encode_stream,
    pad_batch,
    prompts,
    scored_bytes,
    token_byte_lengths,
    windows,
)

EOS = "<|endoftext|>"
SAMPLE = (
    "The quick brown fox jumps over the lazy dog, 1234 times; "
    "na\u00efve caf\u00e9 \u2013 \u65e5\u672c\u8a9e!\n"
    "def f(x):\n    return x + 1\n"
)


def train(*, digits: bool = True) -> Any:
    """A small byte-level BPE, saved in the form of the bundled models' tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[EOS, "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token="<|pad|>", model_max_length=64
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train()


TOKENIZER = train()
LENGTHS = token_byte_lengths(TOKENIZER)


def workload(*texts: str) -> Workload:
    documents = tuple(Document(str(i), text) for i, text in enumerate(texts))
    return Workload("made-up", "text", "test", documents, {})


# --- streams and windows ----------------------------------------------------------------


def test_each_document_is_ended_by_the_end_of_text_token(tokenizer: Any) -> None:
    stream = encode_stream(tokenizer, workload("one", "", "two three"))
    assert stream.dtype == np.int64
    assert (stream == tokenizer.eos_token_id).sum() == 3
    assert stream[-1] == tokenizer.eos_token_id
    parts = np.split(stream, np.flatnonzero(stream == tokenizer.eos_token_id) + 1)
    assert [tokenizer.decode(p[:-1]) for p in parts[:3]] == ["one", "", "two three"]


def test_a_special_token_spelled_in_a_document_is_ordinary_text(tokenizer: Any) -> None:
    text = f"before {EOS} after"
    stream = encode_stream(tokenizer, workload(text))
    assert (stream == tokenizer.eos_token_id).sum() == 1
    assert tokenizer.decode(stream[:-1]) == text
    assert LENGTHS[stream].sum() == len(text)


def test_long_documents_are_not_cut_and_raise_no_warning(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stream = encode_stream(tokenizer, workload(SAMPLE * 50))
    assert len(stream) > tokenizer.model_max_length
    assert tokenizer.decode(stream[:-1]) == SAMPLE * 50
    assert not caplog.records


def test_a_tokenizer_without_an_end_is_refused() -> None:
    other = train()
    other.eos_token = None
    with pytest.raises(CheckpointError, match="no end-of-text token"):
        encode_stream(other, workload("text"))


@given(st.integers(0, 200), st.integers(1, 50))
def test_windows_are_disjoint_and_drop_the_rest(n_tokens: int, length: int) -> None:
    stream = np.arange(n_tokens)
    found = windows(stream, length)
    assert found.shape == (n_tokens // length, length)
    assert (found.reshape(-1) == np.arange(found.size)).all()


def test_a_window_needs_a_length() -> None:
    with pytest.raises(UnknownNameError, match="at least 1 token"):
        windows(np.arange(10), 0)


# --- prompts ----------------------------------------------------------------------------

# Random letters, so that no two windows are alike.
_RNG = np.random.default_rng(0)
NUMBERED = workload(*("".join(_RNG.choice(list("abcdefgh "), 90)) for _ in range(60)))


def test_prompts_are_windows_of_the_workload_spread_over_it(tokenizer: Any) -> None:
    import torch

    available = windows(encode_stream(tokenizer, NUMBERED), 16)
    chosen = prompts(tokenizer, NUMBERED, n=10, length=16, seed=3)
    assert chosen.shape == (10, 16)
    assert chosen.dtype == torch.long
    places = [int(np.flatnonzero((available == row).all(1))[0]) for row in chosen.numpy()]
    runs = np.searchsorted(np.arange(1, 11) * len(available) // 10, places, side="right")
    assert sorted(runs) == list(range(10))  # one of each tenth
    assert places != sorted(places)  # in shuffled order


def test_prompts_follow_the_seed(tokenizer: Any) -> None:
    first = prompts(tokenizer, NUMBERED, n=10, length=16, seed=0)
    assert (first == prompts(tokenizer, NUMBERED, n=10, length=16, seed=0)).all()
    assert not (first == prompts(tokenizer, NUMBERED, n=10, length=16, seed=1)).all()


def test_all_windows_can_be_asked_for_and_no_more(tokenizer: Any) -> None:
    available = windows(encode_stream(tokenizer, NUMBERED), 16)
    chosen = prompts(tokenizer, NUMBERED, n=len(available), length=16, seed=0)
    assert sorted(map(tuple, chosen.tolist())) == sorted(map(tuple, available.tolist()))
    with pytest.raises(DataUnavailableError, match=f"holds {len(available)} windows of 16"):
        prompts(tokenizer, NUMBERED, n=len(available) + 1, length=16, seed=0)
    with pytest.raises(UnknownNameError, match="at least 1"):
        prompts(tokenizer, NUMBERED, n=0, length=16)


# --- bytes ------------------------------------------------------------------------------


@given(st.text(max_size=80))
def test_token_bytes_add_up_to_the_bytes_of_the_text(text: str) -> None:
    stream = encode_stream(TOKENIZER, workload(text))
    assert LENGTHS[stream].sum() == len(text.encode("utf-8"))


@given(st.lists(st.text(max_size=30), min_size=1, max_size=5), st.integers(2, 12))
def test_scored_bytes_leave_out_the_first_token_of_each_window(
    texts: list[str], length: int
) -> None:
    cut = windows(encode_stream(TOKENIZER, workload(*texts)), length)
    by_hand = [sum(int(LENGTHS[token]) for token in row[1:]) for row in cut]
    assert scored_bytes(cut, LENGTHS).tolist() == by_hand


def test_every_token_has_the_bytes_it_decodes_to() -> None:
    # Independent of the vocabulary's spelling: the decoder turns ids into bytes, and a token
    # that is no whole character shows as replacement characters, so whole ones are compared.
    compared = 0
    for token in range(len(TOKENIZER)):
        text = TOKENIZER.decode([token], skip_special_tokens=True)
        if "\ufffd" not in text:
            assert LENGTHS[token] == len(text.encode("utf-8")), token
            compared += 1
    assert compared > 150
    assert LENGTHS[TOKENIZER.eos_token_id] == LENGTHS[TOKENIZER.pad_token_id] == 0


def test_added_tokens_count_their_bytes_and_special_ones_none() -> None:
    other = train()
    other.add_tokens(["n\u00e4chste"])
    other.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    lengths = token_byte_lengths(other)
    assert lengths.shape == (len(other),)
    assert lengths[other.convert_tokens_to_ids("n\u00e4chste")] == len("n\u00e4chste".encode())
    assert lengths[other.convert_tokens_to_ids("<|turn|>")] == 0


def test_a_vocabulary_of_words_is_refused() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "\u2581word": 1}, unk_token="[UNK]"))
    with pytest.raises(CheckpointError, match="not byte-level"):
        token_byte_lengths(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"))


def test_bits_per_byte() -> None:
    # A uniform guess among 256 bytes costs 8 bits a byte.
    assert bits_per_byte(100 * math.log(256), 100) == pytest.approx(8.0)
    with pytest.raises(UnknownNameError, match="0 bytes"):
        bits_per_byte(1.0, 0)


# --- batches ----------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(2, 9), max_size=6), min_size=1, max_size=5), st.booleans())
def test_padding_keeps_every_token_and_marks_it(rows: list[list[int]], left: bool) -> None:
    ids, mask = pad_batch(rows, 1, side="left" if left else "right")
    assert ids.shape == mask.shape == (len(rows), max(map(len, rows)))
    for row, padded, real in zip(rows, ids, mask, strict=True):
        assert padded[real].tolist() == row
        assert (padded[~real] == 1).all()
        assert int(real.sum()) == len(row)
        if row:
            assert bool(real[-1] if left else real[0])


def test_padding_side_must_exist() -> None:
    with pytest.raises(UnknownNameError, match="'left' or 'right'"):
        pad_batch([[1]], 0, side="middle")  # type: ignore[arg-type]
