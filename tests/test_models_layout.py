"""Expert layouts: read from nine architectures' configurations, held against real tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    JambaConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from repro.errors import CheckpointError
from repro.models.layout import (
    SUPPORTED_ARCHITECTURES,
    check_model,
    find_experts,
    inspect_config,
    read_config,
)
from repro.models.parameters import build_on_meta, count_model, count_parameters
from repro.models.tiny import ARCHITECTURES, tiny_config, tiny_model

MODEL_TYPE = {"gemma4": "gemma4_text"}


def small_qwen3(**fields: object) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            **fields,
        }
    )


def test_the_nine_architectures_are_supported() -> None:
    assert {MODEL_TYPE.get(arch, arch) for arch in ARCHITECTURES} == set(SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layout_is_what_the_instantiated_model_holds(arch: str) -> None:
    model = tiny_model(arch)
    layout = check_model(model)
    assert layout == inspect_config(tiny_config(arch))
    experts = find_experts(model)
    assert tuple(sorted(experts)) == layout.moe_layer_ids
    for _, module in experts.values():
        assert module.num_experts == layout.n_experts
        assert module.is_transposed == layout.is_transposed
        assert module.is_concatenated == layout.is_concatenated
        assert module.has_bias == layout.has_bias
        assert module.has_gate
        n_params = sum(p.numel() for p in module.parameters())
        assert n_params == layout.n_experts * layout.params_per_expert
    count = count_model(model)
    assert count.routed == layout.n_moe_layers * layout.n_experts * layout.params_per_expert
    shared = 3 * layout.n_moe_layers * layout.hidden * layout.shared_intermediate
    assert count.shared == shared
    assert count.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_top_k_is_what_the_router_chooses(arch: str) -> None:
    model = tiny_model(arch)
    layout = inspect_config(model.config)
    seen: list[tuple[int, ...]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[1].shape)))
        for _, module in find_experts(model).values()
    ]
    with torch.no_grad():
        model(torch.arange(5)[None])
    for hook in hooks:
        hook.remove()
    assert seen == [(5, layout.top_k)] * layout.n_moe_layers


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_activation_is_what_the_experts_apply(arch: str) -> None:
    model = tiny_model(arch)
    layout = inspect_config(model.config)
    _, module = next(iter(find_experts(model).values()))
    gate_up = torch.linspace(-3, 3, 2 * layout.intermediate)[None]
    gate, up = (
        gate_up.chunk(2, dim=-1)
        if layout.is_concatenated
        else (gate_up[..., ::2], gate_up[..., 1::2])
    )
    expected = {
        "silu": lambda: torch.nn.functional.silu(gate) * up,
        "gelu_pytorch_tanh": lambda: torch.nn.functional.gelu(gate, approximate="tanh") * up,
        "clamped_swiglu": lambda: (
            (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))
        ),
    }[layout.activation]()
    torch.testing.assert_close(module._apply_gate(gate_up), expected)


def test_a_multimodal_configuration_is_read_by_its_text_part() -> None:
    text = tiny_config("gemma4")
    whole = AutoConfig.for_model("gemma4", text_config=text.to_dict())
    assert inspect_config(whole) == inspect_config(text)


@settings(deadline=None, max_examples=25)
@given(
    n_layers=st.integers(1, 6),
    step=st.integers(1, 3),
    dense=st.lists(st.integers(0, 5), max_size=3, unique=True),
    hidden=st.sampled_from([16, 32]),
    width=st.sampled_from([8, 16, 32, 64]),  # square, half and twice the hidden size
)
def test_sparse_layers_of_a_qwen_model(
    n_layers: int, step: int, dense: list[int], hidden: int, width: int
) -> None:
    config = small_qwen3(
        num_hidden_layers=n_layers,
        decoder_sparse_step=step,
        mlp_only_layers=dense,
        hidden_size=hidden,
        moe_intermediate_size=width,
    )
    held = tuple(sorted(find_experts(build_on_meta(config))))
    if not held:
        with pytest.raises(CheckpointError, match="no Mixture-of-Experts layer"):
            inspect_config(config)
    else:
        assert inspect_config(config).moe_layer_ids == held
        assert count_parameters(config).layout.intermediate == width


@pytest.mark.parametrize("arch", ["deepseek_v2", "qwen3_next"])
def test_dense_first_layers_are_no_expert_layers(arch: str) -> None:
    layout = inspect_config(tiny_config(arch))
    assert 0 < layout.n_moe_layers < layout.n_layers


def test_counting_allocates_nothing() -> None:
    model = build_on_meta(small_qwen3(num_experts=4096, moe_intermediate_size=4096))
    assert {p.device.type for p in model.parameters()} == {"meta"}


# --- what is refused


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen3Config()], ids=lambda c: c.model_type)
def test_dense_models_are_refused_by_name(config) -> None:
    with pytest.raises(CheckpointError, match=rf"'{config.model_type}' is a dense model.*mixtral"):
        inspect_config(config)


def test_another_moe_architecture_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"'jamba' is a Mixture-of-Experts .*not supported"):
        inspect_config(JambaConfig())


def test_a_subclass_under_a_new_type_is_refused() -> None:
    class RenamedConfig(Qwen3MoeConfig):
        model_type = "renamed_moe"

    with pytest.raises(CheckpointError, match=r"'renamed_moe'.*not supported.*qwen3_moe"):
        inspect_config(RenamedConfig())


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("qwen2_moe", {"num_experts": 0}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
        ("qwen3_moe", {"decoder_sparse_step": 3}),
        ("deepseek_v2", {"first_k_dense_replace": 3}),
        ("gemma4", {"enable_moe_block": False}),
        ("gemma4", {"num_experts": None}),
    ],
)
def test_a_known_architecture_without_experts_is_refused(arch: str, fields: dict) -> None:
    with pytest.raises(CheckpointError, match="no Mixture-of-Experts layer"):
        inspect_config(tiny_config(arch, **fields))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_more_choices_than_experts_are_refused(arch: str) -> None:
    field = "top_k_experts" if arch == "gemma4" else "num_experts_per_tok"
    with pytest.raises(CheckpointError, match=f"{field}=9 of only 8 experts"):
        inspect_config(tiny_config(arch, **{field: 9}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("moe_intermediate_size", 0), ("num_experts_per_tok", -1), ("num_experts", -4)],
)
def test_sizes_that_are_none_are_refused(field: str, value: int) -> None:
    config = small_qwen3()
    setattr(config, field, value)
    with pytest.raises(CheckpointError, match=f"{field}={value}"):
        inspect_config(config)


def test_a_quantised_checkpoint_is_refused_early() -> None:
    config = MixtralConfig(quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match=r"already quantised \(gptq\)"):
        inspect_config(config)


# --- a configuration that does not belong to its model


def test_experts_of_another_shape_are_found_out() -> None:
    model = tiny_model("qwen3_moe")
    model.config.moe_intermediate_size = 12
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj has shape \[8, 48, 32\].*\[8, 24, 32\]"
    ):
        check_model(model)


@pytest.mark.parametrize("width", [32, 64])
def test_a_transposed_expert_of_square_shape_is_told_by_its_flag(width: int) -> None:
    """At width = hidden the down matrix is square, so its shape says nothing."""
    model = tiny_model("mixtral", intermediate_size=width)
    check_model(model)
    _, module = find_experts(model)[1]
    module.is_transposed = True
    with pytest.raises(CheckpointError, match=r"layers\.1\..*is_transposed=True"):
        check_model(model)


def test_a_layer_that_lost_its_experts_is_found_out() -> None:
    model = tiny_model("olmoe")
    model.model.layers[1].mlp.experts = torch.nn.Identity()
    with pytest.raises(CheckpointError, match=r"in layers \[0\].*says \[0, 1\]"):
        check_model(model)


# --- config.json on disk


def write_config(folder: Path, text: str) -> Path:
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_saved_configuration_reads_back_to_the_same_layout(arch: str, tmp_path: Path) -> None:
    config = tiny_config(arch)
    config.save_pretrained(tmp_path)
    assert inspect_config(read_config(tmp_path)) == inspect_config(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "mixtral", "hidden_', "truncated or not JSON"),
        ("[]", "names no model_type"),
        ('{"hidden_size": 32}', "names no model_type"),
        ('{"model_type": 7}', "names no model_type"),
        ('{"model_type": "never_heard_of"}', r"'never_heard_of'.*cannot be read.*use one of"),
        ('{"model_type": "mixtral", "hidden_size": "wide"}', r"'mixtral'.*hidden_size"),
    ],
)
def test_a_broken_config_json_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(write_config(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_no_config_json_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No such file.*name a folder that holds a model"):
        read_config(tmp_path / "absent")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(CheckpointError, match="is not text"):
        read_config(tmp_path)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    """A foreign ``auto_map`` is ignored for a known type and refused for an unknown one."""
    (tmp_path / "foreign.py").write_text("raise SystemExit('ran')\n", encoding="utf-8")
    fields = json.loads(Qwen2MoeConfig(num_hidden_layers=1).to_json_string())
    fields["auto_map"] = {"AutoConfig": "foreign.ForeignConfig"}
    write_config(tmp_path, json.dumps(fields))
    assert inspect_config(read_config(tmp_path)).architecture == "qwen2_moe"
    write_config(tmp_path, json.dumps({**fields, "model_type": "foreign"}))
    with pytest.raises(CheckpointError, match="'foreign'"):
        read_config(tmp_path)


def test_a_counted_model_equals_the_allocated_one() -> None:
    config = small_qwen3(tie_word_embeddings=True)
    allocated = AutoModelForCausalLM.from_config(config)
    count = count_parameters(config)
    assert count.total == sum(p.numel() for p in allocated.parameters())
    assert count.embedding == 64 * 32  # tied: counted once
    # Active: four of the eight (layer, expert) pairs are not chosen by a token.
    assert count.active == count.total - 4 * 3 * 32 * 16
