"""Which requests take part in the next step: continuous batching with chunked prefill.

The one idea: a step is planned anew each time from what is there.  Decoding requests come
first, in order of arrival, one token each; what is left of the step's tokens goes to prompts,
in chunks; then waiting requests are admitted while their prompt has room.  A request that
finds no KV memory is left out of the step and keeps what it has; the shortage is reported as
demand, and only if nobody can run and weights cannot give way is one sent back to be computed
again.

Left out: priorities, and fairness beyond order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from repro.serving.request import Phase, Request


class KvPool(Protocol):
    """KV memory in blocks of some tokens of all layers."""

    def new_table(self) -> Any:
        """An empty table."""
        ...

    def extend(self, table: Any, n_tokens: int) -> bool:
        """Room for ``n_tokens`` in all, or nothing changed and False."""
        ...

    def release(self, table: Any) -> None:
        """Give all its blocks back."""
        ...

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        ...

    def blocks_of(self, table: Any) -> int:
        """Blocks the table has."""
        ...

    def free_blocks(self) -> int:
        """Blocks that could be had right now."""
        ...


@dataclass
class Plan:
    """One step."""

    decode: list[Request] = field(default_factory=list)
    prefill: list[tuple[Request, int]] = field(default_factory=list)  # tokens of the chunk
    stalled: list[Request] = field(default_factory=list)
    needed_blocks: int = 0  # that those who were left out lack, free ones not subtracted

    @property
    def empty(self) -> bool:
        """Nobody can run."""
        return not self.decode and not self.prefill


class Scheduler:
    """Waiting and running requests, and their claim on KV memory.

    Args:
        kv: where blocks come from.
        max_running: requests in a step at most.
        max_step_tokens: tokens of a step at most; a decode token is one.
        can_chunk: whether a prompt may be computed in pieces (False: models whose recurrent
            state cannot be continued, whose prompts go in one piece whatever their length).
    """

    def __init__(
        self, kv: KvPool, *, max_running: int, max_step_tokens: int, can_chunk: bool = True
    ) -> None:
        self.kv = kv
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self._can_chunk = can_chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def n_unfinished(self) -> int:
        """Requests that still want something."""
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Put a request in the queue."""
        self.waiting.append(request)

    def plan(self, now: float, *, admit: bool = True) -> Plan:
        """The next step; blocks for it are taken here."""
        plan = Plan()
        tokens = self.max_step_tokens
        for request in self.running:
            if request.decoding and tokens > 0:
                if self._claim(request, 1, plan, now):
                    plan.decode.append(request)
                    tokens -= 1
        for request in self.running:
            if not request.decoding and tokens > 0:
                tokens -= self._prefill(request, tokens, plan, now)
        while admit and self.waiting and tokens > 0 and len(self.running) < self.max_running:
            request = self.waiting[0]
            if plan.stalled or not self._has_room(request):
                # Whoever runs already comes first; the others show what they lack.
                plan.needed_blocks += max(0, self._lacking(request))
                self._stall(request, now)
                break
            self.waiting.popleft()
            request.phase = Phase.RUNNING
            if request.table is None:
                request.table = self.kv.new_table()
            self.running.append(request)
            tokens -= self._prefill(request, tokens, plan, now)
        return plan

    def _lacking(self, request: Request) -> int:
        held = 0 if request.table is None else self.kv.blocks_of(request.table)
        return self.kv.blocks_for(len(request.tokens) + (0 if request.score else 1)) - held

    def _has_room(self, request: Request) -> bool:
        """Room for the whole prompt and its first token: no half-computed prompts pile up."""
        return self._lacking(request) <= self.kv.free_blocks()

    def _prefill(self, request: Request, tokens: int, plan: Plan, now: float) -> int:
        chunk = request.n_pending
        if self._can_chunk:
            chunk = min(chunk, tokens)
        elif chunk > tokens and (plan.decode or plan.prefill):
            return 0  # in a step of its own
        if not self._claim(request, chunk, plan, now):
            return 0
        plan.prefill.append((request, chunk))
        return chunk

    def _claim(self, request: Request, n_tokens: int, plan: Plan, now: float) -> bool:
        wanted = request.n_cached + n_tokens
        if self.kv.extend(request.table, wanted):
            self._unstall(request, now)
            return True
        plan.needed_blocks += self.kv.blocks_for(wanted) - self.kv.blocks_of(request.table)
        plan.stalled.append(request)
        self._stall(request, now)
        return False

    @staticmethod
    def _stall(request: Request, now: float) -> None:
        if request.timing.stalled_since is None:
            request.timing.stalled_since = now

    @staticmethod
    def _unstall(request: Request, now: float) -> None:
        since = request.timing.stalled_since
        if since is not None:
            request.timing.kv_stall_s += now - since
            request.timing.stalled_since = None

    def preempt(self) -> Request | None:
        """Send the newest running request back to be computed again; None if it is the only one."""
        candidates = [r for r in self.running if r.table is not None and self.kv.blocks_of(r.table)]
        if len(candidates) < 2:
            return None
        request = max(candidates, key=lambda r: r.number)
        self.send_back(request)
        request.n_preemptions += 1
        return request

    def send_back(self, request: Request) -> None:
        """Release a running request's KV and put it first in the queue, to be computed again."""
        self.running.remove(request)
        self.kv.release(request.table)
        request.table = None
        request.phase = Phase.WAITING
        if request.score:
            request.log_likelihoods.clear()
        self.waiting.appendleft(request)

    def finish(
        self, request: Request, now: float, keep: Callable[[Request], bool] | None = None
    ) -> None:
        """Take a request out; its blocks are free at once unless ``keep`` took them over."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._unstall(request, now)
        request.phase = Phase.FINISHED
        if request.table is not None and not (keep and keep(request)):
            self.kv.release(request.table)
        request.table = None
