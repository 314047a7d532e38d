"""The error of an exact code: what no code of the same width can beat.

The one idea: in one dimension the best clusters are runs of the sorted values, so dynamic
programming over all cut positions finds the least (weighted) squared error of any code with C
levels.  It is dense, ``O(C * M^2)`` for a row of M values, and in float64: a yardstick for
tests and for :mod:`repro.experiments.nesting`, not an encoder.  The tables of an exact code
are real numbers here; what a stored table loses by being float16 counts against the format.

Letters: G rows (problems), M values of each, C levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK_BYTES = {"cpu": 1 << 23, "cuda": 1 << 32}  # of one table of segment gains
_TILE = 64  # cut positions tried at once: nothing beyond them is looked at, and a cache holds it


def exact_errors(values: Tensor, weights: Tensor, n_levels: Sequence[int]) -> Tensor:
    """Least weighted squared error of every row with each number of levels.

    Args:
        values: ``[G, M]``, in any order.
        weights: ``[G, M]``, not negative; what each squared error counts.
        n_levels: numbers of levels, each at least 1.

    Returns:
        float64 ``[G, len(n_levels)]``.

    Raises:
        ValueError: a number of levels below 1, or shapes that differ.
    """
    if values.shape != weights.shape or values.dim() != 2:
        raise ValueError(f"values {tuple(values.shape)} and weights {tuple(weights.shape)}")
    if not n_levels or min(n_levels) < 1:
        raise ValueError(f"n_levels={tuple(n_levels)}: give numbers of at least 1")
    n_rows, n_values = values.shape
    limit = _CHUNK_BYTES.get(values.device.type, _CHUNK_BYTES["cpu"])
    step = max(1, limit // (8 * (n_values + 1) ** 2))
    found = [
        _errors(values[start : start + step], weights[start : start + step], n_levels)
        for start in range(0, n_rows, step)
    ]
    return torch.cat(found)


def _errors(values: Tensor, weights: Tensor, n_levels: Sequence[int]) -> Tensor:
    ordered, order = values.to(torch.float64).sort(dim=-1)
    counts = weights.to(torch.float64).gather(-1, order)
    # Near zero, so that the squares whose differences are taken stay small.
    total = counts.sum(dim=-1, keepdim=True).clamp_min(1e-300)
    ordered = ordered - (counts * ordered).sum(dim=-1, keepdim=True) / total
    squares = (counts * ordered**2).sum(dim=-1)
    gain = _gains(ordered, counts)
    best = gain[:, :, 0]  # one segment from the start to each position
    errors = {1: squares - best[:, -1]}
    for level in range(2, max(n_levels) + 1):
        best = torch.cat(
            [
                (gain[:, start : start + _TILE, : start + _TILE] + best[:, None, : start + _TILE])
                .amax(dim=-1)
                for start in range(0, best.shape[-1], _TILE)
            ],
            dim=-1,
        )  # fmt: skip
        errors[level] = squares - best[:, -1]
    return torch.stack([errors[level].clamp_min(0.0) for level in n_levels], dim=-1)


def _gains(ordered: Tensor, counts: Tensor) -> Tensor:
    """What one level saves on the values between two cuts: ``[G, to, from]``.

    The error of a segment is its sum of squares less ``(sum w x)^2 / sum w``; an empty one
    saves nothing, so fewer levels than allowed are allowed.
    """
    weight = torch.nn.functional.pad(counts.cumsum(dim=-1), (1, 0))
    weighted = torch.nn.functional.pad((counts * ordered).cumsum(dim=-1), (1, 0))
    mass = weight[:, :, None] - weight[:, None, :]
    saved = (weighted[:, :, None] - weighted[:, None, :]).square_()
    gain = torch.where(mass > 0, saved / mass.clamp_min(1e-300), 0.0)
    backward = torch.ones(gain.shape[1:], dtype=torch.bool, device=gain.device).triu(1)
    return gain.masked_fill_(backward, -torch.inf)
