"""Quantising a checkpoint layer by layer: what it writes, resumes and refuses to touch."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_training import small_tokenizer
from torch import Tensor

from repro.errors import CheckpointError, OutputError
from repro.formats.any_precision import AnyPrecision
from repro.formats.dense import Dense
from repro.formats.group_affine import GroupAffine
from repro.models import tensor_files
from repro.models.checkpoint_reader import CheckpointReader
from repro.models.integrity import MANIFEST, UNFINISHED, fingerprint, weight_files
from repro.models.loading import load_model
from repro.models.quantize import quantize
from repro.models.quantized import load_quantized
from repro.models.quantized_manifest import Manifest, read_manifest
from repro.models.tiny import ARCHITECTURES, tiny_model

VOCAB_SIZE = 384
INT4 = GroupAffine(4, 32, clip="none")  # the quickest to encode


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a small checkpoint of an architecture, with tokenizer; returns its folder."""

    def write(arch: str = "qwen3_moe", **options: Any) -> Path:
        model = tiny_model(arch, vocab_size=VOCAB_SIZE, **options)
        folder = tmp_path / "source"
        model.save_pretrained(folder)
        small_tokenizer().save_pretrained(folder)
        return folder

    return write


def silent(text: str) -> None:
    """A progress that nobody reads."""


def run(source: Path | str, out: Path, format: Any = INT4, **options: Any) -> Manifest:
    return quantize(source, out, format, device="cpu", **{"progress": silent, **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


# --- what is written


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_stored_without_loss_every_weight_comes_back(
    arch: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    source = save(arch, tie_word_embeddings=arch in ("gemma4", "qwen2_moe"))
    run(source, tmp_path / "out", Dense("float32"))
    expected, _ = load_model(source, device="cpu")
    model, tokenizer = load_model(tmp_path / "out", device="cpu")
    found, state = model.state_dict(), expected.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    assert not model.training
    assert model.generation_config.eos_token_id == expected.generation_config.eos_token_id == 0
    assert tokenizer("the cat")["input_ids"] == small_tokenizer()("the cat")["input_ids"]


def test_the_folder_holds_what_the_manifest_says(save: Callable[..., Path], tmp_path: Path) -> None:
    source, out = save("deepseek_v2"), tmp_path / "out"
    manifest = run(source, out)
    names = {path.name for path in out.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        MANIFEST, "dense-000.safetensors", "experts-layer-001.safetensors",
        "experts-layer-002.safetensors",
    }  # fmt: skip
    assert read_manifest(out) == manifest
    assert manifest.fingerprint == CheckpointReader(source).fingerprint()
    assert set(manifest.files) == {name for name in names if name.endswith(".safetensors")}
    assert manifest.n_bytes == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    load_quantized(out, expected_fingerprint=manifest.fingerprint, verify=True)
    stored, original = (
        load_file(out / "dense-000.safetensors"),
        load_file(source / "model.safetensors"),
    )
    assert set(stored) == {name for name in original if ".experts." not in name}
    assert all(torch.equal(stored[name], original[name]) for name in stored)
    assert all(stored[name].dtype == original[name].dtype for name in stored)


def test_parts_are_tensors_of_their_own(save: Callable[..., Path], tmp_path: Path) -> None:
    """Planes cut from one pool must not share storage in the file: their bytes add up."""
    out = tmp_path / "out"
    run(save(), out, AnyPrecision(rows_per_lut=1))
    path = out / "experts-layer-001.safetensors"
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        planes = {f"layers.1.{block}.plane{i}" for block in ("gate_up", "down") for i in range(8)}
        assert planes <= names
        n_bytes = sum(file.get_tensor(name).nbytes for name in names)
        assert file.get_tensor("layers.1.down.plane7").dtype == torch.int32
        assert tuple(file.get_tensor("layers.1.down.plane7").shape) == (8, 32, 1)
    header = path.stat().st_size - n_bytes
    assert 0 < header < 8192


def test_biases_of_experts_stay_as_they_are(save: Callable[..., Path], tmp_path: Path) -> None:
    source, out = save("gpt_oss"), tmp_path / "out"
    run(source, out)
    stored, original = (
        load_file(out / "dense-000.safetensors"),
        load_file(source / "model.safetensors"),
    )
    biases = [name for name in original if name.endswith("_proj_bias")]
    assert len(biases) == 4
    assert all(torch.equal(stored[name], original[name]) for name in biases)


def test_an_encoder_that_needs_second_moments_gets_them(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    source, format = save(), GroupAffine(3, 32, encoder="gptq")
    generator = torch.Generator().manual_seed(0)
    inputs = {
        b: torch.randn(8, 64, k, generator=generator) for b, k in (("gate_up", 32), ("down", 24))
    }
    hessians = {f"{block}_hessian": x.transpose(1, 2) @ x for block, x in inputs.items()}
    run(source, tmp_path / "out", format, importance=lambda layer: hessians)
    weight = CheckpointReader(source).expert_stack(0).down
    expected = format.encode_stack(weight, hessian=hessians["down_hessian"])
    found = load_quantized(tmp_path / "out").stack(0, "down")
    assert all(torch.equal(found.tensors[n], t) for n, t in expected.tensors.items())


@pytest.mark.parametrize("format", [AnyPrecision(), AnyPrecision(rows_per_lut=1), INT4])
def test_encoded_a_few_at_a_time_or_all_at_once_is_the_same(
    format: Any, save: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = save(), tmp_path / "out"
    run(source, out, format)
    checkpoint = load_quantized(out)
    whole = CheckpointReader(source).expert_stack(1)
    for block, weight in (("gate_up", whole.gate_up), ("down", whole.down)):
        expected = format.encode_stack(weight)
        found = checkpoint.stack(1, block)  # type: ignore[arg-type]
        assert found.scheme == expected.scheme
        assert found.tensors.keys() == expected.tensors.keys()
        assert all(torch.equal(found.tensors[n], t) for n, t in expected.tensors.items())


def test_rows_that_need_scales_make_all_rows_have_them(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    """The published format has scales only where float16 cannot hold a table."""
    source, out = save(), tmp_path / "out"

    def grow(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.0.mlp.experts.5.down_proj.weight"][3] *= 1e6
        return tensors

    rewrite(source, grow)
    manifest = run(source, out, AnyPrecision(rows_per_lut=1))
    assert manifest.layers[0].schemes["down"]["has_scales"] is True
    assert manifest.layers[1].schemes["down"]["has_scales"] is False
    assert manifest.notes == {"rescaled_rows": 1}
    weight = CheckpointReader(source).expert_stack(0).down
    decoded = load_quantized(out).decode(0, "down", 8)
    torch.testing.assert_close(decoded[5, 3], weight[5, 3], rtol=0.02, atol=2e4)


def test_importance_reaches_the_encoder(save: Callable[..., Path], tmp_path: Path) -> None:
    source = save()
    generator = torch.Generator().manual_seed(0)
    weights = {
        "gate_up": torch.rand(8, 1, 32, generator=generator) ** 4,
        "down": torch.rand(8, 1, 24, generator=generator) ** 4,
    }
    asked: list[int] = []

    def importance(layer: int) -> dict[str, Tensor]:
        asked.append(layer)
        return weights

    run(source, tmp_path / "weighed", AnyPrecision(), importance=importance)
    assert asked == [0, 0, 1]  # once more to know the size of it all
    stack = CheckpointReader(source).expert_stack(1)
    expected = AnyPrecision().encode_stack(stack.down, weights["down"])
    found = load_quantized(tmp_path / "weighed").stack(1, "down")
    assert all(torch.equal(found.tensors[n], t) for n, t in expected.tensors.items())
    plain = AnyPrecision().encode_stack(stack.down)
    assert not torch.equal(found.tensors["plane2"], plain.tensors["plane2"])


def test_fallbacks_are_counted_by_layer(save: Callable[..., Path], tmp_path: Path) -> None:
    source = save()

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.1.mlp.experts.2.down_proj.weight"][:] = 0
        tensors["model.layers.1.mlp.experts.3.down_proj.weight"][5] = 0.25
        return tensors

    rewrite(source, spoil)
    told: list[str] = []
    manifest = run(source, tmp_path / "out", AnyPrecision(), progress=told.append)
    assert manifest.layers[0].notes == {"gate_up": {}, "down": {}}
    assert manifest.layers[1].notes["down"] == {"constant_rows": 33, "zero_experts": 1}
    assert "treated specially: constant_rows 33, zero_experts 1" in told[-1]
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["notes"] == manifest.notes
    decoded = load_quantized(tmp_path / "out").decode(1, "down", 8)
    assert torch.equal(decoded[2], torch.zeros(32, 24))
    torch.testing.assert_close(decoded[3, 5], torch.full((24,), 0.25), rtol=0.02, atol=0)


def test_progress_tells_the_time_that_is_left(save: Callable[..., Path], tmp_path: Path) -> None:
    texts: list[str] = []
    run(save("qwen3_next"), tmp_path / "out", progress=texts.append)
    assert texts[0] == "source: reading all of it once, for its fingerprint"
    told = texts[1:]
    assert [text.split(":")[0] for text in told[:3]] == [
        "layer 0 (1 of 3)", "layer 2 (2 of 3)", "layer 3 (3 of 3)"
    ]  # fmt: skip
    assert all(" s, about " in text and text.endswith(" s left") for text in told[:3])
    assert "about 0 s left" in told[2]


# --- interruptions


class Stopped(Exception):
    """Stands for whatever ends a run."""


def stop_after(n_layers: int) -> Callable[[str], None]:
    told: list[str] = []

    def progress(text: str) -> None:
        told.append(text)
        if sum(text.startswith("layer ") for text in told) == n_layers:
            raise Stopped

    return progress


def test_an_interrupted_run_goes_on_with_the_next_layer(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = save("qwen3_next"), tmp_path / "out"
    with pytest.raises(Stopped):
        run(source, out, progress=stop_after(2))
    assert (out / UNFINISHED).is_file()
    assert not (out / MANIFEST).exists()
    with pytest.raises(CheckpointError, match="was not finished: run it again"):
        load_model(out, device="cpu")
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert len(before) == 3
    texts: list[str] = []
    manifest = run(source, out, progress=texts.append)
    told = [text for text in texts if text.startswith("layer ")]
    assert told[0].endswith("finished before")
    assert told[1].endswith("finished before")
    assert told[2].endswith("s left")
    assert before == {name: (out / name).stat().st_mtime_ns for name in before}
    assert not (out / UNFINISHED).exists()
    assert run(source, tmp_path / "at-once") == manifest
    assert contents(out) == contents(tmp_path / "at-once")


def test_a_finished_run_repeated_changes_nothing(save: Callable[..., Path], tmp_path: Path) -> None:
    source, out = save(), tmp_path / "out"
    manifest = run(source, out)
    before, made = contents(out), fingerprint(out)
    told: list[str] = []
    assert run(source, out, progress=told.append) == manifest
    assert contents(out) == before
    assert sum("finished before" in text for text in told) == 2
    assert made == fingerprint(out) != manifest.fingerprint
    run(source, out, Dense("float16"), force=True)
    assert fingerprint(out) != made


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def relabel(path: Path) -> None:
    """A layer of another source under the right name."""
    tensors, metadata = load_file(path), tensor_files.read_metadata(path)
    tensor_files.write_tensors(path, tensors, metadata | {"fingerprint": "0" * 64})


def lose_a_plane(path: Path) -> None:
    tensors, metadata = load_file(path), tensor_files.read_metadata(path)
    tensors.pop("layers.0.down.scales")
    tensor_files.write_tensors(path, tensors, metadata)


@pytest.mark.parametrize(
    ("damage", "is_finished"),
    [(truncate, False), (relabel, False), (lose_a_plane, True), (Path.unlink, True)],
)
def test_what_is_not_whole_or_not_ours_is_made_again(
    damage: Callable[[Path], None],
    is_finished: bool,
    save: Callable[..., Path],
    tmp_path: Path,
) -> None:
    source, out = save(), tmp_path / "out"
    if is_finished:
        run(source, out)
    else:
        with pytest.raises(Stopped):
            run(source, out, progress=stop_after(2))
    damage(out / "experts-layer-000.safetensors")
    run(source, out)
    run(source, tmp_path / "at-once")
    assert contents(out) == contents(tmp_path / "at-once")


def test_a_fresh_process_and_a_killed_one(save: Callable[..., Path], tmp_path: Path) -> None:
    """A fresh process knows no format before a manifest names it; no handler runs on SIGKILL."""
    source, out = save("qwen3_next"), tmp_path / "out"
    run(source, tmp_path / "at-once")
    code = (
        "import os, signal, sys, repro\n"
        "model, _ = repro.load_model(sys.argv[2], device='cpu')\n"
        "print(type(model).__name__, model.dtype, flush=True)\n"
        "from repro.formats.group_affine import GroupAffine\n"
        "from repro.models.quantize import quantize\n"
        "def stop(text):\n"
        "    if text.startswith('layer 0'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "quantize(sys.argv[1], sys.argv[3], GroupAffine(4, 32, clip='none'), progress=stop)\n"
    )
    command = [sys.executable, "-c", code, source, tmp_path / "at-once", out]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.stdout.split() == ["Qwen3NextForCausalLM", "torch.float32"], killed.stderr
    assert killed.returncode == -signal.SIGKILL
    assert (out / "experts-layer-000.safetensors").is_file()
    (out / ".experts-layer-002.safetensors.0123abcd.part").write_bytes(b"half a layer")
    run(source, out)
    assert contents(out) == contents(tmp_path / "at-once")


# --- disks


def test_a_disk_that_fills_leaves_no_layer(save: Callable[..., Path], tmp_path: Path) -> None:
    """A limit on file sizes cuts the write off half-way, as a full disk would."""
    source, out = save("qwen3_next"), tmp_path / "out"
    with pytest.raises(Stopped):
        run(source, out, progress=stop_after(1))
    n_bytes = (out / "experts-layer-000.safetensors").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes // 2, hard))
        with pytest.raises(OutputError) as caught:
            run(source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    said = str(caught.value)
    assert "experts-layer-002.safetensors" in said
    assert f"needs {n_bytes:,} bytes and " in said
    assert "are free" in said
    assert {p.name for p in out.glob("*.safetensors*")} == {
        "dense-000.safetensors", "experts-layer-000.safetensors"
    }  # fmt: skip
    assert not list(out.glob(".*.part"))
    with pytest.raises(CheckpointError, match="was not finished"):
        load_quantized(out)
    run(source, out)
    run(source, tmp_path / "at-once")
    assert contents(out) == contents(tmp_path / "at-once")


def test_too_little_space_is_said_before_the_work(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save(), tmp_path / "out"
    n_bytes = run(source, tmp_path / "elsewhere").n_bytes
    # No test can fill a disk; what it answers is the one thing that is replaced.
    monkeypatch.setattr(
        tensor_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=n_bytes // 2)
    )
    with pytest.raises(
        OutputError, match=r"cannot write '.*out'.*needs [\d,]+ bytes and"
    ) as caught:
        run(source, out)
    needed = int(str(caught.value).split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert 0.9 * n_bytes < needed <= n_bytes
    assert not list(out.glob("*"))


def test_a_file_in_the_way(save: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("not a folder")
    with pytest.raises(OutputError, match="cannot write '.*out'"):
        run(save(), tmp_path / "out")


# --- folders that hold something


def test_another_job_is_not_overwritten_unless_asked(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = save("qwen3_next"), tmp_path / "out"
    run(source, out)
    before = contents(out)
    with pytest.raises(OutputError, match="holds a quantised checkpoint of another source, format"):
        run(source, out, GroupAffine(8, 32, clip="none"))
    assert contents(out) == before
    manifest = run(source, out, GroupAffine(8, 32, clip="none"), force=True)
    assert manifest.widths == (8,)
    assert max(load_quantized(out, verify=True).widths) == 8
    shutil.rmtree(source)
    other = save("deepseek_v2")
    with pytest.raises(OutputError, match="of another source"):
        run(other, out, GroupAffine(8, 32, clip="none"))
    run(other, out, force=True)
    assert not (out / "experts-layer-003.safetensors").exists()
    assert load_quantized(out, verify=True).layers == (1, 2)


def test_other_importance_is_another_job(save: Callable[..., Path], tmp_path: Path) -> None:
    source, out = save(), tmp_path / "out"
    run(source, out, AnyPrecision())
    before = contents(out)
    generator = torch.Generator().manual_seed(0)
    weights = {
        block: torch.rand(8, 1, columns, generator=generator) ** 4
        for block, columns in (("gate_up", 32), ("down", 24))
    }
    with pytest.raises(OutputError, match="made with other importance"):
        run(source, out, AnyPrecision(), importance=lambda layer: weights)
    assert contents(out) == before
    run(source, out, AnyPrecision(), importance=lambda layer: weights, force=True)
    run(source, tmp_path / "at-once", AnyPrecision(), importance=lambda layer: weights)
    assert contents(out) == contents(tmp_path / "at-once") != before


def test_folders_of_others_are_left_alone(save: Callable[..., Path], tmp_path: Path) -> None:
    source = save()
    before = contents(source)
    with pytest.raises(OutputError, match="is the checkpoint itself"):
        run(source, source, force=True)
    other = tmp_path / "other"
    shutil.copytree(source, other)
    with pytest.raises(OutputError, match="was not quantised here"):
        run(source, other, force=True)
    assert contents(source) == contents(other) == before


@pytest.mark.gpu
def test_encoded_on_a_gpu(save: Callable[..., Path], tmp_path: Path) -> None:
    """Another order of sums may move a code; what was encoded there is read here as it was."""
    source, out = save(), tmp_path / "out"
    quantize(source, out, AnyPrecision(), progress=silent, device="cuda")
    checkpoint = load_quantized(out, verify=True)
    weight = CheckpointReader(source).expert_stack(1).gate_up
    stack = checkpoint.stack(1, "gate_up")
    for n_bits in stack.widths:
        on_gpu = checkpoint.decode(1, "gate_up", n_bits, device="cuda")
        assert torch.equal(on_gpu.cpu(), stack.decode(n_bits))
    assert (stack.decode(8) - weight).norm() < 0.02 * weight.norm()


# --- sources


def test_a_quantised_folder_is_no_source(save: Callable[..., Path], tmp_path: Path) -> None:
    run(save(), tmp_path / "out")
    with pytest.raises(CheckpointError, match="'out' is already quantised"):
        run(tmp_path / "out", tmp_path / "again")
    with pytest.raises(CheckpointError, match="'out' is quantised, its weights are codes"):
        weight_files(tmp_path / "out")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number(bad: float, save: Callable[..., Path], tmp_path: Path) -> None:
    source, name = save(), "model.layers.1.mlp.experts.6.gate_proj.weight"

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name][7, 3] = bad
        return tensors

    rewrite(source, spoil)
    with pytest.raises(CheckpointError, match=rf"'{name}' has NaN or infinite .* in row 7"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert not (tmp_path / "out" / "experts-layer-001.safetensors").exists()


@pytest.mark.parametrize("change", ["lost", "extra", "shape"])
def test_dense_tensors_that_would_not_load_are_refused_at_once(
    change: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    source, name = save(), "model.layers.0.self_attn.q_proj.weight"
    rewrite(source, lambda t: {n: v for n, v in t.items() if n != name or change != "lost"})
    if change != "lost":
        added = "model.extra.weight" if change == "extra" else name
        rewrite(source, lambda t: t | {added: torch.zeros(3, 3)})
    said = {"lost": f"lacks 1 tensors .*{name}", "extra": "'model.extra.weight' belongs to no",
            "shape": rf"'{name}' has shape \[3, 3\]"}  # fmt: skip
    with pytest.raises(CheckpointError, match=said[change]):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- found by trying to break it


@pytest.mark.parametrize("name", ["experts-layer-001.safetensors", "dense-000.safetensors"])
def test_a_byte_that_changed_is_mended_not_signed(
    name: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = save(), tmp_path / "out"
    run(source, out)
    before = contents(out)
    changed = bytearray(before[name])
    changed[-9] ^= 255
    (out / name).write_bytes(changed)
    run(source, out)
    assert contents(out) == before
    load_quantized(out, verify=True)


def test_replacing_with_too_little_space_loses_nothing(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save(), tmp_path / "out"
    run(source, out)
    (out / "heads.json").write_text("{}")  # of the calibration that belongs to it
    before = contents(out)
    with monkeypatch.context() as patch:
        patch.setattr("repro.models.quantize.free_bytes", lambda folder: 0)
        with pytest.raises(OutputError, match="are free"):
            run(source, out, Dense("float32"), force=True)
    assert contents(out) == before
    run(source, out, Dense("float32"), force=True)
    assert not (out / "heads.json").exists()
    assert read_manifest(out).widths == (32,)


def test_layers_that_the_configuration_has_not_are_refused(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    source = save()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match="stores layer 1 where its configuration ends at 1"):
        run(source, tmp_path / "out")


def test_what_overflows_the_type_it_is_loaded_in_is_named(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    source = save()
    rewrite(source, lambda t: {**t, "lm_head.weight": t["lm_head.weight"] * 1e6})
    run(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"lm_head.weight.*overflows torch.float16: load"):
        load_model(tmp_path / "out", device="cpu", dtype="float16")
    load_model(tmp_path / "out", device="cpu", dtype="bfloat16")


def test_an_overflow_is_named_by_layer_and_expert(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    source = save()
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    rewrite(source, lambda t: {**t, name: t[name] * 1e6})
    with pytest.raises(CheckpointError, match=r"layer 1, down .* counted from 5.*float16"):
        run(source, tmp_path / "out", Dense("float16"))


def test_experts_of_several_types_are_read_in_one_that_holds_all(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    source = save()
    names = [f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(8)]
    rewrite(
        source,
        lambda t: {**t, names[0]: t[names[0]].half(), names[1]: t[names[1]].bfloat16() * 2**20},
    )
    stored = load_file(source / "model.safetensors")
    stack = CheckpointReader(source).expert_stack(0)
    assert torch.equal(stack.down, torch.stack([stored[name].float() for name in names]))


@pytest.mark.parametrize("change", [{"widths": []}, {"rows_per_lut": 0}])
def test_numbers_that_make_no_sense_are_damage(
    change: dict[str, Any], save: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(save(), out, AnyPrecision())
    content = json.loads((out / MANIFEST).read_text())
    if "widths" in change:
        content |= change
    else:
        content["layers"]["0"]["schemes"]["down"] |= change
    (out / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="again"):
        load_quantized(out)
