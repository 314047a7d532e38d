"""Token streams for training: every source tokenised once, cached, sampled on the device.

A stream is one flat ``uint16`` array of documents, each ended by the end-of-text token.
Generated tasks are packed so that every block of one training window begins with a
document: a window cut out of the middle of a recall list would ask for facts it does
not show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from repro.files import atomic_path
from repro.models.corpus import SOURCES, Source, read_documents, task_documents
from repro.models.corpus import word_problem_documents as problem_documents
from repro.models.specs import EOS_ID

TASK_CHARACTERS = 60_000_000
N_WORD_PROBLEMS = 70_000
VALIDATION_TOKENS = 65_536


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, documents: Iterable[str], batch: int = 2000
) -> list[np.ndarray]:
    """Ids of each document with the end-of-text token, as ``uint16`` arrays."""
    found = []
    iterator = iter(documents)
    while chunk := list(islice(iterator, batch)):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(
            chunk, add_special_tokens=False
        ):
            found.append(np.array([*encoding.ids, EOS_ID], dtype=np.uint16))
    return found


def pack_blocks(documents: list[np.ndarray], block_tokens: int) -> np.ndarray:
    """Fill blocks of ``block_tokens`` with whole documents; the last one of a block is cut."""
    blocks, current, room = [], [], block_tokens
    for ids in documents:
        current.append(ids[:room])
        room -= current[-1].size
        if room == 0:
            blocks.append(np.concatenate(current))
            current, room = [], block_tokens
    if not blocks:
        raise ValueError(f"documents do not fill one block of {block_tokens} tokens")
    return np.concatenate(blocks)


@dataclass
class Stream:
    """Training and validation ids of one source; ``block_tokens`` > 0 means aligned blocks."""

    source: Source
    train: np.ndarray
    validation: np.ndarray
    block_tokens: int = 0


def _cache_file(folder: Path, tokenizer: PreTrainedTokenizerFast, name: str) -> Path:
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:12]
    return folder / f"{name}-{digest}.npy"


def _source_ids(
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    data_dir: Path,
    seq_tokens: int,
    seed: int,
    task_characters: int,
    n_word_problems: int,
) -> np.ndarray:
    if source.file is not None:
        return np.concatenate(encode_documents(tokenizer, read_documents(source, data_dir)))
    if source.name == "tasks":
        texts = task_documents(seed, task_characters, seq_tokens)
        return pack_blocks(encode_documents(tokenizer, texts), seq_tokens + 1)
    texts = problem_documents(seed, n_word_problems)
    return np.concatenate(encode_documents(tokenizer, texts))


def load_source(
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    data_dir: Path,
    cache_dir: Path,
    *,
    seq_tokens: int,
    seed: int,
    task_characters: int = TASK_CHARACTERS,
    n_word_problems: int = N_WORD_PROBLEMS,
) -> Stream:
    """The stream of one source, from the cache where it is there already.

    Raises:
        DataUnavailableError: the corpus is missing or damaged.
    """
    block = seq_tokens + 1 if source.name == "tasks" else 0
    label = source.name
    if block:
        label += f"-{block}-{seed}-{task_characters}"
    elif source.file is None:
        label += f"-{seed}-{n_word_problems}"
    path = _cache_file(cache_dir, tokenizer, label)
    if path.is_file():
        ids = np.load(path)
    else:
        ids = _source_ids(
            source, tokenizer, data_dir, seq_tokens, seed, task_characters, n_word_problems
        )
        with atomic_path(path) as temporary, open(temporary, "wb") as handle:
            np.save(handle, ids)
    held = min(VALIDATION_TOKENS, ids.size // 20)
    if block:
        held = max(1, held // block) * block
    return Stream(source, ids[:-held], ids[-held:], block)


def build_streams(
    tokenizer: PreTrainedTokenizerFast, data_dir: Path, cache_dir: Path, **settings: int
) -> list[Stream]:
    """All streams of the mixture (``settings`` as in :func:`load_source`)."""
    return [load_source(s, tokenizer, data_dir, cache_dir, **settings) for s in SOURCES]


class Sampler:
    """Draws windows from the mixture on the device, fixed by the seed and the step.

    All streams lie end to end in one ``int32`` tensor, so that a batch is one gather.
    """

    def __init__(self, streams: list[Stream], seq_tokens: int, device: torch.device) -> None:
        self.seq_tokens = seq_tokens
        self.device = device
        arrays = [s.train for s in streams]
        sizes = [a.size for a in arrays]
        self.ids = torch.from_numpy(np.concatenate(arrays).astype(np.int32)).to(device)
        weights = torch.tensor([s.source.weight for s in streams], dtype=torch.float64)
        self.weights = weights / weights.sum()
        span = seq_tokens + 1
        self._base = torch.tensor([0, *np.cumsum(sizes)[:-1]], device=device)
        stride = [s.block_tokens or 1 for s in streams]
        starts = [
            size // span if s.block_tokens else max(1, size - span + 1)
            for s, size in zip(streams, sizes, strict=True)
        ]
        self._stride = torch.tensor(stride, device=device)
        self._n_starts = torch.tensor(starts, device=device, dtype=torch.float64)
        self._offsets = torch.arange(span, device=device)
        self._cdf = torch.cumsum(self.weights, 0).to(device)

    def batch(self, n_sequences: int, generator: torch.Generator) -> torch.Tensor:
        """``[n_sequences, seq_tokens + 1]`` ids.  Sources are drawn by stratified sampling."""
        u = torch.rand(2, n_sequences, device=self.device, dtype=torch.float64, generator=generator)
        # One point per stratum keeps each batch close to the mixture, whatever its size.
        where = (torch.arange(n_sequences, device=self.device) + u[0]) / n_sequences
        which = torch.searchsorted(self._cdf, where, right=True).clamp_max(self._cdf.numel() - 1)
        start = (u[1] * self._n_starts[which]).long() * self._stride[which] + self._base[which]
        return self.ids[start[:, None] + self._offsets].long()
