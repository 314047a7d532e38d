"""Bytes of a weight at a precision tier.

One idea: a tier is a number of bits per weight plus what every group of weights
carries with it (a scale, sometimes a zero point), so bytes are counted, never
estimated from "bits divided by eight".  The tiers are those of DynaExq: FP16, INT4
in groups of 128 and INT2 in groups of 64, each with an FP16 scale; the native INT4
layout of its authors also keeps a zero point of two bytes per group.

``tier_bytes`` counts groups over a flat run of weights, which is what the published
tables do.  ``matrix_bytes`` counts them per row, which is what a format has to store:
a row whose length is no multiple of the group ends in a group of its own.  The two
agree wherever the group divides both row lengths of an expert.  Left out: look-up
tables of the Any-Precision format, which belong to the formats themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from repro.errors import ReproError, unknown_name


@dataclass(frozen=True)
class Tier:
    """How many bits a weight has, and what each group of weights adds.

    ``group`` is the number of weights that share ``scale_bytes + zero_bytes``; None
    means that nothing is shared, as in FP16 or in a nominal width.
    """

    name: str
    n_bits: int
    group: int | None = None
    scale_bytes: int = 0
    zero_bytes: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight with the group's share counted (rows of whole groups)."""
        if self.group is None:
            return float(self.n_bits)
        return self.n_bits + 8 * (self.scale_bytes + self.zero_bytes) / self.group


_TIERS = (
    Tier("fp16", 16),
    Tier("int4", 4),
    Tier("int4_g128", 4, 128, 2),
    Tier("int4_g128_zero", 4, 128, 2, 2),
    Tier("int2", 2),
    Tier("int2_g64", 2, 64, 2),
)
TIERS: dict[str, Tier] = {tier.name: tier for tier in _TIERS}


def get_tier(name: str) -> Tier:
    """The tier called ``name``.

    Raises:
        UnknownNameError: no such tier.
    """
    try:
        return TIERS[name]
    except KeyError:
        raise unknown_name("precision tier", name, TIERS) from None


def tier_bytes(
    params: int,
    n_bits: int,
    group: int | None = None,
    scale_bytes: int = 0,
    zero_bytes: int = 0,
) -> int:
    """Bytes of ``params`` weights in one run: packed codes, then one entry per group.

    Codes are packed to whole bytes at the end of the run, and a last group that is
    not full costs as much as a full one.

    Raises:
        ReproError: a count, width or group that no weight can have.
    """
    if params < 0 or not 1 <= n_bits <= 32 or (group is not None and group < 1):
        raise ReproError(
            f"no weights have params={params}, n_bits={n_bits}, group={group}: "
            "give params >= 0, n_bits from 1 to 32, and a group of at least 1 or None"
        )
    code_bytes = -(-params * n_bits // 8)
    n_groups = 0 if group is None else -(-params // group)
    return code_bytes + n_groups * (scale_bytes + zero_bytes)


def bytes_of(params: int, tier: str) -> int:
    """:func:`tier_bytes` of a tier by name."""
    t = get_tier(tier)
    return tier_bytes(params, t.n_bits, t.group, t.scale_bytes, t.zero_bytes)


def matrix_bytes(shapes: Iterable[tuple[int, int]], tier: str) -> int:
    """Bytes of matrices ``[N, K]`` with groups along K that never cross a row."""
    t = get_tier(tier)
    return sum(
        rows * tier_bytes(columns, t.n_bits, t.group, t.scale_bytes, t.zero_bytes)
        for rows, columns in shapes
    )
