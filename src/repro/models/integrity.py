"""Checks on checkpoint files before they are loaded, and on tensors after.

A truncated shard fails deep inside a library, a missing one loads as random weights, 8-bit
codes without their scales load as plausible numbers: all are found here first, from the
files' own headers, and named.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.errors import CheckpointError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MANIFEST = "repro_quantized.json"  # of a folder that holds experts in a format of this package
UNFINISHED = "repro_quantized.unfinished.json"  # the same while it is being made
ATTACHED = ("sensitivity.npz", "heads.json")  # of a calibration, beside the manifest
_HEADER_LIMIT = 100_000_000
# What a weight may be stored in.  Codes of a quantiser have one or two bytes or fewer and are
# no weights without their scales; whole-number buffers (positions, counters) are wider.
_CODE_DTYPES = re.compile(r"[IU](8|16)|F[468]_\w+|F4")
_EXPERT_IN_NAME = re.compile(r"^(?P<stack>.*\.experts)\.(?P<expert>\d+)\.(?P<part>.+)$")


def is_quantized(folder: Path) -> bool:
    """Whether a folder holds (or is about to hold) a checkpoint that this package quantised."""
    return (folder / MANIFEST).is_file() or (folder / UNFINISHED).is_file()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, in order.

    A single file goes before an index, because Transformers reads it first.

    Raises:
        CheckpointError: there are none, the index is damaged, or a shard is missing.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if is_quantized(folder):
        raise CheckpointError(
            f"checkpoint {folder.name!r} is quantised, its weights are codes: name the folder it "
            "was made from, or load it with repro.load_model"
        )
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(
            f"checkpoint {folder.name!r} holds no {SINGLE!r} and no {INDEX!r}: "
            "point at a folder with safetensors weights (other formats are not read)"
        )
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(content["weight_map"].values()))
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("no file names")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
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


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensors of a safetensors file (``dtype``, ``shape``, ``data_offsets``) by name.

    Raises:
        CheckpointError: not a safetensors file, or its size is not what the header promises.
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
        header.pop("__metadata__", None)
        expected = 8 + length + max((v["data_offsets"][1] for v in header.values()), default=0)
        for tensor in header.values():
            if any(not isinstance(n, int) for n in tensor["shape"]) or not tensor["dtype"]:
                raise ValueError("tensor without shape or type")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = str(error) if isinstance(error, ValueError) else "damaged header"
        raise CheckpointError(
            f"{path.name!r} is not a whole safetensors file ({reason}): copy it again"
        ) from error
    if size != expected:
        raise CheckpointError(
            f"{path.name!r} has {size:,} bytes where its header promises {expected:,}: "
            "the file is truncated or damaged, copy it again"
        )
    return header


def count_parameters(folder: Path) -> int:
    """Values of all weights of a checkpoint, from the headers (tied weights lie there once)."""
    headers = (read_header(path) for path in weight_files(folder))
    return sum(math.prod(tensor["shape"]) for header in headers for tensor in header.values())


def check_files(folder: Path, n_experts: int) -> None:
    """Refuse files that are truncated, hold quantised codes, or lack experts.

    Raises:
        CheckpointError: names the file or the tensor.
    """
    names: list[str] = []
    for path in weight_files(folder):
        for name, tensor in read_header(path).items():
            if _CODE_DTYPES.fullmatch(tensor["dtype"]):
                raise CheckpointError(
                    f"checkpoint {folder.name!r} stores {name!r} as {tensor['dtype']}, codes "
                    "of a quantiser: use the bf16 or FP16 checkpoint, precision is changed here"
                )
            names.append(name)
    check_experts(folder.name, names, n_experts)


def check_experts(label: str, names: Iterable[str], n_experts: int) -> None:
    """Refuse a checkpoint that stores its experts one by one and not each of them.

    Loading would pack the others into one tensor and find it too small, which says nothing
    of the expert that is missing.

    Raises:
        CheckpointError: names the first missing tensor.
    """
    experts: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in names:
        if found := _EXPERT_IN_NAME.match(name):
            experts[found["stack"], found["part"]].add(int(found["expert"]))
    for (stack, part), there in sorted(experts.items()):
        lacking = sorted(set(range(n_experts)) - there)
        if lacking:
            raise CheckpointError(
                f"checkpoint {label!r} lacks {f'{stack}.{lacking[0]}.{part}'!r} "
                f"({len(there)} of {n_experts} experts are there): copy the checkpoint again, or "
                "use the config.json that belongs to it"
            )


def fingerprint(folder: Path) -> str:
    """sha256 over config and weight files: which checkpoint a record speaks of.

    Of a quantised folder the manifest stands for the weights: it holds their hashes.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    manifest = folder / MANIFEST
    weights = [manifest] if manifest.is_file() else weight_files(folder)
    for path in [folder / "config.json", *weights]:
        digest.update(path.name.encode())
        try:
            with open(path, "rb") as handle:
                while chunk := handle.read(1 << 22):
                    digest.update(chunk)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {path.name!r} of checkpoint {folder.name!r} "
                f"({error.strerror or error}): copy the checkpoint again"
            ) from error
    return digest.hexdigest()


def check_loading(name: str, report: dict[str, Any]) -> None:
    """Refuse a load that re-initialised, dropped or reshaped any tensor.

    Raises:
        CheckpointError: names the first tensors concerned.
    """
    for key, meaning in (
        ("mismatched_keys", "have another shape than the configuration says"),
        ("missing_keys", "are not in the checkpoint and would be random"),
        ("unexpected_keys", "belong to no parameter of this architecture"),
        ("error_msgs", "could not be converted"),
    ):
        found = sorted(k if isinstance(k, str) else str(k[0]) for k in report.get(key) or ())
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
    import torch

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
