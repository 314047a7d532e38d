"""Reproduction of DynaExq and PagedWeight: expert precision that changes while serving.

The public surface is loaded on first use, so that ``import repro`` costs nothing
and a machine without torch can still run ``repro doctor``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from repro.models import list_models, load_model
    from repro.serving import Engine

_LAZY = {
    "Engine": "repro.serving",
    "list_models": "repro.models",
    "load_model": "repro.models",
}

__all__ = ["Engine", "__version__", "list_models", "load_model"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'repro' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
