"""The paged cache in a model: layouts, growing and cutting, masks, and every guard removed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from small_kv import Bench, exact
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, LinearAttentionAndFullAttentionLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from repro.contract import Step
from repro.formats import Dense
from repro.integration.experts import experts_layers, observe
from repro.integration.paged_experts import StepContext, release_originals
from repro.models.tiny import tiny_model
from repro.residency import BlockPayload, ExpertResidency, HostStore
from repro.serving import forward, kv_layout, paged_cache
from repro.serving.kv_blocks import BlockTable
from repro.serving.kv_layout import KVError, probe
from repro.serving.paged_cache import PagedCache

A, B, C = list(range(3, 14)), [40, 41], list(range(20, 27))


# layouts ---------------------------------------------------------------------------------


def test_the_layout_is_what_the_layers_receive() -> None:
    plain = probe(tiny_model("qwen3_moe"))
    assert [layer.kind for layer in plain.layers] == ["full", "full"]
    assert plain.layers[0].key_shape == plain.layers[0].value_shape == (2, 8)
    assert plain.token_bytes == 2 * 2 * (2 * 8) * 4
    assert plain.can_chunk
    assert not plain.recurrent
    assert not plain.shares_kv

    sliding = probe(tiny_model("gpt_oss"))
    assert [layer.window for layer in sliding.layers] == [8, None]

    latent = probe(tiny_model("deepseek_v2"))  # not the 4 heads of the configuration
    assert latent.token_bytes < 3 * 4 * (16 + 8) * 4

    mixed = probe(tiny_model("gemma4", global_head_dim=16, num_global_key_value_heads=1))
    assert [layer.key_shape for layer in mixed.layers] == [(2, 8), (2, 16)]

    half = probe(tiny_model("qwen3_moe").to(torch.bfloat16))
    assert half.token_bytes * 2 == plain.token_bytes


def test_recurrent_layers_have_states_and_no_tokens() -> None:
    layout = probe(tiny_model("qwen3_next"))
    assert [layer.kind for layer in layout.layers] == ["recurrent"] * 3 + ["full"]
    assert layout.recurrent
    assert layout.can_chunk
    assert {(state.kind, state.shape) for state in layout.states} == {
        ("conv", (64, 4)),
        ("recurrent", (4, 8, 8)),
    }
    assert layout.token_bytes == layout.layers[3].token_bytes


def test_shared_layers_keep_nothing() -> None:
    model = tiny_model(
        "gemma4",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
    )
    layout = probe(model)
    assert layout.shares_kv
    assert layout.token_bytes == 2 * layout.layers[0].token_bytes


def test_a_model_that_cannot_go_on_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are dropped before a second chunk, as older versions did."""
    model: Any = tiny_model("qwen3_next")
    layer = type(model.model.layers[0].linear_attn)
    original = layer.forward

    def forgets(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if isinstance(value, DynamicCache) and hidden_states.shape[1] > 1:
                kwargs[name] = value if not value.has_previous_state(self.layer_idx) else None
        return original(self, hidden_states, **kwargs)

    monkeypatch.setattr(layer, "forward", forgets)
    assert not probe(model).can_chunk


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (DynamicIndexedLayer, "more than keys and values"),
        (LinearAttentionAndFullAttentionLayer, "both attention and a recurrent state"),
    ],
)
def test_layers_that_keep_more_are_refused_by_name(layer: Any, reason: str) -> None:
    made = layer()
    if hasattr(made, "keys"):
        made.keys = made.values = torch.ones(1, 2, 3, 4)
    with pytest.raises(KVError, match=f"{layer.__name__}.*{reason}"):
        kv_layout._layer(0, made)


def test_the_probe_needs_no_experts() -> None:
    """Their weights may be on the meta device already, and nothing of the probe stays."""
    model = tiny_model("qwen3_moe")
    before = probe(model)
    implementation = model.config._experts_implementation
    for layer in experts_layers(model):
        release_originals(layer)
    assert probe(model) == before
    assert model.config._experts_implementation == implementation
    with pytest.raises(KVError, match="at least 1"):
        probe(model, 0)


def test_a_model_without_cache_is_refused() -> None:
    with pytest.raises(KVError, match="Linear takes no cache"):
        kv_layout.cache_argument(torch.nn.Linear(2, 2))


# passes ----------------------------------------------------------------------------------


def alone(model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits after the last of ``tokens``, by the model itself."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_conversations_grow(arch: str) -> None:
    model = exact(arch)
    bench = Bench(model)
    table, text = bench.table(), []
    for turn in (A, B, [5], C):
        logits = bench.run([(table, turn)])
        text += turn
        assert torch.allclose(logits[0], alone(model, text), atol=1e-4, rtol=0)
        assert table.n_tokens == len(text)
    pages = table.pages.copy()
    assert table.extend(len(text) + 100)
    assert np.array_equal(table.pages[: len(pages)], pages)  # what is there is not moved


@pytest.mark.parametrize("keep", [0, 1, 5, 11])
def test_cut_back_and_go_on(keep: int) -> None:
    model = exact("gpt_oss")
    bench = Bench(model)
    table = bench.table()
    bench.run([(table, A)])
    table.crop(keep)
    table.trim()
    logits = bench.run([(table, C)])
    assert torch.allclose(logits[0], alone(model, A[:keep] + C), atol=1e-9, rtol=0)


def test_recurrent_states_start_anew() -> None:
    """After a cut to nothing the old state is gone, whatever the pages still hold."""
    model = exact("qwen3_next")
    bench = Bench(model)
    table = bench.table()
    bench.run([(table, A)])
    with pytest.raises(KVError, match="crop to 0"):
        table.crop(5)
    table.crop(0)
    logits = bench.run([(table, C)])
    assert torch.allclose(logits[0], alone(model, C), atol=1e-4, rtol=0)


def test_recurrent_rows_of_any_length_in_one_call() -> None:
    """Split into passes that fit together; logits come back in the order of the rows."""
    model = exact("qwen3_next")
    bench = Bench(model)
    old, one, two, three = (bench.table() for _ in range(4))
    bench.run([(old, A)])
    logits = bench.run([(one, B), (old, [9]), (two, C), (three, B[::-1])])
    for row, tokens in enumerate((B, [*A, 9], C, B[::-1])):
        assert torch.allclose(logits[row], alone(model, tokens), atol=1e-4, rtol=0)
    every = bench.run([(one, A), (old, [9]), (two, [5, 6])], all_logits=True)
    assert [len(part) for part in every] == [11, 1, 2]
    assert torch.allclose(every[2][-1], alone(model, [*C, 5, 6]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("arch", ["mixtral", "gemma4"])
def test_all_logits_of_ragged_rows(arch: str) -> None:
    model = exact(arch)
    bench = Bench(model)
    tables = [bench.table() for _ in range(3)]
    parts = bench.run(list(zip(tables, (A, B, C), strict=True)), all_logits=True)
    for part, tokens in zip(parts, (A, B, C), strict=True):
        assert len(part) == len(tokens)
        with torch.inference_mode():
            right = model(torch.tensor([tokens]), use_cache=False).logits[0]
        assert torch.allclose(part, right, atol=1e-5, rtol=0)


def test_bits_do_not_depend_on_pages() -> None:
    """The same rows on other pages, in other order of memory: the same logits bit for bit."""
    model = tiny_model("qwen3_moe")
    found = []
    for page_bytes, block_tokens in ((24, 3), (512, 4), (65536, 16)):
        bench = Bench(model, page_bytes, block_tokens, n_pages=4_000_000 // page_bytes)
        tables = [bench.table() for _ in range(3)]
        bench.run(list(zip(tables, (A, B, C), strict=True)))
        found.append(bench.run([(table, [7]) for table in tables]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_equals_the_library_cache_bit_for_bit() -> None:
    """Rows of one length: the model cannot tell the two caches apart."""
    model = tiny_model("qwen3_moe")
    bench = Bench(model)
    tables = [bench.table() for _ in range(2)]
    texts = [A, A[::-1]]
    ours = [bench.run(list(zip(tables, texts, strict=True)))]
    ours += [bench.run([(table, [n]) for table in tables]) for n in (5, 6, 7)]
    cache = DynamicCache(config=model.config)
    name = kv_layout.cache_argument(model)
    with torch.inference_mode():
        for mine, ids in zip(ours, (texts, [[5]] * 2, [[6]] * 2, [[7]] * 2), strict=True):
            theirs = model(torch.tensor(ids), use_cache=True, **{name: cache}).logits[:, -1]
            assert torch.equal(mine, theirs)


def test_scratch_is_counted() -> None:
    model = tiny_model("qwen3_moe")
    bench = Bench(model)
    tables = [bench.table() for _ in range(2)]
    bench.run(list(zip(tables, (A, B), strict=True)))
    layer = bench.cache.layout.layers[0].token_bytes
    assert bench.cache.peak_scratch_bytes == 2 * len(A) * layer
    assert bench.cache.peak_scratch_bytes <= bench.cache.layout.scratch_bytes(2, len(A))


# statistics ------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_padding_is_masked_for_the_experts(shared: bool) -> None:
    """Tokens that the mask calls real, in every layer = tokens given; also in shared layers."""
    overrides: dict[str, Any] = {"hidden_size_per_layer_input": 8}
    if shared:
        overrides |= {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
        }
    model = exact("gemma4", **overrides)
    bench = Bench(model)
    context = StepContext()
    counted: dict[int, int] = {}

    def count(module: Any, layer: int, index: Tensor, weights: Tensor) -> None:
        mask = context.token_mask
        n_real = len(index) if mask is None else int(mask.sum())
        assert mask is None or mask.shape == (len(index),)
        counted[layer] = counted.get(layer, 0) + n_real

    one, two = bench.table(), bench.table()
    with observe(model, count):
        bench.run([(one, A), (two, B)], context=context)
        bench.run([(one, [5]), (two, [6])], context=context)
    assert set(counted.values()) == {len(A) + len(B) + 2}
    assert len(counted) == model.config.num_hidden_layers


def test_a_shared_layer_model_without_inputs_per_layer() -> None:
    """The library's own default (``logits_to_keep=0``) fails there; columns are named instead."""
    model = exact(
        "gemma4",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
    )
    bench = Bench(model)
    (part,) = bench.run([(bench.table(), A)], all_logits=True)
    with torch.inference_mode():
        every = torch.arange(len(A))
        known = model(torch.tensor([A]), use_cache=False, logits_to_keep=every).logits[0]
    assert torch.allclose(part, known, atol=1e-5, rtol=0)


# bad input, and passes that raise --------------------------------------------------------


def test_rows_that_cannot_be_computed_are_named() -> None:
    bench = Bench(tiny_model("qwen3_moe"))
    table = bench.table()
    with pytest.raises(KVError, match="no rows"):
        forward.run(bench.model, bench.cache, [])
    with pytest.raises(KVError, match="no new token"):
        bench.run([(table, [])])
    assert table.extend(4)
    row = forward.Row(table, A)
    with pytest.raises(KVError, match="room for 4 tokens and would have 11"):
        forward.run(bench.model, bench.cache, [row])
    with pytest.raises(KVError, match="twice"):
        bench.run([(table, [5]), (table, [6])])
    with pytest.raises(KVError, match="outside a pass"):
        bench.cache.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)


def test_another_type_than_probed_is_refused() -> None:
    bench = Bench(tiny_model("qwen3_moe"))
    bench.model.to(torch.bfloat16)
    with pytest.raises(KVError, match="probe it again"):
        bench.run([(bench.table(), A)])


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen3_next"])
def test_a_pass_that_raises_changes_nothing(arch: str) -> None:
    model = exact(arch)
    bench = Bench(model)
    table = bench.table()
    bench.run([(table, A)])

    def fails(module: Any, layer: int, index: Tensor, weights: Tensor) -> None:
        if layer == model.config.num_hidden_layers - 1:
            raise RuntimeError("in the last layer")

    with observe(model, fails), pytest.raises(RuntimeError, match="last layer"):
        bench.run([(table, C)])
    assert table.n_tokens == len(A)
    logits = bench.run([(table, B)])  # not C: what it left behind must not be seen
    assert torch.allclose(logits[0], alone(model, A + B), atol=1e-4, rtol=0)


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_of_a_pass_is_left(raises: bool) -> None:
    """Neither the mask, which the next pass would be counted with, nor views of the arena."""
    bench = Bench(tiny_model("qwen3_moe"))
    context = StepContext()
    seen = []

    def watch(module: Any, layer: int, index: Tensor, weights: Tensor) -> None:
        assert context.token_mask is not None
        seen.append(context.token_mask.tolist())
        if raises:
            raise RuntimeError("as asked")

    chunks = [(bench.table(), [5, 6, 7]), (bench.table(), [8])]
    with observe(bench.model, watch):
        if raises:
            with pytest.raises(RuntimeError, match="as asked"):
                bench.run(chunks, context=context)
        else:
            bench.run(chunks, context=context)
    assert seen[0] == [True, True, True, False, False, True]
    assert context.token_mask is None
    with pytest.raises(KVError, match="outside a pass"):
        _ = bench.cache.current


# every guard removed once ----------------------------------------------------------------


def ragged(bench: Bench) -> Tensor:
    """A short row beside a long one, then a step of both."""
    tables = [bench.table() for _ in range(3)]
    bench.run(list(zip(tables, (A, B, C), strict=True)))
    return bench.run([(table, tokens) for table, tokens in zip(tables, (B, C, [9]), strict=True)])


def right(model: Any) -> Tensor:
    return torch.stack([alone(model, tokens) for tokens in (A + B, B + C, [*C, 9])])


@pytest.fixture(params=["qwen3_moe", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> Any:
    return exact(request.param)


def agrees(model: Any) -> bool:
    return bool((ragged(Bench(model)) - right(model)).abs().max() < 1e-5)


def test_with_all_guards(model: Any) -> None:
    assert agrees(model)


def test_padding_that_reads_free_memory(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 times NaN: masked or not, a column of padding must not point at what nobody wrote."""

    def unclamped(padding: Tensor, n_columns: int) -> Tensor:
        tokens = torch.arange(n_columns) - padding[:, None]
        return tokens.where(tokens >= 0, 3)  # the last slot of the first block, not yet written

    monkeypatch.setattr(paged_cache, "_tokens_to_read", unclamped)
    bench = Bench(model)
    short, long = bench.table(), bench.table()
    assert not torch.isfinite(bench.run([(short, B), (long, A)])).all()


def test_padding_that_is_stored(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache, "_real_tokens", lambda n_new, n_query: None)
    assert not agrees(model)


def test_a_mask_that_forgets_the_padding(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = forward._arguments

    def without(*args: Any) -> dict[str, Any]:
        return {k: v for k, v in original(*args).items() if k != "attention_mask"}

    monkeypatch.setattr(forward, "_arguments", without)
    assert not agrees(model)


def test_positions_that_count_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's first token is at position 0, however far right it stands.

    Rotations are relative, so the models here would not notice; longer contexts would.
    """
    seen: list[dict[str, Any]] = []
    original = forward._arguments

    def spy(*args: Any) -> dict[str, Any]:
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(forward, "_arguments", spy)
    bench = Bench(tiny_model("qwen3_moe"))
    one, two = bench.table(), bench.table()
    bench.run([(one, A), (two, B)])
    bench.run([(one, [5]), (two, C)])
    assert seen[0]["position_ids"][0].tolist() == list(range(len(A)))
    assert seen[0]["position_ids"][1, -2:].tolist() == [0, 1]
    assert seen[1]["position_ids"][0, -1] == len(A)
    assert seen[1]["position_ids"][1].tolist() == list(range(2, 2 + len(C)))


def test_recurrent_rows_padded_into_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact("qwen3_next")
    assert (ragged(Bench(model)) - right(model)).abs().max() < 1e-4
    monkeypatch.setattr(forward, "_passes", lambda cache, rows: [list(range(len(rows)))])
    with pytest.raises(KVError, match="equally many new tokens"):
        ragged(Bench(model))
    monkeypatch.setattr(paged_cache, "_check_rows", lambda *args: None)
    assert not (ragged(Bench(model)) - right(model)).abs().max() < 1e-4


def test_states_that_are_not_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact("qwen3_next")
    monkeypatch.setattr("repro.serving.recurrent.RecurrentStates.write_back", lambda self: None)
    found = ragged(Bench(model))
    assert not (found - right(model)).abs().max() < 1e-4


# the real allocator ----------------------------------------------------------------------


class StepClock:
    unit = "steps"

    def now(self) -> float:
        return 0.0


def test_kv_and_weights_on_one_arena() -> None:
    """KV beside expert weights: neither touches the other, and all pages come back."""
    model = exact("mixtral")
    format_ = Dense("float32")
    payloads = [
        [BlockPayload.of_stack(format_.encode_stack(weight.detach().float())) for weight in pair]
        for pair in (
            (layer.module.gate_up_proj, layer.module.down_proj) for layer in experts_layers(model)
        )
    ]
    store = HostStore(payloads, 512)
    for row, pair in enumerate(payloads):
        for block, payload in enumerate(pair):
            store.put(row, block, payload)
    residency = ExpertResidency(
        store, capacity_bytes=512 * 2000, clock=StepClock(), worker="manual",
        kv_bytes=512 * 400,
    )  # fmt: skip
    before = residency.used_bytes()
    rows = [residency.resolve(0, expert) for expert in range(8)]
    bytes_before = [residency.read_pages(row[0].pages) for row in rows]
    layout = probe(model, 4)
    cache = PagedCache(layout, residency.arena)
    tables = [BlockTable(cache.plan, residency.reserve, residency.release) for _ in range(3)]
    step: Step = residency.begin_step()
    for table, tokens in zip(tables, (A, B, C), strict=True):
        assert table.extend(len(tokens) + 7)
    forward.run(model, cache, [forward.Row(t, x) for t, x in zip(tables, (A, B, C), strict=True)])
    logits = forward.run(
        model, cache, [forward.Row(t, x) for t, x in zip(tables, (B, C, [9]), strict=True)]
    )
    residency.end_step(step)
    assert (logits - right(model)).abs().max() < 1e-5
    held = sum(table.n_bytes for table in tables)
    assert residency.used_bytes() == before + held
    assert [residency.read_pages(row[0].pages) for row in rows] == bytes_before
    tables[0].crop(1)
    tables[0].trim()
    for table in tables:
        table.release()
    assert residency.used_bytes() == before
    residency.close()


def test_the_probe_leaves_the_registry_usable() -> None:
    probe(tiny_model("qwen3_moe"))
    assert "grouped_mm" in ALL_EXPERTS_FUNCTIONS
