"""``load_model`` is never silently wrong: every bad input on real files, and equal logits."""

import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_training import small_tokenizer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import repro
from repro.errors import (
    CheckpointError,
    DataUnavailableError,
    MissingDeviceError,
    UnknownNameError,
)
from repro.models import loading
from repro.models.catalog import format_models, list_models
from repro.models.layout import find_experts
from repro.models.loading import load_model, resolve_device, resolve_dtype
from repro.models.published import PUBLISHED
from repro.models.specs import SPECS
from repro.models.tiny import ARCHITECTURES, tiny_model
from repro.paths import models_dir

WEIGHTS = "model.safetensors"
VOCAB_SIZE = 384
NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="says what a machine without GPU says"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer()


@pytest.fixture
def save(tmp_path: Path, tokenizer: Any) -> Callable[..., Path]:
    """Write a small checkpoint of an architecture, with tokenizer; returns its folder."""

    def write(arch: str = "qwen3_moe", **options: Any) -> Path:
        shard = options.pop("shard", None)
        model = tiny_model(arch, vocab_size=VOCAB_SIZE, **options)
        folder = tmp_path / "checkpoint"
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        tokenizer.save_pretrained(folder)
        return folder

    return write


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = change(load_file(folder / WEIGHTS))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def refused(folder: Path | str, said: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind, match=said) as caught:
        load_model(folder, device="cpu")
    assert "\n" not in str(caught.value)


# --- what loads, loads right


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_saved_model_comes_back_with_every_weight(
    arch: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save(arch)
    original = tiny_model(arch, vocab_size=VOCAB_SIZE)
    model, tokenizer = load_model(folder, device="cpu")
    assert not model.training
    expected = dict(original.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name
    assert tokenizer("the cat")["input_ids"] == small_tokenizer()("the cat")["input_ids"]


def loop_logits(module: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Experts one token and one choice at a time, from matrices as the checkpoint means them."""
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for slot in range(index.shape[1]):
            expert = int(index[token, slot])
            gate_up, down = module.gate_up_proj[expert], module.down_proj[expert]
            if module.is_transposed:
                hidden = x[token] @ gate_up + module.gate_up_proj_bias[expert]
            else:
                hidden = gate_up @ x[token]
            inner = module._apply_gate(hidden[None])[0]
            if module.is_transposed:
                part = inner @ down + module.down_proj_bias[expert]
            else:
                part = down @ inner
            out[token] += weight[token, slot] * part
    return out


@pytest.mark.parametrize("width", [32, 16, 64])
@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_square_expert_matrices_are_not_transposed(
    arch: str, width: int, save: Callable[..., Path]
) -> None:
    """Width = hidden makes ``down`` square, width = hidden / 2 makes ``gate_up`` square."""
    field = "moe_intermediate_size" if arch == "qwen3_moe" else "intermediate_size"
    model, _ = load_model(save(arch, **{field: width}), device="cpu")
    original = tiny_model(arch, vocab_size=VOCAB_SIZE, **{field: width})
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(5, 32, generator=generator)
        index = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(5)])
        weight = torch.rand(5, 2, generator=generator)
        for _, module in find_experts(model).values():
            expected = loop_logits(module, x, index, weight)
            torch.testing.assert_close(module(x, index, weight), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_bundled_model_takes_the_bytes_it_lists(name: str) -> None:
    """An unmatched prefix that kept experts in float32 would double them."""
    model, _ = load_model(name, device="cpu", dtype="bfloat16")
    (info,) = [info for info in list_models() if info.name == name]
    assert sum(p.numel() for p in model.parameters()) == info.n_params
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert n_bytes == 2 * info.n_params
    assert n_bytes == pytest.approx(info.n_bytes, rel=0.01)
    assert AutoModelForCausalLM.from_pretrained(models_dir() / name).dtype is torch.bfloat16


def test_the_default_type_on_a_cpu_is_float32(save: Callable[..., Path]) -> None:
    folder = save()
    assert load_model(folder, device="cpu")[0].dtype is torch.float32
    for dtype in ("bfloat16", torch.float64):
        model, _ = load_model(folder, device=torch.device("cpu"), dtype=dtype)
        assert str(model.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")


def test_shards_load_like_one_file(save: Callable[..., Path]) -> None:
    folder = save(shard="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    model, _ = load_model(folder, device="cpu")
    expected = tiny_model("qwen3_moe", vocab_size=VOCAB_SIZE).state_dict()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in model.state_dict().items())


def test_from_another_folder_and_process(tmp_path: Path) -> None:
    code = (
        "import repro; model, tokenizer = repro.load_model('moe-fine', device='cpu')\n"
        "print(model.config.model_type, len(tokenizer), model.dtype)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout.strip() == "qwen3_moe 8192 torch.float32", done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- damaged files


@pytest.mark.parametrize("cut", [4, 300, -1, -3000])
def test_truncated_weights(cut: int, save: Callable[..., Path]) -> None:
    folder = save()
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:cut])
    refused(folder, r"'model\.safetensors' .*copy it again")


def test_a_truncated_shard_is_named(save: Callable[..., Path]) -> None:
    folder = save(shard="20KB")
    victim = sorted(folder.glob("model-*.safetensors"))[2]
    victim.write_bytes(victim.read_bytes()[:-10])
    refused(folder, rf"'{victim.name}' has .* truncated or damaged, copy it again")


def test_a_missing_shard_is_named(save: Callable[..., Path]) -> None:
    folder = save(shard="20KB")
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.unlink()
    refused(folder, f"lacks '{victim.name}'")


def test_a_damaged_index(save: Callable[..., Path]) -> None:
    folder = save(shard="20KB")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-40])
    refused(folder, r"index\.json' in 'checkpoint' is damaged \(JSONDecodeError\)")


def test_a_header_that_only_the_library_finds_wrong(save: Callable[..., Path]) -> None:
    folder = save()
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data.replace(b'"dtype":"F32"', b'"dtype":"F33"', 1))
    refused(folder, "'checkpoint' cannot be loaded .*F33.*copy the checkpoint again")


def test_no_weights(save: Callable[..., Path]) -> None:
    folder = save()
    (folder / WEIGHTS).unlink()
    refused(folder, "holds no 'model.safetensors'")


# --- tensors that would be re-initialised


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("model.layers.1.mlp.experts.", r"2 tensors are not .*layers\.1\.mlp\.experts\.down_proj"),
        ("model.layers.1.mlp.experts.3.", r"lacks 'model\.layers\.1\.mlp\.experts\.3\.down_proj"),
        ("model.layers.0.mlp.experts.7.up", r"lacks .*experts\.7\.up_proj\.weight' \(7 of 8"),
        (
            "model.layers.0.mlp.gate.",
            r"1 tensors are not in .*\(model\.layers\.0\.mlp\.gate\.weigh",
        ),
        ("model.norm.", r"1 tensors are not in the checkpoint and would be random \(model\.norm"),
        ("lm_head.", r"1 tensors are not in the checkpoint and would be random \(lm_head\.weight"),
    ],
)
def test_a_missing_tensor_is_never_initialised(
    pattern: str, said: str, save: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save()
    rewrite(folder, lambda t: {k: v for k, v in t.items() if not k.startswith(pattern)})
    capfd.readouterr()
    refused(folder, said)
    assert capfd.readouterr().err == ""  # the sentence alone, no table of the library beside it


@pytest.mark.parametrize(
    ("old", "new"),
    [("model.", "backbone."), ("mlp.experts", "block_sparse_moe.experts"), ("embed_tokens", "wte")],
)
def test_a_renamed_prefix(old: str, new: str, save: Callable[..., Path]) -> None:
    folder = save()
    rewrite(folder, lambda t: {k.replace(old, new, 1): v for k, v in t.items()})
    refused(folder, "are not in the checkpoint and would be random")


def test_tensors_that_nothing_uses(save: Callable[..., Path]) -> None:
    folder = save()
    rewrite(folder, lambda t: {**t, "model.layers.0.mlp.bonus.weight": torch.ones(3)})
    refused(folder, r"1 tensors belong to no parameter .*mlp\.bonus\.weight")


def test_a_custom_type_loses_no_weights_in_silence(save: Callable[..., Path]) -> None:
    """Under another ``model_type`` the map that packs the experts is not found."""

    class CustomConfig(Qwen3MoeConfig):
        model_type = "custom_moe"

    class CustomModel(Qwen3MoeForCausalLM):
        config_class = CustomConfig

    folder = save()
    edit_config(folder, model_type="custom_moe")
    refused(folder, "'custom_moe'.*cannot be read by the installed Transformers")
    AutoConfig.register("custom_moe", CustomConfig)
    AutoModelForCausalLM.register(CustomConfig, CustomModel)
    try:
        refused(folder, "'custom_moe' is a Mixture-of-Experts architecture that is not supported")
    finally:
        _forget("custom_moe", CustomConfig)


def _forget(model_type: str, config: type) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    CONFIG_MAPPING._extra_content.pop(model_type)
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(config)


# --- a configuration that does not belong to its weights


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"moe_intermediate_size": 16}, r"4 tensors have another shape .*experts\.down_proj"),
        ({"num_experts": 4, "num_local_experts": None}, r"another shape .*experts\.down_proj"),
        ({"num_experts": 16, "num_local_experts": None}, r"experts\.8\.down_proj.*8 of 16 experts"),
        ({"num_hidden_layers": 1}, r"11 tensors belong to no parameter of this architecture"),
        ({"num_hidden_layers": 3}, r"11 tensors are not in the checkpoint and would be random"),
        ({"vocab_size": 400}, r"tensors have another shape .*embed_tokens"),
        ({"model_type": "qwen2_moe", "num_experts": 8}, "are not in the checkpoint and would be"),
        ({"model_type": "qwen3", "num_local_experts": None}, "'qwen3' is a dense model without"),
        ({"model_type": "llama"}, "'llama' is a Mixture-of-Experts architecture that is not sup"),
        ({"model_type": "never_heard_of"}, "'never_heard_of'.*cannot be read"),
        ({"num_experts": 0, "num_local_experts": None}, "no Mixture-of-Experts layer"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"already quantised \(fp8\)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\)"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_fit(
    fields: dict[str, Any], said: str, save: Callable[..., Path]
) -> None:
    folder = save()
    edit_config(folder, **fields)
    refused(folder, said)


@pytest.mark.parametrize("config", [LlamaConfig(), MixtralConfig(num_local_experts=2)], ids=repr)
def test_weights_of_another_model_are_not_loaded_under_a_config(
    config: Any, save: Callable[..., Path]
) -> None:
    folder = save()
    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE}
    (folder / "config.json").unlink()
    type(config)(**{**config.to_dict(), **small, "intermediate_size": 24}).save_pretrained(folder)
    refused(folder, "dense model|lacks|are not in the checkpoint|belong to no parameter|another")


def test_a_config_cut_short(save: Callable[..., Path]) -> None:
    folder = save()
    path = folder / "config.json"
    path.write_text(path.read_text()[:60])
    refused(folder, "is truncated or not JSON")
    path.unlink()
    refused(folder, "cannot read config.json in 'checkpoint'")


# --- values


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_weight_that_is_no_number_is_named(value: str, save: Callable[..., Path]) -> None:
    folder = save()

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.1.mlp.experts.5.down_proj.weight"][3, 2] = float(value)
        return tensors

    rewrite(folder, spoil)
    refused(folder, r"1 values of 'model\.layers\.1\.mlp\.experts\.down_proj' are NaN or infinite")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_without_scales_are_no_weights(dtype: torch.dtype, save: Callable[..., Path]) -> None:
    folder = save()
    rewrite(
        folder, lambda t: {k: (v * 50).to(dtype) if "experts" in k else v for k, v in t.items()}
    )
    refused(folder, r"stores 'model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight' as [IUF]8")


# --- tokenizer


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
def test_a_missing_tokenizer(arch: str, save: Callable[..., Path]) -> None:
    """For some types Transformers makes an empty one, for others it raises."""
    folder = save(arch)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    refused(folder, r"tokenizer.*tokenizer\.json and tokenizer_config\.json")


def test_a_damaged_tokenizer(save: Callable[..., Path]) -> None:
    folder = save()
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:500])
    refused(folder, "tokenizer of 'checkpoint' cannot be loaded .*copy its tokenizer.json and")


def test_a_tokenizer_of_a_larger_model(save: Callable[..., Path]) -> None:
    folder = save()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models_dir() / "moe-fine" / name, folder)
    refused(folder, r"gives id \d+ where the model has 384 embeddings: use the tokenizer that")


def test_a_swapped_tokenizer_is_told(tmp_path: Path) -> None:
    """A bare tokenizer.json beside a Qwen config loads as another class, with other ids."""
    shutil.copytree(models_dir() / "moe-shared", tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer_config.json").unlink()
    with pytest.warns(UserWarning, match="other ids than its tokenizer.json: save it once with"):
        load_model(tmp_path / "bare", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model("moe-shared", device="cpu")


# --- names, folders, hub


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("moe-fien", UnknownNameError, r"unknown model 'moe-fien' \(did you mean 'moe-fine'\?\)"),
        ("Mixtral", UnknownNameError, r"unknown model 'Mixtral' \(did you mean 'Mixtral-8x7B'\?\)"),
        ("", UnknownNameError, "unknown model ''"),
        ("./absent", CheckpointError, "no checkpoint folder './absent'"),
        ("data/models/moe-fin", CheckpointError, "no checkpoint folder 'data/models/moe-fin'"),
        (Path("absent"), CheckpointError, "no checkpoint folder 'absent'"),
        (__file__, CheckpointError, "no checkpoint folder "),
    ],
)
def test_unknown_names_and_folders(name: str | Path, kind: type[Exception], said: str) -> None:
    refused(name, said, kind)  # type: ignore[arg-type]


def test_a_bundled_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "models_dir", lambda: tmp_path)
    refused("moe-fine", "bundled model 'moe-fine' is missing from .*check out the repository")


@pytest.mark.parametrize("name", ["some-one/some-model", "Mixtral-8x7B"])
def test_an_unreachable_hub_is_told_at_once(name: str) -> None:
    start = time.perf_counter()
    hub_id = PUBLISHED[name].hub_id if name in PUBLISHED else name
    refused(
        name, f"hub checkpoint '{hub_id}' cannot be loaded .*unset HF_HUB_", DataUnavailableError
    )
    assert time.perf_counter() - start < 5


def test_what_is_no_hub_id() -> None:
    refused("a b/c", "hub checkpoint 'a b/c' cannot be loaded", DataUnavailableError)


# --- device and type


@NO_GPU
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_no_gpu_here(device: str) -> None:
    with pytest.raises(MissingDeviceError, match=f"device '{device}' is not on this machine: use"):
        load_model("moe-fine", device=device)


@pytest.mark.parametrize("device", ["tpu", "", "cpu:x", "gpu"])
def test_devices_that_do_not_exist(device: str) -> None:
    with pytest.raises(
        MissingDeviceError, match=f"device '{device}' does not exist: use auto, cpu"
    ):
        resolve_device(device)


@pytest.mark.parametrize("device", ["meta", "mps", "xpu"])
def test_devices_that_are_not_supported(device: str) -> None:
    with pytest.raises(MissingDeviceError, match=f"device '{device}' is not supported"):
        resolve_device(device)


@pytest.mark.gpu
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(MissingDeviceError, match="is not on this machine: it has"):
        resolve_device("cuda:99")


@pytest.mark.parametrize("dtype", ["float23", "int8", torch.int8, torch.float8_e4m3fn, None])
def test_unknown_types(dtype: Any) -> None:
    with pytest.raises(UnknownNameError, match="unknown dtype .*: choose one of auto, bfloat16"):
        resolve_dtype(dtype, torch.device("cpu"))


def test_types_by_device() -> None:
    assert resolve_dtype("auto", torch.device("cpu")) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == "auto"
    assert resolve_dtype(torch.float16, torch.device("cuda")) is torch.float16


# --- the list


def test_the_list_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "import repro; models = repro.list_models()\n"
        "print(len(models), {'torch', 'transformers'} & set(sys.modules))\n"
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    names, seconds = done.stdout.splitlines()
    assert names == "10 set()"
    assert float(seconds) < 2


def test_what_the_list_says() -> None:
    models = {info.name: info for info in repro.list_models()}
    assert list(models) == [*SPECS, *PUBLISHED]
    for name in SPECS:
        info = models[name]
        assert (info.kind, info.available) == ("bundled", True)
        assert info.where == f"data/models/{name}"
    for name, published in PUBLISHED.items():
        info = models[name]
        assert (info.kind, info.available, info.where) == ("published", False, published.hub_id)
        assert info.n_bytes == 2 * info.n_params
    assert models["Qwen3-30B-A3B"].n_params == 30_532_122_624
    table = format_models(models.values())
    assert all(name in table for name in models)
    assert max(map(len, table.splitlines())) <= 90
    assert "moe-fine              17.5 M" in table


@pytest.mark.parametrize("damage", ["gone", "no config", "cut"])
def test_a_damaged_bundled_model_does_not_hide_the_others(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from repro.models import catalog

    if damage != "gone":
        shutil.copytree(models_dir() / "moe-shared", tmp_path / "moe-shared")
    if damage == "no config":
        (tmp_path / "moe-shared" / "config.json").unlink()
    if damage == "cut":
        victim = next((tmp_path / "moe-shared").glob("*.safetensors"))
        victim.write_bytes(victim.read_bytes()[:-1])
    monkeypatch.setattr(catalog, "models_dir", lambda: tmp_path)
    models = {info.name: info for info in list_models()}
    assert len(models) == 10
    assert not models["moe-shared"].available
    assert models["moe-shared"].n_params is models["moe-shared"].n_bytes is None
    assert "missing or damaged" in format_models(models.values())
