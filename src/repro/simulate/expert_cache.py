"""Offloading in virtual time: a cache of whole experts, a link, and a forward pass that waits.

The one idea: layer by layer, what the layer needs and is not there is fetched and waited for;
while it computes, the link brings what the policy expects of the next ones.  Decisions are
:class:`repro.policies.offload.OffloadPolicy`'s, blocks of pages those of residency
(:class:`repro.residency.memory.VersionsMemory`); time is added here.

A copy that has begun ends; copies that are waited for go before those fetched ahead.  Whether a
fetch ahead is right is the *accuracy* of the predictor: of the experts it names for a layer
(as many as the layer uses) so many per cent are used.

Letters: L layers, E experts.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.contract import FloatArray, Reservation
from repro.policies.inventory import Inventory
from repro.policies.offload import Cache, Fetch, Key, OffloadPolicy
from repro.residency.memory import Intake, VersionsMemory
from repro.residency.plan import MemoryPlan
from repro.simulate.errors import SimulationError
from repro.simulate.virtual_time import VirtualClock, VirtualLink

Active = npt.NDArray[np.bool_]


class ExpertCache:
    """Blocks for experts, and KV pages, under one cap.

    Args:
        policy: decides.
        inventory: sizes; the widest width is what is cached.
        capacity_bytes: rounded down to whole pages.
        kv_bytes: of the KV partition; what is left of the rest beyond whole experts is added.
        page_bytes: of a page.
        link: of the device.
        clock: virtual.
        read_ahead: whether the predictor is asked at all.
        accuracy: of the predictor, 0 to 1.
        seed: of its mistakes.

    Raises:
        SimulationError: fewer blocks than one layer may need, or no accuracy.
    """

    def __init__(
        self,
        policy: OffloadPolicy,
        inventory: Inventory,
        *,
        capacity_bytes: int,
        kv_bytes: int,
        page_bytes: int,
        link: VirtualLink,
        clock: VirtualClock,
        read_ahead: bool = True,
        accuracy: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not 0 <= accuracy <= 1:
            raise SimulationError(f"accuracy={accuracy}: give 0 to 1")
        self.policy, self.link, self.page_bytes = policy, link, page_bytes
        self._clock = clock
        self._read_ahead, self._accuracy = read_ahead, accuracy
        self._rng = np.random.default_rng([seed, 7])
        n_bits = inventory.widths[-1]
        self.expert_bytes = int(inventory.expert_bytes[:, -1].max())
        pages = -(-self.expert_bytes // page_bytes)
        n_pages, kv_pages = capacity_bytes // page_bytes, -(-kv_bytes // page_bytes)
        slots = policy.n_slots((n_pages - kv_pages) * page_bytes)
        if slots < inventory.shape[1]:
            raise SimulationError(
                f"{slots} experts fit and a layer has {inventory.shape[1]}: give at least "
                f"{(inventory.shape[1] * pages + kv_pages) * page_bytes} bytes"
            )
        rest = n_pages - kv_pages - slots * pages
        plan = MemoryPlan(
            "versions", n_pages, page_bytes, kv_pages + rest, 0, 0, slots * pages, 0,
            n_high=slots, high_blocks=slots, high_pages=pages,
        )  # fmt: skip
        self.n_slots = slots
        self.memory = VersionsMemory(plan, (n_bits,))
        self._intake = Intake(pages, n_bits, False)
        self._blocks: dict[Key, npt.NDArray[np.int32]] = {}
        self.n_bits = policy.initial_bits(slots * pages * page_bytes)
        self.cache = Cache(self.n_bits[:, :, 0] > 0)
        self.there_at: FloatArray = np.where(self.cache.resident, 0.0, np.inf)
        for layer, expert in np.argwhere(self.cache.resident).tolist():
            self._blocks[layer, expert] = self.memory.take(self._intake)
        self._waiting: deque[tuple[Key, float]] = deque()  # fetched ahead, not begun
        self.n_late = 0  # hits that were still on their way
        self.n_cancelled = 0  # fetched ahead and dropped before they began
        self.wait_s = 0.0
        self.demand_bytes = 0

    # KV pages ----------------------------------------------------------------------------------

    def reserve(self, n_bytes: int, purpose: str) -> Reservation | None:
        """KV pages, all or none."""
        pages = self.memory.reserve(-(-n_bytes // self.page_bytes))
        return None if pages is None else Reservation(purpose, tuple(pages.tolist()))

    def release(self, reservation: Reservation) -> None:
        """Give them back."""
        self.memory.release(np.asarray(reservation.pages, dtype=np.int32))

    def free_bytes(self, purpose: str = "kv") -> int:
        """Of the KV partition."""
        return self.memory.free_for_kv() * self.page_bytes

    def used_bytes(self) -> int:
        """Pages in use times their size."""
        return self.memory.budget.used * self.page_bytes

    @property
    def capacity_bytes(self) -> int:
        """The hard cap."""
        return self.memory.budget.n_pages * self.page_bytes

    def check(self) -> None:
        """Raise AssertionError unless books, blocks and cache agree."""
        self.memory.check()
        assert set(self._blocks) == {(i, e) for i, e in np.argwhere(self.cache.resident).tolist()}
        pages = list(self._blocks.values())
        taken = np.concatenate(pages) if pages else np.empty(0, dtype=np.int32)
        both = np.concatenate([taken, self.memory.free_pages()])
        assert len(np.unique(both)) == len(both), "a page has two owners"
        assert self.used_bytes() <= self.capacity_bytes

    # a pass ------------------------------------------------------------------------------------

    def run(self, active: Active, layer_s: FloatArray) -> FloatArray:
        """A pass that begins now: moves the clock to the end of its layers.

        Args:
            active: ``[L, E]`` experts that the pass uses.
            layer_s: ``[L]`` time of each layer without waiting.

        Returns:
            Seconds that each layer waited, ``[L]``.
        """
        waits = np.zeros(len(active))
        predicted = self._predict(active) if self._read_ahead else None
        missed = 0
        for layer in range(len(active)):
            now = self._clock.now()
            chosen = np.flatnonzero(active[layer])
            missing = self.cache.touch(layer, chosen)
            missed += len(missing)
            ready = self._need(layer, chosen, missing, now)
            waits[layer] = max(0.0, ready - now)
            now = max(now, ready)
            self._clock.advance_to(now)
            if predicted is not None:
                self._fetch_ahead(layer, predicted, now, float(layer_s[layer]))
            now += float(layer_s[layer])
            self._clock.advance_to(now)
            self._begin_waiting(now)
        self.wait_s += float(waits.sum())
        mean_s = float(layer_s.mean())
        self.policy.adapt(self.cache, missed / len(active), self._rate, mean_s)
        return waits

    def _need(
        self,
        layer: int,
        chosen: npt.NDArray[np.intp],
        missing: npt.NDArray[np.intp],
        now: float,
    ) -> float:
        """When all that the layer uses is there."""
        self._begin_waiting(now)
        late = self.there_at[layer, chosen] > now
        self.n_late += int(late.sum()) - len(missing)
        urgent = {(layer, int(e)) for e in chosen[late]}
        promoted = [key for key, _ in self._waiting if key in urgent]
        if promoted:
            self._waiting = deque(entry for entry in self._waiting if entry[0] not in urgent)
        if len(missing):
            fetch = self.policy.demand(self.cache, layer, missing, self._n_free)
            if len(fetch.wanted) < len(missing):
                raise SimulationError(
                    f"layer row {layer} misses {len(missing)} experts and {len(fetch.wanted)} "
                    "can be fetched: give the cache more bytes"
                )
            self._place(fetch)
            promoted += fetch.wanted
        if promoted:
            self.link.not_before(now)
            for key in promoted:
                self.there_at[key] = self.link.use("in", self.expert_bytes)
                self.demand_bytes += self.expert_bytes
        return float(self.there_at[layer, chosen].max(initial=now))

    def _fetch_ahead(self, layer: int, predicted: FloatArray, now: float, layer_s: float) -> None:
        ahead = predicted[layer + 1 : layer + 1 + self.policy.lookahead]
        carried = len(ahead) * layer_s * self._rate / self.expert_bytes
        limit = max(1, int(np.ceil(carried))) - len(self._waiting)
        if limit <= 0 or not len(ahead):
            return
        fetch = self.policy.prefetch(self.cache, layer, ahead, self._n_free, limit)
        self._place(fetch)
        self._waiting += [(key, now) for key in fetch.wanted]
        self._begin_waiting(now)

    def _begin_waiting(self, now: float) -> None:
        """What was fetched ahead begins as soon as the link is free."""
        while self._waiting and self.link.free_at <= now:
            key, since = self._waiting.popleft()
            self.link.not_before(since)
            self.there_at[key] = self.link.use("in", self.expert_bytes)

    def _place(self, fetch: Fetch) -> None:
        gone = set(fetch.victims)
        before = len(self._waiting)
        if gone and before:
            self._waiting = deque(entry for entry in self._waiting if entry[0] not in gone)
            self.n_cancelled += before - len(self._waiting)
        for key in fetch.victims:
            self.memory.give(self._blocks.pop(key))
            self.there_at[key] = np.inf
        for key in fetch.wanted:
            self._blocks[key] = self.memory.take(self._intake)
        self.cache.place(fetch)

    def _predict(self, active: Active) -> FloatArray:
        """``[L, E]`` 1 where the predictor expects a use."""
        if self._accuracy == 1.0:
            return active.astype(np.float64)
        kept = active & (self._rng.random(active.shape) < self._accuracy)
        order = np.where(active, np.inf, self._rng.random(active.shape))
        n_wrong = active.sum(axis=1) - kept.sum(axis=1)
        rank = np.argsort(np.argsort(order, axis=1), axis=1)
        wrong = (rank < n_wrong[:, None]) & ~active
        return (kept | wrong).astype(np.float64)

    @property
    def _n_free(self) -> int:
        return self.n_slots - len(self._blocks)

    @property
    def _rate(self) -> float:
        return self.link.rate("in")

    def report(self) -> dict[str, Any]:
        """JSON-able."""
        cache = self.cache
        uses = cache.n_hits + cache.n_misses
        return {
            "n_slots": self.n_slots,
            "n_hits": cache.n_hits,
            "n_misses": cache.n_misses,
            "hit_rate": cache.n_hits / uses if uses else 1.0,
            "n_late": self.n_late,
            "n_ahead": cache.n_ahead,
            "n_wasted": cache.n_wasted,
            "n_cancelled": self.n_cancelled,
            "demand_bytes": self.demand_bytes,
            "wait_s": self.wait_s,
        }
