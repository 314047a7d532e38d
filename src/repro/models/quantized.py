"""A quantised checkpoint, opened: encoded experts read lazily, a layer or a width at a time.

The one idea: opening checks what the headers can tell (files, sizes, tensors, versions) and
reads no weight; a stack is read when it is asked for, and of a nested format only the planes
that a width needs.

Left out: making one (:mod:`repro.models.quantize`), and the model itself
(:mod:`repro.models.quantized_loading`).

Letters: E experts, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.errors import CheckpointError
from repro.formats.encoded import EncodedStack, all_tensors, check_width
from repro.models.expert_tensors import BLOCKS, BlockName
from repro.models.layout import MoeLayout, inspect_config, read_config
from repro.models.quantized_manifest import Manifest, check_tensors, part_name, read_manifest
from repro.models.tensor_files import StoredTensor, hash_file, stored_tensors

_DECODE_VALUES = 1 << 24  # decoded at once while a model is filled


class QuantizedCheckpoint:
    """A folder that ``repro quantize`` made."""

    def __init__(self, folder: Path | str) -> None:
        """Open and check ``folder``; see :func:`load_quantized`."""
        self.folder = Path(folder)
        self.label = self.folder.resolve().name
        self.manifest: Manifest = read_manifest(self.folder)
        self._check_files()
        self.config: Any = read_config(self.folder)
        self.layout: MoeLayout = inspect_config(self.config)
        self._check_config()
        self._files = {
            name: stored_tensors(self.folder / name) for name in sorted(self.manifest.files)
        }
        for layer, note in self.manifest.layers.items():
            check_tensors(layer, note, self.layout.n_experts, self._files[note.file])

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits per weight that every layer can be read at, ascending."""
        return self.manifest.widths

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers that have experts."""
        return self.layout.moe_layer_ids

    @cached_property
    def dense(self) -> dict[str, StoredTensor]:
        """What is no expert weight, by its name in the source."""
        experts = {note.file for note in self.manifest.layers.values()}
        found: dict[str, StoredTensor] = {}
        for name, tensors in self._files.items():
            if name not in experts:
                found.update(tensors)
        return found

    def scheme(self, layer: int, block: BlockName) -> Any:
        """How a block of a layer is stored.

        Raises:
            CheckpointError: the layer has no experts.
        """
        if layer not in self.manifest.layers:
            raise CheckpointError(
                f"layer {layer} of {self.label!r} has no experts: ask for one of {self.layers}"
            )
        return self.manifest.layers[layer].scheme(block)

    def stack(self, layer: int, block: BlockName) -> EncodedStack:
        """All experts of a block with every width, read from the file now."""
        specs = all_tensors(self.scheme(layer, block))
        tensors = {spec.name: self._part(layer, block, spec.name).read() for spec in specs}
        notes = self.manifest.layers[layer].notes.get(block, {})
        return EncodedStack(self.scheme(layer, block), tensors, dict(notes))

    def parts(
        self, layer: int, block: BlockName, n_bits: int, first: int = 0, last: int | None = None
    ) -> dict[str, Tensor]:
        """What one width needs of experts ``first`` to ``last``, and nothing else.

        Raises:
            UnknownNameError: a width that was not stored.
        """
        scheme = self.scheme(layer, block)
        check_width(scheme, n_bits)
        last = self.layout.n_experts if last is None else last
        found = {}
        for spec in scheme.tensors(n_bits):
            found[spec.name] = torch.empty((last - first, *spec.shape), dtype=spec.dtype)
            self._part(layer, block, spec.name).read_into(found[spec.name], first)
        return found

    def decode(
        self,
        layer: int,
        block: BlockName,
        n_bits: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The weights of a block at a width, ``[E, N, K]``; a few experts at a time.

        Raises:
            UnknownNameError: a width that was not stored.
        """
        scheme, n_experts = self.scheme(layer, block), self.layout.n_experts
        check_width(scheme, n_bits)
        n_rows, n_columns = scheme.shape
        weight = torch.empty((n_experts, n_rows, n_columns), dtype=dtype, device=device)
        step = max(1, _DECODE_VALUES // (n_rows * n_columns))
        for first in range(0, n_experts, step):
            last = min(first + step, n_experts)
            parts = self.parts(layer, block, n_bits, first, last)
            moved = {name: tensor.to(device) for name, tensor in parts.items()}
            weight[first:last] = scheme.decode(moved, n_bits)
        return weight

    def nbytes(self, n_bits: int) -> int:
        """Bytes of all experts at a width, tables and scales counted."""
        return sum(
            self.layout.n_experts * spec.n_bytes
            for layer in self.layers
            for block in BLOCKS
            for spec in self.scheme(layer, block).tensors(n_bits)
        )

    def verify(self) -> None:
        """Read every weight file and compare its hash with the manifest's.

        Raises:
            CheckpointError: names the first file that differs.
        """
        for name, note in self.manifest.files.items():
            if hash_file(self.folder / name) != note.sha256:
                raise CheckpointError(
                    f"{name!r} of {self.label!r} is not what was written (its sha256 differs): "
                    "copy the folder again, or quantise again"
                )

    def _part(self, layer: int, block: BlockName, part: str) -> StoredTensor:
        return self._files[self.manifest.layers[layer].file][part_name(layer, block, part)]

    def _check_files(self) -> None:
        for name, note in self.manifest.files.items():
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(
                    f"quantised checkpoint {self.label!r} lacks {name!r}: "
                    "copy the missing file, or quantise again"
                )
            n_bytes = path.stat().st_size
            if n_bytes != note.n_bytes:
                raise CheckpointError(
                    f"{name!r} of {self.label!r} has {n_bytes:,} bytes where its manifest says "
                    f"{note.n_bytes:,}: copy the file again, or quantise again"
                )

    def _check_config(self) -> None:
        layout, manifest = self.layout, self.manifest
        shapes = dict(zip(BLOCKS, layout.expert_shapes, strict=True))
        fits = (
            layout.architecture == manifest.architecture
            and layout.n_experts == manifest.n_experts
            and set(layout.moe_layer_ids) == set(manifest.layers)
            and all(
                manifest.layers[layer].scheme(block).shape == shape
                for layer in layout.moe_layer_ids
                for block, shape in shapes.items()
            )
        )
        if not fits:
            raise CheckpointError(
                f"config.json in {self.label!r} describes another model than the one that was "
                f"quantised ({manifest.source}): copy the config.json of that one"
            )


def load_quantized(
    folder: Path | str, *, expected_fingerprint: str | None = None, verify: bool = False
) -> QuantizedCheckpoint:
    """Open a quantised checkpoint.

    Args:
        folder: what ``repro quantize`` made.
        expected_fingerprint: of the checkpoint it must have been made from.
        verify: read all files and compare their hashes too.

    Raises:
        CheckpointError: not a finished quantised checkpoint; another layout version, format
            or source; a file that is missing, truncated or changed.
    """
    checkpoint = QuantizedCheckpoint(folder)
    made_from = checkpoint.manifest.fingerprint
    if expected_fingerprint is not None and made_from != expected_fingerprint:
        raise CheckpointError(
            f"{checkpoint.label!r} was made from {checkpoint.manifest.source!r} with fingerprint "
            f"{made_from[:12]}, expected is {expected_fingerprint[:12]}: "
            "quantise the model at hand"
        )
    if verify:
        checkpoint.verify()
    return checkpoint
