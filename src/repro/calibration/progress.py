"""One line per step of long work: how far, and how long it will still take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_EVERY_S = 2.0


class Ticker:
    """Prints at most one line every two seconds, and the last one.

    ``ticker("damage")`` gives the callback ``(done, total)`` of a stage.
    """

    def __init__(
        self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out or sys.stderr
        self._clock = clock

    def __call__(self, stage: str) -> Callable[[int, int], None]:
        """A callback for one stage; its clock starts now."""
        start = self._clock()
        last = [start - _EVERY_S]
        first_done: list[int] = []

        def tick(done: int, total: int) -> None:
            now = self._clock()
            if not first_done:
                first_done.append(done)  # what an earlier run had done took no time of this one
            if done < total and now - last[0] < _EVERY_S:
                return
            last[0] = now
            ours = done - first_done[0] + 1
            left = (now - start) / ours * (total - done)
            print(f"{stage}: {done} of {total}, {left:.0f} s left", file=self._out, flush=True)

        return tick
