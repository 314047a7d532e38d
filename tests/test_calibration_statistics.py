"""Statistics of what experts saw: against a plain loop, with padding, with experts never hit."""

from __future__ import annotations

import importlib
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.calibration import probes
from repro.calibration.collect import Calibration, collect, layer_file
from repro.calibration.statistics import importance, shrink
from repro.contract import Block
from repro.errors import CheckpointError
from repro.integration.experts import expert_matrices, experts_layers, observe, use_experts
from repro.integration.steps import CaptureError
from repro.models.tiny import ARCHITECTURES, tiny_model


def _prompts(n: int = 3, length: int = 9, seed: int = 5) -> torch.Tensor:
    return torch.randint(2, 64, (n, length), generator=torch.Generator().manual_seed(seed))


def _mask(ids: torch.Tensor, padding: list[int]) -> torch.Tensor:
    mask = torch.ones_like(ids, dtype=torch.bool)
    for row, n in enumerate(padding):
        mask[row, :n] = False
    return mask


def _gate(module, pre):
    """The activation of one token, written again for the layouts of the nine."""
    if module.is_concatenated:
        half = pre.shape[-1] // 2
        return module.act_fn(pre[:half]) * pre[half:]
    gate, up = pre[0::2].clamp(max=7.0), pre[1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _plain(model, ids, mask):
    """Token by token in float64: what every expert of every layer was given."""
    seen = {}
    handles = []
    for layer in experts_layers(model):

        def keep(module, args, kwargs, index=layer.layer_index):
            hidden, chosen, weights = [*args, *kwargs.values()]
            seen[index] = (hidden.detach(), chosen, weights)

        handles.append(layer.module.register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    for handle in handles:
        handle.remove()
    found = {}
    for layer in experts_layers(model):
        hidden, chosen, weights = seen[layer.layer_index]
        rows = {e: [] for e in range(layer.n_experts)}
        for token in range(len(hidden)):
            if not mask.reshape(-1)[token]:
                continue
            for rank in range(chosen.shape[1]):
                e = int(chosen[token, rank])
                m = expert_matrices(layer.module, e)
                x = hidden[token].double()
                pre = m.gate_up.double() @ x
                pre = pre if m.gate_up_bias is None else pre + m.gate_up_bias.double()
                rows[e].append((float(weights[token, rank]), x, pre, _gate(layer.module, pre)))
        found[layer.layer_index] = rows
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_moments_equal_a_plain_loop(arch):
    model, ids = tiny_model(arch), _prompts()
    mask = _mask(ids, [0, 4, 2])
    calibration = collect(model, ids, mask, hessians=True, micro_batch=2)
    plain = _plain(model, ids, mask)
    for stats in calibration.layers:
        module = next(x.module for x in experts_layers(model) if x.layer_index == stats.layer_index)
        assert stats.n_tokens == 21 and int(stats.counts.sum()) == 42
        for e, rows in plain[stats.layer_index].items():
            assert int(stats.counts[e]) == len(rows)
            if not rows:
                assert not stats.gate_up_moment[e].any() and not stats.down_hessian[e].any()
                continue
            r = torch.tensor([row[0] for row in rows], dtype=torch.float64)
            x, h = (torch.stack([row[i] for row in rows]) for i in (1, 3))
            n = len(rows)
            down = expert_matrices(module, e).down.double()
            gains = []
            for weight, _, pre, _ in rows:
                leaf = pre.detach().clone().requires_grad_()
                jacobian = torch.autograd.functional.jacobian(partial(_gate, module), leaf)
                # every row of gate_up reaches one channel of the inner state
                gains.append(weight**2 * (down.norm(dim=0) @ jacobian) ** 2)
            expected = {
                "mass": r.sum(),
                "square_mass": (r**2).sum(),
                "gate_up_moment": (x**2).mean(0),
                "down_moment": (h**2).mean(0),
                "gate_up_weighted": (r[:, None] ** 2 * x**2).mean(0),
                "down_weighted": (r[:, None] ** 2 * h**2).mean(0),
                "gate_up_hessian": x.T @ x / n,
                "down_hessian": h.T @ h / n,
                "gate_up_rows": torch.stack(gains).mean(0),
            }
            for name, value in expected.items():
                torch.testing.assert_close(
                    getattr(stats, name)[e].double(), value, rtol=2e-4, atol=1e-6, msg=name
                )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_watching_changes_no_bit(arch):
    class Nothing:
        gradients = False
        calls = 0

        def wants(self, layer_index):
            return True

        def begin(self, layer_index, top_k_index, top_k_weights):
            self.calls += 1

        def expert(self, call):
            assert call.inputs.shape[0] == call.weight.shape[0] > 0

        def end(self, layer_index):
            pass

    model, probe = tiny_model(arch), Nothing()
    with torch.no_grad():
        with use_experts(model, "eager"):
            plain = model(_prompts()).logits
        with probes.probing(model, probe):
            watched = model(_prompts()).logits
    assert probe.calls == len(experts_layers(model))
    assert torch.equal(plain, watched)


@settings(max_examples=25)
@given(
    padding=st.lists(st.integers(0, 8), min_size=3, max_size=3),
    micro_batch=st.integers(1, 3),
    seed=st.integers(0, 50),
)
def test_counts_do_not_depend_on_micro_batches_or_padding(padding, micro_batch, seed):
    model = tiny_model("qwen3_moe")
    ids = _prompts(seed=seed)
    mask = _mask(ids, padding)
    whole = collect(model, ids, mask, micro_batch=3)
    parts = collect(model, ids, mask, micro_batch=micro_batch)
    alone = [collect(model, ids[i : i + 1, n:]) for i, n in enumerate(padding)]
    for row, stats in enumerate(whole.layers):
        other = parts.layers[row]
        assert torch.equal(stats.counts, other.counts)
        single = [c.layers[row] for c in alone]
        assert torch.equal(stats.counts, torch.stack([s.counts for s in single]).sum(0))
        total = sum(s.counts[:, None] * s.down_moment for s in single)
        mean = total / stats.counts.clamp(min=1)[:, None]
        for found in (stats.down_moment, other.down_moment):
            torch.testing.assert_close(found, mean.float(), rtol=1e-3, atol=1e-6)


def test_padding_that_is_not_a_number_does_not_spread():
    model, ids = tiny_model("qwen3_moe"), _prompts(1, 6)
    mask = _mask(ids, [2])
    before = collect(model, ids, mask)

    def poison(module, args):
        args[0].view(-1, args[0].shape[-1])[:2] = float("nan")

    layer = experts_layers(model)[-1].module
    handle = layer.register_forward_pre_hook(poison)
    after = collect(model, ids, mask)
    handle.remove()
    for one, other in zip(before.layers, after.layers, strict=True):
        assert torch.equal(one.gate_up_moment, other.gate_up_moment)
        assert torch.equal(one.down_weighted, other.down_weighted)


def test_activations_that_are_not_numbers_are_refused_by_name():
    model = tiny_model("qwen3_moe")
    layer = experts_layers(model)[1].module

    def poison(module, args):
        args[0][0] = float("nan")

    layer.register_forward_pre_hook(poison)
    with pytest.raises(CheckpointError, match=r"layer 1, expert \d"):
        collect(model, _prompts())


def _starve(model, expert: int) -> None:
    """A router that never chooses one expert."""
    layer = experts_layers(model)[0]
    block = model.get_submodule(layer.name.rpartition(".")[0])

    def bias(module, args, output):
        logits = output[0] if isinstance(output, tuple) else output
        logits = logits.clone()
        logits[..., expert] = -1e4
        weights, index = torch.topk(logits.softmax(dim=-1), 2, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), index

    block.gate.register_forward_hook(bias)


def test_an_expert_never_routed_gets_the_mean_of_its_layer():
    model = tiny_model("qwen3_moe")
    _starve(model, 3)
    stats = collect(model, _prompts(8, 40), min_tokens=4).layers[0]
    assert int(stats.counts[3]) == 0 and bool(stats.few_tokens[3])
    assert int(stats.few_tokens.sum()) == 1  # only that one falls back
    share = stats.counts.double() / stats.counts.sum()
    for block, name in ((Block.GATE_UP, "gate_up_weighted"), (Block.DOWN, "down_weighted")):
        raw = getattr(stats, name)
        layer = (share[:, None] * raw.double()).sum(0).float()
        torch.testing.assert_close(importance(stats, block)[3, 0], layer)
        assert torch.equal(importance(stats, block)[2, 0], raw[2])
    assert float(stats.usage()[3]) == 0.5 / 320


@settings(max_examples=50)
@given(
    counts=st.lists(st.integers(0, 200), min_size=1, max_size=6),
    prior=st.integers(1, 100),
    limit=st.integers(0, 150),
)
def test_shrinking_is_the_stated_mixture(counts, prior, limit):
    n = torch.tensor(counts)
    rng = np.random.default_rng(sum(counts))
    means = torch.from_numpy(rng.random((len(counts), 4))) * (n > 0)[:, None]
    found = shrink(means, n, limit, prior)
    if not n.any():
        assert torch.equal(found, torch.ones_like(means))
        return
    layer = sum(c * m for c, m in zip(counts, means, strict=True)) / sum(counts)
    for c, m, f in zip(counts, means, found, strict=True):
        expected = m if c >= limit else (c * m + prior * layer) / (c + prior)
        torch.testing.assert_close(f, expected)


def test_one_token_leaves_everything_finite():
    model = tiny_model("qwen3_moe")
    calibration = collect(model, _prompts(1, 1), fisher=True, hessians=True)
    for stats in calibration.layers:
        assert int(stats.counts.sum()) == 2 and bool(stats.few_tokens.all())
        for block in Block:
            values = importance(stats, block)
            assert torch.isfinite(values).all() and (values > 0).all()
        assert not stats.gate_up_fisher.any()  # one token scores nothing


def test_routed_by_hand_on_four_tokens():
    model, ids = tiny_model("qwen3_moe"), _prompts(1, 4)
    stats = collect(model, ids).layers[0]
    seen = []
    with observe(model, lambda m, i, index, w: seen.append((i, index, w))), torch.no_grad():
        logits = []
        layer = experts_layers(model)[0]
        gate = model.get_submodule(layer.name.rpartition(".")[0]).gate
        handle = gate.register_forward_pre_hook(
            lambda m, args: logits.append(F.linear(args[0], m.weight))
        )
        model(ids)
        handle.remove()
    top, index = torch.topk(logits[0].reshape(4, -1).softmax(dim=-1), 2)
    mass = torch.zeros(8).index_add_(
        0, index.reshape(-1), (top / top.sum(1, keepdim=True)).reshape(-1)
    )
    torch.testing.assert_close(stats.mass.float(), mass, rtol=1e-5, atol=1e-6)


def test_resuming_equals_one_run(tmp_path):
    model, ids = tiny_model("qwen3_moe"), _prompts()
    options = {"hessians": True, "fisher": True, "folder": tmp_path}
    one = collect(model, ids, **options)
    kept = layer_file(tmp_path, 0).stat().st_mtime_ns
    layer_file(tmp_path, 1).unlink()
    two = collect(model, ids, **options)
    assert layer_file(tmp_path, 0).stat().st_mtime_ns == kept
    three = Calibration.load(tmp_path, model=one.meta["model"])
    for other in (two, three):
        assert other.meta == one.meta
        for a, b in zip(one.layers, other.layers, strict=True):
            for name, value in vars(a).items():
                same = getattr(b, name)
                assert torch.equal(value, same) if torch.is_tensor(value) else value == same


def test_a_folder_of_something_else_is_refused_by_name(tmp_path):
    ids = _prompts()
    collect(tiny_model("qwen3_moe"), ids, folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"layer-000.npz.*another model"):
        collect(tiny_model("qwen3_moe", seed=1), ids, folder=tmp_path)
    with pytest.raises(CheckpointError, match="another prompts"):
        collect(tiny_model("qwen3_moe"), ids + 1, folder=tmp_path)
    with pytest.raises(CheckpointError, match="another hessians"):
        collect(tiny_model("qwen3_moe"), ids, hessians=True, folder=tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        Calibration.load(tmp_path, model="0" * 64)
    with pytest.raises(CheckpointError, match="calibrate into it first"):
        Calibration.load(tmp_path / "nowhere")
    path = layer_file(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(CheckpointError, match=r"layer-001.npz.*not a whole"):
        collect(tiny_model("qwen3_moe"), ids, folder=tmp_path)


def test_layers_that_go_round_the_experts_function_are_an_error():
    model = tiny_model("qwen3_moe")
    module = experts_layers(model)[1].module
    loop = type(module).forward.__wrapped__
    module.forward = lambda *args: loop(module, *args)
    with pytest.raises(CaptureError, match=r"layers \[1\]"):
        collect(model, _prompts())


def test_statistics_that_miss_choices_are_an_error():
    """Experts on another device: their mark is the number of experts."""
    model = tiny_model("qwen3_moe")

    def away(module, args):
        args[1][args[1] == 3] = module.num_experts

    experts_layers(model)[0].module.register_forward_pre_hook(away)
    with pytest.raises(CaptureError, match="layer 0 counted"):
        collect(model, _prompts(8, 20))


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.zeros(0, 4, dtype=torch.long), None, "shape"),
        (_prompts(), torch.ones(2, 2), "one value per token"),
        (_prompts(), torch.zeros(3, 9), "mark at least one"),
    ],
)
def test_prompts_that_cannot_be_used(ids, mask, message):
    with pytest.raises(CaptureError, match=message):
        collect(tiny_model("qwen3_moe"), ids, mask)


def test_registration_survives_a_reload():
    model, ids = tiny_model("qwen3_moe"), _prompts()
    before = collect(model, ids).layers[0]
    importlib.reload(probes)
    assert probes.register() == probes.register() == "repro-calibrate"
    after = collect(model, ids).layers[0]
    assert torch.equal(before.counts, after.counts)
    assert torch.equal(before.down_moment, after.down_moment)
