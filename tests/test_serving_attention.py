"""Decode passes that read pages: same tokens as gathered ones, and why some are gathered."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from small_kv import Bench
from torch import Tensor

from repro.errors import UnknownNameError
from repro.kernels.paged_attention import interpreted
from repro.models.tiny import ARCHITECTURES, tiny_model
from repro.residency import Arena
from repro.serving import attention_function
from repro.serving.attention import Installed, install
from repro.serving.engine import Engine
from repro.serving.kv_layout import KVError
from repro.serving.paged_cache import PagedCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not interpreted():
    pytest.skip("no GPU and no interpreter", allow_module_level=True)

A, B, C = list(range(3, 14)), [40, 41], list(range(20, 27))
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, sliding": ("mixtral", {"sliding_window": 8}),
    "gemma4, sizes differ": ("gemma4", {"global_head_dim": 16, "num_global_key_value_heads": 1}),
}
SHARED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}
#: Reasons of the layers with keys and values; None: paged.
EXPECTED = {"deepseek_v2": "latent attention"}


def small(arch: str, **overrides: Any) -> Any:
    return tiny_model(arch, **overrides).to(DEVICE)


def bench_of(model: Any, page_bytes: int = 512) -> Bench:
    """As the cache's own tests, on the device."""
    bench = Bench(model, page_bytes, n_pages=400_000 // page_bytes)
    if DEVICE != "cpu":
        bench.pool.arena = Arena(bench.pool.arena.n_pages, page_bytes, DEVICE)
        bench.pool._poison(bench.pool.free)
        bench.cache = PagedCache(bench.cache.layout, bench.pool.arena)
    return bench


def serve(bench: Bench, n_new: int = 5) -> tuple[list[list[int]], Tensor]:
    """Ragged prompts, of which one joins late; greedy tokens and the logits that chose them."""
    texts, tables = [list(A), list(B), list(C)], [bench.table() for _ in range(3)]
    found = []
    for step in range(n_new):
        going = [0, 1, 2] if step >= 2 else [0, 1]
        logits = bench.run([(tables[i], texts[i][tables[i].n_tokens :]) for i in going])
        found.append(logits)
        for i, row in zip(going, logits, strict=True):
            texts[i].append(int(row.argmax()))
    return texts, torch.cat(found)


def both(name: str, page_bytes: int) -> tuple[Any, Any, Installed]:
    arch, overrides = VARIANTS.get(name, (name, {}))
    right = serve(bench_of(small(arch, **overrides), page_bytes))
    model = small(arch, **overrides)
    bench = bench_of(model, page_bytes)
    installed = install(model, bench.cache, "paged")
    return right, serve(bench), installed


@pytest.mark.parametrize(
    ("name", "page_bytes"),
    [*((name, 512) for name in [*ARCHITECTURES, *VARIANTS]), ("qwen3_moe", 24), ("gpt_oss", 40)],
)
def test_equals_the_gathered_path(name: str, page_bytes: int) -> None:
    right, found, installed = both(name, page_bytes)
    assert found[0] == right[0]
    assert (found[1] - right[1]).abs().max() < 2e-4
    report, expected = installed.report(), EXPECTED.get(name)
    assert report["reason"] is None
    for layer, why in report["layers"].items():
        assert (why == "paged") if expected is None else (expected in why), (layer, why)
    # prefill, decode, mixed, two of decode; recurrent rows of other lengths go apart
    n_paged = report["passes"].get("paged", 0)
    assert n_paged == (0 if expected else 4 if name == "qwen3_next" else 3)


def test_only_layers_with_keys_and_values_are_counted() -> None:
    model = small("qwen3_next")
    bench = bench_of(model)
    installed = install(model, bench.cache, "paged")
    serve(bench)
    assert installed.report()["layers"] == {"3": "paged"}  # the other three are recurrent


def test_nothing_is_gathered_and_no_mask_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("qwen3_moe")
    bench = bench_of(model)
    installed = install(model, bench.cache, "paged")
    table, other = bench.table(), bench.table()
    bench.run([(table, A), (other, B)])
    bench.cache.peak_scratch_bytes = 0
    masks = []
    original = attention_function._mask
    name = model.config._attn_implementation

    def spy(*args: Any, **kwargs: Any) -> Any:
        masks.append(original("sdpa", *args, **kwargs))
        return masks[-1]

    monkeypatch.setitem(attention_function.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, spy)
    bench.run([(table, [5]), (other, [6])])
    assert bench.cache.peak_scratch_bytes == 0
    assert masks == [None]
    assert installed.report()["passes"] == {"more than one new token in a row": 1, "paged": 1}


def test_a_layer_is_gathered_until_it_was_seen() -> None:
    model = small("qwen3_moe")
    bench = bench_of(model)
    installed = install(model, bench.cache, "paged")
    table = bench.table()
    for token in (4, 5):
        bench.run([(table, [token])])
    assert installed.report()["passes"] == {"not seen in a gathered pass yet": 1, "paged": 1}


def test_some_layers_may_be_paged_and_others_not() -> None:
    """A layer that does not qualify gets its mask and its gathered keys."""
    right = serve(bench_of(small("gpt_oss")))
    model = small("gpt_oss")
    bench = bench_of(model)
    installed = install(model, bench.cache, "paged")
    bench.run([(bench.table(), A)])
    installed.why_gathered[1] = "for a test"
    found = serve(bench)
    assert found[0] == right[0]
    assert (found[1] - right[1]).abs().max() < 2e-4
    assert installed.report()["layers"] == {"0": "paged", "1": "for a test"}
    assert installed.passes["paged"] == 3


def test_an_engine_answers_the_same() -> None:
    """Experts and KV on one arena, continuous batching, requests of different lengths."""
    answers = []
    for mode in ("gathered", "paged"):
        engine = Engine(tiny_model("qwen3_moe"), None, "dense", device=DEVICE, worker="manual")
        with engine:
            parts = engine._parts
            installed = install(parts.model, parts.cache, mode)
            done = engine.generate([A, B, C], 6, ignore_eos=True)
            answers.append([completion.token_ids for completion in done])
            assert (installed.passes["paged"] > 3) is (mode == "paged")
            installed.uninstall()
    assert answers[0] == answers[1]


# why not ---------------------------------------------------------------------------------


def refused(model: Any, mode: Any) -> str:
    bench = bench_of(model)
    before = model.config._attn_implementation
    installed = install(model, bench.cache, mode)
    assert not installed.active
    assert model.config._attn_implementation == before
    assert bench.cache.reader is None
    assert installed.report()["reason"] == installed.reason
    installed.uninstall()
    return str(installed.reason)


def test_what_cannot_be_paged_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = small("qwen3_moe")
    if DEVICE == "cpu":
        assert "on cpu" in refused(model, "auto")
    assert "gathered" in refused(model, "gathered")
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "repro.serving"):
        assert "float64" in refused(small("qwen3_moe").double(), "paged")
    assert "float64" in caplog.text
    assert "share keys and values" in refused(small("gemma4", **SHARED), "paged")
    with pytest.raises(UnknownNameError, match="did you mean 'paged'"):
        refused(model, "page")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"position_bias": 1}, "position_bias, which the kernel does not know"),
        ({"sliding_window": 9}, "window 9 in attention, None in the cache"),
        ({"dropout": 0.1}, "weights are wanted"),
        ({"scaling": torch.ones(1)}, "scale is a tensor"),
        ({"positional arguments": (1,)}, "does not know"),
        ({"scaling": 1.0, "sliding_window": None}, None),
    ],
)
def test_arguments_the_kernel_does_not_know(given: dict[str, Any], reason: str | None) -> None:
    model: Any = small("qwen3_moe")
    installed = install(model, bench_of(model).cache, "paged")
    module, query = model.model.layers[0].self_attn, torch.ones(1, 4, 1, 8)
    why = installed._objection(0, module, query, given)
    assert why is None if reason is None else reason in str(why)


def test_chunked_attention_is_not_taken_for_sliding() -> None:
    model: Any = small("gpt_oss")
    installed = install(model, bench_of(model).cache, "paged")
    module = model.model.layers[0].self_attn
    model.config.layer_types = ["chunked_attention", "full_attention"]
    assert "neither full nor sliding" in str(
        installed._objection(0, module, torch.ones(1, 4, 1, 8), {})
    )


# guards ----------------------------------------------------------------------------------


def ready(arch: str = "qwen3_moe") -> tuple[Any, Bench, Installed, Any]:
    model = small(arch)
    bench = bench_of(model)
    installed = install(model, bench.cache, "paged")
    table = bench.table()
    bench.run([(table, A)])
    return model, bench, installed, table


def test_a_token_that_was_not_stored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, bench, _, table = ready()
    model.set_attn_implementation("sdpa")  # behind our back
    with pytest.raises(KVError, match=r"layers \[0, 1\] did not call"):
        bench.run([(table, [5])])
    assert table.n_tokens == len(A)
    monkeypatch.setattr(Installed, "check", lambda self: None)
    wrong = bench.run([(table, [5])])
    right = bench_of(small("qwen3_moe"))
    expected = right.run([(right.table(), [*A, 5])])
    assert (wrong - expected).abs().max() > 1e-2  # what the guard is for


def test_latent_attention_taken_for_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without looking at what arrives, the keys of MLA would be read as if they were plain."""
    _, bench, installed, table = ready("deepseek_v2")
    assert "latent" in str(installed.why_gathered[0])
    for layer in installed.why_gathered:
        installed.why_gathered[layer] = None
    with pytest.raises(Exception, match="give"):
        bench.run([(table, [5])])


def test_a_pass_that_raises_is_repeated() -> None:
    model, bench, installed, table = ready()
    hook = model.model.layers[1].register_forward_hook(lambda *a: (_ for _ in ()).throw(OSError()))
    with pytest.raises(OSError):
        bench.run([(table, [9])])
    hook.remove()
    found = bench.run([(table, [5])])
    right = bench_of(small("qwen3_moe"))
    expected = right.run([(right.table(), [*A, 5])])
    assert (found - expected).abs().max() < 1e-4
    assert installed._pages is None


def test_uninstalling_gives_back_what_was() -> None:
    model, bench, installed, table = ready()
    installed.uninstall()
    installed.uninstall()
    assert model.config._attn_implementation == "sdpa"
    assert bench.cache.reader is None
    assert not installed.active
    bench.run([(table, [5])])
    again = install(model, bench.cache, "paged")
    for token in (6, 7):
        bench.run([(table, [token])])
    assert again.passes["paged"] == 1


def test_other_uses_of_the_model_go_on() -> None:
    """``generate`` with a cache of its own, and a model beside it, as before."""
    model, _, installed, _ = ready("gpt_oss")
    ids = torch.tensor([A], device=DEVICE)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None}
    right = small("gpt_oss").generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), right)
    assert installed.passes["paged"] == 0


def test_nothing_keeps_the_model_alive() -> None:
    watched: Sequence[Any] = []

    def use() -> None:
        nonlocal watched
        model, bench, installed, table = ready()
        bench.run([(table, [5])])
        watched = [ref(model), ref(bench.cache), ref(installed)]

    use()
    gc.collect()
    assert [one() for one in watched] == [None] * 3
