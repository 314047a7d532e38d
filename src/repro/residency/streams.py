"""Two timelines of a device: the compute stream and the migration stream.

The one idea: everything that must wait for the device asks an event, and a CPU, where calls
return when their work is done, has none.  So the code above is the same on both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Streams:
    """Events of the current (compute) stream and of a migration stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._migration = torch.cuda.Stream(device) if self.is_cuda else None

    def migrating(self) -> AbstractContextManager[Any]:
        """Work enqueued inside goes to the migration stream."""
        return torch.cuda.stream(self._migration) if self._migration else nullcontext()

    def compute_event(self) -> Any | None:
        """Done when the compute work enqueued so far is."""
        if not self.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def migration_event(self) -> Any | None:
        """Done when the copies enqueued so far are."""
        if not self.is_cuda:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(self._migration)
        return event

    def migration_waits_for(self, event: Any | None) -> None:
        """Copies enqueued from now on begin after ``event``; nobody blocks."""
        if event is not None and self._migration is not None:
            self._migration.wait_event(event)

    def synchronize_migration(self) -> None:
        """Block until no copy is under way: after a worker died, and at the end."""
        if self._migration is not None:
            self._migration.synchronize()


def is_done(event: Any | None) -> bool:
    """Whether the device has passed the event; there is nothing to wait for on a CPU."""
    return event is None or bool(event.query())
