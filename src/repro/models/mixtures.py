"""Bytes of a whole model's experts when some are kept wider than others.

One idea: a policy that keeps a share of every layer's experts at a high tier spends the
same bytes as *some* uniform width, and that uniform width is its honest opponent.  One
third FP16 and two thirds INT4 (4.25 bits with scale and zero point) cost as much as 8.2
bits everywhere; one fifth and four fifths as much as 6.6.

Left out: KV cache, dense weights and slack, which the budget of the engine adds.
"""

from __future__ import annotations

import math
from typing import Protocol

from repro.errors import ReproError
from repro.models.published import get_published
from repro.models.tiers import bytes_of, get_tier, tier_bytes


class ExpertGrid(Protocol):
    """What byte totals need to know: a published model, or the layout of any model."""

    @property
    def n_moe_layers(self) -> int:
        """Layers that have routed experts."""

    @property
    def n_experts(self) -> int:
        """Routed experts of one layer."""

    @property
    def params_per_expert(self) -> int:
        """Weights of one routed expert."""


def _grid(model: str | ExpertGrid) -> ExpertGrid:
    return get_published(model) if isinstance(model, str) else model


def n_hi_experts(n_experts: int, n_hi_share: float) -> int:
    """High-tier experts of a layer at a share of them, to the nearest whole expert.

    Raises:
        ReproError: the share is not between 0 and 1.
    """
    if not 0.0 <= n_hi_share <= 1.0:
        raise ReproError(f"n_hi_share={n_hi_share!r} is no share of a layer's experts: give 0 to 1")
    return math.floor(n_hi_share * n_experts + 0.5)


def bytes_at(model: str | ExpertGrid, n_hi_share: float, hi_tier: str, lo_tier: str) -> int:
    """Bytes of all routed experts with a share of every layer's at the high tier.

    Every expert has exactly one resident version, so a layer keeps n_hi + n_lo = E.

    Raises:
        UnknownNameError: no such model or tier.
        ReproError: the share is not between 0 and 1.
    """
    grid = _grid(model)
    n_hi = n_hi_experts(grid.n_experts, n_hi_share)
    hi_bytes = bytes_of(grid.params_per_expert, hi_tier)
    lo_bytes = bytes_of(grid.params_per_expert, lo_tier)
    return grid.n_moe_layers * (n_hi * hi_bytes + (grid.n_experts - n_hi) * lo_bytes)


def uniform_bits(model: str | ExpertGrid, n_bytes: int) -> float:
    """Bits per weight when ``n_bytes`` are spread evenly over all routed experts."""
    grid = _grid(model)
    return 8 * n_bytes / (grid.n_moe_layers * grid.n_experts * grid.params_per_expert)


def best_uniform_width(model: str | ExpertGrid, n_bytes: int, like_tier: str) -> int:
    """The widest whole number of bits at which every expert fits into ``n_bytes``.

    Groups, scales and zero points are those of ``like_tier``.

    Raises:
        UnknownNameError: no such model or tier.
        ReproError: not even one bit per weight fits.
    """
    grid, tier = _grid(model), get_tier(like_tier)
    n_experts = grid.n_moe_layers * grid.n_experts
    for n_bits in range(16, 0, -1):
        expert_bytes = tier_bytes(
            grid.params_per_expert, n_bits, tier.group, tier.scale_bytes, tier.zero_bytes
        )
        if n_experts * expert_bytes <= n_bytes:
            return n_bits
    raise ReproError(
        f"{n_bytes} bytes do not hold one bit per weight of {n_experts} experts: give more bytes"
    )
