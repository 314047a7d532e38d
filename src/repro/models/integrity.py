"""Checks on checkpoint files before they are loaded, and on tensors after.

A truncated shard fails deep inside a library, a missing one loads as random weights:
both are found here first, from the files' own headers, and named.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import torch

from repro.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HEADER_LIMIT = 100_000_000


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, in order.

    Raises:
        CheckpointError: there are none, the index is damaged, or a shard is missing.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{INDEX!r} in {folder.name!r} is damaged ({type(error).__name__}): "
                "copy the checkpoint again"
            ) from error
        for name in names:
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"checkpoint {folder.name!r} lacks {name!r}, which its index names: "
                    "copy the missing file"
                )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise CheckpointError(
        f"checkpoint {folder.name!r} holds no {SINGLE!r} and no {INDEX!r}: "
        "point at a folder with safetensors weights (other formats are not read)"
    )


def check_file(path: Path) -> None:
    """Compare a safetensors file's size with what its header promises.

    Raises:
        CheckpointError: truncated, or not a safetensors file.
    """
    size = path.stat().st_size
    with open(path, "rb") as handle:
        head = handle.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _HEADER_LIMIT + 1
        raw = handle.read(length) if length <= min(size, _HEADER_LIMIT) else b""
    try:
        if len(raw) != length:
            raise ValueError("header cut off")
        header: dict[str, Any] = json.loads(raw)
        spans = [v["data_offsets"] for k, v in header.items() if k != "__metadata__"]
        expected = 8 + length + max((end for _, end in spans), default=0)
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path.name!r} is not a whole safetensors file ({error}): copy it again"
        ) from error
    if size != expected:
        raise CheckpointError(
            f"{path.name!r} has {size:,} bytes where its header promises {expected:,}: "
            "the file is truncated or damaged, copy it again"
        )


def fingerprint(folder: Path) -> str:
    """sha256 over config and weight files: which checkpoint a record speaks of."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *weight_files(folder)]:
        digest.update(path.name.encode())
        with open(path, "rb") as handle:
            while chunk := handle.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def check_loading(name: str, report: dict[str, Any]) -> None:
    """Refuse a load that re-initialised, dropped or reshaped any tensor.

    Raises:
        CheckpointError: names the first tensors concerned.
    """
    for key, meaning in (
        ("missing_keys", "are not in the checkpoint and would be random"),
        ("mismatched_keys", "have another shape than the configuration says"),
        ("unexpected_keys", "belong to no parameter of this architecture"),
        ("error_msgs", "could not be converted"),
    ):
        found = sorted(str(k) for k in report.get(key) or ())
        if found:
            shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if found[3:] else "")
            raise CheckpointError(
                f"checkpoint {name!r}: {len(found)} tensors {meaning} ({shown}): "
                "use the checkpoint's own config.json, or copy the checkpoint again"
            )


def check_finite(name: str, model: torch.nn.Module) -> None:
    """Refuse NaN or infinite weights.

    Raises:
        CheckpointError: names the tensor and how many values are concerned.
    """
    for key, tensor in model.named_parameters():
        if tensor.is_meta or not tensor.is_floating_point():
            continue
        # One pass without a mask: NaN and infinity survive in the sum of zeros.
        if torch.isnan((tensor.detach() * 0).sum()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"checkpoint {name!r}: {bad} values of {key!r} are NaN or infinite: "
                "copy it again or convert it anew from its source"
            )
