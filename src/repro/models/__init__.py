"""Bundled trained models, published configurations, and loading that checks what it loads."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from repro.models.loading import ModelInfo, list_models, load_model

__all__ = ["ModelInfo", "list_models", "load_model"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: reading a published configuration should not import torch.
    if name in __all__:
        return getattr(import_module("repro.models.loading"), name)
    raise AttributeError(f"module 'repro.models' has no attribute {name!r}")
