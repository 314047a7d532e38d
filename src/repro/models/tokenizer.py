"""The tokenizer of both bundled models: a byte-level BPE of 8,192 tokens, single digits.

Single digits keep arithmetic learnable for a small model; byte level means that any
text has ids and that bytes per token are exact.  It is saved as a
``PreTrainedTokenizerFast``: a bare ``tokenizer.json`` beside a Qwen configuration
would make ``AutoTokenizer`` swap the pre-tokenizer in silence (a test compares ids).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from repro.models.corpus import SOURCES, read_documents, task_documents, word_problem_documents
from repro.models.specs import CONTEXT_TOKENS, EOS_TOKEN, PAD_TOKEN, VOCAB_SIZE

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
_GENERATED_CHARACTERS = 1_000_000


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
    yield from islice(word_problem_documents(seed, 4000), 4000)
    yield from task_documents(seed, _GENERATED_CHARACTERS, CONTEXT_TOKENS)


def train_tokenizer(data_dir: Path, seed: int = 0) -> PreTrainedTokenizerFast:
    """Learn the tokenizer from the training corpora (about a minute on 2 cores)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(data_dir, seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
