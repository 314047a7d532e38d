"""Bundled trained models, published configurations, and loading that checks what it loads."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from repro.models.catalog import ModelInfo, list_models
    from repro.models.loading import load_model

_HOMES = {
    "ModelInfo": "repro.models.catalog",
    "list_models": "repro.models.catalog",
    "load_model": "repro.models.loading",
}

__all__ = ["ModelInfo", "list_models", "load_model"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: listing models or reading a configuration should not import torch.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'repro.models' has no attribute {name!r}")
