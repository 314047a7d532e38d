"""Decode attention over pages: the kernel against the reference, and nothing else is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.kernels import paged_attention as kernels
from repro.kernels.paged_attention import paged_attention
from repro.kernels.paged_attention_reference import (
    KvPlace,
    PagedAttentionError,
    paged_attention_reference,
    token_indices,
)
from repro.kernels.paged_attention_workspace import Workspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not kernels.interpreted():
    pytest.skip("no GPU and no interpreter", allow_module_level=True)


class Case(NamedTuple):
    """Random keys and values on pages; whatever belongs to nobody is NaN."""

    query: Any
    arena: Any
    pages: Any
    lengths: Any
    place: KvPlace
    keys: Any
    values: Any

    def run(self, function: Any = None, **options: Any) -> tuple[Any, Any]:
        """Output, and the arena after it; this case stays as it is."""
        arena = self.arena.clone()
        if function is None:
            options["workspace"] = Workspace(DEVICE)
            function = paged_attention
        options.setdefault("scale", 0.3)
        out = function(self.query, arena, *self[2:], **options)
        return out, arena


def case(
    lengths: list[int],
    *,
    group: int = 2,
    heads: int = 2,
    sizes: tuple[int, int] = (8, 8),
    page_values: int = 32,
    block_tokens: int = 4,
    start: int = 0,
    n_spare: int = 0,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    end = start + block_tokens * heads * sum(sizes)
    block_pages = -(-end // page_values)
    place = KvPlace(start, block_tokens, block_pages, page_values, heads, *sizes)
    n_blocks = max(1, *(-(-n // block_tokens) for n in lengths)) + n_spare
    owned = [-(-n // block_tokens) * block_pages for n in lengths]
    free = torch.randperm(sum(owned) + 3, generator=generator) + 1  # page 0 is nobody's
    arena = torch.full((len(free) + 1, page_values), torch.nan)
    pages = torch.zeros(len(lengths), n_blocks * block_pages, dtype=torch.int64)
    for row, (n, n_pages) in enumerate(zip(lengths, owned, strict=True)):
        pages[row, :n_pages], free = free[:n_pages], free[n_pages:]
        if n > 1:  # the new token is not there yet
            at = token_indices(pages[row], n - 1, place)
            arena.view(-1)[at] = torch.randn(at.shape, generator=generator)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    return Case(
        random(len(lengths), heads * group, sizes[0]),
        arena.to(DEVICE, dtype),
        pages.to(DEVICE, index),
        torch.tensor(lengths, dtype=index, device=DEVICE),
        place,
        random(len(lengths), heads, sizes[0]),
        random(len(lengths), heads, sizes[1]),
    )


def agree(one: Case, tolerance: float = 1e-5, **options: Any) -> None:
    options_reference = {k: v for k, v in options.items() if k != "n_splits"}
    right, arena_right = one.run(paged_attention_reference, **options_reference)
    found, arena = one.run(**options)
    assert torch.isfinite(found).all()
    assert (found - right).norm() <= tolerance * right.norm()
    # the new tokens are stored to the bit, and no other value is touched
    assert torch.equal(arena.nan_to_num(-99), arena_right.nan_to_num(-99))
    padded = one.lengths == 0
    assert not found[padded].any()


@settings(max_examples=25)
@given(data=st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    draw = data.draw
    one = case(
        draw(st.lists(st.integers(0, 70), min_size=1, max_size=3)),
        group=draw(st.sampled_from([1, 2, 3, 5])),
        heads=draw(st.sampled_from([1, 2, 3])),
        sizes=draw(st.sampled_from([(8, 8), (12, 12), (16, 8), (20, 20), (33, 7)])),
        page_values=draw(st.sampled_from([6, 16, 24, 40, 64, 1000])),
        block_tokens=draw(st.sampled_from([1, 4, 16, 48])),
        start=draw(st.sampled_from([0, 8, 48, 6])),
        n_spare=draw(st.integers(0, 2)),
        index=draw(st.sampled_from([torch.int32, torch.int64])),
        seed=draw(st.integers(0, 99)),
    )
    window = draw(st.sampled_from([None, 1, 2, 5, 33, 1000]))
    softcap = draw(st.sampled_from([None, 0.7, 30.0]))
    sinks = torch.randn(one.query.shape[1]).to(DEVICE) if draw(st.booleans()) else None
    agree(one, window=window, softcap=softcap, sinks=sinks, n_splits=draw(st.integers(1, 3)))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 8, 9, 128, 129, 130, 257])
def test_lengths_at_borders(length: int) -> None:
    """Of blocks (4), of tiles (64) and of splits (128), beside a row of another length."""
    agree(case([length, 7], block_tokens=4))


@pytest.mark.parametrize("size", [64, 80, 128, 192, 256, 512])
def test_head_sizes(size: int) -> None:
    agree(case([40, 3], sizes=(size, size), page_values=4 * size, heads=1, group=4))


@pytest.mark.parametrize(("heads", "group"), [(1, 24), (4, 8), (6, 1)])
def test_groups(heads: int, group: int) -> None:
    agree(case([40, 3], heads=heads, group=group))


def test_large_logits_overflow_nothing() -> None:
    one = case([100, 40])
    agree(one._replace(query=one.query * 100, keys=one.keys * 100), n_splits=2)
    agree(one._replace(query=one.query * 1000), n_splits=2, softcap=5.0)


def test_float16() -> None:
    one = case([30, 1, 150], dtype=torch.float16, sizes=(16, 16), page_values=64)
    agree(one, tolerance=2e-3, n_splits=2)


def test_counters_are_left_as_they_were_found() -> None:
    """A second launch on the same workspace combines as the first did."""
    one, workspace = case([300, 150, 5]), Workspace(DEVICE)
    first, arena = one.run(lambda *a, **k: paged_attention(*a, **k, workspace=workspace))
    again = paged_attention(one.query, arena, *one[2:], scale=0.3, workspace=workspace)
    assert torch.equal(first, again)
    assert workspace._now is not None
    assert not workspace._now[2].any()


def test_a_workspace_keeps_what_it_outgrew() -> None:
    workspace = Workspace(DEVICE)
    small = workspace.take(1, 1, 8)
    large = workspace.take(4, 16, 8)
    assert workspace.take(2, 2, 8)[0] is large[0]
    assert workspace._outgrown[0][0] is small[0]


def test_a_length_beyond_the_table_reads_no_other_row() -> None:
    one = case([8, 8])
    too_long = one._replace(lengths=torch.tensor([800, 8], device=DEVICE))
    assert torch.equal(too_long.run()[0], one.run()[0])


def test_poison_is_seen_where_it_belongs() -> None:
    """The poison of these tests is no decoration: a page of the row itself shows."""
    one = case([9, 9])
    one.arena[one.pages[0, 0]] = torch.nan
    out = one.run()[0]
    assert out[0].isnan().any()
    assert torch.isfinite(out[1]).all()


def test_views_of_projections_are_taken() -> None:
    """Keys and values arrive as transposed views of one product."""
    one = case([20, 3])
    both = torch.cat([one.keys, one.values], -1)
    views = one._replace(keys=both[..., :8], values=both[..., 8:])
    assert torch.equal(views.run()[0], one.run()[0])


def test_bad_arguments_are_named() -> None:
    one = case([5, 5])
    bad: list[tuple[Case, str]] = [
        (one._replace(query=one.query[..., :4]), r"query of shape \(2, 4, 4\)"),
        (one._replace(keys=one.keys.half()), "keys of torch.float16"),
        (one._replace(lengths=one.lengths.float()), "give int32 or int64"),
        (one._replace(lengths=one.lengths[:1]), "lengths of shape"),
        (one._replace(pages=one.pages[:, :-1]), "whole blocks"),
        (one._replace(query=one.query[:, :3]), "no whole groups"),
        (one._replace(query=one.query.to("meta")), "on meta and the arena on"),
    ]
    for wrong, message in bad:
        for function in (None, paged_attention_reference):
            with pytest.raises(PagedAttentionError, match=message):
                wrong.run(function)
    place = replace(one.place, key_size=520, value_size=520)
    assert "larger than 512" in str(kernels.unsupported(place, 4, torch.float32))
    assert "float64" in str(kernels.unsupported(one.place, 4, torch.float64))
    assert "more than 64" in str(kernels.unsupported(one.place, 2 * 65, torch.float32))
    assert kernels.unsupported(one.place, 4, torch.bfloat16) is None


def test_no_rows() -> None:
    one = case([5])
    empty = Case(*(t if isinstance(t, KvPlace) or t is one.arena else t[:0] for t in one))
    assert empty.run()[0].shape == (0, 4, 8)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 3e-3), ("float16", 5e-4)])
@pytest.mark.parametrize("size", [64, 80, 128, 256, 512])
def test_errors_on_the_device(size: int, dtype: str, tolerance: float) -> None:
    one = case(
        [1, 17, 700, 0, 2000, 129], sizes=(size, size), page_values=size * 16, heads=2, group=8,
        block_tokens=16, dtype=getattr(torch, dtype),
    )  # fmt: skip
    precise = Case(*(t.double() if getattr(t, "is_floating_point", bool)() else t for t in one))
    for options in ({}, {"window": 100}, {"softcap": 3.0}):
        right = precise.run(paged_attention_reference, scale=size**-0.5, **options)[0]
        found = one.run(scale=size**-0.5, **options)[0].double()
        assert torch.isfinite(found).all()
        assert (found - right).norm() <= tolerance * right.norm()


@pytest.mark.gpu
def test_a_captured_launch_follows_lengths() -> None:
    one, workspace = case([1000, 3, 400], page_values=512, n_spare=2), Workspace(DEVICE)
    lengths = one.lengths.clone()
    arguments = (one.query, one.arena, one.pages, lengths, *one[4:])
    paged_attention(*arguments, scale=0.3, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*arguments, scale=0.3, workspace=workspace)
    for new in ([1000, 3, 400], [700, 2, 399], [1, 0, 400]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        right = one._replace(lengths=lengths).run(paged_attention_reference)[0]
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
