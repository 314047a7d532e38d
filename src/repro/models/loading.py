"""``load_model``: by bundled name, folder or hub id, and never silently wrong.

Everything goes through Transformers' own ``from_pretrained``; what is added is refusal:
unknown architectures and dense models, truncated files, tensors that would be
re-initialised, quantised codes, NaN weights, a tokenizer that is not there, a missing
device, an unreachable hub - each in one sentence.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from repro.errors import CheckpointError, DataUnavailableError, MissingDeviceError, unknown_name
from repro.models.integrity import check_files, check_finite, check_loading, is_quantized
from repro.models.layout import check_model, inspect_config, read_config
from repro.models.published import PUBLISHED
from repro.models.specs import SPECS
from repro.paths import models_dir, relative

DTYPES = ("float32", "float64", "bfloat16", "float16")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"
)  # fmt: skip
# Spaces, digits, contractions, letters beyond ASCII: where pre-tokenizers differ.
_PROBE = "It's 12345 things:\n\n  x += 1\tZoë won't écrire 漢字."


def resolve_device(device: str | torch.device) -> torch.device:
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
            f"device {str(device)!r} does not exist: use auto, cpu or cuda"
        ) from error
    if chosen.type not in ("cpu", "cuda"):
        raise MissingDeviceError(f"device {str(device)!r} is not supported: use auto, cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise MissingDeviceError(
            f"device {str(device)!r} is not on this machine: use device='cpu', "
            "or a machine with a GPU"
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise MissingDeviceError(
            f"device {str(device)!r} is not on this machine: it has "
            f"{torch.cuda.device_count()} GPU(s), counted from cuda:0"
        )
    return chosen


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """``auto`` is float32 on a CPU (bf16 decodes slower there), the checkpoint's own on a GPU.

    Raises:
        UnknownNameError: no such type, or none that weights are computed in.
    """
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in DTYPES:
        raise unknown_name("dtype", name, ("auto", *DTYPES))
    return getattr(torch, name)  # type: ignore[no-any-return]


def _locate(name_or_path: str | Path) -> tuple[str, Path | None]:
    """(label, folder) of a local checkpoint, or (hub id, None)."""
    text = str(name_or_path)
    if text in SPECS:
        folder = models_dir() / text
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"bundled model {text!r} is missing from {relative(folder)!r}: "
                "check out the repository again"
            )
        return text, folder
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return folder.resolve().name, folder
    if text in PUBLISHED:
        return PUBLISHED[text].hub_id, None
    looks_like_one = text.startswith((".", "/", "~")) or text.count("/") > 1 or folder.is_file()
    if looks_like_one or isinstance(name_or_path, Path):
        raise CheckpointError(
            f"no checkpoint folder {text!r}: give a bundled name, a folder or a hub id"
        )
    if "/" not in text:
        raise unknown_name("model", text, [*SPECS, *PUBLISHED])
    return text, None


def local_folder(name_or_path: str | Path, revision: str | None = None) -> tuple[str, Path]:
    """(label, folder) of a checkpoint whose files can be read a tensor at a time.

    A hub id is fetched into the hub's own cache, or found there.

    Raises:
        UnknownNameError, CheckpointError, DataUnavailableError: as :func:`load_model`.
    """
    label, folder = _locate(name_or_path)
    if folder is not None:
        return label, folder
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return label, Path(snapshot_download(label, revision=revision, allow_patterns=wanted))
    except Exception as error:  # the library raises many kinds
        raise _loading_error(f"checkpoint {label!r}", False, error, "") from error


def load_model(
    name_or_path: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    *,
    revision: str | None = None,
    n_bits: int | None = None,
) -> tuple[Any, Any]:
    """Load a Mixture-of-Experts model and its tokenizer, checked.

    Args:
        name_or_path: bundled name, published name, checkpoint folder (also one that
            ``repro quantize`` made) or hub id.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``auto`` (float32 on a CPU, the checkpoint's own on a GPU) or a dtype.
        revision: commit or tag on the hub.
        n_bits: of a quantised folder, the width its experts are decoded at; the largest
            by default.

    Returns:
        ``(model, tokenizer)``: the model in evaluation mode.

    Raises:
        UnknownNameError: neither a known name, nor a folder, nor the form of a hub id; a
            width that a quantised folder does not hold.
        CheckpointError: unsupported layout; missing, truncated, quantised or non-finite
            weights; no tokenizer that fits; ``n_bits`` for what is not quantised.
        DataUnavailableError: the hub cannot be reached or refuses.
        MissingDeviceError: no such device here.
    """
    target = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, target)
    label, folder = _locate(name_or_path)
    if folder is not None and is_quantized(folder):
        from repro.models.quantized_loading import load_quantized_model

        return load_quantized_model(folder, target, torch_dtype, n_bits)
    if n_bits is not None:
        raise CheckpointError(
            f"checkpoint {label!r} is not quantised, so it cannot be read at {n_bits} bits: "
            "quantise it first, or leave n_bits out"
        )
    if folder is not None:
        layout = inspect_config(read_config(folder))
        check_files(folder, layout.n_experts)
    source = str(folder) if folder is not None else label
    model, report = _from_pretrained(label, source, folder is not None, torch_dtype, revision)
    check_loading(label, report)
    check_model(model)
    check_finite(label, model)
    tokenizer = _load_tokenizer(label, source, folder is not None, revision)
    _check_tokenizer(label, tokenizer, folder, model.get_input_embeddings().num_embeddings)
    return model.to(target).eval(), tokenizer


def load_local_tokenizer(label: str, folder: Path, model: Any) -> Any:
    """The checked tokenizer in ``folder``; None if it holds no file of one.

    Raises:
        CheckpointError: it cannot be loaded or does not fit the model.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    tokenizer = _load_tokenizer(label, str(folder), True, None)
    _check_tokenizer(label, tokenizer, folder, model.get_input_embeddings().num_embeddings)
    return tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Transformers' own table of problems off the screen: the error names them."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _from_pretrained(
    label: str, source: str, local: bool, dtype: torch.dtype | str, revision: str | None
) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {} if local else {"revision": revision}
    try:
        if not local:
            inspect_config(AutoConfig.from_pretrained(source, **options))
        with _quiet():
            # Mismatched shapes are let through here to be refused by name in check_loading.
            loaded = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=local,
                **options,
            )
    except CheckpointError:
        raise
    except Exception as error:  # the libraries below raise many kinds, some of their own
        remedy = "copy the checkpoint again"
        raise _loading_error(f"checkpoint {label!r}", local, error, remedy) from error
    model, report = loaded
    return model, dict(report)


def _load_tokenizer(label: str, source: str, local: bool, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    options: dict[str, Any] = {} if local else {"revision": revision}
    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(source, local_files_only=local, **options)
    except Exception as error:  # as above
        remedy = "copy its tokenizer.json and tokenizer_config.json again"
        raise _loading_error(f"tokenizer of {label!r}", local, error, remedy) from error


def _check_tokenizer(label: str, tokenizer: Any, folder: Path | None, n_embeddings: int) -> None:
    """Refuse a tokenizer that encodes nothing or more than the model has; warn of a swapped one."""
    ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    if len(set(ids)) < 3:
        # Without files Transformers builds an empty tokenizer for some types, in silence.
        raise CheckpointError(
            f"checkpoint {label!r} brings no tokenizer that encodes text: "
            "add its tokenizer.json and tokenizer_config.json"
        )
    if max(ids) >= n_embeddings:
        raise CheckpointError(
            f"the tokenizer of {label!r} gives id {max(ids)} where the model has {n_embeddings} "
            "embeddings: use the tokenizer that belongs to the checkpoint"
        )
    if folder is None or not (folder / "tokenizer.json").is_file():
        return
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if raw.encode(_PROBE, add_special_tokens=False).ids != ids:
        warnings.warn(
            f"the tokenizer of {label!r} was loaded as {type(tokenizer).__name__}, which gives "
            "other ids than its tokenizer.json: save it once with PreTrainedTokenizerFast("
            "tokenizer_file=...).save_pretrained(...) if the file is right",
            stacklevel=3,
        )


def _loading_error(what: str, local: bool, error: Exception, remedy: str) -> Exception:
    lines = str(error).strip().splitlines() or [""]
    reason = " ".join(lines[0].split())[:160].rstrip(".: ") or type(error).__name__
    if local:
        return CheckpointError(f"{what} cannot be loaded ({reason}): {remedy}")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}
    remedy = (
        "unset HF_HUB_OFFLINE to allow the hub, or give a local folder"
        if offline
        else "check the id and the network, log in if the model is gated, or give a local folder"
    )
    return DataUnavailableError(f"hub {what} cannot be loaded ({reason}): {remedy}")
