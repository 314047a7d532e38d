"""A published checkpoint, read a layer at a time.

The one idea: encoding and calibration need each layer once and never all of them.  Opening
a checkpoint reads the headers of its files and finds every expert from them, so whatever is
missing, truncated or of another shape is refused before hours of work; weights are read when
they are asked for.

Letters: E experts, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from repro.errors import CheckpointError
from repro.models.expert_tensors import (
    ExpertStack,
    LayerExperts,
    check_rows,
    layer_of,
    locate_experts,
)
from repro.models.integrity import check_files, fingerprint, is_quantized, weight_files
from repro.models.layout import inspect_config, read_config
from repro.models.loading import local_folder
from repro.models.tensor_files import StoredTensor, stored_tensors


class CheckpointReader:
    """A local checkpoint of one of the nine architectures."""

    def __init__(self, folder: Path | str) -> None:
        """Open ``folder`` (or a bundled model by name); only headers are read.

        Raises:
            CheckpointError: truncated or missing files, quantised codes, missing experts,
                an architecture or shape that is not supported.
        """
        self.label, self.folder = local_folder(folder)
        if is_quantized(self.folder):
            raise CheckpointError(
                f"checkpoint {self.label!r} is already quantised: name the folder it was made "
                "from, or load it with repro.load_model"
            )
        self.config: Any = read_config(self.folder)
        self.layout = inspect_config(self.config)
        check_files(self.folder, self.layout.n_experts)
        self.tensors: dict[str, StoredTensor] = {}
        for path in weight_files(self.folder):
            self.tensors.update(stored_tensors(path))
        self._experts = locate_experts(self.label, self.tensors, self.layout)

    def experts(self, layer: int) -> LayerExperts:
        """Where the experts of a layer lie, to read a few of them at a time.

        Raises:
            CheckpointError: the layer has no experts.
        """
        if layer not in self._experts:
            raise CheckpointError(
                f"layer {layer} of {self.label!r} has no experts: "
                f"ask for one of {list(self.layout.moe_layer_ids)}"
            )
        return self._experts[layer]

    def expert_stack(self, layer: int) -> ExpertStack:
        """All experts of a layer, ``[E, N, K]`` as stored.

        Raises:
            CheckpointError: the layer has no experts, or they are not finite.
        """
        experts = self.experts(layer)
        return ExpertStack(
            gate_up=experts.read("gate_up"),
            down=experts.read("down"),
            gate_up_bias=experts.read_bias("gate_up"),
            down_bias=experts.read_bias("down"),
        )

    def dense_tensors(self, layer: int | None) -> dict[str, StoredTensor]:
        """What is no expert, by its name in the checkpoint: of a layer, or outside of all."""
        return self._dense.get(layer, {})

    @property
    def layers_beyond(self) -> tuple[int, ...]:
        """Decoder layers that are stored and that the configuration does not have."""
        layers = {layer for name in self.tensors if (layer := layer_of(name)) is not None}
        return tuple(sorted(layer for layer in layers if layer >= self.layout.n_layers))

    def read(self, tensor: StoredTensor) -> Tensor:
        """A tensor that is no expert.

        Raises:
            CheckpointError: it holds NaN or infinite values.
        """
        values = tensor.read()
        check_rows(self.label, tensor.name, values)
        return values

    def fingerprint(self) -> str:
        """sha256 over configuration and weight files; reads them all, once."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.folder)

    @cached_property
    def _dense(self) -> dict[int | None, dict[str, StoredTensor]]:
        routed = {t.name for experts in self._experts.values() for t in experts.stored}
        found: dict[int | None, dict[str, StoredTensor]] = {}
        for name, tensor in self.tensors.items():
            if name not in routed:
                found.setdefault(layer_of(name), {})[name] = tensor
        return found
