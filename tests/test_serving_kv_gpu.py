"""The paged cache on a CUDA device: equal to the library's cache, and no poison is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_kv import Bench
from transformers import DynamicCache

from repro.models.tiny import ARCHITECTURES, tiny_model
from repro.serving.kv_layout import cache_argument

pytestmark = pytest.mark.gpu

TEXTS = [list(range(3, 14)), list(range(20, 31))]
FUSED = [arch for arch in ARCHITECTURES if arch != "gpt_oss"]  # its attention has sinks


def on_gpu(arch: str, dtype: torch.dtype) -> Any:
    model: Any = tiny_model(arch).to("cuda", dtype)
    if arch in FUSED:
        model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equals_the_library_cache(arch: str) -> None:
    model = on_gpu(arch, torch.float32)
    bench = Bench(model)
    tables = [bench.table() for _ in TEXTS]
    ours = [bench.run(list(zip(tables, TEXTS, strict=True)))]
    ours += [bench.run([(table, [n]) for table in tables]) for n in (5, 6, 7)]
    cache = {cache_argument(model): DynamicCache(config=model.config)}
    with torch.inference_mode():
        for mine, ids in zip(ours, (TEXTS, [[5]] * 2, [[6]] * 2, [[7]] * 2), strict=True):
            ids_on_gpu = torch.tensor(ids, device="cuda")
            theirs = model(ids_on_gpu, use_cache=True, **cache).logits[:, -1]
            assert torch.allclose(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ragged_rows_read_no_poison(arch: str, dtype: torch.dtype) -> None:
    bench = Bench(on_gpu(arch, dtype))
    tables = [bench.table() for _ in range(3)]
    for chunks in (([2, 3, 4, 5, 6, 7, 8, 9], [5], [6, 7]), ([9], [3] * 5, [4, 5]), ([2],) * 3):
        logits = bench.run(list(zip(tables, chunks, strict=True)))
        assert torch.isfinite(logits).all()
