"""``quantize``: a published checkpoint to encoded experts, one layer in memory at a time.

The one idea: each layer becomes one file that appears under its name only when it is whole,
and the manifest is written last.  So a run that was killed goes on with the next layer, a
full disk leaves nothing that could be mistaken for a layer, and a folder with a manifest has
all of it.

Left out: how a layer is encoded (:mod:`repro.models.quantized_layers`), and where importance
comes from (calibration).

Letters: E experts, K columns (inputs).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from repro.errors import CheckpointError, OutputError
from repro.files import output_error, write_bytes, write_text
from repro.formats.any_precision import AnyPrecision
from repro.formats.encoded import all_tensors
from repro.models.checkpoint_reader import CheckpointReader
from repro.models.expert_tensors import BLOCKS
from repro.models.integrity import ATTACHED, MANIFEST, UNFINISHED
from repro.models.loading import resolve_device
from repro.models.quantized_layers import (
    Encoder,
    Importance,
    QuantizeJob,
    copy_dense,
    dense_tensors,
    encode_block,
    encode_layer,
    finished_layer,
    hash_importance,
    is_of,
)
from repro.models.quantized_manifest import (
    FileNote,
    LayerNote,
    Manifest,
    experts_file,
    read_manifest,
)
from repro.models.skeleton import build_skeleton, check_stored
from repro.models.tensor_files import free_bytes, hash_file

_COPIED = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json "
    "special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt tokenizer.model "
    "chat_template.jinja chat_template.json"
).split()


def quantize(
    model_name_or_path: str | Path,
    out_dir: str | Path,
    format: Encoder | None = None,
    importance: Importance | None = None,
    *,
    force: bool = False,
    progress: Callable[[str], None] = print,
    device: str | torch.device = "auto",
) -> Manifest:
    """Encode the experts of a checkpoint into ``out_dir``, layer by layer.

    Args:
        model_name_or_path: as for :func:`repro.load_model`.
        out_dir: made if need be; layers that an earlier run of the same source, format and
            importance finished there are kept.
        format: an encoder of :mod:`repro.formats`; ``AnyPrecision()`` by default.
        importance: which errors matter more, by layer; without, all alike.  See
            :data:`repro.models.quantized_layers.Importance`.
        force: replace a quantised checkpoint of another source, format or importance.
        progress: told what is being done and how long it will take.
        device: where weights are encoded.

    Returns:
        The manifest of the finished checkpoint.

    Raises:
        CheckpointError: the source is damaged, quantised already, or not finite.
        OutputError: ``out_dir`` holds something else, cannot be written, or has too little
            space (named: the file, the bytes it needs and the bytes that are free).
    """
    target = resolve_device(device)
    reader = CheckpointReader(model_name_or_path)
    folder = Path(out_dir).expanduser()
    job = QuantizeJob(reader, folder, AnyPrecision() if format is None else format, target)
    _check_model(reader)
    progress(f"{reader.label}: reading all of it once, for its fingerprint")
    finished = _prepare(job, force, importance)
    is_closed = finished is not None
    layers: dict[int, LayerNote] = {}
    # Of a finished checkpoint: a file that changed since is made again, never taken for right.
    written = {} if finished is None else {n: f.sha256 for n, f in finished.files.items()}
    digests: dict[str, str] = copy_dense(job, written)
    n_layers, n_encoded, spent_s = reader.layout.n_moe_layers, 0, 0.0
    for number, layer in enumerate(reader.layout.moe_layer_ids, start=1):
        began_s = time.perf_counter()
        weights = None if importance is None else importance(layer)
        name, hashed = experts_file(layer), hash_importance(weights)
        if finished is not None and finished.layers[layer].importance != hashed:
            if not force:
                raise _occupied(folder, "a finished checkpoint made with other importance")
            for attached in ATTACHED:  # of the calibration that is replaced
                (folder / attached).unlink(missing_ok=True)
        note = finished_layer(job, layer, hashed)
        if note is not None:
            digests[name] = hash_file(folder / name)
            note = note if written.get(name, digests[name]) == digests[name] else None
        if note is None and is_closed:  # the manifest must not outlive what it speaks of
            _begin(job)
            is_closed = False
        if note is not None:
            progress(f"layer {layer} ({number} of {n_layers}): finished before")
        else:
            note, digests[name] = encode_layer(job, layer, weights)
            n_encoded, took_s = n_encoded + 1, time.perf_counter() - began_s
            spent_s += took_s
            left_s = spent_s / n_encoded * (n_layers - number)
            progress(
                f"layer {layer} ({number} of {n_layers}): {took_s:.1f} s, about {left_s:.0f} s left"
            )
        layers[layer] = note
    return _finish(job, layers, digests, progress)


def _check_model(reader: CheckpointReader) -> None:
    """Refuse now what would be refused when the result is loaded."""
    model = build_skeleton(reader.config, torch.float32, torch.device("cpu"))
    stored = {name: tensor.shape for name, tensor in dense_tensors(reader).items()}
    check_stored(reader.label, reader.layout.architecture, model, stored)


def _prepare(job: QuantizeJob, force: bool, importance: Importance | None) -> Manifest | None:
    """Make the folder ready; the manifest of this very job if it was finished before."""
    folder = job.folder
    if folder.resolve() == job.reader.folder.resolve():
        raise OutputError(f"{str(folder)!r} is the checkpoint itself: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise output_error(folder, error) from error
    ours = next((name for name in (MANIFEST, UNFINISHED) if name in names), None)
    if ours is None and any(n == "config.json" or n.endswith(".safetensors") for n in names):
        raise OutputError(
            f"{str(folder)!r} holds a checkpoint that was not quantised here: name another folder"
        )
    if ours is not None and not _is_same(job, ours):
        if not force:
            raise _occupied(folder, "a quantised checkpoint of another source, format or version")
        ours = None
    if ours != MANIFEST:
        _check_space(job, importance)
        _begin(job)
        if force and names & {MANIFEST, UNFINISHED}:
            _remove_others(job, names)
    for pattern in (".dense-*.part", ".experts-layer-*.part"):
        for left_over in folder.glob(pattern):  # of a run that was killed while it wrote
            left_over.unlink(missing_ok=True)
    for name in _COPIED:
        source, copy = job.reader.folder / name, folder / name
        if source.is_file():
            data = source.read_bytes()
            if not copy.is_file() or copy.read_bytes() != data:
                write_bytes(copy, data)
    return read_manifest(folder) if ours == MANIFEST else None


def _remove_others(job: QuantizeJob, names: Iterable[str]) -> None:
    """Remove the weights, and what a calibration left beside them, of another job."""
    for name in names:
        path = job.folder / name
        if name in ATTACHED or (
            name.startswith(("dense-", "experts-layer-")) and not is_of(job, path)
        ):
            path.unlink(missing_ok=True)


def _begin(job: QuantizeJob) -> None:
    """Mark the folder as unfinished."""
    write_text(job.folder / UNFINISHED, json.dumps(job.identity, indent=1) + "\n")
    (job.folder / MANIFEST).unlink(missing_ok=True)


def _is_same(job: QuantizeJob, name: str) -> bool:
    """Whether the folder's manifest or unfinished job is of this source and format."""
    try:
        if name == MANIFEST:
            manifest = read_manifest(job.folder)
            encoder = json.dumps(dict(manifest.encoder), sort_keys=True)
            return (manifest.fingerprint, encoder) == (
                job.identity["fingerprint"],
                job.identity["encoder"],
            )
        held = json.loads((job.folder / name).read_text(encoding="utf-8"))
    except (CheckpointError, ValueError):  # another version, or damaged
        return False
    return bool(held == job.identity)


def _occupied(folder: Path, by: str) -> OutputError:
    return OutputError(
        f"{str(folder)!r} holds {by}: name another folder, or replace it with force=True (--force)"
    )


def _check_space(job: QuantizeJob, importance: Importance | None) -> None:
    """Refuse before hours of work what cannot fit; one expert says how large all will be.

    Raises:
        OutputError: names the folder, the bytes needed and the bytes free.
    """
    layout = job.reader.layout
    layer = layout.moe_layer_ids[0]
    weights = None if importance is None else importance(layer)
    n_bytes = sum(tensor.n_bytes for tensor in dense_tensors(job.reader).values())
    for block in BLOCKS:
        one = encode_block(job, layer, block, weights, n_first=1)
        one_bytes = sum(spec.n_bytes for spec in all_tensors(one.scheme))
        n_bytes += one_bytes * layout.n_experts * layout.n_moe_layers
    there = sum(path.stat().st_size for path in job.folder.glob("*.safetensors"))
    n_free = free_bytes(job.folder)
    if n_bytes - there > n_free:
        raise OutputError(
            f"cannot write {str(job.folder)!r}: it needs {n_bytes - there:,} bytes and "
            f"{n_free:,} are free: free space there, or name another folder"
        )


def _finish(
    job: QuantizeJob,
    layers: Mapping[int, LayerNote],
    digests: Mapping[str, str],
    progress: Callable[[str], None],
) -> Manifest:
    widths = [set(note.scheme(block).widths) for note in layers.values() for block in BLOCKS]
    manifest = Manifest(
        source=job.reader.label,
        fingerprint=job.reader.fingerprint(),
        architecture=job.reader.layout.architecture,
        n_experts=job.reader.layout.n_experts,
        encoder=job.options,
        widths=tuple(sorted(set.intersection(*widths))),
        layers=layers,
        files={
            name: FileNote((job.folder / name).stat().st_size, digest)
            for name, digest in digests.items()
        },
    )
    manifest.write(job.folder)
    (job.folder / UNFINISHED).unlink(missing_ok=True)
    counted = ", ".join(f"{name} {count}" for name, count in sorted(manifest.notes.items()))
    progress(
        f"{manifest.source}: {manifest.n_bytes:,} bytes in {len(digests)} files; "
        f"treated specially: {counted or 'nothing'}"
    )
    return manifest
