"""DynaExq's two versions of every expert: a high and a low precision tier.

The one idea: a pair names two formats, and every expert is encoded in both, so that a switch
is a change of pointer.  The pairs are those of the paper (section 5.1, Table 3): FP16/INT4,
and INT4/INT2 for models whose FP16 does not fit.  INT4 is symmetric in groups of 128 columns,
INT2 symmetric in groups of 64, each group with a scale of two bytes (the authors' drafts;
their FP16 scales are bfloat16 here, of the same size).  ``fp16/int2`` is the third curve of
Figure 3; the ``bf16`` pairs are for weights that overflow or vanish in FP16.

Two ways to make INT2.  ``int4/int2`` rounds the weights themselves.
``int4/int2-compounded`` rounds what INT4 decodes to, as the authors had to where only an INT4
checkpoint existed (Qwen3-Next-80B): the errors of both add up, and the option is named so
that nobody meets them by accident.

Letters: E experts, N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from repro.errors import unknown_name
from repro.formats.dense import Dense, DenseScheme
from repro.formats.encoded import EncodedStack
from repro.formats.group_affine import GroupAffine, GroupAffineScheme

Format = Dense | GroupAffine

INT4 = GroupAffine(4, group_size=128, symmetric=True)
INT2 = GroupAffine(2, group_size=64, symmetric=True)
# Made from what INT4 decodes to.
INT2_FROM_INT4 = replace(INT2, from_bits=INT4.n_bits, from_group_size=INT4.group_size)


@dataclass(frozen=True)
class TierPair:
    """The formats of the high and the low version of an expert."""

    name: str
    high: Format
    low: GroupAffine


PAIRS: dict[str, TierPair] = {
    pair.name: pair
    for pair in (
        TierPair("fp16/int4", Dense("float16"), INT4),
        TierPair("fp16/int2", Dense("float16"), INT2),
        TierPair("bf16/int4", Dense("bfloat16"), INT4),
        TierPair("bf16/int2", Dense("bfloat16"), INT2),
        TierPair("int4/int2", INT4, INT2),
        TierPair("int4/int2-compounded", INT4, INT2_FROM_INT4),
    )
}


def get_pair(name: str) -> TierPair:
    """The pair called ``name``.

    Raises:
        UnknownNameError: no such pair.
    """
    if name not in PAIRS:
        raise unknown_name("pair of tiers", name, PAIRS)
    return PAIRS[name]


def encode_pair(
    weight: Tensor,
    pair: str | TierPair,
    importance: Tensor | None = None,
    hessian: Tensor | None = None,
) -> dict[int, EncodedStack]:
    """Both versions of a block ``[E, N, K]``, by width: the high one, then the low one.

    Raises:
        UnknownNameError: no such pair.
        CheckpointError: weights that a tier cannot hold; named.
    """
    pair = get_pair(pair) if isinstance(pair, str) else pair
    stacks: dict[int, EncodedStack] = {}
    for tier in (pair.high, pair.low):
        if isinstance(tier, Dense):
            stack = tier.encode_stack(weight, importance)
        else:
            stack = tier.encode_stack(weight, importance, hessian)
        stacks[stack.widths[0]] = stack
    return stacks


def matrix_bytes(tier: Format, shapes: Iterable[tuple[int, int]]) -> int:
    """Bytes of matrices ``[N, K]`` in a format, scales counted, without encoding them."""
    total = 0
    for n_rows, n_columns in shapes:
        scheme: DenseScheme | GroupAffineScheme
        if isinstance(tier, Dense):
            scheme = DenseScheme(n_rows, n_columns, tier.dtype)
        else:
            scheme = tier.scheme(n_rows, n_columns)
        (n_bits,) = scheme.widths
        total += sum(spec.n_bytes for spec in scheme.tensors(n_bits))
    return total


def expert_shapes(hidden_size: int, intermediate_size: int) -> tuple[tuple[int, int], ...]:
    """``[N, K]`` of the two blocks of a gated expert: gate_up and down."""
    return (2 * intermediate_size, hidden_size), (hidden_size, intermediate_size)
