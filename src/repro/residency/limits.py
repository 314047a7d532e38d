"""Back-pressure: how much may be under way, and when a worker counts as stuck.

The one idea: limits act at admission, on the injected clock.  A change that memory does not
need waits when the link has enough to do; one that gives memory back never waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from repro.contract import Clock
from repro.residency.errors import BudgetError

DEFAULT_COPY_LIMIT = {"s": 30.0, "steps": 10_000.0}


@dataclass(frozen=True)
class Limits:
    """What may be under way.

    Args:
        copy_limit: clock units without any finished chunk after which the worker counts as
            stuck; None: 30 seconds, or 10,000 steps.
        max_in_flight: changes under way at a time; None: no limit.
        bytes_per_unit: bytes over the link per clock unit (seconds or steps); None: no limit.
        attempts: how often a failed copy to the host is tried before it is reported.
    """

    copy_limit: float | None = None
    max_in_flight: int | None = None
    bytes_per_unit: float | None = None
    attempts: int = 3

    def __post_init__(self) -> None:
        given = {
            "copy_limit": self.copy_limit,
            "max_in_flight": self.max_in_flight,
            "bytes_per_unit": self.bytes_per_unit,
            "attempts": self.attempts,
        }
        for name, value in given.items():
            if value is not None and not value > 0:
                raise BudgetError(f"{name}={value}: a limit is positive, or None for no limit")


class RateLimit:
    """A bucket that drains at ``bytes_per_unit``; one unit's worth may be ahead."""

    def __init__(self, bytes_per_unit: float | None, clock: Clock) -> None:
        self._rate = bytes_per_unit
        self._clock = clock
        self._level = 0.0
        self._at = clock.now()

    def admits(self, n_bytes: int) -> bool:
        """Whether that many bytes may be asked of the link now; more than a unit's worth alone."""
        if self._rate is None:
            return True
        now = self._clock.now()
        self._level = max(0.0, self._level - self._rate * (now - self._at))
        self._at = now
        return self._level == 0 or self._level + n_bytes <= self._rate

    def charge(self, n_bytes: int) -> None:
        """They were asked for."""
        if self._rate is not None:
            self._level += n_bytes


class Backpressure:
    """Whether a change that memory does not need may begin."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._most = limits.max_in_flight
        self.rate = RateLimit(limits.bytes_per_unit, clock)

    def holds(self, n_in_flight: int, n_bytes: int) -> bool:
        """Too much is under way for another ``n_bytes``."""
        full = self._most is not None and n_in_flight >= self._most
        return full or not self.rate.admits(n_bytes)


class Watchdog:
    """Notices, whenever it is asked, that a busy worker finishes nothing."""

    def __init__(self, copy_limit: float | None, clock: Clock) -> None:
        self._clock = clock
        self.limit = DEFAULT_COPY_LIMIT[clock.unit] if copy_limit is None else copy_limit
        self._seen = -1
        self._since = clock.now()

    def look(self, n_jobs: int, n_copied: int) -> float:
        """Clock units that the worker has been busy without finishing a chunk."""
        now = self._clock.now()
        if n_jobs == 0 or n_copied != self._seen:
            self._seen, self._since = n_copied, now
        return now - self._since

    def restart(self) -> None:
        """A new worker begins."""
        self._seen, self._since = -1, self._clock.now()
