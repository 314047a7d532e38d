"""What holds the experts while a simulated server runs: versions that change, or a cache.

The one idea: the server sees one small surface.  :class:`Resident` is serving's own residency
and :class:`repro.serving.control.Control` on virtual time, and its passes never wait;
:class:`Offloaded` is a cache whose passes do.  Both lend KV pages out of the same cap.

Letters: L layers, E experts, B blocks, W widths.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from repro.contract import FloatArray, IntArray, Step
from repro.policies import ServingPolicy
from repro.serving.control import Control, Pressure
from repro.simulate.control_parts import StepCounts
from repro.simulate.cost import ExpertCosts
from repro.simulate.expert_cache import ExpertCache
from repro.simulate.virtual_residency import VirtualResidency
from repro.simulate.virtual_time import VirtualClock, VirtualLink

Active = npt.NDArray[np.bool_]


class Mechanism(Protocol):
    """What the server needs."""

    kv_lender: Any  # reserve, release, free_bytes
    page_bytes: int
    link: VirtualLink
    costs: ExpertCosts
    damage: FloatArray  # [L, E] of one use at the widths of now
    is_high: Active  # [L, E] whether a use is served at the widest width

    @property
    def n_fetched(self) -> int:
        """Experts that a cache has fetched so far; 0 where there is none."""
        ...

    def boundary(self) -> None:
        """Between two steps: what is complete is switched to."""
        ...

    def tick(self, pressure: Pressure, *, force: bool = False) -> int:
        """The policy may decide; wishes granted."""
        ...

    def run(self, active: Active, counts: IntArray, layer_s: FloatArray, rest_s: float) -> float:
        """A pass from now: moves the clock to its end; seconds it waited for weights."""
        ...

    def wait(self) -> bool:
        """Nobody can run: move the clock to the end of the copy under way; False if none is."""
        ...

    def lendable_bytes(self) -> int:
        """KV bytes that could be had at most."""
        ...

    def report(self) -> dict[str, Any]:
        """JSON-able, the same for the same run."""
        ...

    def check(self) -> None:
        """Raise AssertionError unless the books are right."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Resident:
    """Every expert has a version that is there: passes never wait for weights.

    Args:
        residency: in miniature.
        policy: decides.
        clock: virtual.
        costs: of experts by width.
        damage_per_use: ``[L, E, B, W]``.
        sensitivity: ``[L, E, B, W]`` shown to the policy.
        kv_block_bytes: whole pages.
        top_k: k.
        frozen: no decisions.
        update_queue: see :class:`repro.serving.control.Control`.
    """

    def __init__(
        self,
        residency: VirtualResidency,
        policy: ServingPolicy,
        clock: VirtualClock,
        costs: ExpertCosts,
        damage_per_use: FloatArray,
        sensitivity: FloatArray | None,
        kv_block_bytes: int,
        top_k: int,
        *,
        frozen: bool = False,
        update_queue: bool | None = None,
    ) -> None:
        self.residency = self.kv_lender = residency
        self.page_bytes = residency.page_bytes
        self.link = residency.link
        self.costs = costs
        self._clock = clock
        self._damage = damage_per_use
        n_layers, n_experts = residency.n_bits.shape[:2]
        self.statistics = StepCounts(n_layers, n_experts, top_k)
        self.control = Control(
            policy=policy,
            residency=cast(Any, residency),
            context=cast(Any, SimpleNamespace(statistics=self.statistics, signals=None)),
            clock=clock,
            sensitivity=sensitivity,
            layer_block_bytes=residency.layer_block_bytes,
            kv_block_bytes=kv_block_bytes,
            frozen=frozen,
            update_queue=update_queue,
        )
        self.is_high: Active = np.zeros((n_layers, n_experts), dtype=bool)
        self.damage: FloatArray = np.zeros((n_layers, n_experts))
        self._look()

    @property
    def n_fetched(self) -> int:
        """There is no cache."""
        return 0

    def _look(self) -> None:
        """Widths have changed."""
        n_bits, widths = self.residency.n_bits, self.residency.widths
        self.costs.set_widths(n_bits)
        which = np.searchsorted(widths, n_bits)
        self.is_high = (which == len(widths) - 1).all(axis=2)
        chosen = np.take_along_axis(self._damage, which[..., None], axis=3)[..., 0]
        self.damage = chosen.sum(axis=2)

    def boundary(self) -> None:
        """Copies that are over, then publication."""
        self.residency.pump.advance()
        if self.residency.publish():
            self._look()

    def tick(self, pressure: Pressure, *, force: bool = False) -> int:
        """Serving's own control."""
        return self.control.tick(pressure, force=force)

    def run(self, active: Active, counts: IntArray, layer_s: FloatArray, rest_s: float) -> float:
        """Copies go on while the pass computes; what it read stays until it ends."""
        step: Step = self.residency.begin_step()
        self.statistics.add_counts(counts)
        self._clock.advance_to(self._clock.now() + (float(layer_s.sum()) + rest_s))
        self.residency.pump.advance()
        self.residency.end_step(step)
        return 0.0

    def wait(self) -> bool:
        """Until the copy under way is over."""
        end = self.residency.pump.next_end()
        if end is None:
            return bool(self.residency.targets())  # copied, and published at the next boundary
        self._clock.advance_to(end)
        return True

    def lendable_bytes(self) -> int:
        """Free, or free once weights are at their floor."""
        return self.residency.lendable_bytes()

    def report(self) -> dict[str, Any]:
        """Without wall times: they differ from run to run."""
        control = {k: v for k, v in self.control.report().items() if k != "decision_s"}
        widths, n = np.unique(self.residency.n_bits, return_counts=True)
        counts = self.residency.inner.transitions.counts
        return {
            "policy": control,
            "bytes_moved": self.residency.bytes_moved(),
            "published": {name: counts[name] for name in ("promotions", "demotions")},
            "blocks_by_width": {str(int(w)): int(k) for w, k in zip(widths, n, strict=True)},
            "weight_bytes": self.residency.inner.placement.resident_pages() * self.page_bytes,
            "weight_budget_bytes": self.residency.weight_budget_bytes,
            "capacity_bytes": self.residency.capacity_bytes,
            "used_bytes": self.residency.used_bytes(),
            "page_bytes": self.page_bytes,
        }

    def check(self) -> None:
        """Of residency."""
        self.residency.check()

    def close(self) -> None:
        """Twice is fine."""
        self.residency.close()


class Offloaded:
    """Full-precision experts in a cache: passes wait for what is not there.

    Args:
        experts: blocks and decisions.
        clock: virtual.
        costs: of experts at the width that is cached.
        damage_per_use: ``[L, E, B]`` at that width.
    """

    def __init__(
        self,
        experts: ExpertCache,
        clock: VirtualClock,
        costs: ExpertCosts,
        damage_per_use: FloatArray,
    ) -> None:
        self.experts = self.kv_lender = experts
        self.page_bytes, self.link, self.costs = experts.page_bytes, experts.link, costs
        self._clock = clock
        shape = experts.n_bits.shape
        costs.set_widths(np.full(shape, int(experts.n_bits.max()), dtype=np.int8))
        self.is_high: Active = np.ones(shape[:2], dtype=bool)
        self.damage: FloatArray = np.asarray(damage_per_use).sum(axis=2)

    @property
    def n_fetched(self) -> int:
        """Waited for, or fetched ahead."""
        cache = self.experts.cache
        return cache.n_misses + cache.n_ahead - self.experts.n_cancelled

    def boundary(self) -> None:
        """Nothing changes between steps."""

    def tick(self, pressure: Pressure, *, force: bool = False) -> int:
        """Nothing is decided between steps."""
        return 0

    def run(self, active: Active, counts: IntArray, layer_s: FloatArray, rest_s: float) -> float:
        """Layer by layer."""
        waits = self.experts.run(active, layer_s)
        self._clock.advance_to(self._clock.now() + rest_s)
        return float(waits.sum())

    def wait(self) -> bool:
        """Nothing is on its way that would give memory back."""
        return False

    def lendable_bytes(self) -> int:
        """The KV partition is frozen."""
        return self.experts.free_bytes("kv")

    def report(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "policy": self.experts.policy.report(),
            "bytes_moved": dict(self.link.n_bytes),
            "cache": self.experts.report(),
            "weight_bytes": self.experts.n_slots * self.experts.expert_bytes,
            "weight_budget_bytes": self.experts.n_slots * self.experts.expert_bytes,
            "capacity_bytes": self.experts.capacity_bytes,
            "used_bytes": self.experts.used_bytes(),
            "page_bytes": self.page_bytes,
        }

    def check(self) -> None:
        """Of the cache."""
        self.experts.check()

    def close(self) -> None:
        """Nothing to give back."""
