"""A Transformers model from a quantised checkpoint, its experts decoded at one width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from repro.errors import CheckpointError, unknown_name
from repro.models.expert_tensors import BLOCKS, check_rows
from repro.models.layout import check_model, find_experts
from repro.models.loading import load_local_tokenizer
from repro.models.quantized import load_quantized
from repro.models.skeleton import (
    build_skeleton,
    check_filled,
    fused_name,
    place,
    target_name,
    tie_missing,
)


def load_quantized_model(
    folder: Path, device: torch.device, dtype: torch.dtype | str, n_bits: int | None = None
) -> tuple[Any, Any]:
    """The model and tokenizer of a quantised folder; see :func:`repro.load_model`.

    Raises:
        CheckpointError: as :func:`repro.models.quantized.load_quantized`; no tokenizer; values
            beyond the range of ``dtype``.
        UnknownNameError: ``n_bits`` is no width of the checkpoint.
    """
    from transformers import GenerationConfig

    checkpoint = load_quantized(folder)
    n_bits = max(checkpoint.widths) if n_bits is None else n_bits
    if n_bits not in checkpoint.widths:
        raise unknown_name("width", str(n_bits), [str(width) for width in checkpoint.widths])
    if not isinstance(dtype, torch.dtype):
        own = getattr(checkpoint.config.get_text_config(decoder=True), "dtype", None)
        stored = next(t.dtype for t in checkpoint.dense.values() if t.dtype.is_floating_point)
        dtype = own if isinstance(own, torch.dtype) else stored
    model = build_skeleton(checkpoint.config, dtype, device)
    known = set(model.state_dict())
    architecture = checkpoint.layout.architecture
    for name, tensor in checkpoint.dense.items():
        goal = target_name(architecture, name, known)
        if goal is not None:
            values = tensor.read()
            check_rows(checkpoint.label, name, values)
            place(model, goal, values, device)
    for layer, (name, _) in find_experts(model).items():
        for block in BLOCKS:
            weight = checkpoint.decode(layer, block, n_bits, dtype=dtype, device=device)
            if checkpoint.layout.is_transposed:
                weight = weight.transpose(1, 2).contiguous()
            place(model, fused_name(name, block), weight, device)
    tie_missing(model, known)
    check_filled(checkpoint.label, model, known)
    check_model(model)
    _check_range(checkpoint.label, model)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    tokenizer = load_local_tokenizer(checkpoint.label, folder, model)
    if tokenizer is None:
        raise CheckpointError(
            f"quantised checkpoint {checkpoint.label!r} brings no tokenizer: "
            "add its tokenizer.json and tokenizer_config.json"
        )
    return model, tokenizer


def _check_range(label: str, model: Any) -> None:
    """Refuse what was finite as it is stored and is not in the type of the model.

    Raises:
        CheckpointError: names the first tensor.
    """
    for name, parameter in model.named_parameters():
        if parameter.numel() and not bool(
            torch.isfinite(torch.stack(torch.aminmax(parameter))).all()
        ):
            raise CheckpointError(
                f"{name!r} of {label!r} overflows {parameter.dtype}: "
                "load it with dtype='bfloat16' or dtype='float32'"
            )
