"""Measured damage: the model's bits come back, and short cuts equal the full forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from repro.calibration.blocks import BlockRef, block_weights, sample_blocks
from repro.calibration.damage import Damage, measure_damage, replaced
from repro.calibration.passes import scored_tokens
from repro.calibration.replay import Replay
from repro.contract import Block
from repro.errors import CheckpointError, UnknownNameError
from repro.formats.group_affine import GroupAffine
from repro.integration.experts import experts_layers
from repro.models.tiny import ARCHITECTURES, tiny_model


class Coarse:
    """Weights on a grid of ``n_bits`` levels: enough of a stack for these tests."""

    widths = (2, 4)

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.float()

    def decode(self, n_bits: int, expert: int | None = None) -> torch.Tensor:
        weight = self._weight if expert is None else self._weight[expert]
        step = weight.abs().amax(dim=(-2, -1), keepdim=True) / 2 ** (n_bits - 1)
        return torch.round(weight / step) * step


def _stacks(model):
    return {
        layer.layer_index: [Coarse(w.clone()) for w in block_weights(layer.module)]
        for layer in experts_layers(model)
    }


def _prompts(n: int = 3, length: int = 9) -> torch.Tensor:
    return torch.randint(2, 64, (n, length), generator=torch.Generator().manual_seed(5))


def _by_hand(model, stack, ref, n_bits, ids, mask):
    """Divergence and loss per prompt from two full forward passes, in float64."""

    def log_p():
        with torch.no_grad():
            kwargs = {} if mask.all() else {"attention_mask": mask.long()}
            return model(ids, use_cache=False, **kwargs).logits[:, :-1].double().log_softmax(-1)

    layer = next(x for x in experts_layers(model) if x.layer_index == ref.layer_index)
    weight = block_weights(layer.module)[ref.block][ref.expert]
    before = log_p()
    original = weight.clone()
    weight.copy_(stack.decode(n_bits, ref.expert))
    after = log_p()
    weight.copy_(original)
    scored = scored_tokens(mask).double()
    kl = F.kl_div(after, before, reduction="none", log_target=True).sum(-1)
    labels = ids[:, 1:, None]
    loss = (before - after).gather(2, labels)[..., 0]
    n = scored.sum(1)
    return ((kl * scored).sum(1) / n).numpy(), ((loss * scored).sum(1) / n).numpy()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equals_two_full_forwards(arch):
    model, ids = tiny_model(arch), _prompts()
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :4] = False
    before = [p.clone() for p in model.parameters()]
    blocks = sample_blocks(experts_layers(model), 8, seed=1)
    stacks = _stacks(model)
    found = measure_damage(model, stacks, blocks, (2, 4), ids, mask)
    assert found.kl.shape == (8, 2, 3) and found.n_scored.tolist() == [8, 4, 8]
    for row, ref in enumerate(blocks):
        for column, n_bits in enumerate((2, 4)):
            stack = stacks[ref.layer_index][ref.block]
            kl, loss = _by_hand(model, stack, ref, n_bits, ids, mask)
            np.testing.assert_allclose(found.kl[row, column], kl, rtol=1e-2, atol=1e-9)
            np.testing.assert_allclose(found.loss[row, column], loss, rtol=1e-2, atol=2e-6)
    assert found.kl.max() > 1e-5
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss"])
def test_layers_are_replayed_not_the_model(arch):
    model, ids = tiny_model(arch), _prompts()
    with torch.no_grad():
        replay = Replay(model, ids, torch.ones_like(ids, dtype=torch.bool))
    assert not replay.whole_model
    with torch.no_grad():
        whole = model(ids).logits[:, :-1].flatten(0, 1)
        for layer_index in range(2):
            assert torch.equal(torch.cat(list(replay.logits(layer_index, 7))), whole)


def test_a_model_put_together_otherwise_is_run_in_full():
    model, ids = tiny_model("qwen3_moe"), _prompts()
    model.lm_head.register_forward_hook(lambda m, args, out: out * 1.5 if out.dim() == 3 else out)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        assert Replay(model, ids, mask).whole_model
    ref, stacks = BlockRef(1, 0, Block.DOWN), _stacks(model)
    for expert in range(8):
        ref = BlockRef(0, expert, Block.GATE_UP)
        found = measure_damage(model, stacks, [ref], (2,), ids)
        kl, _ = _by_hand(model, stacks[0][0], ref, 2, ids, mask)
        np.testing.assert_allclose(found.kl[0, 0], kl, rtol=1e-2, atol=1e-9)


def test_batches_and_implementations_agree():
    model, ids = tiny_model("qwen3_moe"), _prompts(5)
    stacks, blocks = _stacks(model), sample_blocks(experts_layers(model), 4)
    calls = []
    whole = measure_damage(model, stacks, blocks, (2,), ids)
    parts = measure_damage(
        model, stacks, blocks, (2,), ids, batch=2, implementation="repro",
        progress=lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    np.testing.assert_allclose(whole.kl, parts.kl, rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(whole.reference_loss, parts.reference_loss, rtol=1e-5)
    assert calls == [(i, 12) for i in range(1, 13)]


def test_original_bits_come_back_after_an_error():
    model = tiny_model("gpt_oss")
    module = experts_layers(model)[0].module
    before = module.down_proj.detach().clone()

    class Broken(Coarse):
        def decode(self, n_bits, expert=None):
            if n_bits == 4:
                raise RuntimeError("disk on fire")
            return super().decode(n_bits, expert)

    stacks = {0: [Broken(w.clone()) for w in block_weights(module)]}
    with pytest.raises(RuntimeError, match="on fire"):
        measure_damage(model, stacks, [BlockRef(0, 2, Block.DOWN)], (2, 4), _prompts())
    assert torch.equal(module.down_proj, before)
    weight = torch.ones(3)
    with pytest.raises(ValueError), replaced(weight) as replace:
        replace(torch.zeros(3))
        assert not weight.any()
        raise ValueError
    assert weight.all()


def test_a_width_without_error_does_no_damage():
    model, ids = tiny_model("qwen3_moe"), _prompts()

    class Same(Coarse):
        def decode(self, n_bits, expert=None):
            return self._weight if expert is None else self._weight[expert]

    stacks = {0: [Same(w.clone()) for w in block_weights(experts_layers(model)[0].module)]}
    blocks = [BlockRef(0, e, b) for e in range(8) for b in Block]
    found = measure_damage(model, stacks, blocks, (2,), ids)
    assert found.kl.max() < 1e-15 and abs(found.loss).max() < 1e-15


def test_one_token_scores_nothing():
    model = tiny_model("qwen3_moe")
    found = measure_damage(
        model, _stacks(model), [BlockRef(0, 0, Block.DOWN)], (2,), _prompts(1, 1)
    )
    assert found.n_scored.tolist() == [0]
    assert found.kl.tolist() == [[[0.0]]] and found.mean().tolist() == [[0.0]]


def test_encoded_stacks_of_the_package_work():
    model, ids = tiny_model("qwen3_moe"), _prompts()
    weights = block_weights(experts_layers(model)[1].module)
    stacks = {1: [GroupAffine(2, 32).encode_stack(w.float()) for w in weights]}
    blocks = [BlockRef(1, e, Block.DOWN) for e in range(8)]
    found = measure_damage(model, stacks, blocks, (2,), ids)
    assert (found.kl.sum(axis=(1, 2)) > 0).sum() >= 6


def test_blocks_that_are_not_there_are_named():
    model = tiny_model("qwen3_moe")
    for ref in (BlockRef(0, 8, Block.DOWN), BlockRef(7, 0, Block.DOWN)):
        with pytest.raises(UnknownNameError, match=rf"\({ref.layer_index}, {ref.expert}, 1\)"):
            measure_damage(model, _stacks(model), [ref], (2,), _prompts())
    with pytest.raises(UnknownNameError, match="n_blocks=0"):
        sample_blocks(experts_layers(model), 0)


def test_sampled_blocks_are_different_and_seeded():
    layers = experts_layers(tiny_model("qwen3_moe"))
    one = sample_blocks(layers, 20, seed=3)
    assert len(set(one)) == 20 and one == sample_blocks(layers, 20, seed=3)
    assert one != sample_blocks(layers, 20, seed=4)
    assert len(sample_blocks(layers, 10_000)) == 2 * 8 * 2


def test_saving_and_reading_back(tmp_path):
    model = tiny_model("qwen3_moe")
    blocks = sample_blocks(experts_layers(model), 3)
    found = measure_damage(model, _stacks(model), blocks, (2, 4), _prompts(), meta={"model": "a"})
    found.save(tmp_path / "d.npz")
    again = Damage.load(tmp_path / "d.npz", model="a")
    assert again.blocks == found.blocks and again.widths == found.widths
    assert np.array_equal(again.kl, found.kl) and np.array_equal(
        again.mean("loss"), found.mean("loss")
    )
    with pytest.raises(CheckpointError, match=r"d.npz.*another model"):
        Damage.load(tmp_path / "d.npz", model="b")
