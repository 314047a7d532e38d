"""A calibration beside the checkpoint it belongs to.

The one idea: what a planner reads (sensitivities, prompt heads) travels with the weights it
speaks of.  A quantised folder gets a copy of both, refused by name when the calibration was
of another model; the statistics become the importance that weights are encoded with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from repro.calibration.collect import check_statistics, layer_file
from repro.calibration.heads import Heads
from repro.calibration.statistics import LayerStatistics, importance
from repro.calibration.table import SensitivityTable
from repro.contract import Block
from repro.errors import CheckpointError
from repro.files import write_bytes
from repro.models.integrity import ATTACHED, fingerprint
from repro.models.quantized_manifest import read_manifest
from repro.paths import relative

STATISTICS = "statistics"


def importance_of(
    calibration: Path | str, model: Path | str | None = None, *, hessians: bool = False
) -> Callable[[int], dict[str, Tensor]]:
    """What :func:`repro.models.quantize.quantize` asks for, from a calibration folder.

    Args:
        calibration: written by ``repro calibrate``.
        model: folder of the checkpoint that is to be encoded, to be held against it.
        hessians: also the second moments of the inputs, which "-gptq" formats need.

    Returns:
        a function of the layer, which reads that layer's statistics and keeps nothing.

    Raises:
        CheckpointError: no calibration there, or one of another model, unfinished, or without
            second moments.
    """
    folder = Path(calibration)
    if not (folder / STATISTICS).is_dir():
        raise CheckpointError(
            f"{str(relative(folder))!r} holds no calibration: make one with `repro calibrate`"
        )
    expected = None if model is None else fingerprint(Path(model))
    check_statistics(folder / STATISTICS, model=expected, hessians=hessians)
    attached(folder, expected)  # what will be copied is refused before hours of encoding

    def by_layer(layer: int) -> dict[str, Tensor]:
        stats, _ = LayerStatistics.load(layer_file(folder / STATISTICS, layer))
        found = {
            "gate_up": importance(stats, Block.GATE_UP),
            "down": importance(stats, Block.DOWN),
        }
        if hessians:
            for name in ("gate_up_hessian", "down_hessian"):
                found[name] = stats.shrunk(name)
        return found

    return by_layer


def attach(calibration: Path | str, checkpoint: Path | str) -> list[str]:
    """Copy sensitivities and heads into a quantised folder; returns the names of the files.

    What an earlier calibration left there and this one has not is removed.

    Raises:
        CheckpointError: they are damaged or of another model than the checkpoint's source.
        OutputError: the folder cannot be written.
    """
    attached(calibration, read_manifest(Path(checkpoint)).fingerprint)
    copied = []
    for name in ATTACHED:
        source, copy = Path(calibration) / name, Path(checkpoint) / name
        if source.is_file():
            write_bytes(copy, source.read_bytes())
            copied.append(name)
        else:
            copy.unlink(missing_ok=True)
    return copied


def attached(
    checkpoint: Path | str, model: str | None = None
) -> tuple[SensitivityTable | None, Heads | None]:
    """What was stored with a checkpoint.

    Args:
        checkpoint: the folder; that of a calibration holds the same files.
        model: fingerprint that it must be of.

    Raises:
        CheckpointError: damaged, or of another model.
    """
    folder = Path(checkpoint)
    table, heads = (folder / name for name in ATTACHED)
    return (
        SensitivityTable.load(table, model=model) if table.is_file() else None,
        Heads.load(heads, model=model) if heads.is_file() else None,
    )
