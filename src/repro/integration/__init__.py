"""Plugging into Transformers: experts functions, routing capture, routing traces.

The one idea: since version 5 every Mixture-of-Experts model of Transformers hands its
experts' work to one registered function, so whoever stands there sees all routing of
all architectures, whatever kernel does the arithmetic.

Names are loaded on first use: reading a trace needs NumPy only.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {
    "EXPERTS_NAME": "experts",
    "ExpertsLayer": "experts",
    "experts_layers": "experts",
    "register": "experts",
    "use_experts": "experts",
    "CaptureError": "steps",
    "RoutingRecorder": "routing",
    "capture_routing": "routing",
    "record_decode": "recording",
    "record_prefill": "recording",
    "DeviceStatistics": "statistics",
    "RoutingTrace": "traces",
    "replay": "traces",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"repro.integration.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'repro.integration' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
