"""Quantised checkpoints read back bit for bit, and refused by name where they are not whole."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_training import small_tokenizer

import repro
from repro.errors import CheckpointError, UnknownNameError
from repro.formats.any_precision import AnyPrecision
from repro.formats.dense import Dense
from repro.formats.group_affine import GroupAffine
from repro.models import tensor_files
from repro.models.checkpoint_reader import CheckpointReader
from repro.models.integrity import MANIFEST
from repro.models.layout import find_experts
from repro.models.loading import load_model
from repro.models.quantize import quantize
from repro.models.quantized import QuantizedCheckpoint, load_quantized
from repro.models.tiny import tiny_model

VOCAB_SIZE = 384
EXPERTS = "experts-layer-001.safetensors"
DENSE = "dense-000.safetensors"
FORMATS = {
    "any-precision": AnyPrecision(),
    "table-per-row": AnyPrecision(rows_per_lut=1),
    "int5": GroupAffine(5, 32, clip="none"),
    "int3-asymmetric": GroupAffine(3, 32, symmetric=False, clip="none"),
    "dense": Dense("bfloat16"),
}


def make(folder: Path, arch: str, format: Any) -> tuple[Path, Path]:
    """A small checkpoint and what was made of it."""
    source, out = folder / "source", folder / "out"
    tiny_model(arch, vocab_size=VOCAB_SIZE).save_pretrained(source)
    small_tokenizer().save_pretrained(source)
    quantize(source, out, format, progress=lambda text: None, device="cpu")
    return source, out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("made"), "qwen3_moe", AnyPrecision())


@pytest.fixture
def copied(made: tuple[Path, Path], tmp_path: Path) -> Path:
    """A quantised folder to spoil."""
    return Path(shutil.copytree(made[1], tmp_path / "copied"))


# --- what comes back


def assert_bit_for_bit(source: Path, out: Path, format: Any) -> None:
    """Every layer, block and width: stack, prefix, and the parameters of the loaded model."""
    reader, checkpoint = CheckpointReader(source), load_quantized(out)
    layout = reader.layout
    encoded: dict[tuple[int, str], Any] = {}
    for layer in layout.moe_layer_ids:
        stack = reader.expert_stack(layer)
        encoded[layer, "gate_up"] = format.encode_stack(stack.gate_up)
        encoded[layer, "down"] = format.encode_stack(stack.down)
    widths = encoded[layout.moe_layer_ids[0], "down"].widths
    assert checkpoint.widths == widths
    for n_bits in widths:
        model, _ = load_model(out, device="cpu", n_bits=n_bits)
        modules = find_experts(model)
        for (layer, block), before in encoded.items():
            weight = before.decode(n_bits)
            read = checkpoint.stack(layer, block)  # type: ignore[arg-type]
            assert torch.equal(read.decode(n_bits), weight)
            assert torch.equal(checkpoint.decode(layer, block, n_bits), weight)  # type: ignore[arg-type]
            held = getattr(modules[layer][1], f"{block}_proj")
            assert torch.equal(held.transpose(1, 2) if layout.is_transposed else held, weight)
        n_bytes = sum(stack.nbytes(n_bits) for stack in encoded.values()) * layout.n_experts
        assert checkpoint.nbytes(n_bits) == n_bytes


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "gemma4"])
@pytest.mark.parametrize("name", FORMATS)
def test_decoded_after_reload_is_decoded_before(name: str, arch: str, tmp_path: Path) -> None:
    source, out = make(tmp_path, arch, FORMATS[name])
    assert_bit_for_bit(source, out, FORMATS[name])


def test_the_largest_width_is_the_default(made: tuple[Path, Path]) -> None:
    model, _ = repro.load_model(made[1], device="cpu")
    best, _ = repro.load_model(made[1], device="cpu", n_bits=8)
    narrow, _ = repro.load_model(made[1], device="cpu", n_bits=2)
    original, _ = repro.load_model(made[0], device="cpu")
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        logits = {n: m(ids).logits for n, m in
                  (("default", model), (8, best), (2, narrow), (16, original))}  # fmt: skip
    assert torch.equal(logits["default"], logits[8])
    errors = {n: float((logits[n] - logits[16]).norm() / logits[16].norm()) for n in (2, 8)}
    assert 0 < errors[8] < 0.1 < errors[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_are_those_of_an_ordinary_load(dtype: str, tmp_path: Path) -> None:
    source, out = make(tmp_path, "deepseek_v2", FORMATS["int5"])
    model, _ = load_model(out, device="cpu", dtype=dtype)
    expected, _ = load_model(source, device="cpu", dtype=dtype)
    types = {name: tensor.dtype for name, tensor in expected.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == types
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


@pytest.mark.skipif(not Path("/proc/self/io").is_file(), reason="counts reads under Linux")
def test_a_width_reads_its_own_planes_only(made: tuple[Path, Path]) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    checkpoint = load_quantized(made[1])
    spent = {}
    for n_bits in (2, 8):
        parts = checkpoint.parts(1, "gate_up", n_bits)
        planes = {f"plane{i}" for i in range(n_bits)}
        assert set(parts) == planes | {"scales", f"lut{n_bits}"}
        before = bytes_read()
        checkpoint.parts(1, "gate_up", n_bits)
        spent[n_bits] = bytes_read() - before
        n_bytes = checkpoint.stack(1, "gate_up").nbytes(n_bits) * 8
        assert n_bytes <= spent[n_bits] < n_bytes + 1000
    assert spent[2] < spent[8] / 2


def test_some_experts_of_a_width(made: tuple[Path, Path]) -> None:
    checkpoint = load_quantized(made[1])
    whole = checkpoint.decode(0, "down", 5)
    parts = checkpoint.parts(0, "down", 5, 3, 6)
    assert torch.equal(checkpoint.scheme(0, "down").decode(parts, 5), whole[3:6])


# --- what is refused


def refused(folder: Path, said: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind, match=said) as caught:
        load_model(folder, device="cpu")
    assert "\n" not in str(caught.value)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))


def test_another_layout_version(copied: Path) -> None:
    edit_manifest(copied, lambda m: m.update(layout_version=0))
    refused(copied, "layout version 0, this version reads 1: quantise its source again")


def test_the_checkpoint_of_another_model(made: tuple[Path, Path]) -> None:
    right = CheckpointReader(made[0]).fingerprint()
    load_quantized(made[1], expected_fingerprint=right)
    with pytest.raises(CheckpointError, match=f"fingerprint {right[:12]}, expected is abcdef"):
        load_quantized(made[1], expected_fingerprint="abcdef")


@pytest.mark.parametrize("name", [EXPERTS, DENSE])
def test_a_truncated_file(name: str, copied: Path) -> None:
    path = copied / name
    path.write_bytes(path.read_bytes()[:-1])
    refused(copied, rf"'{name}' of 'copied' has [\d,]+ bytes where its manifest says")


@pytest.mark.parametrize("name", [EXPERTS, DENSE])
def test_a_missing_file(name: str, copied: Path) -> None:
    (copied / name).unlink()
    refused(copied, f"lacks '{name}'")


@pytest.mark.parametrize("name", [EXPERTS, DENSE])
def test_sizes_made_to_agree_with_a_truncated_file(name: str, copied: Path) -> None:
    path = copied / name
    path.write_bytes(path.read_bytes()[:-8])
    edit_manifest(copied, lambda m: m["files"][name].update(n_bytes=path.stat().st_size))
    refused(copied, f"'{name}' has .* bytes where its header promises")


def test_a_flipped_bit_is_found_when_asked(copied: Path) -> None:
    data = bytearray((copied / EXPERTS).read_bytes())
    data[-1] ^= 1
    (copied / EXPERTS).write_bytes(data)
    load_quantized(copied)  # headers and sizes say nothing of it
    with pytest.raises(CheckpointError, match=f"'{EXPERTS}' .*its sha256 differs"):
        load_quantized(copied, verify=True)


def respell(copied: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the tensors of a layer's file and make size and manifest agree."""
    path = copied / EXPERTS
    tensors, metadata = load_file(path), tensor_files.read_metadata(path)
    change(tensors)
    digest = tensor_files.write_tensors(path, tensors, metadata)
    note = {"n_bytes": path.stat().st_size, "sha256": digest}
    edit_manifest(copied, lambda m: m["files"].update({EXPERTS: note}))


def test_a_plane_that_is_missing(copied: Path) -> None:
    respell(copied, lambda t: t.pop("layers.1.down.plane4"))
    refused(copied, f"'{EXPERTS}': tensor 'layers.1.down.plane4' is missing")


def test_a_plane_of_another_shape(copied: Path) -> None:
    name = "layers.1.down.plane4"
    respell(copied, lambda t: t.update({name: t[name][:, :-1].contiguous()}))
    refused(copied, rf"tensor '{name}' is torch.int32 \[8, 31, 1\], its scheme asks for")


def test_a_tensor_of_no_scheme(copied: Path) -> None:
    respell(copied, lambda t: t.update(extra=torch.zeros(8, 3)))
    refused(copied, "tensor 'extra' is .*, its scheme asks for none")


def test_an_unknown_format(copied: Path) -> None:
    edit_manifest(copied, lambda m: m["layers"]["1"]["schemes"]["down"].update(format="awq"))
    refused(copied, r"cannot be read here \(unknown format 'awq'")


def test_a_scheme_with_other_fields(copied: Path) -> None:
    edit_manifest(copied, lambda m: m["layers"]["1"]["schemes"]["down"].pop("n_rows"))
    refused(copied, r"cannot be read here \(n_rows\)")


@pytest.mark.parametrize("n_bits", [1, 9, 16])
def test_a_width_that_was_not_stored(n_bits: int, made: tuple[Path, Path]) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown width '{n_bits}'.*choose one of 2, 3"):
        load_model(made[1], device="cpu", n_bits=n_bits)
    with pytest.raises(UnknownNameError, match=f"unknown width '{n_bits}'"):
        load_quantized(made[1]).parts(0, "down", n_bits)
    with pytest.raises(UnknownNameError, match=f"unknown width '{n_bits}'"):
        load_quantized(made[1]).decode(0, "down", n_bits)


def test_a_width_for_what_is_not_quantised(made: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match="'source' is not quantised, .* at 4 bits"):
        load_model(made[0], device="cpu", n_bits=4)
    with pytest.raises(CheckpointError, match=f"'source' holds no '{MANIFEST}'"):
        load_quantized(made[0])


def test_a_layer_without_experts(made: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"layer 7 of 'out' has no experts"):
        load_quantized(made[1]).stack(7, "down")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"kind": "other", "layout_version": 1}',
             '{"kind": "repro-quantized", "layout_version": 1}']
)  # fmt: skip
def test_a_damaged_manifest(text: str, copied: Path) -> None:
    (copied / MANIFEST).write_text(text)
    refused(copied, f"'{MANIFEST}' in 'copied' is damaged")


def test_a_manifest_that_points_elsewhere(copied: Path) -> None:
    edit_manifest(copied, lambda m: m["files"].update({"../x": {"n_bytes": 1, "sha256": ""}}))
    refused(copied, "is damaged")


@pytest.mark.parametrize("field", ["moe_intermediate_size", "experts", "num_hidden_layers"])
def test_the_config_of_another_model(field: str, copied: Path) -> None:
    path = copied / "config.json"
    content = json.loads(path.read_text())
    if field == "experts":  # one version of the library writes another name than the next
        field = next(f for f in ("num_experts", "num_local_experts") if f in content)
    content.pop("layer_types", None)
    path.write_text(json.dumps(content | {field: content[field] * 2}))
    refused(copied, "config.json in 'copied' describes another model .*quantised .source.")


def test_a_folder_without_tokenizer(copied: Path) -> None:
    for path in copied.glob("tokenizer*"):
        path.unlink()
    refused(copied, "brings no tokenizer")


def test_dense_weights_are_checked_too(copied: Path) -> None:
    path = copied / DENSE
    tensors, metadata = load_file(path), tensor_files.read_metadata(path)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name][4, 0] = float("nan")
    tensor_files.write_tensors(path, tensors, metadata)
    refused(copied, f"'{name}' has NaN .* in row 4")
    tensors.pop(name)
    tensor_files.write_tensors(path, tensors, metadata)
    edit_manifest(copied, lambda m: m["files"][DENSE].update(n_bytes=path.stat().st_size))
    refused(copied, f"lacks 1 tensors that would be random .{name}")


def test_opening_reads_headers_only(made: tuple[Path, Path]) -> None:
    """A folder opened once answers about bytes and schemes without its weights."""
    checkpoint = QuantizedCheckpoint(made[1])
    assert checkpoint.scheme(0, "gate_up").shape == (48, 32)
    assert checkpoint.layers == (0, 1)
    assert checkpoint.nbytes(2) < checkpoint.nbytes(8) < checkpoint.manifest.n_bytes
    assert set(checkpoint.dense) >= {"lm_head.weight", "model.layers.0.mlp.gate.weight"}
