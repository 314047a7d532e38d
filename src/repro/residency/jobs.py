"""What the worker is asked for, and how far it has come.

The one idea: a job is the whole of what one change (or one old version that leaves) needs
copied; it is cut into chunks of at most a staging slot, and only chunks are ever under way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from repro.residency.pages import Pages
from repro.residency.staging import Slot


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive host pages and the arena pages they belong to."""

    host: slice
    pages: Pages

    @property
    def together(self) -> bool:
        """Whether the arena pages lie together too, in order."""
        return len(self.pages) == 1 or bool((self.pages[1:] - self.pages[:-1] == 1).all())


@dataclass(eq=False)
class CopyJob:
    """The chunks of one change, or of one old version that leaves."""

    direction: Literal["in", "out"]
    token: Any  # the change, or the retired version
    chunks: deque[Chunk]
    gives_back: bool  # memory is free once it is over
    after: Any | None = None  # compute work that must be over before a page is touched
    n_busy: int = 0
    over: bool = False
    cancelled: bool = False
    error: str = ""


@dataclass(eq=False)
class Transfer:
    """One chunk on its way."""

    job: CopyJob
    chunk: Chunk
    slot: Slot | None
    stage: Literal["loading", "loaded", "moving", "moved"] = "loading"
    event: Any | None = None


class Progress(Enum):
    """What a micro-step did."""

    IDLE = "idle"  # nothing to do
    WAITING = "waiting"  # for the device, or for a slot
    WORKED = "worked"
    COMPLETED = "completed"  # one chunk is over


Option = tuple[Literal["complete", "move", "load"], Transfer | None]
