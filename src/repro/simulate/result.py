"""What a run was worth: waits and speed, and how far each policy stayed below its bound.

The one idea: the counts of every pass are kept, so once the run is over the oracle of each kind
of decision can be asked what it would have done with the same bytes and the same traffic.

- frequency oracle: share of selections at the widest width, per phase (``dynaexq``, ``static``);
- damage oracle: predicted damage of the best allocation, per phase (``pagedweight`` and others);
- clairvoyant cache: fetches of Belady's cache that begins with the same experts (``offload``);
- best uniform width of the same bytes.

A *phase* is a run of passes most of whose tokens belong to one workload.

Letters: L layers, E experts, B blocks, W widths.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from repro.contract import IntArray
from repro.policies.bounds import (
    CacheBound,
    best_uniform,
    clairvoyant_cache,
    damage_oracle,
    frequency_oracle,
)
from repro.serving.request import Completion

if TYPE_CHECKING:
    from repro.simulate.setup import Built

# Our choice: a policy has followed a change once a window of passes serves this share of what
# the phase's oracle serves in them.
FOLLOWED = 0.95
WINDOW = 8


@dataclass(frozen=True, eq=False)
class PassTrail:
    """One pass."""

    at_s: float
    kind: str
    workload: str
    counts: npt.NDArray[np.uint16]  # [L, E]
    n_high: int  # selections served at the widest width
    n_uses: int
    damage: float  # of all selections
    n_fetched: int = 0  # by a cache, since the start, at the end of the pass


@dataclass(frozen=True, eq=False)
class Phase:
    """Neighbouring passes of one workload."""

    workload: str
    passes: tuple[PassTrail, ...]

    def counts(self) -> IntArray:
        """``[L, E]`` of all its passes."""
        return np.sum([p.counts for p in self.passes], axis=0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Result:
    """A run that is over."""

    report: dict[str, Any]
    completions: tuple[Completion, ...] = ()
    trail: tuple[PassTrail, ...] = field(default=(), repr=False)
    built: Built | None = field(default=None, repr=False)

    def to_json(self) -> str:
        """The report, the same bytes for the same run."""
        return json.dumps(self.report, sort_keys=True, separators=(",", ":"))

    def phases(self) -> list[Phase]:
        """In order; runs shorter than :data:`WINDOW` belong to the phase before them."""
        found: list[tuple[str, list[PassTrail]]] = []
        for workload, group in groupby(self.trail, key=lambda p: p.workload):
            passes = list(group)
            if found and (len(passes) < WINDOW or found[-1][0] == workload):
                found[-1][1].extend(passes)
            else:
                found.append((workload, passes))
        return [Phase(workload, tuple(passes)) for workload, passes in found]

    def bounds(self, *, cache_passes: int = 0) -> dict[str, Any]:
        """Bounds and the share of each that was reached; needs the trail.

        Args:
            cache_passes: ``offload``: passes from the first that the clairvoyant cache is run
                on (0: all; it is slow).  Its share is fetches that it needs over fetches made.
        """
        assert self.built is not None
        found: dict[str, Any] = {"uniform": self._uniform(), "phases": []}
        if self.built.n_slots:
            found["cache"] = self._cache(cache_passes)
            return found
        for phase in self.phases():
            found["phases"].append(self._phase(phase))
        return found

    def _phase(self, phase: Phase) -> dict[str, Any]:
        built = self.built
        assert built is not None
        inventory, budget = built.inventory, built.weight_budget_bytes
        counts = phase.counts()
        uses = int(counts.sum())
        oracle = frequency_oracle(inventory, counts, budget)
        best = (oracle == inventory.widths[-1]).all(axis=2)
        high = sum(p.n_high for p in phase.passes)
        oracle_high = int((counts * best).sum())
        damage = counts[..., None, None] * built.damage_per_use
        allocation = damage_oracle(inventory, damage, budget)
        columns = allocation.columns.reshape(*inventory.shape, inventory.n_blocks)
        least = float(np.take_along_axis(damage, columns[..., None], axis=3).sum())
        mine = sum(p.damage for p in phase.passes)
        followed = adaptation(phase, best)
        return {
            "workload": phase.workload,
            "n_passes": len(phase.passes),
            "high_share": high / uses,
            "oracle_high_share": oracle_high / uses,
            "of_frequency_oracle": high / oracle_high if oracle_high else None,
            "damage_per_use": mine / uses,
            "oracle_damage_per_use": least / uses,
            "of_damage_oracle": least / mine if mine else None,
            "adaptation_passes": None if followed is None else followed,
            "adaptation_s": None
            if followed is None
            else phase.passes[followed].at_s - phase.passes[0].at_s,
        }

    def _uniform(self) -> dict[str, Any] | None:
        """The widest width of the same format for all experts; None where none fits."""
        built = self.built
        assert built is not None
        if built.inventory.floor_bytes > built.weight_budget_bytes:
            return None
        found = best_uniform(built.inventory, built.weight_budget_bytes)
        return {"n_bits": found.n_bits, "n_bytes": found.n_bytes}

    def _cache(self, n_passes: int) -> dict[str, Any]:
        built = self.built
        assert built is not None
        passes = self.trail[: n_passes or len(self.trail)]
        accesses = [
            (layer, np.flatnonzero(p.counts[layer]).tolist())
            for p in passes
            for layer in range(p.counts.shape[0])
        ]
        bound: CacheBound = clairvoyant_cache(accesses, built.n_slots, resident=built.resident)
        fetched = passes[-1].n_fetched if passes else 0
        return {
            "n_passes": len(passes),
            "hit_rate": bound.hit_rate,
            "n_fetches": bound.n_misses,
            "fetches_of_policy": fetched,
            "of_clairvoyant": bound.n_misses / fetched if fetched else None,
        }


def adaptation(phase: Phase, best: npt.NDArray[np.bool_]) -> int | None:
    """Passes until the phase is served as its oracle's map ``bool [L, E]`` would serve it.

    The first pass from which a window of :data:`WINDOW` passes reaches :data:`FOLLOWED` of the
    oracle's share; None: never.
    """
    high = np.array([p.n_high for p in phase.passes], dtype=np.float64)
    oracle = np.array([(p.counts * best).sum() for p in phase.passes], dtype=np.float64)
    window = min(WINDOW, len(high))
    one = np.ones(window)
    mine, theirs = np.convolve(high, one, "valid"), np.convolve(oracle, one, "valid")
    reached = np.flatnonzero(mine >= FOLLOWED * theirs)
    return int(reached[0]) if len(reached) else None
