"""Fields in words, planes, pieces and pages: what kernels will read, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro.contract import Part
from repro.formats.layout import (
    FIELD_BITS,
    WORD_BITS,
    code_pieces,
    fragmentation,
    pack_fields,
    pack_planes,
    row_words,
    unpack_fields,
    unpack_planes,
)

COLUMNS = st.integers(1, 4097)


def random_codes(shape: tuple[int, ...], n_bits: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << n_bits, shape, generator=generator, dtype=torch.uint8)


def field_of(words: Tensor, column: int, field_bits: int) -> int:
    """A field by the definition: column j of a row at bit ``j * field_bits``."""
    bit = column * field_bits
    word = int(words[bit // WORD_BITS]) & 0xFFFFFFFF
    return word >> bit % WORD_BITS & ((1 << field_bits) - 1)


@given(st.sampled_from(FIELD_BITS), COLUMNS, st.integers(1, 4), st.integers(0, 2**31))
@example(1, 4097, 2, 0)
@example(8, 1, 1, 0)
def test_fields_come_back(field_bits: int, n_columns: int, n_rows: int, seed: int) -> None:
    codes = random_codes((n_rows, n_columns), field_bits, seed)
    words = pack_fields(codes, field_bits)
    assert words.dtype == torch.int32
    assert words.shape == (n_rows, row_words(n_columns, field_bits))
    assert torch.equal(unpack_fields(words, field_bits, n_columns), codes)


@given(st.sampled_from(FIELD_BITS), st.integers(1, 300), st.integers(0, 2**31))
def test_every_field_is_where_the_layout_says(field_bits: int, n_columns: int, seed: int) -> None:
    codes = random_codes((n_columns,), field_bits, seed)
    words = pack_fields(codes, field_bits)
    read = [field_of(words, column, field_bits) for column in range(n_columns)]
    assert read == codes.tolist()
    n_fields = len(words) * WORD_BITS // field_bits
    assert not any(field_of(words, column, field_bits) for column in range(n_columns, n_fields))


@given(st.integers(1, 8), COLUMNS, st.integers(0, 2**31))
@example(8, 4097, 0)
def test_planes_come_back(n_bits: int, n_columns: int, seed: int) -> None:
    codes = random_codes((2, 3, n_columns), n_bits, seed)
    planes = pack_planes(codes, n_bits)
    assert len(planes) == n_bits
    assert all(plane.shape == (2, 3, row_words(n_columns)) for plane in planes)
    assert torch.equal(unpack_planes(planes, n_columns), codes)


@given(st.integers(2, 8), st.integers(1, 200), st.integers(0, 2**31))
def test_the_first_planes_are_the_top_bits(n_bits: int, n_columns: int, seed: int) -> None:
    codes = random_codes((2, n_columns), n_bits, seed)
    planes = pack_planes(codes, n_bits)
    for kept in range(1, n_bits):
        assert torch.equal(unpack_planes(planes[:kept], n_columns), codes >> (n_bits - kept))
        for plane, narrow in zip(planes, pack_planes(codes >> (n_bits - kept), kept), strict=False):
            assert torch.equal(plane, narrow)


def test_a_plane_by_hand() -> None:
    codes = torch.zeros(1, 40, dtype=torch.uint8)
    codes[0, [0, 1, 31, 32, 39]] = 1
    words = [int(word) & 0xFFFFFFFF for word in pack_fields(codes, 1)[0]]
    assert words == [1 << 31 | 0b11, 1 << 7 | 1]


@settings(max_examples=20)
@given(st.sampled_from(FIELD_BITS), st.integers(0, 2**31))
def test_what_follows_a_row_is_not_read(field_bits: int, seed: int) -> None:
    codes = random_codes((2, 33), field_bits, seed)
    words = pack_fields(codes, field_bits)
    used = 33 * field_bits % WORD_BITS
    words[:, -1] |= torch.tensor(-1 << used, dtype=torch.int64).to(torch.int32)
    assert torch.equal(unpack_fields(words, field_bits, 33), codes)


@pytest.mark.parametrize("field_bits", FIELD_BITS[:-1])
def test_a_code_that_does_not_fit_is_refused(field_bits: int) -> None:
    codes = torch.tensor([[0, 1 << field_bits]], dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"code {1 << field_bits} does not fit"):
        pack_fields(codes, field_bits)


@pytest.mark.parametrize("field_bits", [0, 3, 5, 16])
def test_a_field_that_does_not_exist_is_refused(field_bits: int) -> None:
    with pytest.raises(ValueError, match="do not exist"):
        pack_fields(torch.zeros(1, 1, dtype=torch.uint8), field_bits)
    with pytest.raises(ValueError, match="do not exist"):
        unpack_fields(torch.zeros(1, 1, dtype=torch.int32), field_bits, 1)


@pytest.mark.parametrize("n_bits", range(1, 9))
def test_pieces_make_up_the_width(n_bits: int) -> None:
    pieces = code_pieces(n_bits)
    assert sum(pieces) == n_bits and set(pieces) <= set(FIELD_BITS)
    assert list(pieces) == sorted(set(pieces), reverse=True)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=6), st.integers(1, 4096))
def test_fragmentation_is_what_the_pages_leave_unused(sizes: list[int], page_bytes: int) -> None:
    parts = [Part("plane", index, n_bytes) for index, n_bytes in enumerate(sizes)]
    taken = 0
    for n_bytes in sizes:
        left = n_bytes
        while left > 0:
            taken, left = taken + page_bytes, left - page_bytes
    assert fragmentation(parts, page_bytes) == pytest.approx((taken - sum(sizes)) / taken)


def test_whole_pages_leave_nothing_unused() -> None:
    assert fragmentation([Part("plane", 0, 3 * 16_384), Part("lut", 4, 16_384)], 16_384) == 0
    assert fragmentation([Part("scales", 4, 1)], 4) == 0.75
