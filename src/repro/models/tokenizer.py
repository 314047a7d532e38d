"""The tokenizer of both bundled models: a byte-level BPE of 8,192 tokens, single digits.

Single digits keep arithmetic learnable for a small model; byte level means that any
text has ids and that bytes per token are exact.  It is saved as a
``PreTrainedTokenizerFast``: a bare ``tokenizer.json`` beside a Qwen configuration
would make ``AutoTokenizer`` swap the pre-tokenizer in silence (a test compares ids).

``python -m repro.models.tokenizer --data DIR --out DIR`` trains it anew.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from repro.errors import CheckpointError, ReproError
from repro.models.corpus import (
    SOURCES,
    read_documents,
    task_documents,
    training_folder,
    word_problem_documents,
)
from repro.models.saving import write_folder
from repro.models.specs import (
    CONTEXT_TOKENS,
    EOS_ID,
    EOS_TOKEN,
    PAD_ID,
    PAD_TOKEN,
    VOCAB_SIZE,
)

# Characters of each source the merges are learned from: the test sets' kinds of text weigh more
# than their share of the corpus, since every byte of them is scored.
_SAMPLE_CHARACTERS = {
    "wikitext2": 8_000_000,
    "novels": 3_000_000,
    "textbooks": 4_000_000,
    "speeches": 500_000,
    "gsm8k": 4_000_000,
    "math4500": 2_000_000,
    "math-textbooks": 4_000_000,
    "python": 11_000_000,
}
_TASK_CHARACTERS = 1_000_000
_N_WORD_PROBLEMS = 4000


def _sample(data_dir: Path, seed: int) -> Iterator[str]:
    for source in SOURCES:
        budget = _SAMPLE_CHARACTERS.get(source.name, 0)
        if not budget or source.file is None:
            continue
        documents = list(read_documents(source, data_dir))
        random.Random(f"tokenizer-{source.name}-{seed}").shuffle(documents)
        for document in documents:
            piece = document[: min(budget, 200_000 if len(documents) > 1 else budget)]
            yield piece
            budget -= len(piece)
            if budget <= 0:
                break
    yield from word_problem_documents(seed, _N_WORD_PROBLEMS)
    yield from task_documents(seed, _TASK_CHARACTERS, CONTEXT_TOKENS)


def train_tokenizer(data_dir: Path, seed: int = 0) -> PreTrainedTokenizerFast:
    """Learn the tokenizer from the training corpora (about a minute on 2 cores).

    Raises:
        DataUnavailableError: a corpus is missing or damaged.
    """
    return train_from_texts(_sample(data_dir, seed))


def train_from_texts(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """The same from any texts, with at most ``vocab_size`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in ``folder``, for training.

    Raises:
        CheckpointError: there is none, it is damaged, or its special tokens are not ours.
    """
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            f"no tokenizer.json in {str(folder)!r}: name the folder of a bundled model or train "
            "one with `python -m repro.models.tokenizer`"
        )
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises plain Exception, Transformers many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"the tokenizer in {str(folder)!r} cannot be loaded ({reason}): copy it again"
        ) from error
    ids = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    if ids != (EOS_ID, PAD_ID) or len(tokenizer) > VOCAB_SIZE:
        raise CheckpointError(
            f"the tokenizer in {str(folder)!r} has {len(tokenizer):,} tokens, end {ids[0]} and "
            f"padding {ids[1]}: training needs at most {VOCAB_SIZE:,}, {EOS_ID} and {PAD_ID}, "
            "as the bundled models have"
        )
    return tokenizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m repro.models.tokenizer", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of the corpora (REPRO_DATA_DIR)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--seed", type=int, default=0, help="order of the documents")
    args = parser.parse_args(arguments)
    try:
        tokenizer = train_tokenizer(training_folder(args.data), args.seed)
        write_folder(args.out, tokenizer.save_pretrained)
    except ReproError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
