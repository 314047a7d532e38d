"""Choosing the next token from logits, the same on every device and in every batch.

The one idea: probabilities are computed in float64 on the host from the row of this request
alone, with the request's own generator.  So a sampled answer depends on the seed and the
logits, not on the batch it was computed in.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from repro.serving.request import SamplingParams


def request_seed(engine_seed: int, number: int) -> int:
    """A seed of 63 bits for the ``number``-th request of an engine."""
    digest = hashlib.sha256(f"{engine_seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row of ``[R, V]``; the lowest id among equals."""
    return [int(i) for i in logits.argmax(dim=-1).tolist()]


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """One token from one row ``[V]``.

    Raises:
        ValueError: logits that are no numbers.
    """
    scores = logits.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(scores.max())):
        raise ValueError("the logits are not finite")
    scores = scores / params.temperature
    order = torch.argsort(scores, descending=True, stable=True)
    probabilities = torch.softmax(scores[order], dim=0)
    if params.top_k:
        probabilities[params.top_k :] = 0.0
    if params.top_p < 1.0:
        before = probabilities.cumsum(dim=0) - probabilities
        probabilities[before >= params.top_p] = 0.0  # the first always stays
    place = int(torch.multinomial(probabilities, 1, generator=generator))
    return int(order[place])
