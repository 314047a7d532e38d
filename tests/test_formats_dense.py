"""Matrices kept as floating-point numbers: exact where they fit, refused where they do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro.errors import CheckpointError, UnknownNameError
from repro.formats.dense import DTYPES, Dense
from repro.formats.encoded import scheme_from_json, scheme_to_json


def random_weight(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    st.sampled_from(sorted(DTYPES)), st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**31)
)
def test_a_checkpoint_of_the_same_type_loses_nothing(
    dtype: str, n_rows: int, n_columns: int, seed: int
) -> None:
    weight = random_weight((3, n_rows, n_columns), seed).to(DTYPES[dtype])
    stack = Dense(dtype).encode_stack(weight)  # type: ignore[arg-type]
    (n_bits,) = stack.widths
    assert n_bits == 8 * weight.element_size() and stack.notes == {}
    assert torch.equal(stack.decode(n_bits), weight.float())
    assert stack.nbytes(n_bits) == weight[0].numel() * weight.element_size()


def test_one_matrix_from_its_bytes_alone() -> None:
    weight = random_weight((6, 20)).to(torch.float16)
    matrix = Dense("float16").encode(weight)
    (part,) = matrix.slices(16)
    assert (part.kind, part.index, part.n_bytes) == ("matrix", 16, 240)
    data = matrix.read(part)
    assert data == weight.numpy().tobytes()
    assert torch.equal(matrix.decode(16, {part: data}), weight.float())
    assert not matrix.decode(16, {part: bytes(240)}).any()


def test_the_scheme_survives_json() -> None:
    scheme = Dense("bfloat16").encode(random_weight((2, 3))).scheme
    assert scheme_from_json(scheme_to_json(scheme)) == scheme


def test_rounding_is_to_nearest() -> None:
    weight = random_weight((1, 8, 64))
    decoded = Dense("bfloat16").encode_stack(weight).decode(16)
    assert ((decoded - weight).abs() <= weight.abs() * 2**-8).all()
    assert not torch.equal(decoded, weight)


def test_a_weight_beyond_float16_is_refused_by_value() -> None:
    weight = random_weight((1, 2, 3))
    weight[0, 1, 1] = -70_000
    with pytest.raises(CheckpointError, match=r"-7e\+04 .*row 1\) overflows float16: use"):
        Dense("float16").encode_stack(weight)
    assert Dense("bfloat16").encode_stack(weight).decode(16)[0, 1, 1] == -70_144


def test_weights_that_vanish_in_float16_are_counted() -> None:
    weight = random_weight((2, 3, 4))
    weight[1, 2] = 1e-9
    weight[0, 0, 0] = 0  # zero is no loss
    assert Dense("float16").encode_stack(weight).notes == {"vanished_weights": 4}
    assert Dense("bfloat16").encode_stack(weight).notes == {}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_are_named(value: float) -> None:
    weight = random_weight((3, 4, 5))
    weight[2, 1, 4] = value
    with pytest.raises(CheckpointError, match="expert 2, row 1"):
        Dense("bfloat16").encode_stack(weight)
    with pytest.raises(CheckpointError, match="first in row 1"):
        Dense("bfloat16").encode(weight[2])


def test_codes_and_other_ranks_are_refused() -> None:
    with pytest.raises(CheckpointError, match="not codes of a quantised checkpoint"):
        Dense().encode(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="give 3 dimensions"):
        Dense().encode_stack(torch.zeros(2, 3))
    with pytest.raises(CheckpointError, match="none of them empty"):
        Dense().encode(torch.zeros(0, 3))


def test_an_unknown_type_names_the_choices() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'bfloat16'"):
        Dense("bfloat")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_weight_that_overflows_is_named(dtype: str) -> None:
    weight = torch.zeros(3, 4, 5)
    weight[1, 2, 3] = 3.4028e38
    with pytest.raises(CheckpointError, match=rf"expert 1, row 2\) overflows {dtype}: use"):
        Dense(dtype).encode_stack(weight)  # type: ignore[arg-type]
