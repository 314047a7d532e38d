"""``list_models`` and ``load_model``: by bundled name, folder or hub id, and never silently wrong.

Everything goes through Transformers' own ``from_pretrained``; what is added is refusal:
unknown architectures and dense models, truncated files, tensors that would be
re-initialised, NaN weights, a missing device, an unreachable hub - each in one sentence.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from repro.errors import CheckpointError, DataUnavailableError, MissingDeviceError, unknown_name
from repro.models.integrity import check_file, check_finite, check_loading, weight_files
from repro.models.layout import check_model, inspect_config, read_config
from repro.models.published import PUBLISHED
from repro.paths import models_dir, relative

BUNDLED = {
    "moe-fine": "Qwen3-MoE layout: 6 layers, 48 experts of width 64, top-4 (trained here)",
    "moe-shared": "Qwen2-MoE layout: 4 layers, 16 experts of width 128, top-2, shared expert "
    "(trained here)",
}


@dataclass(frozen=True)
class ModelInfo:
    """One line of ``list_models``: sizes in parameters and bytes, and where it comes from."""

    name: str
    kind: str  # "bundled" or "published"
    summary: str
    n_params: int | None
    n_bytes: int | None
    where: str
    available: bool


def list_models() -> list[ModelInfo]:
    """Bundled small models first, then the published configurations of both papers."""
    found = []
    for name, summary in BUNDLED.items():
        folder = models_dir() / name
        there = (folder / "config.json").is_file()
        n_bytes = sum(f.stat().st_size for f in weight_files(folder)) if there else None
        found.append(
            ModelInfo(
                name,
                "bundled",
                summary,
                n_bytes // 2 if n_bytes else None,
                n_bytes,
                relative(folder),
                there,
            )
        )
    for name, model in PUBLISHED.items():
        dims = model.dimensions
        summary = (
            f"{model.n_moe_layers} MoE layers, {dims.routed_experts} experts of width "
            f"{dims.moe_intermediate_size}, top-{dims.top_k}"
        )
        params = model.count().total
        found.append(ModelInfo(name, "published", summary, params, 2 * params, model.hub_id, False))
    return found


def resolve_device(device: str) -> torch.device:
    """``auto`` is the first GPU, else the CPU.

    Raises:
        MissingDeviceError: a GPU was asked for by name and there is none, or no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise MissingDeviceError(
            f"device {device!r} does not exist: use auto, cpu or cuda"
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise MissingDeviceError(
            f"device {device!r} is not on this machine: use device='cpu', or a machine with a GPU"
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise MissingDeviceError(
            f"device {device!r} is not here: this machine has {torch.cuda.device_count()} GPU(s)"
        )
    return chosen


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """``auto`` is float32 on a CPU (bf16 decodes slower there), the checkpoint's own on a GPU."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    choices = ("float32", "float64", "bfloat16", "float16")
    if dtype not in choices:
        raise unknown_name("dtype", dtype, ("auto", *choices))
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def _locate(name_or_path: str | Path) -> tuple[str, Path | None]:
    """(label, folder) of a local checkpoint, or (hub id, None)."""
    text = str(name_or_path)
    if text in BUNDLED:
        folder = models_dir() / text
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"bundled model {text!r} is missing from {relative(folder)!r}: "
                "check out the repository again"
            )
        return text, folder
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder.name, folder
    if text in PUBLISHED:
        return PUBLISHED[text].hub_id, None
    is_path = text.startswith((".", "/", "~")) or text.count("/") > 1
    if is_path or "/" not in text:
        if is_path:
            raise CheckpointError(
                f"no checkpoint folder {text!r}: give a bundled name, a folder or a hub id"
            )
        raise unknown_name("model", text, [*BUNDLED, *PUBLISHED])
    return text, None


def load_model(
    name_or_path: str | Path,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    *,
    revision: str | None = None,
) -> tuple[Any, Any]:
    """Load a Mixture-of-Experts model and its tokenizer, checked.

    Args:
        name_or_path: bundled name, published name, checkpoint folder or hub id.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``auto`` (float32 on a CPU, the checkpoint's own on a GPU) or a dtype.
        revision: commit or tag on the hub.

    Returns:
        ``(model, tokenizer)``: the model in evaluation mode.

    Raises:
        UnknownNameError: neither a known name, nor a folder, nor the form of a hub id.
        CheckpointError: unsupported layout; missing, truncated or non-finite weights.
        DataUnavailableError: the hub cannot be reached or refuses.
        MissingDeviceError: no such device here.
    """
    target = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, target)
    label, folder = _locate(name_or_path)
    if folder is not None:
        inspect_config(read_config(folder))
        for path in weight_files(folder):
            check_file(path)
    source = str(folder) if folder is not None else label
    model, report = _from_pretrained(label, source, folder is not None, torch_dtype, revision)
    check_loading(label, report)
    check_model(model)
    check_finite(label, model)
    return model.to(target).eval(), _load_tokenizer(label, source, folder is not None, revision)


def _from_pretrained(
    label: str, source: str, local: bool, dtype: torch.dtype | str, revision: str | None
) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {} if local else {"revision": revision}
    try:
        if not local:
            inspect_config(AutoConfig.from_pretrained(source, **options))
        loaded = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True, local_files_only=local, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _loading_error(label, local, error) from error
    model, report = loaded
    return model, dict(report)


def _load_tokenizer(label: str, source: str, local: bool, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    options: dict[str, Any] = {} if local else {"revision": revision}
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=local, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _loading_error(f"tokenizer of {label}", local, error) from error


def _loading_error(label: str, local: bool, error: Exception) -> Exception:
    reason = str(error).strip().split("\n", 1)[0][:200]
    if local:
        return CheckpointError(f"{label!r} cannot be loaded ({reason}): copy the checkpoint again")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}
    remedy = (
        "unset HF_HUB_OFFLINE to allow the hub, or give a local folder"
        if offline
        else "check the id and the network, log in if the model is gated, or give a local folder"
    )
    return DataUnavailableError(f"hub model {label!r} cannot be loaded ({reason}): {remedy}")
