"""Encoding one layer at a time into a file of its own, and recognising a finished one.

The one idea: a layer's file says in its header what it was made from - source, encoder,
layout version, importance, schemes - and takes its name only when it is whole.  Whether an
earlier run's file can be kept is then a question to that file alone.

Memory: a few experts are read, encoded and copied into the layer's output buffers; no layer
is ever held in its own precision.  (Should some experts need another scheme than those
before them, the block is encoded again in one piece.)

Letters: E experts, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from repro.errors import CheckpointError
from repro.formats.encoded import EncodedStack, scheme_to_json, to_bytes
from repro.formats.layout import LAYOUT_VERSION
from repro.models.checkpoint_reader import CheckpointReader
from repro.models.expert_tensors import BLOCKS, BlockName
from repro.models.quantized_manifest import (
    KIND,
    LayerNote,
    check_tensors,
    dense_file,
    experts_file,
    part_name,
)
from repro.models.tensor_files import (
    StoredTensor,
    hash_file,
    read_metadata,
    stored_tensors,
    write_tensors,
)

Importance = Callable[[int], Mapping[str, Tensor]]
"""What squared errors count in a layer: ``{"gate_up": [E, 1, K], "down": [E, 1, K]}``.

An encoder that asks for second moments of the inputs gets those under ``"gate_up_hessian"``
and ``"down_hessian"``, ``[E, K, K]``.  What is missing counts alike.
"""

MAX_DENSE_BYTES = 4 << 30  # of one file of what is no expert weight
# Values encoded at once on a GPU, for speed; on a CPU a 32nd of a block, for memory.
_GPU_VALUES = 1 << 27


class Encoder(Protocol):
    """A format: a frozen dataclass of its options."""

    @property
    def encode_stack(self) -> Callable[..., EncodedStack]:
        """``(weight[E, N, K], importance, hessian=...)``; the last where a format has it."""
        ...


@dataclass(frozen=True)
class QuantizeJob:
    """What is encoded, how, and where to."""

    reader: CheckpointReader
    folder: Path
    encoder: Encoder
    device: torch.device

    @property
    def options(self) -> dict[str, Any]:
        """The encoder as a manifest names it."""
        return {"class": type(self.encoder).__name__, **dataclasses.asdict(self.encoder)}  # type: ignore[call-overload]

    @property
    def identity(self) -> dict[str, str]:
        """What every file of this job says in its header."""
        return {
            "kind": KIND,
            "layout_version": str(LAYOUT_VERSION),
            "fingerprint": self.reader.fingerprint(),
            "encoder": json.dumps(self.options, sort_keys=True),
        }


def dense_tensors(reader: CheckpointReader) -> dict[str, StoredTensor]:
    """What is no expert weight: biases of experts are, and what no model of ours reads is not.

    Raises:
        CheckpointError: the checkpoint has more decoder layers than its configuration says.
    """
    if beyond := reader.layers_beyond:
        raise CheckpointError(
            f"checkpoint {reader.label!r} stores layer {beyond[0]} where its configuration ends "
            f"at {reader.layout.n_layers} layers: use the checkpoint's own config.json"
        )
    found = {
        name: tensor
        for layer in (None, *range(reader.layout.n_layers))
        for name, tensor in reader.dense_tensors(layer).items()
        if not name.startswith("mtp.")
    }
    for layer in reader.layout.moe_layer_ids:
        found |= {tensor.name: tensor for tensor in reader.experts(layer).biases.values()}
    return found


def copy_dense(job: QuantizeJob, written: Mapping[str, str]) -> dict[str, str]:
    """Write ``dense-*.safetensors``, a tensor at a time; the sha256 of each file.

    Files of this job are kept, unless their hash is another than the one in ``written``.
    """
    groups: list[dict[str, StoredTensor]] = [{}]
    n_bytes = 0
    for name, tensor in dense_tensors(job.reader).items():
        if n_bytes and n_bytes + tensor.n_bytes > MAX_DENSE_BYTES:
            groups.append({})
            n_bytes = 0
        groups[-1][name] = tensor
        n_bytes += tensor.n_bytes
    digests: dict[str, str] = {}
    for number, group in enumerate(groups):
        path = job.folder / dense_file(number)
        digest = hash_file(path) if is_of(job, path) else None
        if digest is None or written.get(path.name, digest) != digest:
            digest = write_tensors(path, group, job.identity, job.reader.read)
        digests[path.name] = digest
    return digests


def _metadata(path: Path) -> dict[str, str] | None:
    """What a whole file of ours says in its header; None for anything else."""
    if not path.is_file():
        return None
    try:
        stored_tensors(path)
    except CheckpointError:
        return None
    return read_metadata(path)


def is_of(job: QuantizeJob, path: Path) -> bool:
    """Whether a file is whole and was written by this very job."""
    metadata = _metadata(path) or {}
    return all(metadata.get(key) == value for key, value in job.identity.items())


def finished_layer(job: QuantizeJob, layer: int, importance: str) -> LayerNote | None:
    """The layer as an earlier run left it, if it is whole and of this very job."""
    path = job.folder / experts_file(layer)
    metadata = _metadata(path)
    if metadata is None:
        return None
    expected = {**job.identity, "layer": str(layer), "importance": importance}
    if any(metadata.get(key) != value for key, value in expected.items()):
        return None
    try:
        note = LayerNote(
            path.name, json.loads(metadata["schemes"]), json.loads(metadata["notes"]), importance
        )
        check_tensors(layer, note, job.reader.layout.n_experts, stored_tensors(path))
    except (CheckpointError, ValueError, KeyError):
        return None
    return note


def encode_layer(
    job: QuantizeJob, layer: int, importance: Mapping[str, Tensor] | None
) -> tuple[LayerNote, str]:
    """Encode and write one layer; its note and the sha256 of its file."""
    tensors: dict[str, Tensor] = {}
    schemes: dict[str, Any] = {}
    notes: dict[str, dict[str, int]] = {}
    for block in BLOCKS:
        stack = encode_block(job, layer, block, importance)
        schemes[block], notes[block] = scheme_to_json(stack.scheme), dict(stack.notes)
        for name, tensor in stack.tensors.items():
            tensors[part_name(layer, block, name)] = tensor
    note = LayerNote(experts_file(layer), schemes, notes, hash_importance(importance))
    metadata = {
        **job.identity,
        "layer": str(layer),
        "importance": note.importance,
        "schemes": json.dumps(schemes),
        "notes": json.dumps(notes),
    }
    return note, write_tensors(job.folder / note.file, tensors, metadata)


def encode_block(
    job: QuantizeJob,
    layer: int,
    block: BlockName,
    importance: Mapping[str, Tensor] | None,
    n_first: int | None = None,
) -> EncodedStack:
    """All experts of a block (or the first ``n_first``), a few at a time."""
    experts = job.reader.experts(layer)
    n_all = experts.layout.n_experts
    n_experts = n_all if n_first is None else n_first
    n_values = experts.shape(block)[0] * experts.shape(block)[1]
    step = max(1, n_all // 32, (_GPU_VALUES if job.device.type == "cuda" else 0) // n_values)
    tensors: dict[str, Tensor] = {}
    notes: dict[str, int] = {}
    scheme: Any = None
    first = 0
    while first < n_experts:
        last = min(first + step, n_experts)
        weight = experts.read(block, first, last).to(job.device)
        try:
            piece = job.encoder.encode_stack(
                weight, **_statistics(importance, block, n_all, first, last)
            )
        except CheckpointError as error:
            raise CheckpointError(
                f"layer {layer}, {block} of {job.reader.label!r}, experts counted from {first}: "
                f"{error}"
            ) from error
        del weight
        if scheme is not None and piece.scheme != scheme:
            # Rows that ask for another scheme (scales, say) make it the scheme of them all.
            tensors, notes, scheme, first, step = {}, {}, None, 0, n_experts
            continue
        if scheme is None:
            scheme = piece.scheme
            tensors = {
                name: torch.empty((n_experts, *tensor.shape[1:]), dtype=tensor.dtype)
                for name, tensor in piece.tensors.items()
            }
        for name, tensor in piece.tensors.items():
            tensors[name][first:last] = tensor
        for name, count in piece.notes.items():
            notes[name] = notes.get(name, 0) + count
        first = last
    return EncodedStack(scheme, tensors, notes)


def _statistics(
    importance: Mapping[str, Tensor] | None, block: str, n_experts: int, first: int, last: int
) -> dict[str, Tensor]:
    """Arguments of an encoder for experts ``first`` to ``last``."""
    found = {}
    for name, key in (("importance", block), ("hessian", f"{block}_hessian")):
        tensor = (importance or {}).get(key)
        if tensor is not None:
            per_expert = tensor.dim() == 3 and len(tensor) == n_experts
            found[name] = tensor[first:last] if per_expert else tensor
    return found


def hash_importance(importance: Mapping[str, Tensor] | None) -> str:
    """sha256 of what weighed the errors of a layer."""
    if importance is None:
        return "none"
    digest = hashlib.sha256()
    for name in sorted(importance):
        digest.update(f"{name} {tuple(importance[name].shape)}".encode())
        for part in importance[name].unbind():
            digest.update(to_bytes(part.to(torch.float32)))
    return digest.hexdigest()
