"""The clocks of serving: wall time, and steps for runs that must repeat.

The one idea: whoever decides (policies, limits of the worker) asks the clock it was given.
With a step clock an interval of 200 means 200 steps on every machine, so records of quality
runs are the same to the byte.
"""

from __future__ import annotations

import time
from typing import Literal


class WallClock:
    """Seconds since it was made."""

    unit: Literal["s", "steps"] = "s"

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter() - self._start


class StepClock:
    """Counts the steps of the engine, which calls :meth:`tick`."""

    unit: Literal["s", "steps"] = "steps"

    def __init__(self) -> None:
        self._steps = 0

    def now(self) -> float:
        """Steps so far."""
        return float(self._steps)

    def tick(self) -> None:
        """One more step has begun."""
        self._steps += 1
