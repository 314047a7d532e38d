"""What was learned offline and belongs to the model that is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from repro.calibration.attached import attached, importance_of
from repro.calibration.heads import Heads
from repro.calibration.table import SensitivityTable
from repro.contract import FloatArray
from repro.models.quantized import QuantizedCheckpoint, load_quantized
from repro.serving.payloads import Checkpoint, Importance


@dataclass(frozen=True)
class Calibrated:
    """Encoded experts, importance, sensitivities and heads, each None if there is none."""

    checkpoint: Checkpoint | None = None
    importance: Importance | None = None
    table: SensitivityTable | None = None
    heads: Heads | None = None

    def sensitivity(self, widths: tuple[int, ...]) -> FloatArray | None:
        """``[L, E, B, W]`` at these widths; 16 bits and more count as unchanged."""
        if self.table is None:
            return None
        zero = np.zeros(self.table.s.shape[:3])
        columns = [
            zero if w >= 16 and w not in self.table.widths
            else self.table.s[..., self.table.width_index(w)]
            for w in widths
        ]  # fmt: skip
        return np.stack(columns, axis=-1)


def calibrated(experts: Any, calibration: Any, importance: Importance | None) -> Calibrated:
    """Open what was given; a quantised folder brings its own sensitivities and heads.

    Raises:
        CheckpointError: not such folders, or of another model.
    """
    checkpoint = experts
    if experts is not None and not hasattr(experts, "stack"):
        checkpoint = load_quantized(Path(experts))
    table = heads = None
    if calibration is not None:
        table, heads = attached(Path(calibration))
        if importance is None and checkpoint is None:
            importance = importance_of(calibration)
    elif isinstance(checkpoint, QuantizedCheckpoint):
        table, heads = attached(checkpoint.folder)
    return Calibrated(checkpoint, importance, table, heads)
