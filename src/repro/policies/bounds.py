"""What no policy can beat: oracles that know the future or the measured damage.

The one idea: beside every policy stands the best that its kind of decision could have done with
perfect knowledge, under the same bytes.

- frequency oracle: the top n of each layer by the traffic of the phase, known in advance
  (bounds ``dynaexq``);
- measured-damage oracle: the best allocation by measured loss (bounds ``pagedweight`` and
  ``static_mixed``; additive over blocks, as planners assume, so a bound on planning only);
- clairvoyant cache: Belady's victims and perfect prefetch (bounds ``offload``);
- best uniform width of the same bytes: no bound but the honest opponent.

Letters: L layers, E experts, B blocks, W widths, A accesses of a trace.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro.contract import FloatArray, IntArray
from repro.policies.allocation import Allocation, allocate_inventory
from repro.policies.inventory import Bits, Inventory, PolicyInputError
from repro.policies.selection import n_high_of, top_n
from repro.policies.static import best_uniform_column

Access = tuple[int, Sequence[int]]
"""A layer that is computed, and the experts it uses."""


def frequency_oracle(inventory: Inventory, traffic: IntArray, budget_bytes: int) -> Bits:
    """Narrowest width everywhere, widest for the top n by the traffic ``[L, E]`` to come.

    Raises:
        PolicyBudgetError: the narrowest widths do not fit.
    """
    inventory.check_budget(budget_bytes)
    sizes = inventory.expert_bytes
    n_high = n_high_of(budget_bytes, sizes[:, 0], sizes[:, -1], inventory.n_present)
    bits = inventory.filled(inventory.widths[0])
    chosen = top_n(np.asarray(traffic, dtype=np.float64), n_high, inventory.present)
    bits[chosen] = inventory.widths[-1]
    return bits


def damage_oracle(
    inventory: Inventory, measured: FloatArray, budget_bytes: int, method: str = "auto"
) -> Allocation:
    """The best allocation by measured damage ``[L, E, B, W]`` (see ``allocation`` for the gap).

    Raises:
        PolicyBudgetError: the narrowest widths do not fit.
    """
    return allocate_inventory(inventory, np.asarray(measured, dtype=float), budget_bytes, method)


@dataclass(frozen=True)
class UniformWidth:
    """The widest width for all experts that fits."""

    n_bits: int
    n_bytes: int


def best_uniform(inventory: Inventory, budget_bytes: int) -> UniformWidth:
    """The opponent that costs nothing: one width for all, of at most the same bytes.

    Raises:
        PolicyBudgetError: none fits.
    """
    column = best_uniform_column(inventory, budget_bytes)
    return UniformWidth(inventory.widths[column], inventory.uniform_bytes(column))


@dataclass(frozen=True)
class CacheBound:
    """A clairvoyant cache on a trace."""

    n_hits: int
    n_misses: int  # also what a perfect prefetch must move
    n_bytes: int
    compute_s: float
    stall_s: float  # that remains with perfect prefetch

    @property
    def hit_rate(self) -> float:
        """Of uses; 1 for an empty trace."""
        total = self.n_hits + self.n_misses
        return self.n_hits / total if total else 1.0


def clairvoyant_cache(
    trace: Sequence[Access],
    n_slots: int,
    *,
    expert_bytes: int = 0,
    link_bytes_per_s: float = float("inf"),
    access_s: float = 0.0,
    resident: npt.NDArray[np.bool_] | None = None,
) -> CacheBound:
    """Belady's cache (the victim is whoever is used again last) with perfect prefetch.

    Fetches use the link one after the other in the order of their deadlines, each as soon as its
    victim has been used for the last time before it; a layer begins when all its experts are
    there.  All experts of an access are needed together, and stay until it ends.

    Args:
        trace: accesses in order.
        n_slots: experts that fit.
        expert_bytes: of one.
        link_bytes_per_s: of the host link.
        access_s: time to compute one access.
        resident: ``[L, E]`` at the start; default nothing.

    Raises:
        PolicyInputError: an access needs more experts than fit.
    """
    sets = [(layer, tuple(dict.fromkeys(int(e) for e in experts))) for layer, experts in trace]
    largest = max((len(experts) for _, experts in sets), default=0)
    if largest > n_slots:
        raise PolicyInputError(
            f"an access uses {largest} experts and {n_slots} fit: give the cache more bytes"
        )
    uses: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    for number, (layer, experts) in enumerate(sets):
        for expert in experts:
            uses[layer, expert].append(number)
    never = len(sets)
    cache: dict[tuple[int, int], int] = {}  # key -> its next use
    heap: list[tuple[int, tuple[int, int]]] = []  # (-next use, key), stale entries skipped
    slot_free = [0.0] * n_slots  # when unused slots can be written
    freed_at: dict[tuple[int, int], float] = {}  # when a resident was last used

    def enter(key: tuple[int, int], next_use: int) -> None:
        cache[key] = next_use
        heapq.heappush(heap, (-next_use, key))

    if resident is not None:
        for layer, expert in np.argwhere(resident)[:n_slots].tolist():
            queue = uses.get((layer, expert))
            enter((layer, expert), queue[0] if queue else never)
            freed_at[layer, expert] = 0.0
            slot_free.pop()
    hits = misses = 0
    fetch_s = expert_bytes / link_bytes_per_s
    now = stall = link_free = 0.0
    for layer, experts in sets:
        keys = [(layer, expert) for expert in experts]
        pinned = set(keys)
        ready = now
        for key in keys:
            uses[key].popleft()
            next_use = uses[key][0] if uses[key] else never
            if key in cache:
                hits += 1
                enter(key, next_use)
                continue
            misses += 1
            if slot_free:
                open_at = slot_free.pop()
            else:
                victim = _victim(heap, cache, pinned)
                del cache[victim]
                open_at = freed_at.pop(victim, 0.0)
            link_free = max(link_free, open_at) + fetch_s
            ready = max(ready, link_free)
            enter(key, next_use)
        stall += ready - now
        now = ready + access_s
        for key in keys:
            freed_at[key] = now
    return CacheBound(hits, misses, misses * expert_bytes, len(sets) * access_s, stall)


def _victim(
    heap: list[tuple[int, tuple[int, int]]],
    cache: dict[tuple[int, int], int],
    pinned: set[tuple[int, int]],
) -> tuple[int, int]:
    """Whoever is used again last; entries of an earlier next use are stale."""
    kept = []
    while True:
        negative, key = heapq.heappop(heap)
        if cache.get(key) != -negative:
            continue
        if key not in pinned:
            break
        kept.append((negative, key))
    for entry in kept:
        heapq.heappush(heap, entry)
    return key
