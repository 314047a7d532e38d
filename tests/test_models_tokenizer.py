"""One tokenizer for both bundled models, loaded by AutoTokenizer with the very same ids."""

import argparse
import json
import random
import shutil
import string
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_training import sentences, small_tokenizer, write_corpora
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from repro.errors import CheckpointError
from repro.models import tokenizer as module
from repro.models.specs import (
    CONTEXT_TOKENS,
    EOS_ID,
    EOS_TOKEN,
    PAD_ID,
    PAD_TOKEN,
    SPECS,
    VOCAB_SIZE,
)
from repro.models.tokenizer import load_tokenizer
from repro.paths import models_dir
from repro.workloads.tasks import TASKS

BUNDLED = sorted(SPECS)
# Spaces, contractions, digits beside letters and letters beyond ASCII: where two
# pre-tokenizers part.
SAMPLES = (
    "It's 12345 things, we'll   see\n\n\tdef f(x):\n        return x**2  # no\n",
    "Zoë won't write 漢字 №5 at 3.14 or 1,000,000 — 50%!",
    "    leading and trailing    ",
    "a1b22c333 x_y __init__ 'quoted' \"quoted\"\r\n",
)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return AutoTokenizer.from_pretrained(models_dir() / "moe-fine")


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.from_file(str(models_dir() / "moe-fine" / "tokenizer.json"))


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


# --- what is bundled


@pytest.mark.parametrize("name", BUNDLED)
def test_auto_tokenizer_gives_the_trained_ids(name: str) -> None:
    folder = models_dir() / name
    auto = AutoTokenizer.from_pretrained(folder)
    trained = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [*SAMPLES, *(item.prompt for t in TASKS.values() for item in t.items(3, level=1))]
    texts += [topics["assignment"], Path(argparse.__file__).read_text(encoding="utf-8")[:20_000]]
    for text in texts:
        assert ids(auto, text) == trained.encode(text).ids


def test_a_bare_tokenizer_json_does_not(tmp_path: Path, trained: Tokenizer) -> None:
    """The reason why it is saved with its class: under a Qwen type the ids change in silence."""
    for file in ("tokenizer.json", "config.json"):
        shutil.copy(models_dir() / "moe-fine" / file, tmp_path)
    swapped = AutoTokenizer.from_pretrained(tmp_path)
    assert type(swapped).__name__.startswith("Qwen2")
    differing = [text for text in SAMPLES if ids(swapped, text) != trained.encode(text).ids]
    assert differing


def test_both_models_share_it() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        one, other = ((models_dir() / name / file).read_bytes() for name in BUNDLED)
        assert one == other


def test_size_and_special_tokens(loaded: Any) -> None:
    assert len(loaded) == loaded.vocab_size == VOCAB_SIZE
    assert (loaded.eos_token, loaded.eos_token_id) == (EOS_TOKEN, EOS_ID)
    assert (loaded.bos_token, loaded.bos_token_id) == (EOS_TOKEN, EOS_ID)
    assert (loaded.pad_token, loaded.pad_token_id) == (PAD_TOKEN, PAD_ID)
    assert loaded.model_max_length == CONTEXT_TOKENS
    assert sorted(loaded.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert ids(loaded, "a" + EOS_TOKEN) == [*ids(loaded, "a"), EOS_ID]  # none is added unasked


def test_digits_are_single(loaded: Any) -> None:
    digits = [token for token in loaded.get_vocab() if any(c.isdecimal() for c in token)]
    assert sorted(digits) == list(string.digits)
    for number in ("7", "42", "1234567890", "3.14", "x100y"):
        tokens = [loaded.decode([i]) for i in ids(loaded, number)]
        assert "".join(tokens) == number
        assert [t for t in tokens if t.strip().isdecimal()] == [c for c in number if c.isdecimal()]


@given(text=st.text(max_size=60))
def test_every_text_comes_back(loaded: Any, text: str) -> None:
    found = ids(loaded, text)
    if EOS_TOKEN not in text and PAD_TOKEN not in text:
        assert loaded.decode(found) == text
        assert EOS_ID not in found


@given(data=st.binary(max_size=40))
def test_every_byte_has_a_token(loaded: Any, data: bytes) -> None:
    text = data.decode("latin-1")
    assert loaded.decode(ids(loaded, text)) == text


# --- training one


def test_training_is_deterministic_and_single_digit(tmp_path: Path) -> None:
    first, again = small_tokenizer(), small_tokenizer()
    assert first.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    assert len(first) <= 384
    assert (first.eos_token_id, first.pad_token_id) == (EOS_ID, PAD_ID)
    assert len(first.backend_tokenizer.encode("12").tokens) == 2
    first.save_pretrained(tmp_path)
    auto = AutoTokenizer.from_pretrained(tmp_path)
    for text in SAMPLES:
        assert ids(auto, text) == first.backend_tokenizer.encode(text).ids


def test_the_bundled_one_was_made_by_this_code(trained: Tokenizer) -> None:
    """Everything but the merges, which need the corpora, is what training writes today."""
    ours = json.loads(small_tokenizer().backend_tokenizer.to_str())
    bundled = json.loads(trained.to_str())
    for part in (ours, bundled):
        part["model"].pop("vocab"), part["model"].pop("merges")
    assert ours == bundled


def test_the_command_trains_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TASK_CHARACTERS", 5_000)
    monkeypatch.setattr(module, "_N_WORD_PROBLEMS", 20)
    data, out = write_corpora(tmp_path / "data"), tmp_path / "out"
    assert module.main(["--data", str(data), "--out", str(out)]) == 0
    made = load_tokenizer(out)
    assert 300 < len(made) < VOCAB_SIZE  # so little text has no more to merge
    assert sorted(path.name for path in out.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert module.main(["--data", str(tmp_path / "no"), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: data folder ") and said.count("\n") == 1


# --- what goes wrong


def test_no_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="no tokenizer.json in .*name the folder of a bundled"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}', "[]", "\x00\x01"])
def test_a_damaged_tokenizer_is_one_sentence(content: str, tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be loaded .*copy it again") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    from tokenizers import models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    other = Tokenizer(models.BPE())
    other.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<x>", "</s>"])
    other.train_from_iterator([sentences(random.Random(0), 100)], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=other, eos_token="</s>", pad_token="<s>"
    ).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="end 2 and padding 0: training needs at most 8,192"):
        load_tokenizer(tmp_path)
