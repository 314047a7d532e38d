"""One module per table or figure; each turns a profile into records.

How to add an experiment
    Copy one module, give it a name in :data:`EXPERIMENTS`.  Its ``run(profile, store, *,
    device, force, source)`` measures point by point through the store and returns records.
"""

from __future__ import annotations

import logging
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.errors import (
    DataUnavailableError,
    MissingDeviceError,
    UnknownNameError,
    unknown_name,
)

if TYPE_CHECKING:
    from repro.profiles import Profile
    from repro.reporting.records import Record

EXPERIMENTS: dict[str, str] = {
    "activation": "repro.experiments.activation",
    "heavy-tail": "repro.experiments.heavy_tail",
    "model-table": "repro.experiments.model_table",
    "nesting": "repro.experiments.nesting",
    "format-curve": "repro.experiments.format_curve",
    "sensitivity": "repro.experiments.sensitivity",
    "demotion": "repro.experiments.demotion",
    "transitions": "repro.experiments.serving_transitions",
    "kv-pressure": "repro.experiments.serving_pressure",
    "serving": "repro.experiments.serving_trial",
}
"""Name on the command line and of the records file, and the module that measures it."""

logger = logging.getLogger(__name__)


def resolve_device(device: str, default: str = "cpu") -> str:
    """``cpu`` or ``cuda``; ``auto`` means the profile's, so that records do not depend on luck.

    Raises:
        UnknownNameError: any other name.
        MissingDeviceError: CUDA was asked for and is not there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise unknown_name("device", device, ("auto", "cpu", "cuda"))
    chosen = default if device == "auto" else device
    if chosen == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise MissingDeviceError(
                f"device {device!r} needs a CUDA GPU and this machine has none: use --device cpu"
            )
    return chosen


def run(
    name: str,
    profile: str | Profile,
    *,
    device: str = "auto",
    source: str | None = None,
    force: bool = False,
    out: Path | str | None = None,
    **options: Any,
) -> list[Record]:
    """Run one experiment under a named profile.

    Args:
        name: one of :data:`EXPERIMENTS`.
        profile: name of a profile, or a profile with parameters of its own.
        device: ``cpu``, ``cuda``, or ``auto`` for the profile's.
        source: where workloads come from; by default the profile's first that can be read.
        force: measure again what is recorded.
        out: folder for the records instead of ``data/records/<profile>``.
        options: what only some experiments take (``save_traces=True``).

    Raises:
        UnknownNameError: no such experiment, profile, device, source or option.
        MissingDeviceError: the device is not there.
        DataUnavailableError: the workloads cannot be read from here.
    """
    from repro import profiles
    from repro.reporting.records import RecordStore

    if name not in EXPERIMENTS:
        raise unknown_name("experiment", name, EXPERIMENTS)
    chosen = profiles.get(profile) if isinstance(profile, str) else profile
    target = resolve_device(device, chosen.device)
    measure = import_module(EXPERIMENTS[name]).run
    for option in options:
        if option not in signature(measure).parameters:
            raise UnknownNameError(f"experiment {name!r} has no option {option!r}: leave it out")
    store = RecordStore(chosen.name, root=out)
    candidates = chosen.sources if source is None else (source,)
    for number, candidate in enumerate(candidates, start=1):
        try:
            return list(
                measure(chosen, store, device=target, force=force, source=candidate, **options)
            )
        except DataUnavailableError as error:
            if number == len(candidates):
                raise
            logger.warning("source %r is passed over: %s", candidate, error)
    raise DataUnavailableError(f"profile {chosen.name!r} names no source of workloads: name one")
