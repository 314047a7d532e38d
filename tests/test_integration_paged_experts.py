"""Weights read from pages equal what the formats decode; layers without originals compute alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.contract import HEADER_WORDS, NO_PAGE, Block, Step, pages_of
from repro.errors import CheckpointError
from repro.formats import make_format
from repro.integration.experts import experts_layers, use_experts
from repro.integration.page_reader import PageReader, decode_planes
from repro.integration.paged_experts import (
    PAGED_NAME,
    StepContext,
    bind,
    expert_weights,
    register,
    release_originals,
    unbind,
)
from repro.integration.statistics import DeviceStatistics
from repro.models.tiny import ARCHITECTURES, tiny_model
from repro.residency.payload import BlockPayload

PAGE = 64


class Shelf:
    """Pages in random places of an arena of noise, and the rows that name them."""

    def __init__(self, seed: int, n_pages: int = 4096) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.arena = torch.randint(0, 256, (n_pages, PAGE), dtype=torch.uint8, generator=generator)
        self._free = torch.randperm(n_pages, generator=generator).tolist()

    def row(self, payload: BlockPayload, expert: int, n_bits: int, n_words: int) -> np.ndarray:
        words = np.full(n_words, NO_PAGE, dtype=np.int32)
        taken: list[int] = []
        for spec in payload.tensors(n_bits):
            stored = payload.tensor(n_bits, spec)[expert].contiguous().view(torch.uint8).reshape(-1)
            (n_pages,) = pages_of([spec.part], PAGE)
            for number in range(n_pages):
                page = self._free.pop()
                piece = stored[number * PAGE : (number + 1) * PAGE]
                self.arena[page, : len(piece)] = piece
                taken.append(page)
        words[:HEADER_WORDS] = (payload.format_id(n_bits), n_bits, 0, len(taken))
        words[HEADER_WORDS : HEADER_WORDS + len(taken)] = taken
        return words


def payload_of(name: str, weight: torch.Tensor) -> BlockPayload:
    return BlockPayload.of_stack(make_format(name).encode_stack(weight))


def words_of(payload: BlockPayload) -> int:
    return HEADER_WORDS + max(
        sum(pages_of(payload.parts(n_bits), PAGE)) for n_bits in payload.widths
    )


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(
        ["any-precision", "any-precision-r1", "any-precision-r5", "int4-g128", "int3-g32-asym",
         "fp16", "bf16", "fp32"]
    ),
    n_rows=st.integers(1, 70),
    n_columns=st.integers(1, 70),
    seed=st.integers(0, 5),
)  # fmt: skip
def test_reading_pages_is_decoding(name, n_rows, n_columns, seed):
    weight = torch.randn(4, n_rows, n_columns, generator=torch.Generator().manual_seed(seed))
    stack = make_format(name).encode_stack(weight)
    payload = BlockPayload.of_stack(stack)
    for n_bits in payload.widths:
        shelf = Shelf(seed)
        rows = np.stack([shelf.row(payload, e, n_bits, words_of(payload)) for e in (2, 0, 3)])
        reader = PageReader(shelf.arena, payload, 1 << 20)
        read = reader.read(rows, torch.float32)
        assert torch.equal(read, stack.decode(n_bits)[[2, 0, 3]])


def test_reading_another_page_is_seen():
    payload = payload_of("any-precision", torch.randn(2, 16, 32))
    shelf = Shelf(0)
    rows = np.stack([shelf.row(payload, 0, 4, words_of(payload))])
    reader = PageReader(shelf.arena, payload, 1 << 20)
    before = reader.read(rows, torch.float32)
    rows[0, HEADER_WORDS] = (rows[0, HEADER_WORDS] + 1) % 4096
    assert not torch.equal(reader.read(rows, torch.float32), before)


def test_the_scratch_bounds_what_is_decoded_together():
    payload = payload_of("fp32", torch.randn(8, 4, 8))
    reader = PageReader(Shelf(0).arena, payload, scratch_bytes=3 * 20 * 32)
    n_bits = np.array([32] * 8)
    assert [len(b) for b in reader.batches(list(range(8)), n_bits)] == [3, 3, 2]
    assert [len(b) for b in PageReader(Shelf(0).arena, payload, 1).batches([1, 5], n_bits)] == [
        1,
        1,
    ]


def test_bits_merge_like_the_reference_at_every_width():
    weight = torch.randn(3, 130, 37, generator=torch.Generator().manual_seed(3))
    stack = make_format("any-precision").encode_stack(weight)
    for n_bits in stack.widths:
        decoded = decode_planes(stack.scheme, stack.tensors, n_bits)
        assert torch.equal(decoded, stack.decode(n_bits))


def shelve(model, name: str) -> tuple[Shelf, np.ndarray, StepContext]:
    """Put all experts of a model on pages at full width and bind its layers to them."""
    layers = experts_layers(model)
    shelf, context, tables = Shelf(1, 1 << 15), StepContext(), []
    n_words = 0
    payloads = []
    for layer in layers:
        blocks = [payload_of(name, expert_weights(layer, block).detach()) for block in Block]
        payloads.append(blocks)
        n_words = max(n_words, *(words_of(block) for block in blocks))
    for row, (layer, blocks) in enumerate(zip(layers, payloads, strict=True)):
        tables.append(
            np.stack(
                [
                    np.stack([shelf.row(b, e, b.widths[-1], n_words) for b in blocks])
                    for e in range(layer.n_experts)
                ]
            )
        )
        readers = tuple(PageReader(shelf.arena, block, 1 << 12) for block in blocks)
        bind(layer, row, readers, context)
    return shelf, np.stack(tables), context


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_without_originals_the_output_is_the_same_bit_for_bit(arch):
    model = tiny_model(arch)
    ids = torch.arange(2, 26).view(2, 12)
    with torch.inference_mode(), use_experts(model, "eager"):
        expected = model(ids).logits
    _, table, context = shelve(model, "fp32")
    layers = experts_layers(model)
    freed = sum(release_originals(layer) for layer in layers)
    assert freed == sum(
        4 * layer.n_experts * sum(b.shape[0] * b.shape[1] for b in _shapes(model, layer))
        for layer in layers
    )
    context.step = Step(1, table)
    context.statistics = DeviceStatistics(layers)
    with torch.inference_mode(), use_experts(model, PAGED_NAME):
        found = model(ids).logits
    assert torch.equal(found, expected)
    assert not context.statistics.read().counts.any(), "counted when the pass is over"
    context.commit()
    read = context.statistics.read()
    assert (read.counts.sum(axis=1) == 24 * 2).all()
    assert sum(release_originals(layer) for layer in layers) == 0
    with pytest.raises(CheckpointError, match="another engine"):
        expert_weights(layers[0], Block.DOWN)


def _shapes(model, layer):
    class Shape:
        def __init__(self, weight):
            self.shape = weight.shape[1:]

    module = layer.module
    return [Shape(module.gate_up_proj), Shape(module.down_proj)]


def test_padding_costs_nothing_and_counts_nowhere():
    model = tiny_model("qwen3_moe")
    _, table, context = shelve(model, "fp32")
    layers = experts_layers(model)
    context.step, context.statistics = Step(1, table), DeviceStatistics(layers)
    module = layers[0].module
    hidden = torch.randn(6, 32)
    index = torch.tensor([[0, 1]] * 3 + [[6, 7]] * 3)
    weights = torch.full((6, 2), 0.5)
    hidden[3:] = float("nan")  # padding may hold anything
    context.token_mask = torch.tensor([True] * 3 + [False] * 3)
    with torch.inference_mode(), use_experts(model, PAGED_NAME):
        out = module(hidden, index, weights)
    assert torch.isfinite(out).all() and not out[3:].any() and out[:3].any()
    assert context.experts_read == 2
    context.commit()
    assert context.statistics.read().counts[0].tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    context.token_mask = torch.zeros(6, dtype=torch.bool)
    with torch.inference_mode(), use_experts(model, PAGED_NAME):
        assert not module(hidden, index, weights).any()


def test_a_model_whose_engine_is_gone_says_so():
    model = tiny_model("mixtral")
    _, table, context = shelve(model, "fp32")
    with torch.inference_mode(), use_experts(model, PAGED_NAME):
        with pytest.raises(CheckpointError, match="closed or not running"):
            model(torch.arange(2, 6)[None])
        context.step = Step(1, table)
        model(torch.arange(2, 6)[None])
        for layer in experts_layers(model):
            unbind(layer)
        with pytest.raises(CheckpointError, match="closed or not running"):
            model(torch.arange(2, 6)[None])


def test_registering_twice_is_fine():
    import importlib

    import repro.integration.paged_experts as module

    assert register() == register() == PAGED_NAME
    importlib.reload(module)
