"""Documents to token windows, and how many bytes those tokens stand for.

Dimensions: n windows (or prompts), L tokens each, V the vocabulary.

One protocol everywhere: documents are encoded without added tokens, each is ended by
the end-of-text token, and the stream is cut into disjoint windows of L tokens; the
last partial one is dropped and the first token of a window is never scored.
*Bits per byte* divide the scored loss by the bytes of the scored tokens, so models
with different tokenizers compare.  A byte-level token stands for an exact number of
bytes; the end-of-text token for none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from repro.errors import CheckpointError, DataUnavailableError, UnknownNameError
from repro.workloads.declarations import Workload

if TYPE_CHECKING:
    import torch

Int64Array = npt.NDArray[np.int64]


def _eos_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise CheckpointError(
            f"tokenizer {type(tokenizer).__name__} has no end-of-text token: "
            "set its eos_token, documents are joined by it"
        )
    return int(tokenizer.eos_token_id)


def encode_stream(tokenizer: Any, workload: Workload) -> Int64Array:
    """All documents as one token stream, each ended by the end-of-text token.

    A special token spelled out inside a document is encoded as ordinary text.
    """
    eos = _eos_id(tokenizer)
    texts = [document.text for document in workload.documents]
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        verbose=False,
    )["input_ids"]
    return np.concatenate([np.asarray([*ids, eos], dtype=np.int64) for ids in encoded])


def windows(stream: npt.NDArray[Any], length: int) -> Int64Array:
    """Disjoint windows ``[n, L]`` of ``stream``; the last partial one is dropped."""
    if length < 1:
        raise UnknownNameError(f"window length {length} is not possible: give at least 1 token")
    n = len(stream) // length
    return np.asarray(stream[: n * length], dtype=np.int64).reshape(n, length)


def prompts(
    tokenizer: Any,
    workload: Workload,
    *,
    n: int,
    length: int,
    seed: int = 0,
    stream: Int64Array | None = None,
) -> torch.LongTensor:
    """``n`` different windows of ``length`` tokens, spread over the whole workload.

    The windows are split into ``n`` equal runs and one is drawn from each; their order
    is then shuffled, so that the first few of them already cover the workload.
    ``stream`` is the encoded workload for callers that have it already.

    Raises:
        DataUnavailableError: the workload holds fewer windows.
    """
    import torch

    if n < 1:
        raise UnknownNameError(f"n={n} prompts are not possible: ask for at least 1")
    encoded = encode_stream(tokenizer, workload) if stream is None else stream
    available = windows(encoded, length)
    if len(available) < n:
        raise DataUnavailableError(
            f"workload {workload.name!r} ({workload.source}) holds {len(available)} windows of "
            f"{length} tokens but {n} were asked for: ask for fewer or shorter prompts, or for "
            "more documents"
        )
    rng = np.random.default_rng(seed)
    edges = np.arange(n + 1) * len(available) // n
    chosen = rng.permutation(rng.integers(edges[:-1], edges[1:]))
    return torch.from_numpy(available[chosen])  # type: ignore[return-value]


# --- bytes ------------------------------------------------------------------------------


def token_byte_lengths(tokenizer: Any) -> Int64Array:
    """Bytes each token stands for, ``[V]``, exact for a byte-level BPE.

    Its vocabulary spells every byte as one character, so a token has as many bytes as
    characters.  Special tokens stand for none, other added tokens for their UTF-8 bytes.

    Raises:
        CheckpointError: the vocabulary is not byte-level.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = set(ByteLevel.alphabet())
    added = tokenizer.added_tokens_decoder
    special = {int(i) for i in tokenizer.all_special_ids}
    lengths = np.zeros(len(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        if index in special or (index in added and added[index].special):
            continue
        if index in added:
            lengths[index] = len(added[index].content.encode("utf-8"))
        elif alphabet.issuperset(token):
            lengths[index] = len(token)
        else:
            raise CheckpointError(
                f"tokenizer {type(tokenizer).__name__} is not byte-level (token {token!r}): "
                "bytes per token are not defined for it; report perplexity instead"
            )
    return lengths


def scored_bytes(token_windows: npt.NDArray[Any], byte_lengths: Int64Array) -> Int64Array:
    """Bytes of the scored tokens of each window ``[n]``: all but the first token."""
    return np.asarray(byte_lengths[np.asarray(token_windows)[:, 1:]].sum(axis=1), dtype=np.int64)


def bits_per_byte(total_loss_nats: float, n_bytes: int) -> float:
    """Bits per byte from a summed negative log-likelihood in nats."""
    if n_bytes < 1:
        raise UnknownNameError(f"bits per byte of {n_bytes} bytes are not defined: score some text")
    return total_loss_nats / math.log(2) / n_bytes


# --- batches ----------------------------------------------------------------------------


def pad_batch(
    sequences: Sequence[Sequence[int]], pad_id: int, *, side: Literal["left", "right"] = "left"
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Sequences of different lengths as ``(ids, mask)``, both ``[n, longest]``.

    ``mask`` is True on real tokens; it serves as attention mask and as token mask of
    the routing statistics, which must not count padding.
    """
    import torch

    if side not in ("left", "right"):
        raise UnknownNameError(f"padding side {side!r} does not exist: choose 'left' or 'right'")
    longest = max((len(s) for s in sequences), default=0)
    ids = torch.full((len(sequences), longest), pad_id, dtype=torch.long)
    mask = torch.zeros((len(sequences), longest), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        start = longest - len(sequence) if side == "left" else 0
        ids[row, start : start + len(sequence)] = torch.as_tensor(sequence, dtype=torch.long)
        mask[row, start : start + len(sequence)] = True
    return ids, mask  # type: ignore[return-value]
