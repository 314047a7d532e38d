"""What residency refuses, in sentences that say by how many bytes and what to do."""

from __future__ import annotations

from repro.errors import ReproError


class BudgetError(ReproError, ValueError):
    """A memory budget that cannot hold what must be resident at all times."""


class ClosedError(ReproError, RuntimeError):
    """Residency was used after ``close()``: its pages are gone."""


class StepError(ReproError, RuntimeError):
    """A step was ended that is not under way."""


class WorkerError(ReproError, RuntimeError):
    """The background worker cannot do what was asked of it."""
