"""A calibration beside the checkpoint it belongs to.

The one idea: what a planner reads (sensitivities, prompt heads) travels with the weights it
speaks of.  A quantised folder gets a copy of both, refused by name when the calibration was
of another model; the statistics become the importance that weights are encoded with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from repro.calibration.collect import Calibration
from repro.calibration.heads import Heads
from repro.calibration.statistics import importance
from repro.calibration.table import SensitivityTable
from repro.contract import Block
from repro.errors import CheckpointError
from repro.files import write_bytes
from repro.models.integrity import fingerprint
from repro.paths import relative

STATISTICS, SENSITIVITY, HEADS = "statistics", "sensitivity.npz", "heads.json"


def importance_of(
    calibration: Path | str, model: Path | str | None = None
) -> Callable[[int], dict[str, Tensor]]:
    """What :func:`repro.models.quantize.quantize` asks for, from a calibration folder.

    Args:
        calibration: written by ``repro calibrate``.
        model: folder of the checkpoint that is to be encoded, to be held against it.

    Raises:
        CheckpointError: no calibration there, or one of another model.
    """
    folder = Path(calibration)
    if not (folder / STATISTICS).is_dir():
        raise CheckpointError(
            f"{str(relative(folder))!r} holds no calibration: make one with `repro calibrate`"
        )
    expected = None if model is None else fingerprint(Path(model))
    statistics = Calibration.load(folder / STATISTICS, model=expected)

    def by_layer(layer: int) -> dict[str, Tensor]:
        found = statistics.layer(layer)
        return {
            "gate_up": importance(found, Block.GATE_UP),
            "down": importance(found, Block.DOWN),
        }

    return by_layer


def attach(calibration: Path | str, checkpoint: Path | str) -> list[str]:
    """Copy sensitivities and heads into a quantised folder; returns the names of the files."""
    copied = []
    for name in (SENSITIVITY, HEADS):
        source = Path(calibration) / name
        if source.is_file():
            write_bytes(Path(checkpoint) / name, source.read_bytes())
            copied.append(name)
    return copied


def attached(
    checkpoint: Path | str, model: str | None = None
) -> tuple[SensitivityTable | None, Heads | None]:
    """What was stored with a checkpoint.

    Args:
        checkpoint: the folder.
        model: fingerprint that it must be of.

    Raises:
        CheckpointError: damaged, or of another model.
    """
    folder = Path(checkpoint)
    table, heads = folder / SENSITIVITY, folder / HEADS
    return (
        SensitivityTable.load(table, model=model) if table.is_file() else None,
        Heads.load(heads, model=model) if heads.is_file() else None,
    )
