"""Skew, hot sets and intervals: pure functions of counts.

The one idea: everything the activation and heavy-tail experiments say about routing is a
function of how often each expert was chosen, so it can be tested on counts with a known
answer (uniform, one hot expert, Zipf).

All functions take counts of experts along the last axis and work on any leading axes, so a
bootstrap over prompts is the same call on one more axis.

Letters: E experts, n prompts or batches, R resamples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Counts = npt.NDArray[Any]

TOP = 10  # DynaExq's Figure 2 compares the ten busiest experts
HILL_PART = 0.25  # of the experts: the tail whose index is estimated
LEVEL = 0.95


def _totals(counts: Counts) -> FloatArray:
    total = np.asarray(counts, dtype=np.float64).sum(axis=-1, keepdims=True)
    if (total <= 0).any():
        raise ValueError("counts that are all zero have no distribution")
    return total


def cumulative_share(counts: Counts) -> FloatArray:
    """Share of all choices that the 1, 2, ..., E busiest experts take together: ``[..., E]``."""
    busiest_first = -np.sort(-np.asarray(counts, dtype=np.float64), axis=-1)
    return np.asarray(np.cumsum(busiest_first, axis=-1) / _totals(counts))


def top_share(counts: Counts, n_top: int = TOP) -> FloatArray:
    """Share of all choices that the ``n_top`` busiest experts take."""
    curve = cumulative_share(counts)
    return np.asarray(curve[..., min(n_top, curve.shape[-1]) - 1])


def gini(counts: Counts) -> FloatArray:
    """Gini coefficient: 0 when all experts are used alike, 1 - 1/E when one takes everything."""
    ascending = np.sort(np.asarray(counts, dtype=np.float64), axis=-1)
    n = ascending.shape[-1]
    ranks = np.arange(1, n + 1)
    weighted = (ascending * (2 * ranks - n - 1)).sum(axis=-1)
    return np.asarray(weighted / (n * _totals(counts)[..., 0]))


def effective_experts(counts: Counts) -> FloatArray:
    """Number of evenly used experts with the same entropy: exp of the entropy in nats."""
    share = np.asarray(counts, dtype=np.float64) / _totals(counts)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return np.asarray(np.exp(-(share * logs).sum(axis=-1)))


def hill_index(counts: Counts, n_top: int | None = None) -> FloatArray:
    """Hill estimate of the tail index from the ``n_top`` busiest experts against the next one.

    The inverse of the mean of ``log(x_i / x_{n_top + 1})``.  Small is heavy-tailed; traffic
    that falls with rank r as ``r ** -s`` gives about ``1 / s``.  NaN where it is not defined:
    the compared expert was never chosen, or all of them equally often.

    ``n_top`` is a quarter of the experts by default.
    """
    busiest_first = -np.sort(-np.asarray(counts, dtype=np.float64), axis=-1)
    n_experts = busiest_first.shape[-1]
    k = max(1, round(HILL_PART * n_experts)) if n_top is None else n_top
    if not 1 <= k < n_experts:
        raise ValueError(f"n_top={k} of {n_experts} experts: give 1 to {n_experts - 1}")
    reference = busiest_first[..., k : k + 1]
    known = reference > 0
    ratio = np.divide(
        busiest_first[..., :k], reference, out=np.ones_like(busiest_first[..., :k]), where=known
    )
    mean_log = np.log(ratio).mean(axis=-1)
    defined = mean_log > 0
    return np.divide(1.0, mean_log, out=np.full_like(mean_log, np.nan), where=defined)


def top_experts(counts: Counts, n_top: int = TOP) -> npt.NDArray[np.int64]:
    """The ``n_top`` busiest experts, busiest first; of equals the lower number first."""
    order = np.argsort(-np.asarray(counts, dtype=np.float64), axis=-1, kind="stable")
    return np.asarray(order[..., :n_top], dtype=np.int64)


def top_overlap(first: Counts, second: Counts, n_top: int = TOP) -> npt.NDArray[np.int64]:
    """How many of the ``n_top`` busiest experts two workloads share."""
    a, b = top_experts(first, n_top), top_experts(second, n_top)
    return np.asarray((a[..., :, None] == b[..., None, :]).sum(axis=(-2, -1)), dtype=np.int64)


def resample(n: int, n_resamples: int, rng: np.random.Generator) -> FloatArray:
    """How often each of ``n`` items is drawn in each resample: ``[R, n]``, rows sum to n."""
    draws = rng.multinomial(n, np.full(n, 1.0 / n), size=n_resamples)
    return np.asarray(draws, dtype=np.float64)


def resampled_counts(per_prompt: Counts, weights: FloatArray) -> FloatArray:
    """Counts of resampled prompts: ``[n, ...] -> [R, ...]``."""
    return np.asarray(np.tensordot(weights, np.asarray(per_prompt, dtype=np.float64), axes=1))


def interval(
    value: float,
    samples: npt.NDArray[Any],
    *,
    bounds: tuple[float, float] = (-np.inf, np.inf),
    level: float = LEVEL,
) -> tuple[float, float] | None:
    """Interval around ``value`` as wide as the middle ``level`` of resampled values.

    The resampled values are shifted so that their mean is ``value``: a resample repeats some
    prompts and lacks others, so it looks more skewed than the traffic it was drawn from, and
    its plain quantiles may not even contain the value.  ``bounds`` are those of the statistic.

    None where the statistic is undefined for the value or for a resample.
    """
    found = np.asarray(samples, dtype=np.float64)
    if not (np.isfinite(value) and np.isfinite(found).all()):
        return None
    ends = np.quantile(found, [(1 - level) / 2, (1 + level) / 2]) - found.mean() + value
    low, high = np.clip(ends, *bounds)
    return min(float(low), value), max(float(high), value)


def mean_interval(
    values: npt.NDArray[Any], n_resamples: int, rng: np.random.Generator, level: float = LEVEL
) -> tuple[float, float]:
    """Bootstrap interval of the mean of ``values[n]``; a constant has no width, exactly."""
    array = np.asarray(values, dtype=np.float64)
    if (array == array[0]).all():
        return float(array[0]), float(array[0])
    means = resample(len(array), n_resamples, rng) @ array / len(array)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def blocks(n: int, size: int, n_blocks: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """``n_blocks`` batches of ``size`` different prompts out of ``n``: ``[n_blocks, size]``.

    Prompts are shuffled and cut into disjoint batches, and shuffled again when they are used
    up, so every prompt appears about equally often.
    """
    if not 1 <= size <= n:
        raise ValueError(f"a batch of {size} out of {n} prompts: give 1 to {n}")
    found: list[npt.NDArray[np.int64]] = []
    while len(found) < n_blocks:
        order = rng.permutation(n)
        found += [order[i : i + size] for i in range(0, n - size + 1, size)]
    return np.stack(found[:n_blocks])
