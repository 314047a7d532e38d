"""Bytes and seconds of formats where no text is needed: dimensions, pages, encoding.

The one idea: bytes follow from a shape, so the formats can be weighed at the published
models' dimensions without their weights.  Three questions: how many bits a weight costs with
tables and scales counted, with only the table in use in memory or with those of all widths;
how much of a page stays empty when every part begins on a page of its own; and how long
encoding takes, at the block sizes of Qwen3-30B-A3B on a GPU and on the measured models on a
CPU.

A series holds one row per model, with one number per label (width or format; for unused bytes
the page sizes of the first width, then of the next).

Letters: N rows, K columns, R rows per table, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repro.calibration.blocks import block_weights
from repro.contract import Block
from repro.experiments.traffic import model_digest
from repro.formats.any_precision import WIDTHS, AnyPrecision, AnyPrecisionScheme
from repro.formats.encoded import Scheme
from repro.formats.layout import fragmentation
from repro.formats.registry import make_format
from repro.formats.tiers import expert_shapes
from repro.integration.experts import experts_layers
from repro.models import load_model
from repro.models.layout import inspect_config, read_config
from repro.models.loading import local_folder
from repro.models.published import PUBLISHED
from repro.profiles import Profile
from repro.reporting.records import Measurement

CLAIM = "Formats: bytes at published dimensions"
PAGES_CLAIM = "Formats: unused bytes of pages"
SPEED_CLAIM = "Formats: speed of encoding"
TABLES = (1, 64, 0)  # rows per look-up table; 0: all of the matrix
INTEGERS = tuple(f"int{b}-g{g}" for b in (2, 3, 4) for g in (128, 64, 32))
PAGE_BYTES = tuple(256 << step for step in range(7))  # 256 B to 16 KiB
# What a GPU encodes: the blocks of all experts of one layer of Qwen3-30B-A3B.
TIMED_MODEL, TIMED_REPEATS = "Qwen3-30B-A3B", 5
SOURCES = (
    "repro.experiments.format_bytes",
    "repro.formats.layout",
    "repro.models.published",
)

Shapes = tuple[tuple[int, int], ...]
Points = Iterator[tuple[dict[str, Any], Callable[[], list[Measurement]]]]


def points(profile: Profile, device: str) -> Points:
    """Configurations and their measuring functions."""
    digests = {model: model_digest(model) for model in profile.models}
    dimensions = {"models": profile.models, "model_digests": digests}
    yield {"part": "dimensions", **dimensions}, partial(measure_dimensions, profile.models)
    if device == "cuda":
        config = {"part": "speed", "model": TIMED_MODEL}
        yield config, partial(measure_speed_gpu, profile.seed)
    else:
        for model in profile.models:
            config = {"part": "speed", "model": model, "model_digest": digests[model]}
            yield config, partial(measure_speed, model)


def all_shapes(models: tuple[str, ...]) -> dict[str, Shapes]:
    """``[N, K]`` of both blocks of an expert, by model: measured ones, then published ones."""
    found: dict[str, Shapes] = {}
    for name in models:
        found[name] = inspect_config(read_config(local_folder(name)[1])).expert_shapes
    for name, model in PUBLISHED.items():
        sizes = model.dimensions
        found[name] = expert_shapes(sizes.hidden_size, sizes.moe_intermediate_size)
    return found


def nested_scheme(shape: tuple[int, int], rows_per_lut: int) -> AnyPrecisionScheme:
    """How a matrix of this shape is stored."""
    rows = min(rows_per_lut or shape[0], shape[0])
    return AnyPrecisionScheme(*shape, rows, has_scales=rows > 1)


def _bytes(scheme: Scheme, n_bits: int) -> int:
    return sum(spec.n_bytes for spec in scheme.tensors(n_bits))


def _table_bytes(scheme: Scheme, n_bits: int) -> int:
    return sum(spec.n_bytes for spec in scheme.tensors(n_bits) if spec.kind == "lut")


def measure_dimensions(models: tuple[str, ...]) -> list[Measurement]:
    """Bits per weight and unused bytes, all models in each record."""
    shapes = all_shapes(models)
    weights = {name: sum(n * k for n, k in pair) for name, pair in shapes.items()}
    found: list[Measurement] = []

    def add(
        metric: str, unit: str, numbers: list[list[float]], claim: str = CLAIM, **labels: Any
    ) -> None:
        series = [float(f"{value:.6g}") for row in numbers for value in row]
        named = {"dimensions": list(shapes), **labels}
        found.append(Measurement(claim, "derived", metric, None, unit, series=series, labels=named))

    for rows in TABLES:
        schemes = {n: [nested_scheme(s, rows) for s in pair] for n, pair in shapes.items()}
        kinds: dict[str, Callable[[Scheme, int], int]] = {
            "bits_per_weight": _bytes,
            "table_bits_per_weight": _table_bytes,
        }
        for metric, count in kinds.items():
            numbers = [
                [8 * sum(count(s, b) for s in pair) / weights[name] for b in WIDTHS]
                for name, pair in schemes.items()
            ]
            add(metric, "bits", numbers, format=f"any-precision, {_shared(rows)}", widths=WIDTHS)
        unused = [
            [
                fragmentation([t.part for s in pair for t in s.tensors(n_bits)], page_bytes)
                for n_bits in WIDTHS
                for page_bytes in PAGE_BYTES
            ]
            for pair in schemes.values()
        ]
        add(
            "unused_share", "share", unused, PAGES_CLAIM,
            format=f"any-precision, {_shared(rows)}", widths=WIDTHS, page_bytes=PAGE_BYTES,
        )  # fmt: skip
    numbers = [
        [
            8 * sum(_bytes(s, s.n_bits) for n, k in pair if (s := _integer(name, n, k)))
            / weights[model]
            for name in INTEGERS
        ]
        for model, pair in shapes.items()
    ]  # fmt: skip
    add("bits_per_weight", "bits", numbers, format="group-affine", points=INTEGERS)
    return found


def _integer(name: str, n_rows: int, n_columns: int) -> Any:
    return make_format(name).scheme(n_rows, n_columns)


def _shared(rows_per_lut: int) -> str:
    if rows_per_lut == 0:
        return "one table per matrix"
    return "a table per row" if rows_per_lut == 1 else f"a table per {rows_per_lut} rows"


def measure_speed(model: str) -> list[Measurement]:
    """Seconds to encode all experts of a model on a CPU, in the default format."""
    loaded, _ = load_model(model, device="cpu", dtype="float32")
    blocks = [weight for layer in experts_layers(loaded) for weight in block_weights(layer.module)]
    start = time.perf_counter()
    for weight in blocks:
        AnyPrecision().encode_stack(weight, _importance(weight, 0))
    took = time.perf_counter() - start
    size = sum(weight.numel() for weight in blocks)
    return [
        Measurement(SPEED_CLAIM, "measured", "encode_seconds", float(f"{took:.4g}"), "s", n=1,
                    labels={"n_weights": size, "threads": torch.get_num_threads()})
    ]  # fmt: skip


def measure_speed_gpu(seed: int) -> list[Measurement]:
    """Bytes of bfloat16 weights encoded per second, at real block sizes."""
    sizes = PUBLISHED[TIMED_MODEL].dimensions
    shapes = expert_shapes(sizes.hidden_size, sizes.moe_intermediate_size)
    found: list[Measurement] = []
    for block, (n_rows, n_columns) in zip(Block, shapes, strict=True):
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = (sizes.routed_experts, n_rows, n_columns)
        weight = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        matters = _importance(weight, seed)
        seconds = []
        for _ in range(TIMED_REPEATS + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            AnyPrecision().encode_stack(weight, matters)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        rates = [2 * weight.numel() / took / 1e9 for took in seconds[1:]]  # the first warms up
        found.append(
            Measurement(
                SPEED_CLAIM, "measured", "encode_rate", float(f"{np.median(rates):.4g}"),
                "GB of bfloat16 per s", n=len(rates),
                series=[float(f"{rate:.4g}") for rate in rates],
                labels={"block": block.name.lower(), "shape": list(shape)},
            )
        )  # fmt: skip
        del weight, matters
    return found


def _importance(weight: Tensor, seed: int) -> Tensor:
    """Mean squares of input channels as uneven as calibrated ones, ``[E, 1, K]``."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn((weight.shape[0], 1, weight.shape[2]), generator=generator)
    return (0.5 * drawn).exp().to(weight.device)
