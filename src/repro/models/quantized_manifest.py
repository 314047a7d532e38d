"""The manifest of a quantised checkpoint: what was made of what, and how to be sure of it.

A folder of a quantised checkpoint holds ::

    repro_quantized.json              this manifest; written last, so that its presence
                                      means that everything else is whole
    config.json, tokenizer files      copied from the source
    dense-000.safetensors ...         what is no expert weight, names and types of the source
    experts-layer-003.safetensors     one per Mixture-of-Experts layer: every part of every
                                      width as a tensor of its own, e.g.
                                      layers.3.gate_up.plane0  int32 [E, N, W]

The one idea: a file is accepted because of what the manifest says of it - size, tensors and
the layout version their bytes follow (:mod:`repro.formats.layout`) - never because it is
there.

Letters: E experts, N rows, W words of a row.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from repro import formats
from repro.errors import CheckpointError
from repro.files import write_text
from repro.formats.encoded import all_tensors, scheme_from_json
from repro.formats.layout import LAYOUT_VERSION
from repro.models.expert_tensors import BLOCKS, BlockName
from repro.models.integrity import MANIFEST, UNFINISHED
from repro.models.tensor_files import StoredTensor

KIND = "repro-quantized"


@dataclass(frozen=True)
class FileNote:
    """A weight file as it was written."""

    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class LayerNote:
    """One Mixture-of-Experts layer: its file, and by block the scheme and what was counted."""

    file: str
    schemes: Mapping[str, Mapping[str, Any]]
    notes: Mapping[str, Mapping[str, int]]
    importance: str  # sha256 of what weighed the errors, or "none"

    def scheme(self, block: BlockName) -> Any:
        """The scheme of a block.

        Raises:
            CheckpointError: a format this version does not know, or fields it has not.
        """
        _register_formats()
        try:
            scheme = scheme_from_json(self.schemes[block])
            all_tensors(scheme)  # fields that make no tensors
            return scheme
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            reason = error.args[0] if error.args else type(error).__name__
            raise CheckpointError(
                f"{self.file!r} is encoded in a format that cannot be read here ({reason}): "
                "use the version of this package that wrote it, or quantise again"
            ) from error


@dataclass(frozen=True)
class Manifest:
    """Everything needed to read a quantised checkpoint, or to refuse it."""

    source: str
    fingerprint: str
    architecture: str
    n_experts: int
    encoder: Mapping[str, Any]  # class and options of the format
    widths: tuple[int, ...]
    layers: Mapping[int, LayerNote]
    files: Mapping[str, FileNote]

    @property
    def notes(self) -> dict[str, int]:
        """Fallbacks counted over all layers and blocks, by name."""
        total: dict[str, int] = {}
        for layer in self.layers.values():
            for counted in layer.notes.values():
                for name, count in counted.items():
                    total[name] = total.get(name, 0) + count
        return total

    @property
    def n_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(note.n_bytes for note in self.files.values())

    def write(self, folder: Path) -> None:
        """Write it to ``folder``: from here on the folder is a checkpoint.

        Raises:
            OutputError: the folder cannot be written.
        """
        content = {"kind": KIND, "layout_version": LAYOUT_VERSION, **asdict(self)}
        content["notes"] = self.notes
        write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest in ``folder``.

    Raises:
        CheckpointError: none, an unfinished job, not JSON, or another layout version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / UNFINISHED).is_file():
            raise CheckpointError(
                f"quantising into {folder.name!r} was not finished: run it again with the same "
                "arguments, it goes on where it stopped"
            )
        raise CheckpointError(
            f"{folder.name!r} holds no {MANIFEST!r}: name a folder that `repro quantize` made"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["kind"] != KIND:
            raise ValueError(f"kind {content['kind']!r}")
        version = content["layout_version"]
        if version == LAYOUT_VERSION:
            return _parse(content)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{MANIFEST!r} in {folder.name!r} is damaged ({type(error).__name__}): "
            "copy the folder again, or quantise again"
        ) from error
    raise CheckpointError(
        f"{folder.name!r} is written in layout version {version}, this version reads "
        f"{LAYOUT_VERSION}: quantise its source again"
    )


def check_tensors(layer: int, note: LayerNote, n_experts: int, held: Mapping[str, Any]) -> None:
    """Refuse a layer's file whose tensors are not those of its schemes.

    Raises:
        CheckpointError: names the file and the first tensor.
    """
    expected = {}
    for block in BLOCKS:
        for spec in all_tensors(note.scheme(block)):
            expected[part_name(layer, block, spec.name)] = (spec.dtype, (n_experts, *spec.shape))
    for name in sorted(expected.keys() | held.keys()):
        tensor: StoredTensor | None = held.get(name)
        if tensor is None or expected.get(name) != (tensor.dtype, tensor.shape):
            found = "is missing" if tensor is None else f"is {tensor.dtype} {list(tensor.shape)}"
            raise CheckpointError(
                f"{note.file!r}: tensor {name!r} {found}, its scheme asks for "
                f"{expected.get(name, 'none')}: copy the folder again, or quantise again"
            )


@cache
def _register_formats() -> None:
    """Import every format, so that its scheme can be named: a new one is one new file."""
    for module in pkgutil.iter_modules(formats.__path__):
        importlib.import_module(f"{formats.__name__}.{module.name}")


def part_name(layer: int, block: BlockName, part: str) -> str:
    """Name of a part's tensor in a layer's file."""
    return f"layers.{layer}.{block}.{part}"


def experts_file(layer: int) -> str:
    """Name of a layer's file."""
    return f"experts-layer-{layer:03d}.safetensors"


def dense_file(number: int) -> str:
    """Name of a file of what is no expert weight."""
    return f"dense-{number:03d}.safetensors"


def _parse(content: Mapping[str, Any]) -> Manifest:
    files = {
        str(name): FileNote(int(note["n_bytes"]), str(note["sha256"]))
        for name, note in content["files"].items()
    }
    if any(Path(name).name != name for name in files):
        raise ValueError("a file outside the folder")
    layers = {
        int(layer): LayerNote(
            str(note["file"]), dict(note["schemes"]), dict(note["notes"]), str(note["importance"])
        )
        for layer, note in content["layers"].items()
    }
    if not layers or any(note.file not in files for note in layers.values()):
        raise ValueError("a layer without a file")
    if not content["widths"]:
        raise ValueError("no width")
    return Manifest(
        source=str(content["source"]),
        fingerprint=str(content["fingerprint"]),
        architecture=str(content["architecture"]),
        n_experts=int(content["n_experts"]),
        encoder=dict(content["encoder"]),
        widths=tuple(int(width) for width in content["widths"]),
        layers=layers,
        files=files,
    )
