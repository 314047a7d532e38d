"""Blocks on pages: nobody shares a page, nothing is lost, every token is found bit for bit."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_kv import Pool

from repro.contract import Reservation
from repro.serving.kv_blocks import BlockPlan, BlockTable, UnitIndex
from repro.serving.kv_sizes import KVError, KVLayout, LayerLayout, StateSpec
from repro.serving.paged_cache import PagedCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def full(heads: int, key: int, value: int, dtype: torch.dtype = torch.float32) -> LayerLayout:
    return LayerLayout("full", (heads, key), (heads, value), dtype)


def recurrent(layer: int) -> LayerLayout:
    states = (
        StateSpec(layer, "conv", 0, (6, 4), torch.float32),
        StateSpec(layer, "recurrent", 0, (2, 3, 5), torch.float64),
    )
    return LayerLayout("recurrent", states=states, n_states=1)


@st.composite
def layouts(draw: st.DrawFn, states: bool = True) -> KVLayout:
    layers = []
    dtype = draw(st.sampled_from(DTYPES))
    for index in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["full", "sliding", "none", "recurrent"]))
        size = st.integers(1, 9)
        if kind == "none":
            layers.append(LayerLayout("none"))
        elif kind == "recurrent" and states:
            layers.append(recurrent(index))
        else:
            heads = draw(st.integers(1, 3))
            window = draw(st.integers(1, 12)) if kind == "sliding" else None
            layers.append(
                LayerLayout(
                    "sliding" if window else "full",
                    (heads, draw(size)),
                    (heads, draw(size)),
                    dtype,
                    window,
                )
            )
    if not any(layer.token_bytes for layer in layers):
        layers.append(full(1, 3, 2, dtype))
    return KVLayout(tuple(layers), draw(st.integers(1, 20)))


PAGES = st.integers(1, 24).map(lambda n: 8 * n)


class Tables(RuleBasedStateMachine):
    """Any order of growing, cutting and giving back, on a pool that runs out."""

    @initialize(layout=layouts(), page_bytes=PAGES, blocks=st.integers(5, 30))
    def begin(self, layout: KVLayout, page_bytes: int, blocks: int) -> None:
        self.plan = BlockPlan.of(layout, page_bytes)
        n_pages = blocks * self.plan.block_pages + 3 * self.plan.state_bytes // page_bytes + 1
        self.pool = Pool(page_bytes, n_pages, torch.uint8)
        self.tables = [self.new() for _ in range(3)]

    def new(self) -> BlockTable:
        return BlockTable(self.plan, self.pool.reserve, self.pool.release)

    def held(self, table: BlockTable) -> list[int]:
        return [*table.pages.ravel().tolist(), *table.state_pages.tolist()]

    @rule(which=st.integers(0, 2), more=st.sampled_from([0, 1, 2, 5, 17, 40]))
    def extend(self, which: int, more: int) -> None:
        table = self.tables[which]
        before, free = self.held(table), list(self.pool.free)
        blocks, states = table.pages.ravel().tolist(), table.state_pages.tolist()
        wanted = table.n_tokens + more
        if table.extend(wanted):
            assert table.capacity >= wanted
            assert table.pages.ravel().tolist()[: len(blocks)] == blocks  # nothing has moved
            assert not states or table.state_pages.tolist() == states
            table.n_tokens = wanted
        else:
            assert self.held(table) == before
            assert sorted(self.pool.free) == sorted(free)
            short = self.plan.layout.request_bytes(wanted, self.plan.page_bytes)
            assert short > len(free) * self.plan.page_bytes

    @rule(which=st.integers(0, 2), share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    def crop(self, which: int, share: float) -> None:
        table = self.tables[which]
        n_tokens = int(share * table.n_tokens)
        if self.plan.states and 0 < n_tokens < table.n_tokens:
            with pytest.raises(KVError, match="recurrent state"):
                table.crop(n_tokens)
            return
        before = self.held(table)
        table.crop(n_tokens)
        assert table.n_tokens == n_tokens
        assert self.held(table) == before

    @rule(which=st.integers(0, 2))
    def trim(self, which: int) -> None:
        table = self.tables[which]
        before, n_free = table.n_bytes, len(self.pool.free)
        freed = table.trim()
        assert before - table.n_bytes == freed
        assert (len(self.pool.free) - n_free) * self.plan.page_bytes == freed
        assert table.n_blocks == self.plan.layout.blocks_for(table.n_tokens)

    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        self.tables[which].release()
        assert self.tables[which].n_bytes == self.tables[which].capacity == 0

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def every_page_has_one_owner(self) -> None:
        owned = [page for table in self.tables for page in self.held(table)]
        assert sorted([*owned, *self.pool.free]) == list(range(self.pool.arena.n_pages))
        for table in self.tables:
            assert len(self.held(table)) * self.plan.page_bytes == table.n_bytes
            assert table.n_tokens <= table.capacity

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                table.release()
            assert len(self.pool.free) == self.pool.arena.n_pages


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=100, stateful_step_count=30)


@given(layouts(), PAGES)
def test_no_two_tokens_share_a_byte_and_none_leaves_its_block(
    layout: KVLayout, page_bytes: int
) -> None:
    plan = BlockPlan.of(layout, page_bytes)
    pool = Pool(page_bytes, 3 * plan.block_pages + plan.state_bytes // page_bytes, torch.uint8)
    table = BlockTable(plan, pool.reserve, pool.release)
    n_tokens = 2 * layout.block_tokens + 1
    assert table.extend(n_tokens)
    index = UnitIndex(plan, torch.device("cpu"))
    pages = index.upload([table])
    seen: list[np.ndarray[Any, Any]] = []
    for number, group in enumerate(plan.groups):
        units = index.units(number, pages, torch.arange(n_tokens)[None])
        assert units.shape == (len(group.layers), n_tokens, group.units_per_token)
        first = units.numpy().ravel()[:, None] * group.unit_bytes
        seen.append((first + np.arange(group.unit_bytes)).ravel())
        token_bytes = layout.layers[group.layers[0]].token_bytes
        assert group.units_per_token * group.unit_bytes == token_bytes
    touched = np.concatenate(seen)
    assert len(np.unique(touched)) == len(touched) == n_tokens * layout.token_bytes
    assert set((touched // page_bytes).tolist()) <= set(table.pages.ravel().tolist())


@settings(max_examples=60)
@given(layouts(states=False), PAGES, st.data())
def test_what_is_written_is_read_back_bit_for_bit(
    layout: KVLayout, page_bytes: int, data: st.DataObject
) -> None:
    """Three requests, four passes of ragged chunks; free memory is NaN throughout."""
    dtype = next(layer.dtype for layer in layout.layers if layer.token_bytes)
    blocks = 3 * (40 // layout.block_tokens + 2)
    pool = Pool(page_bytes, blocks * layout.block_bytes(page_bytes) // page_bytes, dtype)
    cache = PagedCache(layout, pool.arena)
    tables = [BlockTable(cache.plan, pool.reserve, pool.release) for _ in range(3)]
    written: dict[tuple[int, int], torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        rows = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        n_new = [data.draw(st.integers(1, 9)) for _ in rows]
        for row, n in zip(rows, n_new, strict=True):
            assert tables[row].extend(tables[row].n_tokens + n)
        chosen = [tables[row] for row in rows]
        now = cache.begin(chosen, n_new)
        for number, layer in enumerate(layout.layers):
            if not layer.token_bytes:
                continue
            new = []
            for heads, size in (layer.key_shape, layer.value_shape):
                shape = (len(rows), heads, now.n_new, size)
                new.append(torch.randn(shape, generator=generator).to(dtype))
            found = cache.update(*new, number)
            n_columns, offset = cache.get_mask_sizes(now.n_new, number)
            assert n_columns + offset == now.n_columns
            for kind in (0, 1):
                assert torch.isfinite(found[kind]).all()
                for place, (row, n) in enumerate(zip(rows, n_new, strict=True)):
                    old = written.get((row, 2 * number + kind), new[kind][0][:, :0])
                    whole = torch.cat([old, new[kind][place][:, now.n_new - n :]], dim=1)
                    written[row, 2 * number + kind] = whole
                    seen = min(whole.shape[1], n_columns)
                    got = found[kind][place][:, n_columns - seen :]
                    assert torch.equal(got, whole[:, whole.shape[1] - seen :])
        cache.commit(chosen, n_new)
        cache.end()


def test_state_that_fits_without_blocks_that_do_not() -> None:
    """A refusal half-way gives the first half back."""
    layout = KVLayout((recurrent(0), full(2, 8, 8)))
    plan = BlockPlan.of(layout, 64)
    pool = Pool(64, plan.state_bytes // 64 + plan.block_pages - 1, torch.uint8)
    table = BlockTable(plan, pool.reserve, pool.release)
    n_free = len(pool.free)
    assert not table.extend(1)
    assert len(pool.free) == n_free
    assert table.n_bytes == 0


def test_an_allocator_that_raises_half_way() -> None:
    layout = KVLayout((recurrent(0), full(2, 8, 8)))
    plan = BlockPlan.of(layout, 64)
    pool = Pool(64, 1000, torch.uint8)

    def reserve(n_bytes: int, purpose: str) -> Reservation | None:
        if n_bytes != plan.state_bytes:
            raise RuntimeError("no")
        return pool.reserve(n_bytes, purpose)

    table = BlockTable(plan, reserve, pool.release)
    with pytest.raises(RuntimeError):
        table.extend(5)
    assert len(pool.free) == 1000
    assert table.n_bytes == 0


@pytest.mark.parametrize("kept", [0, 1, 4, 5, 8, 11])
def test_trim_gives_back_whole_blocks_from_the_end(kept: int) -> None:
    plan = BlockPlan.of(KVLayout((full(2, 8, 8),), block_tokens=4), 64)
    pool = Pool(64, 1000, torch.uint8)
    table = BlockTable(plan, pool.reserve, pool.release)
    assert table.extend(10)  # three blocks at once
    assert table.extend(20)  # and two
    pages = table.pages.copy()
    table.n_tokens = 20
    table.crop(kept)
    n_kept = -(-kept // 4)
    assert table.trim() == (5 - n_kept) * plan.block_bytes
    assert np.array_equal(table.pages, pages[:n_kept])
    assert set(table.pages.ravel()).isdisjoint(pool.free)
    assert set(pages[n_kept:].ravel()) <= set(pool.free)
    assert table.capacity == 4 * n_kept
    assert table.extend(17)
    table.release()
    assert len(pool.free) == 1000


def test_pages_of_another_size_are_refused() -> None:
    plan = BlockPlan.of(KVLayout((full(2, 8, 8),)), 64)
    pool = Pool(128, 100, torch.uint8)
    table = BlockTable(plan, pool.reserve, pool.release)
    with pytest.raises(KVError, match="not of 64 bytes"):
        table.extend(5)
    assert len(pool.free) == 100
    with pytest.raises(KVError, match="multiples of 8"):
        BlockPlan.of(plan.layout, 12)


def test_the_table_cannot_be_cut_to_more_than_it_has() -> None:
    pool = Pool(64, 100, torch.uint8)
    plan = BlockPlan.of(KVLayout((full(1, 4, 4),)), 64)
    table = BlockTable(plan, pool.reserve, pool.release)
    assert table.extend(40)
    table.n_tokens = 40
    with pytest.raises(KVError, match="cut 40 cached tokens back to 41"):
        table.crop(41)


@given(layouts(), PAGES)
def test_sizes(layout: KVLayout, page_bytes: int) -> None:
    block = layout.block_bytes(page_bytes)
    assert block % page_bytes == 0
    assert block >= layout.token_bytes * layout.block_tokens
    assert 0 <= layout.fragmentation(page_bytes) < 1
    fitted = layout.fitted(page_bytes)
    assert fitted.block_tokens % layout.block_tokens == 0
    assert fitted.fragmentation(page_bytes) <= max(0.05, layout.fragmentation(page_bytes))
    states = sum(state.n_bytes for state in layout.states)
    assert layout.state_bytes(page_bytes) >= states
    tokens = 3 * layout.block_tokens
    assert layout.request_bytes(tokens, page_bytes) == 3 * block + layout.state_bytes(page_bytes)


def test_sizes_of_qwen3_30b() -> None:
    """A block of 16 tokens and one layer is 32,768 bytes (48 layers, 4 heads of 128, bf16)."""
    layout = KVLayout(tuple(full(4, 128, 128, torch.bfloat16) for _ in range(48)))
    assert layout.block_bytes(16384) == 48 * 32768
    assert layout.fragmentation(16384) == 0.0
    plan = BlockPlan.of(layout, 16384)
    assert len(plan.groups) == 1
    assert plan.groups[0].units_per_token == 1  # a token of a layer is one piece


def test_the_arena_can_be_dropped_after_a_pass() -> None:
    """The cache keeps no view of it, or closing would not give the memory back."""
    pool = Pool(64, 100, torch.float32)
    cache = PagedCache(KVLayout((full(1, 4, 4),)), pool.arena)
    table = BlockTable(cache.plan, pool.reserve, pool.release)
    assert table.extend(3)
    cache.begin([table], [3])
    cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 0)
    cache.end()
    address = pool.arena.data.untyped_storage().data_ptr()
    known = {id(pool.arena.data), id(pool.arena.as_dtype(torch.float32))}
    held = [
        thing
        for thing in gc.get_objects()
        if type(thing) is torch.Tensor and thing.untyped_storage().data_ptr() == address
    ]
    assert {id(tensor) for tensor in held} == known
