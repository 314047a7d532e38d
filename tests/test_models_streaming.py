"""Reading experts layer by layer, and a model that holds one layer at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_training import small_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from repro.errors import CheckpointError, DataUnavailableError, UnknownNameError
from repro.models.layout import find_experts
from repro.models.loading import load_model
from repro.models.streaming import CheckpointReader, streamed_model
from repro.models.tiny import ARCHITECTURES, tiny_config, tiny_model
from repro.paths import models_dir

WEIGHTS = "model.safetensors"
VOCAB_SIZE = 384
NARROW = ("mixtral", "phimoe", "olmoe", "gpt_oss")  # their one width is the experts'


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a small checkpoint of an architecture, with tokenizer; returns its folder."""

    def write(arch: str = "qwen3_moe", **options: Any) -> Path:
        shard = options.pop("shard", None)
        dtype = options.pop("dtype", torch.float32)
        model = tiny_model(arch, vocab_size=VOCAB_SIZE, **options).to(dtype)
        folder = tmp_path / "checkpoint"
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        small_tokenizer().save_pretrained(folder)
        return folder

    return write


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = change(load_file(folder / WEIGHTS))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def fused(model: Any, folder_layout: Any) -> dict[int, dict[str, Tensor]]:
    """The experts of an ordinary model by layer, turned to [E, out, in]."""
    found = {}
    for layer, (_, module) in find_experts(model).items():
        tensors = {name: tensor.detach() for name, tensor in module.named_parameters()}
        if folder_layout.is_transposed:
            for name in ("gate_up_proj", "down_proj"):
                tensors[name] = tensors[name].transpose(1, 2)
        found[layer] = tensors
    return found


def assert_same_experts(folder: Path, model: Any) -> None:
    reader = CheckpointReader(folder)
    expected = fused(model, reader.layout)
    assert reader.layout.moe_layer_ids == tuple(sorted(expected))
    for layer, tensors in expected.items():
        stack = reader.expert_stack(layer)
        assert torch.equal(stack.gate_up, tensors["gate_up_proj"])
        assert torch.equal(stack.down, tensors["down_proj"])
        for bias, name in (
            (stack.gate_up_bias, "gate_up_proj_bias"), (stack.down_bias, "down_proj_bias")
        ):  # fmt: skip
            assert (bias is not None) == reader.layout.has_bias == (name in tensors)
            assert bias is None or torch.equal(bias, tensors[name])


# --- the reader


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_reader_gives_what_the_loaded_model_holds(arch: str, save: Callable[..., Path]) -> None:
    folder = save(arch, shard="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_same_experts(folder, load_model(folder, device="cpu")[0])


@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_square_expert_matrices_are_not_transposed(
    arch: str, width: int, save: Callable[..., Path]
) -> None:
    """Width = hidden makes ``down`` square, width = hidden / 2 makes ``gate_up`` square."""
    options = {"intermediate_size" if arch in NARROW else "moe_intermediate_size": width}
    assert_same_experts(save(arch, **options), tiny_model(arch, vocab_size=VOCAB_SIZE, **options))


def stacked_spelling(folder: Path, arch: str) -> None:
    """Rename a published checkpoint to the names of the modules that Transformers builds."""
    state = tiny_model(arch, vocab_size=VOCAB_SIZE).state_dict()
    save_file({n: t.contiguous() for n, t in state.items()}, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("arch", ["qwen2_moe", "mixtral", "phimoe", "olmoe", "deepseek_v2"])
def test_the_newer_spelling_is_read_too(arch: str, save: Callable[..., Path]) -> None:
    folder = save(arch)
    old = set(load_file(folder / WEIGHTS))
    stacked_spelling(folder, arch)
    assert not any(".experts.0." in name for name in load_file(folder / WEIGHTS))
    assert any(".experts.0." in name for name in old)
    model = tiny_model(arch, vocab_size=VOCAB_SIZE)
    assert_same_experts(folder, model)
    ids = torch.arange(2, 14)[None]
    with streamed_model(folder) as (streamed, _), torch.no_grad():
        assert torch.equal(streamed(ids).logits, model(ids).logits)


def test_a_few_experts_at_a_time(save: Callable[..., Path]) -> None:
    for arch in ("qwen3_moe", "gpt_oss", "gemma4"):
        experts = CheckpointReader(save(arch)).experts(1)
        for block in ("gate_up", "down"):
            whole = experts.read(block)
            assert torch.equal(experts.read(block, 3, 6), whole[3:6])
            assert torch.equal(experts.read(block, 7), whole[7:])


def bytes_read() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").is_file(), reason="counts reads under Linux")
def test_only_what_is_asked_for_is_read() -> None:
    folder = models_dir() / "moe-fine"
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    before = bytes_read()
    reader = CheckpointReader(folder)
    opened = bytes_read() - before
    assert opened < 0.1 * total
    before = bytes_read()
    stack = reader.expert_stack(1)
    n_bytes = stack.gate_up.nbytes + stack.down.nbytes
    assert n_bytes <= bytes_read() - before < 1.01 * n_bytes < 0.5 * total
    assert stack.gate_up.dtype == torch.bfloat16


def test_the_fingerprint_is_the_folder_s(save: Callable[..., Path]) -> None:
    folder = save()
    first = CheckpointReader(folder).fingerprint()
    assert CheckpointReader(folder).fingerprint() == first
    rewrite(folder, lambda t: t | {"model.norm.weight": t["model.norm.weight"] + 1})
    assert CheckpointReader(folder).fingerprint() != first


# --- what the reader refuses


def refused(folder: Path, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        reader = CheckpointReader(folder)
        for layer in reader.layout.moe_layer_ids:
            reader.expert_stack(layer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_codes_of_a_quantiser(dtype: torch.dtype, save: Callable[..., Path]) -> None:
    folder, name = save(), "model.layers.1.mlp.experts.5.up_proj.weight"
    rewrite(folder, lambda t: t | {name: torch.zeros(t[name].shape, dtype=dtype)})
    refused(folder, f"'{name}' as .*use the bf16 or FP16 checkpoint")


def test_integers_where_weights_belong(save: Callable[..., Path]) -> None:
    folder, name = save(), "model.layers.0.mlp.experts.2.down_proj.weight"
    rewrite(folder, lambda t: t | {name: t[name].to(torch.int32)})
    refused(folder, f"'{name}' as torch.int32")


def test_a_truncated_shard(save: Callable[..., Path]) -> None:
    folder = save(shard="20KB")
    shard = sorted(folder.glob("model-*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(folder, f"'{shard.name}' has .* truncated or damaged")


def test_a_file_that_shrinks_while_it_is_read(save: Callable[..., Path]) -> None:
    folder = save()
    reader = CheckpointReader(folder)
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="ends inside 'model.layers"):
        for layer in reader.layout.moe_layer_ids:
            reader.expert_stack(layer)


@pytest.mark.parametrize("lost", ["experts.5.gate_proj", "experts.7.down_proj"])
def test_a_missing_expert(lost: str, save: Callable[..., Path]) -> None:
    folder = save()
    rewrite(folder, lambda t: {n: v for n, v in t.items() if f"layers.1.mlp.{lost}" not in n})
    refused(folder, f"lacks .*layers.1.mlp.{lost}.weight.*7 of 8")


def test_a_matrix_that_no_expert_has(save: Callable[..., Path]) -> None:
    folder = save()
    rewrite(folder, lambda t: {n: v for n, v in t.items() if "layers.1.mlp.experts" not in n
                               or "up_proj" not in n})  # fmt: skip
    refused(folder, "lacks the up matrix of expert 0 in layer 1")


@pytest.mark.parametrize("lost", ["gate_up_proj", "down_proj_bias"])
def test_a_missing_stacked_tensor(lost: str, save: Callable[..., Path]) -> None:
    folder = save("gpt_oss")
    name = f"model.layers.1.mlp.experts.{lost}"
    rewrite(folder, lambda t: {n: v for n, v in t.items() if n != name})
    refused(folder, f"lacks '{lost}' of its experts in layer 1")


def test_an_expert_of_another_shape(save: Callable[..., Path]) -> None:
    folder, name = save(), "model.layers.0.mlp.experts.3.up_proj.weight"
    rewrite(folder, lambda t: t | {name: t[name].T.contiguous()})
    refused(folder, rf"'{name}' as \[32, 24\], its configuration asks for \[24, 32\]")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_named_by_tensor_and_row(
    bad: float, save: Callable[..., Path]
) -> None:
    folder, name = save(dtype=torch.bfloat16), "model.layers.1.mlp.experts.6.up_proj.weight"

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name][11, 3] = bad
        tensors[name][17, 30] = bad
        return tensors

    rewrite(folder, spoil)
    refused(folder, rf"'{name}' has NaN or infinite values in 2 row\(s\), first in row 11:")


def test_the_same_of_a_stacked_tensor(save: Callable[..., Path]) -> None:
    folder, name = save("gemma4"), "model.layers.1.experts.down_proj"

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name][4, 9, 0] = float("nan")
        return tensors

    rewrite(folder, spoil)
    refused(folder, f"'{name}' has NaN .*first in expert 4, row 9:")


def test_names_that_lead_to_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match="hub checkpoint 'Qwen/Qwen3-30B-A3B"):
        CheckpointReader("Qwen3-30B-A3B")
    with pytest.raises(UnknownNameError, match="did you mean 'moe-fine'"):
        CheckpointReader("moe-fin")
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        CheckpointReader(tmp_path / "nowhere")


def test_a_dense_layer_has_no_experts(save: Callable[..., Path]) -> None:
    reader = CheckpointReader(save("deepseek_v2"))
    with pytest.raises(
        CheckpointError, match=r"layer 0 .* has no experts: ask for one of \[1, 2\]"
    ):
        reader.expert_stack(0)


# --- the streamed model


def batch(n_rows: int, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids and a mask that pads some rows on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCAB_SIZE, (n_rows, n_tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[: n_rows // 2, :4] = 0
    return ids, mask


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_are_those_of_the_ordinary_model(
    arch: str, tied: bool, save: Callable[..., Path]
) -> None:
    folder = save(arch, tie_word_embeddings=tied)
    model, _ = load_model(folder, device="cpu")
    seen: list[int] = []
    # As many sequences as tokens: what counts positions must not be taken for a batch.
    ids, mask = batch(7, 7)
    with streamed_model(folder, micro_batch=3, on_layer=seen.append) as (streamed, tokenizer):
        with torch.no_grad():
            divided = streamed(ids, attention_mask=mask).logits
            whole = streamed(ids[:3], attention_mask=mask[:3]).logits
            expected = model(ids, attention_mask=mask).logits
            assert torch.equal(whole, model(ids[:3], attention_mask=mask[:3]).logits)
    real = mask.bool()
    torch.testing.assert_close(divided[real], expected[real], rtol=1e-4, atol=1e-4)
    assert seen == 2 * list(range(len(model.model.layers)))
    assert tokenizer("the cat")["input_ids"] == small_tokenizer()("the cat")["input_ids"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ["deepseek_v2", "gpt_oss", "gemma4"])
def test_what_stays_in_float32_does_so(arch: str, dtype: str, save: Callable[..., Path]) -> None:
    folder = save(arch)
    model, _ = load_model(folder, device="cpu", dtype=dtype)
    ids = torch.arange(2, 14)[None]
    types: dict[str, torch.dtype] = {}
    with streamed_model(folder, dtype=dtype) as (streamed, _), torch.no_grad():
        types = {name: tensor.dtype for name, tensor in streamed.named_parameters()}
        assert torch.equal(streamed(ids).logits, model(ids).logits)
    assert types == {name: tensor.dtype for name, tensor in model.named_parameters()}


def test_one_layer_is_in_memory_at_a_time(save: Callable[..., Path]) -> None:
    folder = save("qwen3_next")
    held: list[set[str]] = []

    def layers_there() -> set[str]:
        names = [n for n, p in model.named_parameters() if ".layers." in n and not p.is_meta]
        return {name.split(".layers.")[1].split(".")[0] for name in names}

    with streamed_model(folder, on_layer=lambda i: held.append(layers_there())) as (model, _):
        assert layers_there() == set()
        with torch.no_grad():
            model(torch.arange(2, 14)[None])
        assert held == [{"0"}, {"1"}, {"2"}, {"3"}]
        assert layers_there() == set()
        assert not any(buffer.is_meta for buffer in model.buffers())


def test_a_forward_that_fails_leaves_no_weights(save: Callable[..., Path]) -> None:
    def stop(layer: int) -> None:
        raise KeyboardInterrupt

    with streamed_model(save(), on_layer=stop) as (model, _):
        with pytest.raises(KeyboardInterrupt):
            model(torch.arange(2, 14)[None])
        assert all(p.is_meta for n, p in model.named_parameters() if ".layers." in n)


def test_a_bundled_model_streams_by_name() -> None:
    model, tokenizer = load_model("moe-shared", device="cpu")
    ids = tokenizer(["The sum of 3 and 4 is"], return_tensors="pt")["input_ids"]
    with streamed_model("moe-shared") as (streamed, _), torch.no_grad():
        assert torch.equal(streamed(ids).logits, model(ids).logits)


def test_the_text_part_of_a_model_that_also_sees(tmp_path: Path) -> None:
    """The published Gemma 4: its decoder layers have another prefix, beside a vision tower."""
    vision = {
        "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "global_head_dim": 8, "position_embedding_size": 64,
    }  # fmt: skip
    text = tiny_config("gemma4", vocab_size=VOCAB_SIZE, tie_word_embeddings=True).to_dict()
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config=vision)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_same_experts(tmp_path, model)
    ids = torch.arange(5, 17)[None]
    with streamed_model(tmp_path) as (streamed, _), torch.no_grad():
        assert type(streamed) is type(model)
        assert torch.equal(streamed(ids).logits, model(ids).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_on_a_gpu(arch: str, save: Callable[..., Path]) -> None:
    folder = save(arch)
    model, _ = load_model(folder, device="cuda", dtype="bfloat16")
    ids, mask = batch(2, 12)
    ids, mask = ids.cuda(), mask.cuda()
    with streamed_model(folder, device="cuda", dtype="bfloat16") as (streamed, _), torch.no_grad():
        found = streamed(ids, attention_mask=mask).logits
        expected = model(ids, attention_mask=mask).logits
        assert found.is_cuda
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0.02, atol=0.02)


def test_no_cache_and_no_empty_micro_batch(save: Callable[..., Path]) -> None:
    folder = save()
    with streamed_model(folder) as (model, _), pytest.raises(ValueError, match="use_cache=False"):
        model(torch.arange(2, 14)[None], use_cache=True)
    with pytest.raises(ValueError, match="micro_batch is 0"), streamed_model(folder, micro_batch=0):
        pass


def test_without_tokenizer_files_there_is_none(save: Callable[..., Path]) -> None:
    folder = save()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with streamed_model(folder) as (_, tokenizer):
        assert tokenizer is None


def test_the_caller_s_random_state_is_untouched(save: Callable[..., Path]) -> None:
    folder = save()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with streamed_model(folder):
        pass
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    "lost", ["model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"]
)
def test_a_dense_tensor_that_is_missing(lost: str, save: Callable[..., Path]) -> None:
    folder = save()
    rewrite(folder, lambda t: {n: v for n, v in t.items() if n != lost})
    with pytest.raises(CheckpointError, match=f"lacks .*{lost}"), streamed_model(folder):
        pass


@pytest.mark.parametrize("name", ["model.layers.1.mlp.extra.weight", "extra.weight"])
def test_a_tensor_without_a_place(name: str, save: Callable[..., Path]) -> None:
    folder = save()
    rewrite(folder, lambda t: t | {name: torch.zeros(3)})
    with pytest.raises(CheckpointError, match=f"'{name}' belongs to no parameter of qwen3_moe"):
        with streamed_model(folder):
            pass


def test_what_models_compute_or_never_build_is_passed_over(save: Callable[..., Path]) -> None:
    folder = save("qwen3_next")
    extra = {
        "mtp.layers.0.mlp.gate.weight": torch.zeros(8, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    rewrite(folder, lambda t: t | extra)
    ids = torch.arange(2, 14)[None]
    with streamed_model(folder) as (streamed, _), torch.no_grad():
        expected = tiny_model("qwen3_next", vocab_size=VOCAB_SIZE)(ids).logits
        assert torch.equal(streamed(ids).logits, expected)


def test_a_dense_tensor_that_is_not_finite(save: Callable[..., Path]) -> None:
    folder, name = save(), "model.layers.1.self_attn.q_proj.weight"

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name][5, 0] = float("inf")
        return tensors

    rewrite(folder, spoil)
    with streamed_model(folder) as (model, _):
        with pytest.raises(
            CheckpointError, match=rf"'{name}' has NaN .* 1 row\(s\), first in row 5"
        ):
            model(torch.arange(2, 14)[None])


def test_a_quantised_configuration_of_others_is_refused(save: Callable[..., Path]) -> None:
    folder = save()
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(config))
    refused(folder, r"already quantised \(fp8\)")
