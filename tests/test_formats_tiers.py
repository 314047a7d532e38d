"""DynaExq's pairs, their bytes against the published tables, and formats by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from repro.errors import CheckpointError, UnknownNameError
from repro.formats.dense import Dense
from repro.formats.group_affine import WIDTHS, GroupAffine
from repro.formats.registry import FORMATS, format_name, make_format
from repro.formats.tiers import (
    INT2,
    INT4,
    PAIRS,
    TierPair,
    encode_pair,
    expert_shapes,
    get_pair,
    matrix_bytes,
)
from repro.models import tiers as published_tiers
from repro.models.published import PUBLISHED, bytes_row


def random_weight(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return 0.03 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Bytes ---------------------------------------------------------------------------------------

TIERS_OF_THE_TABLE = {
    "bytes_fp16": Dense("float16"),
    "bytes_int4_g128_fp16scale": INT4,
    "bytes_int4_g128_scale_and_zero": replace(INT4, symmetric=False),
    "bytes_int2_g64_fp16scale": INT2,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_an_expert_takes_the_bytes_of_the_published_table(name: str) -> None:
    model = PUBLISHED[name]
    dimensions = model.dimensions
    shapes = expert_shapes(dimensions.hidden_size, dimensions.moe_intermediate_size)
    row = bytes_row(model)
    for column, tier in TIERS_OF_THE_TABLE.items():
        whole_groups = isinstance(tier, Dense) or all(k % tier.group_size == 0 for _, k in shapes)
        found, stated = matrix_bytes(tier, shapes), int(row[column])
        # The table counts groups over a flat run; where a row ends within a group the row's
        # last group is a group of its own, which costs a scale more.
        assert found == stated if whole_groups else found > stated, column
        assert found < 1.02 * stated


def test_bytes_of_qwen3_30b() -> None:
    shapes = expert_shapes(2048, 768)
    assert matrix_bytes(INT4, shapes) == 2_433_024
    assert matrix_bytes(INT2, shapes) == 1_327_104
    assert matrix_bytes(GroupAffine(4, 128, symmetric=False), shapes) == 2_506_752
    assert matrix_bytes(Dense("bfloat16"), shapes) == 9_437_184


@given(st.integers(1, 40), st.integers(1, 5000))
def test_bytes_agree_with_the_count_without_a_format(n_rows: int, n_columns: int) -> None:
    """Groups as :mod:`repro.models.tiers` counts them; rows of codes end with a whole word."""
    for tier, name in ((INT4, "int4_g128"), (INT2, "int2_g64")):
        counted = published_tiers.matrix_bytes([(n_rows, n_columns)], name)
        found = matrix_bytes(tier, [(n_rows, n_columns)])
        assert 0 <= found - counted < 4 * n_rows
        if n_columns * tier.n_bits % 32 == 0:
            assert found == counted


# Pairs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_a_pair_is_two_versions_of_all_experts(name: str) -> None:
    weight = random_weight((3, 16, 128)).half()
    stacks = encode_pair(weight, name)
    pair = get_pair(name)
    high, low = stacks
    assert high > low and len(stacks) == 2
    squares = []
    for n_bits, tier in zip(stacks, (pair.high, pair.low), strict=True):
        assert stacks[n_bits].widths == (n_bits,) and stacks[n_bits].n_matrices == 3
        assert stacks[n_bits].nbytes(n_bits) == matrix_bytes(tier, [(16, 128)])
        squares.append(float((stacks[n_bits].decode(n_bits) - weight.float()).square().mean()))
    assert squares[0] < 0.15 * squares[1]
    if name.startswith("fp16"):
        assert squares[0] == 0


def test_the_compounded_version_is_made_from_int4_and_worse() -> None:
    weight = random_weight((4, 32, 256), seed=1)
    honest, compounded = (
        encode_pair(weight, "int4/int2"),
        encode_pair(weight, "int4/int2-compounded"),
    )
    for name in honest[4].tensors:
        assert torch.equal(honest[4].tensors[name], compounded[4].tensors[name])
    again = INT2.encode_stack(compounded[4].decode(4))
    for name in again.tensors:
        assert torch.equal(again.tensors[name], compounded[2].tensors[name])
    errors = [float((s[2].decode(2) - weight).square().mean()) for s in (honest, compounded)]
    assert 1.001 * errors[0] < errors[1] < 1.5 * errors[0]


def test_importance_and_hessian_reach_the_integer_tiers() -> None:
    weight = random_weight((2, 8, 128))
    x = torch.randn(2, 400, 128, generator=torch.Generator().manual_seed(1))
    x[..., 1:] += 0.7 * x[..., :-1]
    hessian = x.mT @ x / 400
    importance = hessian.diagonal(dim1=1, dim2=2)[:, None] ** 2
    stacks = encode_pair(weight, "int4/int2", importance)
    assert torch.equal(stacks[2].decode(2), INT2.encode_stack(weight, importance).decode(2))
    assert not torch.equal(stacks[2].decode(2), INT2.encode_stack(weight).decode(2))
    tier = replace(INT4, encoder="gptq")
    stacks = encode_pair(weight, TierPair("own", Dense("float32"), tier), hessian=hessian)
    assert list(stacks) == [32, 4]
    expected = tier.encode_stack(weight, hessian=hessian)
    assert torch.equal(stacks[4].decode(4), expected.decode(4))


def test_what_fp16_cannot_hold_is_refused_and_bf16_takes_it() -> None:
    weight = random_weight((1, 4, 64))
    weight[0, 0, 0] = 1e6
    with pytest.raises(CheckpointError, match="overflows float16"):
        encode_pair(weight, "fp16/int4")
    assert torch.isfinite(encode_pair(weight, "bf16/int4")[16].decode(16)).all()


def test_an_unknown_pair_names_the_choices() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'fp16/int4'\?.*int4/int2-compounded"):
        get_pair("fp16/int5")


# Names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_listed_format_encodes(name: str) -> None:
    fmt = FORMATS[name]()
    assert format_name(fmt) == name and make_format(name) == fmt
    weight = random_weight((2, 8, 130))
    stack = fmt.encode_stack(weight)
    widest = stack.widths[-1]
    assert stack.decode(widest).shape == weight.shape
    assert (stack.decode(widest) - weight).square().mean() < 0.3 * weight.square().mean()


@given(
    st.builds(
        GroupAffine,
        st.sampled_from(WIDTHS),
        st.integers(1, 5000),
        symmetric=st.booleans(),
        clip=st.sampled_from(["none", "mse"]),
        encoder=st.sampled_from(["rtn", "gptq"]),
        from_bits=st.sampled_from([None, *WIDTHS]),
    )
)
def test_every_integer_format_has_a_name(fmt: GroupAffine) -> None:
    assert make_format(format_name(fmt)) == fmt


def test_names_that_say_more() -> None:
    assert make_format("int4-g64-asym") == GroupAffine(4, 64, symmetric=False)
    assert make_format("int3-g64-gptq") == GroupAffine(3, 64, encoder="gptq")
    assert make_format("int2-g64-from4g128") == PAIRS["int4/int2-compounded"].low
    assert make_format("any-precision-r1").rows_per_lut == 1
    assert format_name(make_format("any-precision-r1")) == "any-precision-r1"


@pytest.mark.parametrize(
    "name",
    ["", "int7-g64", "int4", "int4-g0", "int4-g64-gptq-asym", "int2-g64-from1g64", "int4-g6a"],
)
def test_a_name_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(
        UnknownNameError, match=r"choose one of any-precision, .*int<bits>-g<group>"
    ):
        make_format(name)


def test_a_near_name_is_proposed() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'int4-g128'"):
        make_format("int4g128")


def test_a_format_without_a_name_is_refused() -> None:
    # The group of a first format that is not there cannot be said in a name.
    with pytest.raises(UnknownNameError, match="unknown format"):
        format_name(GroupAffine(4, 64, from_group_size=32))
    with pytest.raises(UnknownNameError, match="unknown format"):
        format_name(object())
