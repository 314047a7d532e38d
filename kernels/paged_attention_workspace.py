"""Memory that attention over split rows needs between its programs.

The one idea: layers run one after the other, so they share one workspace; its addresses may be
part of a captured graph, so nothing it ever gave out is freed.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Partial results of the splits of a row, and how many have arrived; grows on demand.

    What it outgrew is kept, for a captured graph goes on using it.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._outgrown: list[tuple[Tensor, ...]] = []
        self._now: tuple[Tensor, Tensor, Tensor] | None = None

    def take(self, n_units: int, n_partial: int, value_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for ``n_partial`` results of ``n_units`` rows and heads; counters are zero."""
        sizes = [n_partial * value_size, n_partial * 2, n_units]
        if self._now is not None:
            if all(have.numel() >= n for have, n in zip(self._now, sizes, strict=True)):
                return self._now
            self._outgrown.append(self._now)
            sizes = [max(n, 2 * t.numel()) for n, t in zip(sizes, self._now, strict=True)]
        partial, extremes = (
            torch.empty(n, dtype=torch.float32, device=self.device) for n in sizes[:2]
        )
        arrived = torch.zeros(sizes[2], dtype=torch.int32, device=self.device)
        self._now = (partial, extremes, arrived)
        return self._now
