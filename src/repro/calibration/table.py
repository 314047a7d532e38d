"""``SensitivityTable``: the predicted damage of all blocks at all widths, as planners read it.

The one idea: one array ``s[L, E, B, W]`` with the fingerprint of the model it belongs to; a
table of another model is refused by name before a policy can act on it.

Letters: L layers with experts, E experts (of the widest layer; others are padded with zeros),
B blocks, W widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.calibration.arrays import check_fingerprint, load_arrays, save_arrays
from repro.contract import Block
from repro.errors import CheckpointError, unknown_name
from repro.paths import relative

_KIND, _VERSION = "sensitivity table", 1


def gain(s_from: npt.NDArray[np.float64], s_to: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``g = max(0, s_to - s_from)``: what lowering from one width to another costs."""
    return np.maximum(0.0, s_to - s_from)


@dataclass(frozen=True)
class SensitivityTable:
    """Damage of every block at every width."""

    s: npt.NDArray[np.float64]  # [L, E, B, W]
    widths: tuple[int, ...]
    layer_ids: tuple[int, ...]  # decoder index of each of the L layers
    kind: str  # see sensitivity.py
    few_tokens: npt.NDArray[np.bool_]  # [L, E]
    usage: npt.NDArray[np.float64]  # [L, E] how often a real token chose the expert
    mass: npt.NDArray[np.float64]  # [L, E] routing weight per real token
    meta: dict[str, Any] = field(default_factory=dict)  # model and prompts fingerprints, ...

    def width_index(self, n_bits: int) -> int:
        """Column of a width.

        Raises:
            UnknownNameError: the table does not hold it.
        """
        if n_bits not in self.widths:
            raise unknown_name("width", str(n_bits), [str(w) for w in self.widths])
        return self.widths.index(n_bits)

    def gain(self, n_from: int, n_to: int) -> npt.NDArray[np.float64]:
        """``g[L, E, B]`` of the transition ``n_from -> n_to``; 16 or more means unchanged."""
        before = np.zeros(self.s.shape[:3])
        if n_from in self.widths or n_from < 16:
            before = self.s[..., self.width_index(n_from)]
        return gain(before, self.s[..., self.width_index(n_to)])

    def save(self, path: Path | str) -> None:
        """Write one .npz file.

        Raises:
            OutputError: it cannot be written.
        """
        arrays = {
            "s": self.s,
            "widths": np.asarray(self.widths),
            "layer_ids": np.asarray(self.layer_ids),
            "few_tokens": self.few_tokens,
            "usage": self.usage,
            "mass": self.mass,
        }
        meta = {"kind": self.kind, **self.meta}
        save_arrays(Path(path), _KIND, _VERSION, arrays, meta)

    @classmethod
    def load(cls, path: Path | str, *, model: str | None = None) -> SensitivityTable:
        """Read a table; ``model`` is the fingerprint it must carry.

        Raises:
            CheckpointError: no such file, damaged, of another layout or of another model.
        """
        arrays, meta = load_arrays(Path(path), _KIND, _VERSION)
        check_fingerprint(relative(Path(path)), str(meta.get("model", "")), model)
        return cls(
            s=arrays["s"],
            widths=tuple(int(w) for w in arrays["widths"]),
            layer_ids=tuple(int(i) for i in arrays["layer_ids"]),
            kind=str(meta.pop("kind")),
            few_tokens=arrays["few_tokens"],
            usage=arrays["usage"],
            mass=arrays["mass"],
            meta=meta,
        )


@dataclass(frozen=True)
class LayerSensitivity:
    """One layer's share of the table."""

    layer_index: int
    widths: tuple[int, ...]
    s: npt.NDArray[np.float64]  # [E, B, W]
    few_tokens: npt.NDArray[np.bool_]  # [E]
    usage: npt.NDArray[np.float64]  # [E]
    mass: npt.NDArray[np.float64]  # [E]


def build_table(
    layers: Sequence[LayerSensitivity], kind: str, meta: dict[str, Any]
) -> SensitivityTable:
    """Put layers together; those with fewer experts are padded with zeros.

    Raises:
        CheckpointError: layers of different widths.
    """
    widths = layers[0].widths
    if any(layer.widths != widths for layer in layers):
        raise CheckpointError("layers were encoded at different widths: calibrate again")
    n_experts = max(layer.s.shape[0] for layer in layers)
    s = np.zeros((len(layers), n_experts, len(Block), len(widths)))
    few = np.ones((len(layers), n_experts), dtype=bool)
    usage = np.zeros((len(layers), n_experts))
    mass = np.zeros((len(layers), n_experts))
    for row, layer in enumerate(layers):
        n = layer.s.shape[0]
        s[row, :n], few[row, :n] = layer.s, layer.few_tokens
        usage[row, :n], mass[row, :n] = layer.usage, layer.mass
    ids = tuple(layer.layer_index for layer in layers)
    return SensitivityTable(s, widths, ids, kind, few, usage, mass, meta)
