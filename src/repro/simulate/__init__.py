"""A virtual device: the same policies, queues, pools and scheduler, on a clock that is computed.

The one idea: only two things are replaced, the forward pass (by its cost, ``cost``) and the link
(by the time its copies take, ``virtual_time``); pages shrink to eight bytes (``miniature``).
Everything that decides, admits, moves or reclaims is imported from where it serves::

    model = published_model("Qwen3-30B-A3B")
    device = get_device("rtx-a6000")
    setup = Setup("dynaexq", arena_bytes(device, model), kv_bytes=6 << 30)
    result = simulate(setup, model, device, recorded_routing(model), batch_of(32, 512, 64, "prose"))
    result.report, result.bounds()

Names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {
    "compare": "comparison",
    "row_of": "comparison",
    "CostModel": "cost",
    "PassWork": "cost",
    "uniform_work": "cost",
    "DEVICES": "device",
    "DeviceProfile": "device",
    "KernelCost": "device",
    "get_device": "device",
    "SimulationError": "errors",
    "Fit": "fit",
    "Point": "fit",
    "fit_device": "fit",
    "SimulatedModel": "model",
    "published_model": "model",
    "toy_model": "model",
    "Result": "result",
    "SyntheticRouting": "routing",
    "TraceRouting": "routing",
    "activation": "routing",
    "expand_trace": "routing",
    "recorded_routing": "routing",
    "Server": "server",
    "SimulatedRequest": "arrivals",
    "batch_of": "arrivals",
    "phases": "arrivals",
    "simulate": "server",
    "Setup": "setup",
    "arena_bytes": "setup",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"repro.simulate.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'repro.simulate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
