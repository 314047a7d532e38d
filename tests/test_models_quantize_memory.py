"""Peak memory of quantising: a fraction of a layer beside the output buffers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repro.models.skeleton import build_skeleton
from repro.models.tensor_files import write_tensors
from repro.models.tiny import tiny_config

N_LAYERS, N_EXPERTS, HIDDEN, WIDTH = 4, 64, 512, 256
LAYER_BYTES = N_EXPERTS * 3 * HIDDEN * WIDTH * 2  # 50 MB, bf16

MEASURE = """
import sys
from pathlib import Path
import torch
from repro.formats.registry import make_format
from repro.models.checkpoint_reader import CheckpointReader
from repro.models.quantize import quantize
from repro.models.skeleton import build_skeleton

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

source, out, name = sys.argv[1:]
# What the libraries load once is no cost of a layer.
fmt = make_format(name)
fmt.encode_stack(torch.randn(2, 8, 64))
build_skeleton(CheckpointReader(source).config, torch.float32, torch.device("cpu"))
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
manifest = quantize(source, out, fmt, progress=lambda text: None, device="cpu")
written = max(manifest.files[layer.file].n_bytes for layer in manifest.layers.values())
print(status("VmHWM") - before, written)
"""


def synthetic(folder: Path) -> None:
    """A checkpoint of some 200 MB; all its layers have the same random weights."""
    config = tiny_config(
        "qwen3_moe", num_hidden_layers=N_LAYERS, hidden_size=HIDDEN, num_experts=N_EXPERTS,
        moe_intermediate_size=WIDTH, num_attention_heads=32, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    state = build_skeleton(config, torch.bfloat16, torch.device("cpu")).state_dict()
    shapes = {name: tensor.shape for name, tensor in state.items() if ".experts." not in name}
    dense = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    write_tensors(folder / "dense.safetensors", dense, {})
    weight_map = dict.fromkeys(dense, "dense.safetensors")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((N_EXPERTS, 3, HIDDEN * WIDTH), generator=generator) / 32
    values = values.to(torch.bfloat16)
    for layer in range(N_LAYERS):
        experts = {}
        for expert in range(N_EXPERTS):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            gate, up, down = values[expert]
            experts[f"{name}.gate_proj.weight"] = gate.view(WIDTH, HIDDEN)
            experts[f"{name}.up_proj.weight"] = up.view(WIDTH, HIDDEN)
            experts[f"{name}.down_proj.weight"] = down.view(HIDDEN, WIDTH)
        file = f"layer-{layer}.safetensors"
        write_tensors(folder / file, experts, {})
        weight_map |= dict.fromkeys(experts, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measured under Linux")
@pytest.mark.parametrize("name", ["bf16", pytest.param("any-precision", marks=pytest.mark.slow)])
def test_a_layer_is_never_held_whole_beside_its_output(name: str, tmp_path: Path) -> None:
    synthetic(tmp_path / "source")
    arguments = [sys.executable, "-c", MEASURE, tmp_path / "source", tmp_path / "out", name]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, written = map(int, done.stdout.split())
    assert written > 0.4 * LAYER_BYTES
    assert 0 < peak - written < 1.3 * LAYER_BYTES
