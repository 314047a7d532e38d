"""Errors of the simulator."""

from __future__ import annotations

from repro.errors import ReproError


class SimulationError(ReproError, ValueError):
    """A simulation that was asked for cannot be run as it was asked."""
