"""Kernels against float64: bytes of the formats on shuffled pages, poison in all others."""

import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from repro.contract import FormatId, TableRow, pack_row, pages_of
from repro.errors import MissingDeviceError
from repro.formats.any_precision import AnyPrecision, AnyPrecisionScheme
from repro.formats.encoded import EncodedStack
from repro.kernels import moe
from repro.kernels.geometry import KernelInputError, PlaneGeometry
from repro.kernels.moe import fused_moe
from repro.kernels.reference import moe_reference, read_block

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# numpy has no bfloat16, and so the interpreter rounds it another way.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
LIMIT = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 3e-3}
PAGE_BYTES = 512
POISON = 0xFF  # NaN as float16, bfloat16 and float32; page -1


@dataclass
class Layer:
    arena: Tensor
    table: Tensor
    gate_up: PlaneGeometry
    down: PlaneGeometry


def _geometry(scheme: AnyPrecisionScheme) -> PlaneGeometry:
    return PlaneGeometry(
        scheme.n_rows, scheme.n_columns, scheme.rows_per_lut, scheme.has_scales, PAGE_BYTES
    )


def _layer(
    n_experts: int, hidden: int, inner: int, n_bits: list[tuple[int, int]], rows_per_lut: int = 64
) -> tuple[Layer, tuple[EncodedStack, EncodedStack]]:
    generator = torch.Generator().manual_seed(7)
    encoder = AnyPrecision(rows_per_lut=rows_per_lut, scale_rounds=0)
    stacks = [
        encoder.encode_stack(torch.randn(n_experts, *shape, generator=generator) * 0.2)
        for shape in ((2 * inner, hidden), (hidden, inner))
    ]
    blobs: list[tuple[int, int, list[bytes]]] = []
    for expert in range(n_experts):
        for block, stack in enumerate(stacks):
            data = []
            for spec in stack.scheme.tensors(n_bits[expert][block]):
                raw = stack.tensors[spec.name][expert].contiguous().view(torch.uint8)
                data.append(bytes(raw.reshape(-1).numpy()))
            blobs.append((expert, block, data))
    pages: list[bytes] = []
    places = []
    for expert, block, data in blobs:
        specs = stacks[block].scheme.tensors(n_bits[expert][block])
        counts = pages_of((spec.part for spec in specs), PAGE_BYTES)
        first = len(pages)
        for raw, count in zip(data, counts, strict=True):
            padded = raw + bytes([POISON]) * (count * PAGE_BYTES - len(raw))
            pages += [padded[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in range(count)]
        places.append((expert, block, range(first, len(pages))))
    shuffle = torch.randperm(len(pages) + 5, generator=generator).tolist()
    arena = torch.full((len(pages) + 5, PAGE_BYTES), POISON, dtype=torch.uint8)
    for number, page in enumerate(pages):
        arena[shuffle[number]] = torch.frombuffer(bytearray(page), dtype=torch.uint8)
    n_words = 4 + max(len(place) for _, _, place in places) + 3
    table = np.full((n_experts, 2, n_words), -1, dtype=np.int32)
    for expert, block, place in places:
        row = TableRow(
            FormatId.ANY_PRECISION, n_bits[expert][block], 1, tuple(shuffle[i] for i in place)
        )
        table[expert, block] = pack_row(row, n_words)
    layer = Layer(
        arena.to(DEVICE),
        torch.from_numpy(table).to(DEVICE),
        _geometry(stacks[0].scheme),
        _geometry(stacks[1].scheme),
    )
    return layer, (stacks[0], stacks[1])


def _routing(n_tokens: int, top_k: int, n_experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(n_tokens, n_experts, generator=generator).topk(top_k).indices
    weights = torch.rand(n_tokens, top_k, generator=generator) + 0.1
    return index.to(DEVICE), weights.to(DEVICE)


def _error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def _run(layer: Layer, x: Tensor, index: Tensor, weights: Tensor, kind: str = "silu") -> Tensor:
    return fused_moe(
        x, index, weights, layer.arena, layer.table, layer.gate_up, layer.down, kind
    )  # fmt: skip


def _expected(
    layer: Layer, x: Tensor, index: Tensor, weights: Tensor, kind: str = "silu"
) -> Tensor:
    return moe_reference(
        x, index, weights, layer.arena, layer.table, layer.gate_up, layer.down, kind
    )  # fmt: skip


@pytest.mark.parametrize("rows_per_lut", [1, 64, 0])
def test_the_reference_reads_what_the_format_decodes(rows_per_lut: int) -> None:
    bits = [(b, 10 - b) for b in range(2, 9)]
    layer, stacks = _layer(7, 40, 33, bits, rows_per_lut)
    for expert in range(7):
        for block, (stack, geometry) in enumerate(
            zip(stacks, (layer.gate_up, layer.down), strict=True)
        ):
            width = bits[expert][block]
            row = layer.table[expert, block]
            assert geometry.n_pages(width) == int(row[3])
            tensors = {name: t[expert] for name, t in stack.tensors.items()}
            decoded = stack.scheme.decode(tensors, width)
            read = read_block(layer.arena, row, geometry).cpu()
            torch.testing.assert_close(read.float(), decoded, rtol=1e-6, atol=0)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_every_width_beside_every_other(dtype: torch.dtype, activation: str) -> None:
    layer, _ = _layer(7, 72, 48, [(b, 10 - b) for b in range(2, 9)])
    x = torch.randn(9, 72, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    index, weights = _routing(9, 3, 7)
    out = _run(layer, x, index, weights, activation)
    assert out.dtype == dtype
    assert _error(out, _expected(layer, x, index, weights, activation)) <= LIMIT[dtype]


@needs_triton
@pytest.mark.parametrize(
    ("hidden", "inner", "rows_per_lut"), [(33, 17, 64), (130, 41, 1), (64, 100, 0), (1, 1, 64)]
)
def test_odd_sizes(hidden: int, inner: int, rows_per_lut: int) -> None:
    layer, _ = _layer(3, hidden, inner, [(3, 4), (2, 8), (5, 3)], rows_per_lut)
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    index, weights = _routing(5, 2, 3)
    out = _run(layer, x, index, weights)
    assert _error(out, _expected(layer, x, index, weights)) <= LIMIT[torch.float32]


@needs_triton
def test_one_expert_has_all_tokens_and_the_others_none() -> None:
    layer, _ = _layer(4, 40, 24, [(4, 4)] * 4)
    x = torch.randn(37, 40, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    index = torch.full((37, 1), 2, device=DEVICE)
    weights = torch.ones(37, 1, device=DEVICE)
    out = _run(layer, x, index, weights)
    assert _error(out, _expected(layer, x, index, weights)) <= LIMIT[torch.float32]


@needs_triton
def test_no_tokens() -> None:
    layer, _ = _layer(2, 40, 24, [(4, 4)] * 2)
    empty = torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    out = _run(layer, torch.zeros(0, 40, device=DEVICE), empty, empty.float())
    assert out.shape == (0, 40)


@needs_triton
def test_absent_experts_add_nothing_and_old_bytes_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, _ = _layer(3, 40, 24, [(3, 5)] * 3)
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    index, weights = _routing(6, 2, 3)
    index[0] = 3  # lives on another device
    index[1, 0] = -1
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        out: Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(-7)

    monkeypatch.setattr(moe.torch, "empty", poisoned)
    out = _run(layer, x, index, weights)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert _error(out, _expected(layer, x, index, weights)) <= LIMIT[torch.float32]


@needs_triton
def test_a_published_change_is_seen_by_the_same_launch() -> None:
    layer, _ = _layer(2, 40, 24, [(2, 2), (8, 8)])
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    index = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)
    weights = torch.ones(3, 1, device=DEVICE)
    layer.table[0] = layer.table[1]
    out = _run(layer, x, index, weights)
    assert torch.equal(out, _run(layer, x, index + 1, weights))


@needs_triton
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_pairs_are_grouped_by_expert_in_order(integer: torch.dtype) -> None:
    from repro.kernels import planes

    index = torch.randint(-1, 6, (700,), generator=torch.Generator().manual_seed(6))
    index = index.to(DEVICE, integer)  # 5 is absent
    offsets = torch.full((6,), -7, dtype=torch.int32, device=DEVICE)
    order = torch.full((700,), -7, dtype=torch.int32, device=DEVICE)
    planes.group_pairs[(5,)](index, offsets, order, 700, 5, block=256)
    present = (index >= 0) & (index < 5)
    expected = torch.argsort(torch.where(present, index, 9), stable=True)[: int(present.sum())]
    assert torch.equal(order[: len(expected)].long(), expected)
    counts = torch.bincount(index[present].long(), minlength=5)
    assert offsets.tolist() == [0, *counts.cumsum(0).tolist()]


@needs_triton
def test_what_does_not_fit_is_named() -> None:
    layer, _ = _layer(2, 40, 24, [(4, 4)] * 2)
    x = torch.zeros(3, 40, device=DEVICE)
    index, weights = _routing(3, 1, 2)
    with pytest.raises(KernelInputError, match="activation 'relu'"):
        _run(layer, x, index, weights, "relu")
    with pytest.raises(KernelInputError, match=r"float64: use float16"):
        _run(layer, x.double(), index, weights)
    with pytest.raises(KernelInputError, match=r"\[3, 41\] do not fit"):
        _run(layer, torch.zeros(3, 41, device=DEVICE), index, weights)
    with pytest.raises(KernelInputError, match="for 3 tokens"):
        _run(layer, x, index[:2], weights[:2])
    bad = Layer(layer.arena[:, :256], layer.table, layer.gate_up, layer.down)
    with pytest.raises(KernelInputError, match=r"use uint8 \[pages, page_bytes\]"):
        _run(bad, x, index, weights)
    sliced = torch.zeros(4, 1024, dtype=torch.uint8, device=DEVICE)[:, :PAGE_BYTES]
    with pytest.raises(KernelInputError, match="do not slice it"):
        _run(Layer(sliced, layer.table, layer.gate_up, layer.down), x, index, weights)
    for table in (layer.table.long(), layer.table[:, 0]):
        with pytest.raises(KernelInputError, match=r"use int32 \[E, 2, words\]"):
            _run(Layer(layer.arena, table, layer.gate_up, layer.down), x, index, weights)
    with pytest.raises(KernelInputError, match="words of a table row"):
        skipping = Layer(layer.arena, layer.table[:, :, ::2], layer.gate_up, layer.down)
        _run(skipping, x, index, weights)
    with pytest.raises(KernelInputError, match="one device"):
        _run(layer, x, index.to("meta"), weights)


def test_pages_that_cut_tables_are_refused() -> None:
    with pytest.raises(KernelInputError, match="multiple of 512 bytes"):
        PlaneGeometry(8, 8, 8, True, 768)
    with pytest.raises(KernelInputError, match="nothing to multiply"):
        PlaneGeometry(0, 8, 8, True, 512)


def test_without_triton_the_reference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDeviceError, match=r"repro\.kernels\.reference"):
        moe._kernels(torch.device("cpu"))


@needs_triton
def test_an_old_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    with pytest.raises(MissingDeviceError, match=r"an old card is older than .* 8\.0"):
        moe._kernels(torch.device("cuda"))


@needs_triton
def test_a_layer_takes_four_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.kernels import planes

    names = ("group_pairs", "gate_up_activation", "down_projection", "combine")
    launched = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(planes, name)

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launched.append(self.name)
            return self.kernel[grid]

    layer, _ = _layer(2, 40, 24, [(4, 4)] * 2)
    for name in names:
        monkeypatch.setattr(planes, name, Counted(name))
    x = torch.ones(3, 40, device=DEVICE)
    index, weights = _routing(3, 1, 2)
    _run(layer, x, index, weights)
    assert launched == list(names)
