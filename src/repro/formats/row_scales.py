"""The scale of each row that fits a shared table best.

The one idea: the error of a row under a scale needs no look at its values one by one.  With
the row sorted and its prefix sums kept, a table of C levels costs C - 1 binary searches, so
many scales can be tried.  Both signs are tried too: a table that reaches further on one side
is turned to the side where the row does.

A row of 2,048 values is judged by an even sample of them; the search moves its scale by a few
per cent, and a sample says as well as all which one is best.

Letters: E experts, N rows, K columns, G groups of rows, C levels, R candidates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SEARCH_BITS = (3, 4)
"""Widths whose errors are added: one scale serves all, and these are where models live."""
# Of the present scale: first far and to both sides, then near it.
_FAR = tuple((0.70 + 0.06 * step) * sign for sign in (1, -1) for step in range(15))
_NEAR = (1.0, 0.92, 0.96, 1.04, 1.08)
# Of the numbers that bfloat16 holds in full; scales stay between them.
SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**127
_MAX_COLUMNS = {True: 256, False: 512}  # looked at when searching far, and near


def initial_scales(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Root of the (weighted) mean square of each row ``[E, N]``, bfloat16; 1 for zero rows."""
    # Divided by the largest first: squares of 1e-30 vanish in float32.
    largest = weight.abs().amax(dim=-1, keepdim=True).to(torch.float32)
    relative = weight.to(torch.float32) / torch.where(largest > 0, largest, 1.0)
    if importance is None:
        square = relative.square().mean(dim=-1)
    else:
        total = importance.sum(dim=-1)
        weighted = (relative.square() * importance).sum(dim=-1) / total
        square = torch.where(total > 0, weighted, relative.square().mean(dim=-1))
    scales = largest[..., 0] * square.sqrt().clamp_min(2**-10)
    return torch.where(largest[..., 0] > 0, _stored(scales), 1.0).to(torch.bfloat16)


def search_scales(
    weight: Tensor,
    importance: Tensor | None,
    scales: Tensor,
    levels: Mapping[int, tuple[Tensor, Tensor]],
    rows_per_lut: int,
    *,
    far: bool,
) -> Tensor:
    """Better scales ``[E, N]`` (bfloat16, either sign) for given tables.

    Args:
        weight: ``[E, N, K]`` float32.
        importance: what squared errors count, broadcastable to the weight, or None.
        scales: present scales ``[E, N]``; the result is never worse on the sampled columns
            by the measure of ``SEARCH_BITS``.
        levels: thresholds ``[E, G, C - 1]`` and tables ``[E, G, C]`` by width.
        rows_per_lut: rows of a group.
        far: try both signs and 0.7 to 1.54 of the present scale; else within 8 %.
    """
    n_experts, n_rows, n_columns = weight.shape
    stride = -(-n_columns // _MAX_COLUMNS[far])
    present = scales.to(torch.float32)
    values = (weight[..., ::stride] / present[..., None]).flatten(0, 1)
    counts = torch.ones_like(values)
    if importance is not None:
        counts = importance.expand(weight.shape)[..., ::stride].flatten(0, 1)
    rows = _Rows(values, counts)
    best_error = torch.full((n_experts * n_rows,), torch.inf, device=weight.device)
    best = present.flatten()
    by_row = {width: _of_rows(parts, n_rows, rows_per_lut) for width, parts in levels.items()}
    for ratio in _FAR if far else _NEAR:
        candidate = _stored(present * ratio).flatten()
        relative = (candidate / present.flatten())[:, None]
        error = torch.zeros_like(best)
        for thresholds, table in by_row.values():
            error += rows.error(thresholds * relative, table * relative, flipped=ratio < 0)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, candidate, best)
    return best.view(n_experts, n_rows).to(torch.bfloat16)


def _stored(scales: Tensor) -> Tensor:
    """As bfloat16 will hold them, float32."""
    bounded = scales.abs().clamp(SMALLEST_SCALE, _LARGEST_SCALE).copysign(scales)
    return bounded.to(torch.bfloat16).to(torch.float32)


class _Rows:
    """Sorted rows with prefix sums, to be compared with many tables."""

    def __init__(self, values: Tensor, counts: Tensor) -> None:
        self.values, order = values.sort(dim=-1)
        weight = counts.gather(-1, order)
        self.weight = _prefix(weight)
        self.weighted = _prefix(weight * self.values)

    def error(self, thresholds: Tensor, table: Tensor, *, flipped: bool) -> Tensor:
        """Weighted squared error less what no table changes, ``[rows]``."""
        if flipped:  # a negative scale turns the table round
            thresholds, table = thresholds.flip(-1), table.flip(-1)
        inner = torch.searchsorted(self.values, thresholds.contiguous(), right=not flipped)
        first = torch.zeros_like(inner[:, :1])
        edges = torch.cat([first, inner, torch.full_like(first, self.values.shape[-1])], dim=-1)
        weight = self.weight.gather(-1, edges).diff(dim=-1)
        weighted = self.weighted.gather(-1, edges).diff(dim=-1)
        return (table * (table * weight - 2 * weighted)).sum(dim=-1)


def _prefix(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(dim=-1), (1, 0))


def _of_rows(parts: tuple[Tensor, Tensor], n_rows: int, rows_per_lut: int) -> tuple[Tensor, Tensor]:
    """Thresholds and table of each row ``[E * N, ...]`` from those of its group."""
    group = torch.arange(n_rows, device=parts[0].device) // rows_per_lut
    thresholds, table = (part[:, group].flatten(0, 1) for part in parts)
    return thresholds, table
