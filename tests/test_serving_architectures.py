"""Paged, chunked, batched, ragged: on all nine architectures the tokens of ``generate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from small_kv import Bench, exact
from torch import Tensor

from repro.models.tiny import ARCHITECTURES

N_NEW = 7
PROMPTS = [list(range(3, 3 + 13)), [40, 41], list(range(20, 20 + 29)), [7, 9, 11, 13, 15]]

#: Variants of the nine: what the tiny configurations leave out.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, sliding": ("mixtral", {"sliding_window": 8}),
    "gemma4, sizes differ": ("gemma4", {"global_head_dim": 16, "num_global_key_value_heads": 1}),
    "gemma4, shared": (
        "gemma4",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
        },
    ),
}

#: Products that the library computes in float32 whatever the model's type, so that they round
#: by the shape of the batch: the recurrence, and the router.
FLOAT32_INSIDE = {"qwen3_next": 1e-4, "deepseek_v2": 1e-5}

_SOFTMAX = torch.nn.functional.softmax
_EXPECTED: dict[str, list[tuple[list[int], Tensor]]] = {}


@pytest.fixture(autouse=True)
def _float64_throughout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Softmax is computed in float32 by most models; its sums depend on the padding."""

    def softmax(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype is torch.float64:
            kwargs.pop("dtype", None)
        return _SOFTMAX(x, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    return


def expected(name: str, model: Any) -> list[tuple[list[int], Tensor]]:
    """Of each prompt alone, by ``generate``: new tokens, and the logits that choose them."""
    if name not in _EXPECTED:
        answers = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            out = model.generate(ids, do_sample=False, max_new_tokens=N_NEW, eos_token_id=None)
            with torch.inference_mode():  # those of generate are rounded to float32
                every = torch.arange(out.shape[1] - 1)
                logits = model(out[:, :-1], logits_to_keep=every).logits[0, len(prompt) - 1 :]
            answers.append((out[0, len(prompt) :].tolist(), logits))
        _EXPECTED[name] = answers
    return _EXPECTED[name]


def serve(bench: Bench, chunk: int, joins: Sequence[int]) -> list[tuple[list[int], Tensor]]:
    """Greedy decoding; prompt i joins at step ``joins[i]``, ``chunk`` tokens of it a step."""
    tables = [bench.table() for _ in PROMPTS]
    texts = [list(prompt) for prompt in PROMPTS]
    logits: list[list[Tensor]] = [[] for _ in PROMPTS]
    step = 0
    while any(len(found) < N_NEW for found in logits):
        going = [i for i in range(len(PROMPTS)) if step >= joins[i] and len(logits[i]) < N_NEW]
        step += 1
        if not going:
            continue
        parts = [texts[i][tables[i].n_tokens :][:chunk] for i in going]
        out = bench.run([(tables[i], part) for i, part in zip(going, parts, strict=True)])
        for place, i in enumerate(going):
            if tables[i].n_tokens == len(texts[i]):
                logits[i].append(out[place])
                texts[i].append(int(out[place].argmax()))
                if len(logits[i]) == N_NEW:
                    tables[i].release()
    return [
        (text[len(prompt) :], torch.stack(found))
        for text, prompt, found in zip(texts, PROMPTS, logits, strict=True)
    ]


@pytest.mark.parametrize(
    ("chunk", "joins", "page_bytes"),
    [
        (1000, (0, 0, 0, 0), 512),  # whole prompts, all at once
        (5, (0, 3, 1, 6), 1024),  # chunks that divide nothing, others decode meanwhile
        (3, (4, 0, 2, 0), 24),  # pages that no token fits on, and that divide none
    ],
    ids=["whole", "joining", "small pages"],
)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *VARIANTS])
def test_equals_generate(name: str, chunk: int, joins: tuple[int, ...], page_bytes: int) -> None:
    arch, overrides = VARIANTS.get(name, (name, {}))
    model = exact(arch, **overrides)
    bench = Bench(model, page_bytes, n_pages=3_000_000 // page_bytes)
    tolerance = FLOAT32_INSIDE.get(arch, 1e-9)
    found = serve(bench, chunk, joins)
    for (tokens, logits), (right_tokens, right_logits) in zip(
        found, expected(name, model), strict=True
    ):
        assert tokens == right_tokens
        assert (logits - right_logits).abs().max() < tolerance
    assert len(bench.pool.free) == bench.pool.arena.n_pages  # nothing is left behind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fast_paths_read_no_poison(arch: str, dtype: torch.dtype) -> None:
    """Grouped products and fused attention, ragged: padding is masked, memory is NaN."""
    model = exact(arch).to(dtype)
    model.set_experts_implementation("grouped_mm")
    if arch != "gpt_oss":  # its attention has sinks
        model.set_attn_implementation("sdpa")
    for tokens, logits in serve(Bench(model), 5, (0, 3, 1, 6)):
        assert len(tokens) == N_NEW
        assert torch.isfinite(logits).all()
