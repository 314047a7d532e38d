"""What the planner knows before it serves: statistics, sensitivities, prompt heads.

``collect`` watches a model run over calibration prompts; ``sensitivity`` turns what it saw
and an encoded matrix into the damage of every width; ``damage`` measures the same for single
blocks, and ``heads`` learn from it how the damage depends on the prompt.

Names are loaded on first use: reading a table needs NumPy only.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {
    "BlockRef": "blocks",
    "Calibration": "collect",
    "Damage": "damage",
    "Heads": "heads",
    "LayerStatistics": "statistics",
    "SensitivityTable": "table",
    "agreement": "agreement",
    "calibrate": "run",
    "collect": "collect",
    "gain": "table",
    "importance": "statistics",
    "measure_damage": "damage",
    "prompt_features": "features",
    "sample_blocks": "blocks",
    "scale_by_layer": "scaling",
    "sensitivity": "sensitivity",
    "train_heads": "training",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"repro.calibration.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'repro.calibration' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
