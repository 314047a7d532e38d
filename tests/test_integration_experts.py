"""The experts function: equal to the library's loop on every architecture, and watchable."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from repro.errors import CheckpointError, UnknownNameError
from repro.integration import experts
from repro.models.tiny import ARCHITECTURES, tiny_config, tiny_model


def _ids(n: int = 3, length: int = 11) -> torch.Tensor:
    return torch.randint(2, 64, (n, length), generator=torch.Generator().manual_seed(5))


@torch.inference_mode()
def _logits(model, implementation: str) -> torch.Tensor:
    with experts.use_experts(model, implementation):
        return model(_ids()).logits


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equal_to_eager_bit_for_bit(arch):
    model = tiny_model(arch)
    eager = _logits(model, "eager")
    assert torch.isfinite(eager).all() and eager.std() > 0.1
    assert torch.equal(_logits(model, "repro"), eager)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", ["qwen2_moe", "gpt_oss"])
def test_equal_to_eager_in_other_types(arch, dtype):
    model = tiny_model(arch).to(dtype)
    assert torch.equal(_logits(model, "repro"), _logits(model, "eager"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("base", ["eager", "grouped_mm", "batched_mm"])
def test_observing_changes_no_bit(arch, base):
    model = tiny_model(arch)
    plain = _logits(model, base)
    seen = []
    with experts.observe(model, lambda m, i, idx, w: seen.append(i), base), torch.inference_mode():
        watched = model(_ids()).logits
    assert torch.equal(plain, watched)
    assert seen == [layer.layer_index for layer in experts.experts_layers(model)]


@pytest.mark.parametrize(
    ("arch", "layers"), [("qwen3_moe", [0, 1]), ("deepseek_v2", [1, 2]), ("qwen3_next", [0, 2, 3])]
)
def test_layer_index_counts_dense_layers(arch, layers):
    assert [x.layer_index for x in experts.experts_layers(tiny_model(arch))] == layers


def _by_hand(module, x, index, weights):
    """Every expert on every token, einsum over the stacked weights; no code shared."""
    if module.is_transposed:
        up = torch.einsum("th,ehi->eti", x, module.gate_up_proj)
    else:
        up = torch.einsum("th,eih->eti", x, module.gate_up_proj)
    if module.has_bias:
        up = up + module.gate_up_proj_bias[:, None]
    if module.is_concatenated:
        half = up.shape[-1] // 2
        inner = module.act_fn(up[..., :half]) * up[..., half:]
    else:
        gate, linear = up[..., 0::2].clamp(max=7.0), up[..., 1::2].clamp(-7.0, 7.0)
        inner = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
    if module.is_transposed:
        out = torch.einsum("eti,eih->eth", inner, module.down_proj)
    else:
        out = torch.einsum("eti,ehi->eth", inner, module.down_proj)
    if module.has_bias:
        out = out + module.down_proj_bias[:, None]
    gates = torch.zeros(len(x), module.num_experts + 1, dtype=x.dtype)
    gates.scatter_add_(1, index, weights)
    return torch.einsum("te,eth->th", gates[:, :-1], out)


@pytest.mark.parametrize("width", [32, 16])  # I = H and 2 I = H: a transposed read would fit
@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_square_matrices_are_not_read_transposed(arch, width):
    field = "moe_intermediate_size" if arch == "qwen3_moe" else "intermediate_size"
    model = tiny_model(arch, **{field: width}).double()
    module = experts.experts_layers(model)[0].module
    x = torch.randn(9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    index = torch.stack([torch.arange(9) % 8, (torch.arange(9) + 3) % 8], dim=1)
    weights = torch.rand(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        ours = experts.reference_experts(module, x, index, weights)
        torch.testing.assert_close(ours, _by_hand(module, x, index, weights))
        # and the test can fail: the square matrices transposed give something else
        square = module.gate_up_proj if width == 16 else module.down_proj
        assert square.shape[1:] == (32, 32)
        square.copy_(square.transpose(1, 2).clone())
        other = experts.reference_experts(module, x, index, weights)
    assert not torch.allclose(ours, other)


@pytest.mark.parametrize(
    "flags",
    [
        {"has_gate": False},
        {"has_gate": False, "has_bias": True},
        {"is_transposed": True},
        {"has_bias": True},
        {"is_transposed": True, "has_bias": True},
        {"has_post_expert_norm": True},
    ],
    ids=lambda flags: "+".join(flags),
)
def test_every_storage_flag_against_the_library(flags):
    """Layouts that none of the nine has, but others of the library do."""
    if not set(flags) <= set(inspect.signature(use_experts_implementation).parameters):
        pytest.skip("not known to this version of Transformers")
    rows = 48 if flags.get("has_gate", True) else 24
    first = "gate_up_proj" if flags.get("has_gate", True) else "up_proj"

    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.act_fn = 8, nn.functional.silu
            shapes = {first: (8, rows, 32), "down_proj": (8, 32, 24)}
            for name, (e, n, k) in shapes.items():
                shape = (e, k, n) if flags.get("is_transposed") else (e, n, k)
                setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
                if flags.get("has_bias"):
                    bias = nn.Parameter(torch.randn(e, n, dtype=torch.float64))
                    setattr(self, f"{name}_bias", bias)
            self.post_expert_norm = nn.RMSNorm(32, dtype=torch.float64)

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise NotImplementedError

    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        module = use_experts_implementation(Experts, **flags)(None)
        holder = nn.ModuleList([module])
        assert experts.experts_layers(holder)[0].layer_index == 0
        x, weights = torch.randn(9, 32).double(), torch.rand(9, 2).double()
        index = torch.rand(9, 8).argsort(dim=1)[:, :2]
        ours = experts.reference_experts(module, x, index, weights)
        library = ALL_EXPERTS_FUNCTIONS["batched_mm"](module, x, index, weights)
    torch.testing.assert_close(ours, library)


def test_interleaved_rows_need_their_own_gate():
    module = experts.experts_layers(tiny_model("qwen3_moe"))[0].module
    module.is_concatenated = False
    with pytest.raises(CheckpointError, match="interleaved"):
        experts.experts_layers(nn.ModuleList([module]))


def test_matrices_are_out_by_in_in_both_layouts():
    for arch in ("qwen3_moe", "gpt_oss"):
        module = experts.experts_layers(tiny_model(arch))[0].module
        matrices = experts.expert_matrices(module, 3)
        assert matrices.gate_up.shape == (48, 32)
        assert matrices.down.shape == (32, 24)


def test_experts_without_tokens_are_never_read():
    model = tiny_model("qwen3_moe")
    module = experts.experts_layers(model)[0].module
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([[3, 5]] * 6)
    weights = torch.full((6, 2), 0.5)
    with torch.inference_mode():
        before = experts.reference_experts(module, x, index, weights)
        for expert in {*range(8)} - {3, 5}:
            module.gate_up_proj[expert] = float("nan")
            module.down_proj[expert] = float("nan")
        after = experts.reference_experts(module, x, index, weights)
    assert torch.equal(before, after) and torch.isfinite(after).all()


def test_empty_batch():
    module = experts.experts_layers(tiny_model("gpt_oss"))[0].module
    empty = torch.empty(0, 2, dtype=torch.long)
    out = experts.reference_experts(module, torch.empty(0, 32), empty, torch.empty(0, 2))
    assert out.shape == (0, 32)


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_mark_of_an_absent_expert_adds_nothing(arch):
    module = experts.experts_layers(tiny_model(arch).double())[0].module
    module._is_expert_parallel = True
    x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([[0, 8], [8, 8], [7, 1], [8, 2], [3, 4]])
    weights = torch.full((5, 2), 0.5, dtype=torch.float64).masked_fill(index == 8, 0.0)
    with torch.inference_mode():
        ours = experts.reference_experts(module, x, index, weights)
        torch.testing.assert_close(ours, _by_hand(module, x, index, weights))
    assert torch.equal(ours[1], torch.zeros(32, dtype=torch.float64))


def test_second_registration_and_reload():
    cell = "from repro.integration import experts\nexperts.register()\n"
    for _ in range(2):
        exec(cell, {})
    model = tiny_model("qwen3_moe")
    eager = _logits(model, "eager")
    seen = []
    with experts.observe(model, lambda *a: seen.append(a[1]), "grouped_mm"):
        importlib.reload(experts)  # a notebook cell run again in the middle of a capture
        with torch.inference_mode():
            model(_ids())
    assert seen == [0, 1]
    assert torch.equal(_logits(model, experts.register()), eager)
    assert experts.EXPERTS_NAME in ALL_EXPERTS_FUNCTIONS


def test_previous_implementation_comes_back():
    model = tiny_model("deepseek_v2")
    for previous in ("eager", "batched_mm"):
        model.set_experts_implementation(previous)
        with experts.observe(model, lambda *a: None):
            assert model.config._experts_implementation == f"repro-observed-{previous}"
            with experts.observe(model, lambda *a: None, "repro"):
                assert model.config._experts_implementation == "repro"
        assert model.config._experts_implementation == previous
        with pytest.raises(RuntimeError, match="inside"):
            with experts.observe(model, lambda *a: None):
                raise RuntimeError("inside")
        assert model.config._experts_implementation == previous
        assert not experts._WATCHES


def test_two_observers_see_the_same():
    model, outer, inner = tiny_model("olmoe"), [], []
    with experts.observe(model, lambda *a: outer.append(a[2].clone())):
        with experts.observe(model, lambda *a: inner.append(a[2].clone())):
            model(_ids())
        model(_ids())
    assert len(outer) == 4 and len(inner) == 2
    assert all(torch.equal(a, b) for a, b in zip(outer, inner, strict=False))


def test_reaches_a_class_whose_source_transformers_cannot_judge():
    base = type(tiny_model("qwen3_moe"))
    # what the library decides for a class defined in a notebook: no source, so no
    blind = {"_can_set_experts_implementation": classmethod(lambda cls: False)}
    model = type("OwnModel", (base,), blind)(tiny_config("qwen3_moe")).eval()
    seen = []
    with experts.observe(model, lambda *a: seen.append(a[1]), "grouped_mm"):
        model(_ids())
    assert seen == [0, 1]


def test_unknown_implementation():
    model = tiny_model("qwen3_moe")
    with pytest.raises(UnknownNameError, match="'gruped_mm'.*did you mean 'grouped_mm'"):
        experts.observed("gruped_mm")
    with pytest.raises(UnknownNameError, match="nothing-like-it"):
        with experts.use_experts(model, "nothing-like-it"):
            pass


def test_refuses_by_name_what_it_cannot_run():
    with pytest.raises(CheckpointError, match="Linear has no experts"):
        experts.experts_layers(nn.Linear(2, 2))

    model = tiny_model("qwen3_moe")
    layer = model.model.layers[1].mlp
    stacked = layer.experts
    layer.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts.*ModuleList"):
        experts.experts_layers(model)
    layer.experts = stacked

    stacked.down_proj = nn.Parameter(stacked.down_proj.to(torch.float8_e4m3fn), False)
    with pytest.raises(CheckpointError, match=r"layers\.1.*down_proj.*float8"):
        experts.experts_layers(model)

    stacked.down_proj = nn.Parameter(torch.zeros(8, 24, 32))
    with pytest.raises(CheckpointError, match="does not fit"):
        experts.experts_layers(model)
