"""When nobody can run: wait for memory on its way, or decide who gives some back.

The one idea: an order of remedies, each tried only when the one before it has nothing left.
Memory on its way is waited for; an idle conversation gives its KV up; the policy is asked
again while weights are above their floor; then the newest request is sent back to be computed
again, which is counted and announced; and a request that fits nowhere even alone fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from repro.serving.control import Pressure

if TYPE_CHECKING:
    from repro.serving.engine import Engine

_IDLE_S = 0.0005  # between two looks at the worker
_PATIENCE = 2000  # looks without progress before memory on its way is given up


class RoomMaker:
    """One for each engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._n_idle = 0

    def progress(self) -> None:
        """A step was run: whoever waits next may be patient again."""
        self._n_idle = 0

    def make(self, needed_blocks: int, now: float, timer: Callable[[], float]) -> None:
        """Called instead of a step when no request could take part."""
        engine, parts = self._engine, self._engine._parts
        residency = parts.residency
        if residency.in_transition.any() and residency.health().ok and self._n_idle < _PATIENCE:
            self._n_idle += 1
            if not parts.manual:
                time.sleep(_IDLE_S)
                engine.metrics.idle_wait_s += timer() - now
            return
        if self._evict_conversation():
            return
        n_bytes = needed_blocks * parts.control.kv_block_bytes
        if n_bytes <= residency.lendable_bytes() and not parts.control.frozen:
            pressure = Pressure(parts.scheduler.kv.free_blocks(), needed_blocks)
            if parts.control.tick(pressure, force=True):
                return
        request = parts.scheduler.preempt()
        if request is not None:
            parts.forget_signals(request)
            engine.metrics.n_preemptions += 1
            engine._announce(
                f"request {request.number} gives its KV memory back and will be computed again: "
                f"{needed_blocks} blocks are missing and expert weights cannot make room"
            )
            return
        request = next(iter([*parts.scheduler.running, *parts.scheduler.waiting]))
        request.error = (
            f"its {len(request.tokens)} tokens do not fit into KV memory, with nothing else in it"
        )
        engine._end(request, "error")

    def _evict_conversation(self) -> bool:
        """Release the KV of the conversation that has been idle longest."""
        engine = self._engine
        idle = [c for c in engine._conversations if c.evictable]
        if not idle:
            return False
        conversation = min(idle, key=lambda c: c.last_used)
        conversation.evict()
        engine.metrics.n_conversation_evictions += 1
        engine._announce(
            "an idle conversation gives its KV memory back; its next turn computes it again"
        )
        return True
