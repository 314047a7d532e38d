"""Weighted k-means in one dimension, many problems at once, and the splits that nest it.

The one idea: in one dimension a clustering is a set of cut positions in the sorted values,
and with prefix sums the error of any segment costs four look-ups.  So

* the *seed* and its first split are found together by dynamic programming over a grid of
  candidate cuts (placed evenly in the integral of density^(1/3), where an optimal quantiser
  has its cuts) and then moved to a local optimum over all positions by Lloyd's iteration;
* a later *split* of every cluster into two is exact: every position is tried.

Nothing is random, so equal input gives equal codes.  Source: Any-Precision LLM
(arXiv 2402.10517), section 3: seed model and incremental upscaling.

Letters: G problems, M values of each, C clusters.  All arithmetic is float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

N_CANDIDATES = 64
# What an error of the seed counts beside one of its first split.  Splitting the best seed of
# 8 costs the 4-bit code 5 to 12 %; at 0.5 the seed loses 1 to 2 % and that code 2 to 4 %.
COARSE_WEIGHT = 0.5
_TABLE_VALUES = {"cpu": 1 << 22, "cuda": 1 << 27}  # of the table of segments, at a time
MAX_ITERATIONS = 50


@dataclass(frozen=True)
class Problems:
    """Sorted values with prefix sums: what every question about a segment needs."""

    values: Tensor  # [G, M] ascending
    weight: Tensor  # [G, M + 1] prefix sums of the weights
    weighted: Tensor  # [G, M + 1] prefix sums of weight * value

    @classmethod
    def build(cls, values: Tensor, weights: Tensor) -> Problems:
        """From ``values [G, M]`` and ``weights [G, M]``, not negative, in any order.

        Weights that are zero throughout a problem count as equal ones.
        """
        ordered, order = values.to(torch.float32).sort(dim=-1, stable=True)
        by_value = weights.gather(-1, order).to(torch.float64)
        total = by_value.sum(dim=-1, keepdim=True)
        by_value = torch.where(total > 0, by_value, torch.ones_like(by_value))
        exact = ordered.to(torch.float64)
        return cls(exact, _prefix(by_value), _prefix(by_value * exact))

    @property
    def n_values(self) -> int:
        """M."""
        return self.values.shape[-1]

    def means(self, edges: Tensor) -> Tensor:
        """Weighted mean of each segment ``[G, C]``; NaN where it has no weight."""
        weight = self.weight.gather(-1, edges).diff(dim=-1)
        weighted = self.weighted.gather(-1, edges).diff(dim=-1)
        return torch.where(weight > 0, weighted / weight, torch.nan)

    def thresholds(self, edges: Tensor) -> Tensor:
        """A value between the last before and the first after each inner cut ``[G, C - 1]``."""
        inner = edges[:, 1:-1]
        below = self.values.gather(-1, (inner - 1).clamp(0, self.n_values - 1))
        above = self.values.gather(-1, inner.clamp(0, self.n_values - 1))
        middle = (below + above) / 2
        # Cuts at the ends bound empty clusters: nothing may fall into them.
        middle = torch.where(inner <= 0, -torch.inf, middle)
        return torch.where(inner >= self.n_values, torch.inf, middle)

    def cuts(self, thresholds: Tensor) -> Tensor:
        """Edges ``[G, C + 1]`` such that a segment holds the values in (low, high]."""
        inner = torch.searchsorted(self.values, thresholds.contiguous(), right=True)
        return self._with_ends(inner)

    def _with_ends(self, inner: Tensor) -> Tensor:
        first = inner.new_zeros((inner.shape[0], 1))
        return torch.cat([first, inner, torch.full_like(first, self.n_values)], dim=-1)


def _prefix(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(dim=-1), (1, 0))


def nested_seed(problems: Problems, n_clusters: int) -> Tensor:
    """Edges ``[G, 2 * n_clusters + 1]`` of twice as many clusters that pair up well.

    Every second edge is one of the seed with ``n_clusters``.  Both are judged together: the
    best seed alone leaves its outer clusters too wide for one split, and gives up more in the
    finer code than the pair loses in the coarse one.
    """
    return _lloyd(problems, _by_dynamic_programming(problems, n_clusters))


def _candidates(problems: Problems) -> Tensor:
    """Cut positions ``[G, C + 1]`` worth trying, both ends among them."""
    n_values = problems.n_values
    if n_values <= N_CANDIDATES:
        every = torch.arange(n_values + 1, device=problems.values.device)
        return every.expand(problems.values.shape[0], -1)
    weight = problems.weight.diff(dim=-1)
    gaps = problems.values.diff(dim=-1)
    pairs = (weight[:, :-1] + weight[:, 1:]) / 2
    # A floor spreads a few candidates evenly where many values are equal.
    measure = pairs ** (1 / 3) * gaps ** (2 / 3)
    measure = measure + measure.mean(dim=-1, keepdim=True) * 0.05 + 1e-300
    integral = _prefix(measure)
    steps = torch.arange(1, N_CANDIDATES, device=gaps.device) / N_CANDIDATES
    inner = torch.searchsorted(integral, (integral[:, -1:] * steps).contiguous())
    return problems._with_ends(inner)


def _by_dynamic_programming(problems: Problems, n_clusters: int) -> Tensor:
    """Best of all choices among the candidate cuts, some problems at a time."""
    positions = _candidates(problems)  # [G, candidates + 1]
    limit = _TABLE_VALUES.get(positions.device.type, _TABLE_VALUES["cpu"])
    step = max(1, limit // positions.shape[-1] ** 2)
    chosen = [
        _best_cuts(problems, positions[start : start + step], start, n_clusters)
        for start in range(0, positions.shape[0], step)
    ]
    return torch.cat(chosen)


def _best_cuts(problems: Problems, positions: Tensor, start: int, n_clusters: int) -> Tensor:
    own = slice(start, start + len(positions))
    weight = problems.weight[own].gather(-1, positions)
    weighted = problems.weighted[own].gather(-1, positions)
    # A segment's error is its sum of squares (the same for all) less weighted^2 / weight.
    mass = weight[:, None, :] - weight[:, :, None]  # [G, from, to]
    explained = (weighted[:, None, :] - weighted[:, :, None]) ** 2
    gain = torch.where(mass > 0, explained / mass.clamp_min(1e-300), 0.0)
    n_positions = positions.shape[-1]
    forward = torch.ones(n_positions, n_positions, dtype=torch.bool, device=gain.device).triu()
    gain = gain.masked_fill(~forward, -torch.inf)
    halves, middle = _best_halves(gain)
    both = halves + COARSE_WEIGHT * gain
    best = both[:, 0, :]
    choices = []
    for _ in range(n_clusters - 1):
        best, chosen = (best[:, :, None] + both).max(dim=1)
        choices.append(chosen)
    at = torch.full_like(positions[:, :1], n_positions - 1)
    edges = [at]
    for chosen in reversed(choices):
        at = chosen.gather(-1, at)
        edges.append(at)
    edges.append(torch.zeros_like(at))
    coarse = torch.cat(edges[::-1], dim=-1)
    inside = middle.flatten(1).gather(-1, coarse[:, :-1] * n_positions + coarse[:, 1:])
    return positions.gather(-1, _interleaved(coarse, inside))


def _best_halves(gain: Tensor) -> tuple[Tensor, Tensor]:
    """The best cut of every segment in two: its gain and where, ``[G, from, to]``."""
    best = torch.full_like(gain, -torch.inf)
    middle = torch.zeros_like(gain, dtype=torch.int64)
    for cut in range(gain.shape[-1]):
        here = gain[:, :, cut, None] + gain[:, None, cut, :]
        better = here > best
        best = torch.where(better, here, best)
        middle.masked_fill_(better, cut)
    return best, middle


def _interleaved(edges: Tensor, inside: Tensor) -> Tensor:
    """Edges with one more in every cluster."""
    pairs = torch.stack([edges[:, :-1], inside], dim=-1).flatten(-2)
    return torch.cat([pairs, edges[:, -1:]], dim=-1)


def _lloyd(problems: Problems, edges: Tensor) -> Tensor:
    """Lloyd's iteration for a code and its coarse half together, over all positions.

    A value belongs where its squared distance to the mean of its cluster plus
    ``COARSE_WEIGHT`` times that to the mean of the pair is smallest; between neighbours that
    changes at one point.
    """
    for _ in range(MAX_ITERATIONS):
        fine = fill_empty(problems.means(edges))
        coarse = fill_empty(problems.means(edges[:, ::2])).repeat_interleave(2, dim=-1)
        squares = fine.square() + COARSE_WEIGHT * coarse.square()
        slope = (fine + COARSE_WEIGHT * coarse).diff(dim=-1)
        point = squares.diff(dim=-1) / (2 * slope.clamp_min(1e-300))
        # Neighbours with equal means stay where they are; order is kept whatever rounding does.
        point = torch.where(slope > 0, point, problems.thresholds(edges))
        moved = problems.cuts(point.cummax(dim=-1).values)
        if torch.equal(moved, edges):
            break
        edges = moved
    return edges


def split(problems: Problems, edges: Tensor) -> Tensor:
    """Split every cluster into the two that lower its error most: ``[G, 2C + 1]`` edges.

    Clusters that cannot be split (one value, all equal, no weight) keep theirs on the left;
    the right one is empty.
    """
    n_values, n_clusters = problems.n_values, edges.shape[-1] - 1
    shape = (edges.shape[0], n_values)
    cut = torch.arange(n_values, device=edges.device).expand(shape)  # left of this value
    cluster = torch.searchsorted(edges[:, 1:-1].contiguous(), cut.contiguous(), right=True)
    low, high = edges.gather(-1, cluster), edges.gather(-1, cluster + 1)
    left_mass = problems.weight[:, :-1] - problems.weight.gather(-1, low)
    left = problems.weighted[:, :-1] - problems.weighted.gather(-1, low)
    right_mass = problems.weight.gather(-1, high) - problems.weight[:, :-1]
    right = problems.weighted.gather(-1, high) - problems.weighted[:, :-1]
    between = torch.nn.functional.pad(problems.values.diff(dim=-1), (1, 0)) > 0  # not in a tie
    possible = between & (cut > low) & (left_mass > 0) & (right_mass > 0)
    gain = left**2 / left_mass.clamp_min(1e-300) + right**2 / right_mass.clamp_min(1e-300)
    gain = torch.where(possible, gain, -1.0)
    best = gain.new_full((shape[0], n_clusters), -1.0)
    best.scatter_reduce_(-1, cluster, gain, "amax")
    is_best = possible & (gain == best.gather(-1, cluster))
    first = cut.new_full((shape[0], n_clusters), n_values)
    first.scatter_reduce_(-1, cluster, torch.where(is_best, cut, n_values), "amin")
    middle = torch.where(best >= 0, first, edges[:, 1:])
    return _interleaved(edges, middle)


def fill_empty(means: Tensor) -> Tensor:
    """Give a cluster without weight its left neighbour's mean (the first: its right one's).

    Raises nothing: a problem without any weight at all cannot occur (see ``build``).
    """
    n_clusters = means.shape[-1]
    index = torch.arange(n_clusters, device=means.device).expand(means.shape)
    known = ~means.isnan()
    last = torch.where(known, index, -1).cummax(dim=-1).values
    first = torch.where(known, index, n_clusters).amin(dim=-1, keepdim=True)
    return means.gather(-1, torch.where(last >= 0, last, first).clamp_max(n_clusters - 1))
