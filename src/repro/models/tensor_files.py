"""Reading and writing safetensors files one tensor at a time, straight into and out of memory.

The one idea: the header says where each tensor's bytes lie, so a stack of experts is filled
by reading each expert into its place.  Mapping a file into memory would hold the file's
pages beside the copy, and the format's own writer copies every tensor before it writes one:
with layers of gigabytes both would double the peak.

Left out: types that are no weights (fp8, packed codes) and anything but safetensors.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.errors import CheckpointError, OutputError
from repro.files import atomic_path
from repro.models.integrity import read_header

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_WRITE_BYTES = 1 << 24


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: where it lies and what it is."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The whole tensor."""
        target = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(target)
        return target

    def read_into(self, target: Tensor, first: int = 0) -> None:
        """Fill ``target`` with the rows from ``first`` on of the leading dimension.

        ``target`` has the type of the tensor and is contiguous; it may be smaller.

        Raises:
            CheckpointError: the file ends too early or cannot be read.
        """
        if target.numel() == 0:
            return
        row_bytes = self.n_bytes // self.shape[0] if self.shape else self.n_bytes
        memory = _memory(target)
        try:
            with open(self.path, "rb", buffering=0) as handle:
                handle.seek(self.offset + first * row_bytes)
                done = 0
                while done < len(memory):
                    n_read = handle.readinto(memory[done:])
                    if not n_read:
                        raise CheckpointError(
                            f"{self.path.name!r} ends inside {self.name!r}: the file is "
                            "truncated, copy it again"
                        )
                    done += n_read
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.name!r} from {self.path.name!r} "
                f"({error.strerror or error}): copy the checkpoint again"
            ) from error


Tensors = Mapping[str, "Tensor | StoredTensor"]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file by name, from its header alone.

    Raises:
        CheckpointError: not a whole safetensors file, or a type that is no weight.
    """
    header = read_header(path)
    with open(path, "rb") as handle:
        start = 8 + int(struct.unpack("<Q", handle.read(8))[0])
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{path.name!r} stores {name!r} as {entry['dtype']}, codes of a quantiser: "
                "use the bf16 or FP16 checkpoint, precision is changed here"
            )
        tensor = StoredTensor(
            path,
            name,
            DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            start + entry["data_offsets"][0],
        )
        if tensor.n_bytes != entry["data_offsets"][1] - entry["data_offsets"][0]:
            raise CheckpointError(
                f"{path.name!r} gives {name!r} another number of bytes than its shape "
                f"{list(tensor.shape)} has: the file is damaged, copy it again"
            )
        found[name] = tensor
    return found


def read_metadata(path: Path) -> dict[str, str]:
    """The notes in a file's header; empty without."""
    with open(path, "rb") as handle:
        length = int(struct.unpack("<Q", handle.read(8))[0])
        header: dict[str, Any] = json.loads(handle.read(length))
    return dict(header.get("__metadata__") or {})


def file_bytes(tensors: Tensors, metadata: Mapping[str, str]) -> int:
    """Size of the file that :func:`write_tensors` will write."""
    return len(_header(tensors, metadata)) + sum(_n_bytes(tensor) for tensor in tensors.values())


def free_bytes(folder: Path) -> int:
    """Free space where ``folder`` lies or will lie."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(target: Path, n_bytes: int) -> None:
    """Refuse to begin what cannot fit.

    Raises:
        OutputError: names the file, the bytes it needs and the bytes that are free.
    """
    n_free = free_bytes(target.parent)
    if n_bytes > n_free:
        raise _no_space(target, n_bytes, os.strerror(errno.ENOSPC))


def write_tensors(
    target: Path,
    tensors: Tensors,
    metadata: Mapping[str, str],
    read: Callable[[StoredTensor], Tensor] = StoredTensor.read,
) -> str:
    """Write ``tensors`` to ``target``, whole or not at all; returns the file's sha256.

    Tensors that are given as places in another file are read one at a time by ``read``.

    Raises:
        OutputError: the folder cannot be written or the disk is full; the latter says how
            many bytes the file needs and how many are free.
    """
    n_bytes = file_bytes(tensors, metadata)
    check_space(target, n_bytes)
    digest = hashlib.sha256()
    with atomic_path(target) as temporary:
        try:
            with open(temporary, "wb", buffering=0) as handle:
                _write(handle, _header(tensors, metadata), digest)
                for tensor in _ordered(tensors).values():
                    held = read(tensor) if isinstance(tensor, StoredTensor) else tensor
                    _write(handle, _bytes(held), digest)
                # The name must not appear before the bytes are on the disk.
                os.fsync(handle.fileno())
        except OSError as error:
            if isinstance(error, OutputError) or error.errno not in _FULL:
                raise
            temporary.unlink(missing_ok=True)  # what it took is free again when we say so
            raise _no_space(target, n_bytes, error.strerror) from error
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """sha256 of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _write(handle: Any, data: bytes | memoryview, digest: Any) -> None:
    view = memoryview(data)
    for start in range(0, len(view), _WRITE_BYTES):
        piece = view[start : start + _WRITE_BYTES]
        digest.update(piece)
        while piece:
            piece = piece[handle.write(piece) :]


def _no_space(target: Path, n_bytes: int, reason: str | None) -> OutputError:
    return OutputError(
        f"cannot write {str(target)!r} ({reason}): it needs {n_bytes:,} bytes and "
        f"{free_bytes(target.parent):,} are free: free space there, or name another folder"
    )


def _n_bytes(tensor: Tensor | StoredTensor) -> int:
    return tensor.n_bytes if isinstance(tensor, StoredTensor) else tensor.nbytes


def _ordered(tensors: Tensors) -> dict[str, Tensor | StoredTensor]:
    """Widest type first, so that each tensor begins at a multiple of its item size."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    return {name: tensors[name] for name in names}


def _header(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, tensor in _ordered(tensors).items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + _n_bytes(tensor)],
        }
        offset += _n_bytes(tensor)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: Tensor) -> bytes | memoryview:
    """A view of a tensor's bytes; copies only what lies on another device or in pieces."""
    return _memory(tensor.detach().cpu().contiguous()) if tensor.numel() else b""


def _memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
