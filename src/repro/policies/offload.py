"""``offload``: full-precision experts in a cache that is too small, fetched ahead of their use.

The one idea (ExpertFlow, arXiv 2510.26730): while a layer computes, the routers of the next
layers are asked with the present hidden state, and experts they are likely to choose are
fetched.  How far ahead to look follows from the link: far enough that a fetch ends before its
layer begins, no farther, for predictions get worse.  A miss that remains waits.

Decisions only, from arrays that whoever runs the cache owns (:class:`Cache`): which experts to
fetch, and whom each of them replaces.  ``wait`` and ``copy`` are somebody else's.

Left out of ExpertFlow: its learned predictor of the look-ahead and its cache-aware routing,
which changes what the model computes.

Letters: L layers, E experts, H layers looked ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.contract import Action, FloatArray, PolicyState
from repro.errors import unknown_name
from repro.policies.inventory import Bits, Inventory, PolicyBudgetError, PolicyInputError

BoolArray = npt.NDArray[np.bool_]
Key = tuple[int, int]  # (layer, expert)
RULES = ("lru", "lfu")
# Our choice: beyond a few layers a router asked with an early hidden state guesses little better
# than its expert's popularity.
MAX_LOOKAHEAD = 4
# Our choice: share of fetches in vain above which the look-ahead shrinks by a layer.
MAX_WASTE = 0.5


@dataclass
class Cache:
    """What is in the cache; its owner keeps it up to date with :meth:`touch` and :meth:`place`."""

    resident: BoolArray  # [L, E] there, or on its way
    last_use: npt.NDArray[np.int64] = field(init=False)  # [L, E] tick
    uses: npt.NDArray[np.int64] = field(init=False)  # [L, E]
    unused: BoolArray = field(init=False)  # [L, E] fetched ahead and not used since
    tick: int = 0
    n_hits: int = 0
    n_misses: int = 0
    n_ahead: int = 0
    n_wasted: int = 0  # fetched ahead and dropped unused

    def __post_init__(self) -> None:
        self.last_use = np.zeros(self.resident.shape, dtype=np.int64)
        self.uses = np.zeros(self.resident.shape, dtype=np.int64)
        self.unused = np.zeros(self.resident.shape, dtype=bool)

    def touch(self, layer: int, experts: npt.NDArray[np.integer]) -> npt.NDArray[np.intp]:
        """These experts are computed now; returns those that are missing, in order."""
        chosen = np.unique(np.asarray(experts, dtype=np.intp))
        self.tick += 1
        self.last_use[layer, chosen] = self.tick
        self.uses[layer, chosen] += 1
        there = self.resident[layer, chosen]
        self.unused[layer, chosen] = False
        self.n_hits += int(there.sum())
        self.n_misses += int((~there).sum())
        return chosen[~there]

    def place(self, fetch: Fetch) -> None:
        """Carry out a decision: victims out, experts in."""
        for layer, expert in fetch.victims:
            self.resident[layer, expert] = False
            self.n_wasted += int(self.unused[layer, expert])
            self.unused[layer, expert] = False
        for layer, expert in fetch.wanted:
            self.resident[layer, expert] = True
            self.unused[layer, expert] = fetch.ahead
            self.n_ahead += fetch.ahead
            # A fetch counts as a use in time, or the newest would be the next victim.
            self.last_use[layer, expert] = self.tick


@dataclass(frozen=True)
class Fetch:
    """What to bring in, most urgent first, and who goes (as many as there is no free slot for)."""

    wanted: tuple[Key, ...]
    victims: tuple[Key, ...]
    ahead: bool


def choose_victims(cache: Cache, n: int, protected: BoolArray, rule: str) -> tuple[Key, ...]:
    """``n`` residents that go first, fewer if all others are protected.

    Args:
        cache: as it is.
        n: how many.
        protected: ``[L, E]`` that must stay: in use now, or about to be.
        rule: ``lru`` the longest unused, ``lfu`` the least used, then the longest unused.

    Raises:
        UnknownNameError: no such rule.
    """
    if rule not in RULES:
        raise unknown_name("victim rule", rule, RULES)
    layer, expert = np.nonzero(cache.resident & ~protected)
    last = cache.last_use[layer, expert]
    keys = (last,) if rule == "lru" else (last, cache.uses[layer, expert])
    order = np.lexsort(keys)[: max(0, n)]
    return tuple(zip(layer[order].tolist(), expert[order].tolist(), strict=True))


def lookahead_of(
    n_missing: float, expert_bytes: int, link_bytes_per_s: float, layer_s: float
) -> int:
    """Layers to look ahead so that what is missing of a layer arrives while others compute.

    Args:
        n_missing: experts of a layer that are not there, on average.
        expert_bytes: of one.
        link_bytes_per_s: of the host link.
        layer_s: time to compute a layer.
    """
    if layer_s <= 0 or link_bytes_per_s <= 0:
        return MAX_LOOKAHEAD
    needed = n_missing * expert_bytes / link_bytes_per_s / layer_s
    return int(np.clip(np.ceil(needed), 1, MAX_LOOKAHEAD))


class OffloadPolicy:
    """Cache decisions.

    Args:
        inventory: its widest width is what is cached.
        rule: ``lru`` or ``lfu``.
        lookahead: layers to look ahead at first; adapted by :meth:`adapt` if ``adaptive``.
        adaptive: whether the look-ahead follows the link.
        per_layer: experts to fetch per layer looked ahead; default: as many as are likely.
        likely: probability of use from which an expert is fetched ahead.

    Raises:
        UnknownNameError: no such rule.
        PolicyInputError: numbers out of range.
    """

    name = "offload"

    def __init__(
        self,
        inventory: Inventory,
        *,
        rule: str = "lru",
        lookahead: int = 1,
        adaptive: bool = True,
        per_layer: int | None = None,
        likely: float = 0.5,
    ) -> None:
        if rule not in RULES:
            raise unknown_name("victim rule", rule, RULES)
        if not 0 <= lookahead <= MAX_LOOKAHEAD or not 0 <= likely <= 1:
            raise PolicyInputError(
                f"lookahead={lookahead} must be 0 to {MAX_LOOKAHEAD} and likely={likely} 0 to 1"
            )
        self._inventory = inventory
        self.rule = rule
        self.lookahead = lookahead
        self._adaptive = adaptive
        self._per_layer = per_layer
        self._likely = likely

    # the cache ------------------------------------------------------------------------------

    def n_slots(self, budget_bytes: int) -> int:
        """Experts that the budget holds, of the largest layer's size."""
        each = int(self._inventory.expert_bytes[:, -1].max())
        return min(int(self._inventory.n_present.sum()), budget_bytes // each)

    def initial_bits(self, budget_bytes: int) -> Bits:
        """The widest width for experts in the cache, **0 for those that are not resident**.

        The busiest of calibration, the same number in every layer as far as it goes; without
        calibration the first ones.

        Raises:
            PolicyBudgetError: the budget holds not one expert.
        """
        inventory = self._inventory
        slots = self.n_slots(budget_bytes)
        if slots < 1:
            raise PolicyBudgetError(
                f"a budget of {budget_bytes:,} bytes holds no expert of "
                f"{int(inventory.expert_bytes[:, -1].max()):,} bytes: raise it"
            )
        known = inventory.calibration_mass
        score = np.zeros(inventory.shape) if known is None else np.asarray(known, dtype=float)
        order = np.argsort(np.where(inventory.present, -score, np.inf), axis=1, kind="stable")
        rank = np.empty_like(order)
        places = np.broadcast_to(np.arange(order.shape[1]), order.shape)
        np.put_along_axis(rank, order, places, axis=1)
        flat = np.where(inventory.present, rank, order.size).reshape(-1)
        first = np.argsort(flat, kind="stable")[:slots]
        bits = np.zeros((flat.size, inventory.n_blocks), dtype=np.int8)
        bits[first] = inventory.widths[-1]
        return bits.reshape(*inventory.shape, inventory.n_blocks)

    # decisions of a layer -------------------------------------------------------------------

    def demand(
        self, cache: Cache, layer: int, missing: npt.NDArray[np.integer], free_slots: int
    ) -> Fetch:
        """Misses of the layer that computes now: all of them are wanted, and are waited for.

        With fewer slots than misses the first ones are fetched; ask again for the others once
        those are computed.

        Args:
            cache: as it is, after :meth:`Cache.touch`.
            layer: that computes.
            missing: its experts that are not there.
            free_slots: unused ones.
        """
        protected = np.zeros(cache.resident.shape, dtype=bool)
        protected[layer] = cache.last_use[layer] == cache.tick
        victims = choose_victims(cache, len(missing) - free_slots, protected, self.rule)
        n = min(len(missing), free_slots + len(victims))
        return Fetch(tuple((layer, int(e)) for e in missing[:n]), victims, False)

    def prefetch(
        self, cache: Cache, layer: int, probability: FloatArray, free_slots: int, limit: int
    ) -> Fetch:
        """What the next layers are likely to need.

        Args:
            cache: as it is.
            layer: that computes now; the next one is ``layer + 1``.
            probability: ``[H, E]`` that the layer so many ahead uses the expert in this step.
            free_slots: unused ones.
            limit: fetches at most (what the link carries meanwhile).

        Returns:
            Nearest layers first, likeliest first; nobody likely to be used is replaced.
        """
        probability = np.asarray(probability, dtype=np.float64)
        protected = np.zeros(cache.resident.shape, dtype=bool)
        protected[layer] = cache.last_use[layer] == cache.tick
        wanted: list[Key] = []
        n_layers = cache.resident.shape[0]
        for ahead in range(min(len(probability), self.lookahead)):
            row = layer + 1 + ahead
            if row >= n_layers:
                break
            likely = np.argsort(-probability[ahead], kind="stable")
            likely = likely[probability[ahead][likely] >= self._likely]
            likely = likely[: self._per_layer]
            protected[row, likely] = True
            wanted += [(row, int(e)) for e in likely if not cache.resident[row, e]]
        wanted = wanted[: max(0, limit)]
        victims = choose_victims(cache, len(wanted) - free_slots, protected, self.rule)
        return Fetch(tuple(wanted[: free_slots + len(victims)]), victims, True)

    def adapt(self, cache: Cache, n_missing: float, link_bytes_per_s: float, layer_s: float) -> int:
        """Set the look-ahead from what was measured; a layer less where fetches are in vain."""
        if self._adaptive:
            size = int(self._inventory.expert_bytes[:, -1].max())
            found = lookahead_of(n_missing, size, link_bytes_per_s, layer_s)
            if cache.n_ahead and cache.n_wasted / cache.n_ahead > MAX_WASTE:
                found = max(1, found - 1)
            self.lookahead = found
        return self.lookahead

    # the engine's questions -----------------------------------------------------------------

    def due(self, now: float, kv_free_blocks: int, kv_needed_blocks: int = 0) -> bool:
        """Never: decisions fall inside a step, layer by layer."""
        return False

    def decide(self, state: PolicyState) -> list[Action]:
        """Nothing between steps."""
        return []

    def report(self) -> dict[str, Any]:
        """JSON-able."""
        return {"policy": self.name, "rule": self.rule, "lookahead": self.lookahead}
