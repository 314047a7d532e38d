"""Token streams for training: every source tokenised once, cached, sampled on the device.

A stream is one flat ``uint16`` array of documents, each ended by the end-of-text token.
Generated tasks are packed so that every block of one training window begins with a
document: a window cut out of the middle of a recall list would ask for facts it does
not show.

A stream's cache file is named after everything that decides it (the tokenizer, the corpus
file or what the generator says, seed and sizes), so a changed corpus is tokenised anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerFast

from repro.errors import DataUnavailableError
from repro.files import atomic_path
from repro.models.corpus import (
    SKIP_LINES,
    SOURCES,
    Source,
    read_documents,
    source_file,
    task_documents,
    word_problem_documents,
)
from repro.models.specs import EOS_ID

Ids = npt.NDArray[np.uint16]

TASK_CHARACTERS = 60_000_000
N_WORD_PROBLEMS = 70_000
VALIDATION_TOKENS = 65_536
# Documents of a generator that name its cache file: as many as show any change of it.
_PROBE_DOCUMENTS = 200


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, documents: Iterable[str], batch: int = 2000
) -> list[Ids]:
    """Ids of each document with the end-of-text token, as ``uint16`` arrays."""
    found = []
    iterator = iter(documents)
    while chunk := list(islice(iterator, batch)):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(
            chunk, add_special_tokens=False
        ):
            found.append(np.array([*encoding.ids, EOS_ID], dtype=np.uint16))
    return found


def pack_blocks(documents: list[Ids], block_tokens: int) -> Ids:
    """Fill blocks of ``block_tokens`` with whole documents; the last one of a block is cut."""
    blocks, current, room = [], [], block_tokens
    for ids in documents:
        current.append(ids[:room])
        room -= current[-1].size
        if room == 0:
            blocks.append(np.concatenate(current))
            current, room = [], block_tokens
    if not blocks:
        raise DataUnavailableError(
            f"the documents do not fill one block of {block_tokens:,} tokens: ask for more of them"
        )
    return np.concatenate(blocks)


@dataclass(frozen=True)
class Stream:
    """Training and validation ids of one source; ``block_tokens`` > 0 means aligned blocks."""

    source: Source
    train: Ids
    validation: Ids
    block_tokens: int = 0

    def validation_windows(self, n: int, span: int) -> Ids:
        """At most ``n`` disjoint windows ``[n, span]``; each begins where a block does."""
        rows = self.validation.reshape(-1, self.block_tokens) if self.block_tokens else None
        if rows is None:
            whole = self.validation.size // span
            rows = self.validation[: whole * span].reshape(whole, span)
        return rows[:n, :span]


def _documents(
    source: Source,
    data_dir: Path,
    seq_tokens: int,
    seed: int,
    task_characters: int,
    n_word_problems: int,
) -> Iterator[str]:
    if source.file is not None:
        return read_documents(source, data_dir)
    if source.name == "tasks":
        return task_documents(seed, task_characters, seq_tokens)
    return word_problem_documents(seed, n_word_problems)


def _content_digest(source: Source, data_dir: Path, documents: Iterator[str]) -> bytes:
    """What a stream is made from: the bytes of its files, or how its generator begins."""
    digest = hashlib.sha256()
    if source.file is None:
        for text in islice(documents, _PROBE_DOCUMENTS):
            digest.update(text.encode())
        return digest.digest()
    files = [source_file(source, data_dir)]
    if not source.fields:
        files.append(data_dir / SKIP_LINES)
    for path in files:
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.digest()


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
        DataUnavailableError: the corpus is missing, damaged or too small, or the cache is
            damaged.
    """
    span = seq_tokens + 1
    block = span if source.name == "tasks" else 0
    settings = (data_dir, seq_tokens, seed, task_characters, n_word_problems)
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    digest.update(_content_digest(source, data_dir, _documents(source, *settings)))
    if source.file is None:
        digest.update(f"{block}-{seed}-{task_characters}-{n_word_problems}".encode())
    path = cache_dir / f"{source.name}-{digest.hexdigest()[:16]}.npy"
    ids = _read_cache(path)
    if ids is None:
        encoded = encode_documents(tokenizer, _documents(source, *settings))
        if not encoded:
            raise DataUnavailableError(
                f"training source {source.name!r} holds no document: copy {source.file!r} again"
            )
        ids = pack_blocks(encoded, block) if block else np.concatenate(encoded)
        with atomic_path(path) as temporary, open(temporary, "wb") as handle:
            np.save(handle, ids)
    held = min(VALIDATION_TOKENS, ids.size // 20)
    if block:
        held = max(1, held // block) * block
    cut = ids.size - held
    if cut < span:
        raise DataUnavailableError(
            f"training source {source.name!r} holds {ids.size:,} tokens, too few for one "
            f"sequence of {seq_tokens:,} beside validation: give the whole corpus"
        )
    return Stream(source, ids[:cut], ids[cut:], block)


def _read_cache(path: Path) -> Ids | None:
    if not path.is_file():
        return None
    try:
        found: Ids = np.load(path)
    except (ValueError, EOFError, OSError) as error:
        raise DataUnavailableError(
            f"cached token stream {path.name!r} is damaged: remove it, it is made again"
        ) from error
    return found


def build_streams(
    tokenizer: PreTrainedTokenizerFast, data_dir: Path, cache_dir: Path, **settings: int
) -> list[Stream]:
    """All streams of the mixture (``settings`` as in :func:`load_source`)."""
    return [load_source(s, tokenizer, data_dir, cache_dir, **settings) for s in SOURCES]


class Sampler:
    """Draws windows from the mixture on the device, fixed by the state of the generator.

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
        # A window must not run into the next stream, nor begin inside a block.
        assert all(s.block_tokens in (0, span) and s.train.size >= span for s in streams)
        self._base = torch.tensor([0, *np.cumsum(sizes)[:-1]], device=device)
        stride = [s.block_tokens or 1 for s in streams]
        starts = [
            size // span if s.block_tokens else size - span + 1
            for s, size in zip(streams, sizes, strict=True)
        ]
        self._stride = torch.tensor(stride, device=device)
        self._n_starts = torch.tensor(starts, device=device, dtype=torch.float64)
        self._offsets = torch.arange(span, device=device)
        self._cdf = torch.cumsum(self.weights, 0).to(device)

    def batch(self, n_sequences: int, generator: torch.Generator) -> torch.Tensor:
        """``[n_sequences, seq_tokens + 1]`` ids, ordered by source (stratified sampling)."""
        u = torch.rand(2, n_sequences, device=self.device, dtype=torch.float64, generator=generator)
        # One point per stratum keeps each batch close to the mixture, whatever its size.
        where = (torch.arange(n_sequences, device=self.device) + u[0]) / n_sequences
        which = torch.searchsorted(self._cdf, where, right=True).clamp_max(self._cdf.numel() - 1)
        start = (u[1] * self._n_starts[which]).long() * self._stride[which] + self._base[which]
        return self.ids[start[:, None] + self._offsets].long()
