"""The bundled models in any-precision form: reloaded bit for bit."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import repro
from repro.formats.any_precision import AnyPrecision
from repro.formats.encoded import EncodedStack
from repro.models.layout import find_experts
from repro.models.quantize import quantize
from repro.models.quantized import load_quantized


class Recorded(AnyPrecision):
    """The format itself, which also keeps what it made, in order."""

    made: ClassVar[list[EncodedStack]] = []

    def encode_stack(self, weight: Tensor, importance: Tensor | None = None) -> EncodedStack:
        self.made.append(super().encode_stack(weight, importance))
        return self.made[-1]


@pytest.mark.parametrize("name", ["moe-shared", pytest.param("moe-fine", marks=pytest.mark.slow)])
def test_a_bundled_model_reloads_bit_for_bit(name: str, tmp_path: Path) -> None:
    Recorded.made.clear()
    quantize(name, tmp_path / "out", Recorded(), progress=lambda text: None, device="cpu")
    checkpoint = load_quantized(tmp_path / "out", verify=True)
    n_experts = checkpoint.layout.n_experts
    made = iter(Recorded.made[2:])  # one expert of each block said how large all will be
    model, _ = repro.load_model(tmp_path / "out", device="cpu", n_bits=4)
    for layer, (_, module) in find_experts(model).items():
        for block in ("gate_up", "down"):
            pieces: list[EncodedStack] = []
            while sum(piece.n_matrices for piece in pieces) < n_experts:
                pieces.append(next(made))
            stack = checkpoint.stack(layer, block)  # type: ignore[arg-type]
            for part, tensor in stack.tensors.items():
                assert torch.equal(tensor, torch.cat([p.tensors[part] for p in pieces]))
            widths = stack.widths if layer == checkpoint.layers[0] else (4,)
            for n_bits in widths:
                before = torch.cat([piece.decode(n_bits) for piece in pieces])
                assert torch.equal(stack.decode(n_bits), before)
                if n_bits == 4:
                    assert torch.equal(getattr(module, f"{block}_proj"), before)
    assert next(made, None) is None
