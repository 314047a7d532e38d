"""Virtual time: a clock that is set, a link whose copies take time, and who drives the worker.

The one idea: the copy worker of ``repro.residency`` is driven by micro-steps, and on a GPU a
chunk is complete when its event has passed.  Here it is complete when the virtual clock has
passed the end of its copy; everything else about queues, staging and publication is the same
code that serves.  Chunks use the link one after the other, as the worker queues them.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from repro.residency import ExpertResidency
from repro.simulate.errors import SimulationError


class VirtualClock:
    """Satisfies :class:`repro.contract.Clock`; stands still until it is moved."""

    unit: Literal["s", "steps"] = "s"

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Virtual seconds."""
        return self._now

    def advance_to(self, now: float) -> None:
        """Move on.

        Raises:
            SimulationError: to the past.
        """
        if now < self._now:
            raise SimulationError(f"the clock is at {self._now} s and cannot go back to {now} s")
        self._now = now


class VirtualLink:
    """Satisfies :class:`repro.residency.Link`: copies at once, and says until when it was busy.

    Args:
        h2d_bytes_per_s: host to device.
        d2h_bytes_per_s: device to host.
        copy_fixed_s: of one copy.
        scale: real bytes that one byte of the tensors stands for.
    """

    def __init__(
        self,
        h2d_bytes_per_s: float,
        d2h_bytes_per_s: float,
        copy_fixed_s: float = 0.0,
        scale: int = 1,
    ) -> None:
        self._rates: dict[str, float] = {"in": h2d_bytes_per_s, "out": d2h_bytes_per_s}
        self._fixed_s = copy_fixed_s
        self._scale = scale
        self._slab_at: int | None = None
        self.free_at = 0.0
        self.busy_s = 0.0
        self.n_bytes = {"in": 0, "out": 0}

    def attach(self, slab: Tensor) -> None:
        """This is host memory: a copy into it goes out."""
        self._slab_at = slab.untyped_storage().data_ptr()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, and take the time it takes."""
        out = target.untyped_storage().data_ptr() == self._slab_at
        target.copy_(source)
        self.use("out" if out else "in", source.nbytes * self._scale)

    def use(self, direction: Literal["in", "out"], n_bytes: int) -> float:
        """Send ``n_bytes`` as soon as the link is free; returns when they are over."""
        seconds = self._fixed_s + n_bytes / self._rates[direction]
        self.free_at += seconds
        self.busy_s += seconds
        self.n_bytes[direction] += n_bytes
        return self.free_at

    def rate(self, direction: Literal["in", "out"]) -> float:
        """Bytes per second."""
        return self._rates[direction]

    def not_before(self, now: float) -> None:
        """What is sent next begins at ``now`` at the earliest."""
        self.free_at = max(self.free_at, now)


class CopyPump:
    """Drives the worker of a residency up to the clock's time.

    Call it whenever the clock was moved, before anything else is asked of the residency: what
    is queued after a call begins at the time of that call.
    """

    def __init__(self, residency: ExpertResidency, link: VirtualLink, clock: VirtualClock) -> None:
        self._residency, self._link, self._clock = residency, link, clock
        self._last = clock.now()

    def advance(self) -> None:
        """Copies that end by now are complete; the next one has begun."""
        now, worker = self._clock.now(), self._residency.transitions.worker
        while options := worker.options():
            what, _ = options[0]
            if what == "complete" and self._link.free_at > now:
                break
            if what == "load":
                self._link.not_before(self._last)
            worker.step(options[0])
        self._last = now

    def next_end(self) -> float | None:
        """When the copy under way is over; None if there is none."""
        now = self._clock.now()
        self.advance()
        busy = self._residency.transitions.worker.n_jobs > 0
        return max(now, self._link.free_at) if busy else None
