"""Where pages come from and go to: one pool shared with the KV cache, or two frozen pools.

The one idea: both layouts answer the same three questions - may these pages come in, take them,
give them back - and keep ledger and free lists equal while they do.  Planes and KV blocks use
the same pages, so a plane that went is KV memory the moment it is free (PagedWeight).  DynaExq's
pools are two free lists of whole versions that KV never touches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from repro.contract import Outcome
from repro.residency.budget import BudgetTracker
from repro.residency.pages import BlockPool, Pages, PageStack
from repro.residency.plan import MemoryPlan


@dataclass(frozen=True)
class Intake:
    """Pages that one change needs before its old version can go."""

    n_pages: int
    n_bits: int  # the widest of the new widths
    frees: bool  # gives back at least as many as it takes: may draw on the slack


class Memory(Protocol):
    """Pages of one arena, with their books."""

    budget: BudgetTracker

    def may_end_at(self, n_bits: int) -> bool:
        """Whether one more expert may be at this width when all changes are over."""
        ...

    def answer(self, intake: Intake, pending: int) -> Outcome:
        """Whether there is room now, once ``pending`` pages are back, or not at all."""
        ...

    def take(self, intake: Intake) -> Pages:
        """The pages of an intake whose answer was yes."""
        ...

    def give(self, pages: Pages) -> None:
        """Pages of a version, or of a change that was given up, come back."""
        ...

    def retarget(self, old: int, new: int) -> None:
        """An expert that was to end at width ``old`` is now to end at ``new``."""
        ...

    def reserve(self, n_pages: int) -> Pages | None:
        """Pages outside the weights, all or none."""
        ...

    def release(self, pages: Pages) -> None:
        """They come back."""
        ...

    def free_for_kv(self) -> int:
        """Pages that :meth:`reserve` could give now."""
        ...

    def free_for_weights(self) -> int:
        """Pages that a promotion could take now."""
        ...

    def charged(self, pages: Pages) -> int:
        """How many pages the books charge for whoever has these, for checks."""
        ...

    def check(self) -> None:
        """Raise AssertionError unless ledger and free lists agree."""
        ...

    def free_pages(self) -> Pages:
        """Every free page outside the staging ring, for checks."""
        ...


class PlanesMemory:
    """One stack of pages; partitions are quotas, and slack serves transitions only."""

    def __init__(self, plan: MemoryPlan) -> None:
        quotas = {
            "planes": plan.weight_pages,
            "kv": plan.kv_pages,
            "staging": plan.staging_pages,
            "slack": plan.slack_pages,
        }
        self.budget = BudgetTracker(plan.n_pages, quotas, frozen=False)
        self._kv_home = plan.kv_pages
        self._stack = PageStack(plan.staging_pages, plan.n_pages)

    def _lent_to_kv(self) -> int:
        """Free KV pages beyond the partition KV began with."""
        kv = self.budget["kv"]
        return max(0, min(kv.free, kv.quota - self._kv_home))

    def free_for_weights(self) -> int:
        """Free plane pages, and those that came back from the KV cache."""
        return self.budget["planes"].free + self._lent_to_kv()

    def free_for_kv(self) -> int:
        """Free KV pages and free plane pages."""
        return self.budget["kv"].free + self.budget["planes"].free

    def may_end_at(self, n_bits: int) -> bool:
        """Widths are limited by pages alone."""
        return True

    def answer(self, intake: Intake, pending: int) -> Outcome:
        """Slack counts for changes that give back what they take."""
        slack = self.budget["slack"]
        room = self.free_for_weights()
        if intake.frees:
            room += slack.free
        else:
            pending -= min(pending, slack.used)  # refills the slack first
        if intake.n_pages <= room:
            return Outcome.ACCEPTED
        return Outcome.DEFERRED if intake.n_pages <= room + pending else Outcome.REFUSED

    def take(self, intake: Intake) -> Pages:
        """Plane pages first, then what KV does not need any more, then slack."""
        budget, n_pages = self.budget, intake.n_pages
        back = min(self._lent_to_kv(), max(0, n_pages - budget["planes"].free))
        if back:
            budget.move_border("kv", "planes", back)
        own = min(n_pages, budget["planes"].free)
        charged = budget.try_reserve("planes", own) and budget.try_reserve("slack", n_pages - own)
        assert charged, "pages taken without asking"
        return self._stack.take(n_pages)

    def give(self, pages: Pages) -> None:
        """The slack is refilled first."""
        repaid = min(len(pages), self.budget["slack"].used)
        self.budget.release("slack", repaid)
        self.budget.release("planes", len(pages) - repaid)
        self._stack.give(pages)

    def retarget(self, old: int, new: int) -> None:
        """Widths are limited by pages alone."""

    def reserve(self, n_pages: int) -> Pages | None:
        """KV pages first; then the border moves over free plane pages."""
        budget = self.budget
        if n_pages > self.free_for_kv():
            return None
        short = n_pages - budget["kv"].free
        if short > 0:
            budget.move_border("planes", "kv", short)
        budget.try_reserve("kv", n_pages)
        return self._stack.take(n_pages)

    def release(self, pages: Pages) -> None:
        """They stay with KV until a promotion asks for them."""
        self.budget.release("kv", len(pages))
        self._stack.give(pages)

    def free_pages(self) -> Pages:
        """Every free page outside the staging ring."""
        return self._stack.free()

    def charged(self, pages: Pages) -> int:
        """Just these."""
        return len(pages)

    def check(self) -> None:
        """Ledger equals free list."""
        self.budget.check()
        in_use = self.budget.used - self.budget["staging"].used
        assert in_use == self._stack.n_pages - self._stack.n_free, "ledger and free list differ"
        free = self._stack.free()
        assert len(np.unique(free)) == len(free), "a page is free twice"


class VersionsMemory:
    """Blocks of the high and of the low version, and KV pages of its own; borders are frozen."""

    def __init__(self, plan: MemoryPlan, widths: tuple[int, ...]) -> None:
        first = plan.staging_pages
        self._widths = widths
        self._high = BlockPool(first, plan.high_blocks, plan.high_pages)
        self._low = BlockPool(self._high.last, plan.low_blocks, plan.low_pages)
        self._stack = PageStack(self._low.last, plan.n_pages)
        self._n_high = plan.n_high
        self._high_targets = 0
        quotas = {
            "high": plan.high_blocks * plan.high_pages,
            "low": plan.low_blocks * plan.low_pages,
            "kv": plan.kv_pages,
            "staging": plan.staging_pages,
        }
        self.budget = BudgetTracker(plan.n_pages, quotas, frozen=True)

    def _pool(self, n_bits: int) -> tuple[str, BlockPool]:
        high = n_bits == self._widths[-1]
        return ("high", self._high) if high else ("low", self._low)

    def may_end_at(self, n_bits: int) -> bool:
        """High versions at rest never exceed ``n_high``, so the slack is there for swaps."""
        return n_bits != self._widths[-1] or self._high_targets < self._n_high

    def free_for_weights(self) -> int:
        """Pages of free high blocks."""
        return self._high.n_free * self._high.block_pages

    def free_for_kv(self) -> int:
        """Free pages of the KV partition."""
        return self.budget["kv"].free

    def answer(self, intake: Intake, pending: int) -> Outcome:
        """A swap waits for a block; the slack has one unless swaps are under way."""
        if not self.may_end_at(intake.n_bits):
            return Outcome.REFUSED
        _, pool = self._pool(intake.n_bits)
        return Outcome.ACCEPTED if pool.n_free else Outcome.DEFERRED

    def take(self, intake: Intake) -> Pages:
        """A block; the change uses its first pages."""
        name, pool = self._pool(intake.n_bits)
        charged = self.budget.try_reserve(name, pool.block_pages)
        assert charged, "a block taken without asking"
        return pool.take()[: intake.n_pages]

    def give(self, pages: Pages) -> None:
        """The whole block comes back."""
        first = int(pages[0])
        name, pool = ("high", self._high) if self._high.owns(first) else ("low", self._low)
        pool.give(first)
        self.budget.release(name, pool.block_pages)

    def retarget(self, old: int, new: int) -> None:
        """Count the experts that are, or are to be, high."""
        high = self._widths[-1]
        self._high_targets += (new == high) - (old == high)

    def reserve(self, n_pages: int) -> Pages | None:
        """From the KV partition alone."""
        if not self.budget.try_reserve("kv", n_pages):
            return None
        return self._stack.take(n_pages)

    def release(self, pages: Pages) -> None:
        """Back to the KV partition."""
        self.budget.release("kv", len(pages))
        self._stack.give(pages)

    def free_pages(self) -> Pages:
        """Every free page outside the staging ring."""
        return np.concatenate([self._high.free(), self._low.free(), self._stack.free()])

    def charged(self, pages: Pages) -> int:
        """Whole blocks, however much of them a layer needs."""
        total = int((pages >= self._low.last).sum())
        for pool in (self._high, self._low):
            if pool.n_blocks:
                own = pages[(pages >= pool.first) & (pages < pool.last)]
                blocks = np.unique((own - pool.first) // pool.block_pages)
                total += len(blocks) * pool.block_pages
        return total

    def check(self) -> None:
        """Ledger equals free lists, pool by pool."""
        self.budget.check()
        for name, pool in (("high", self._high), ("low", self._low)):
            taken = (pool.n_blocks - pool.n_free) * pool.block_pages
            assert self.budget[name].used == taken, f"ledger and blocks of {name} differ"
        assert self.budget["kv"].used == self._stack.n_pages - self._stack.n_free
        free = self.free_pages()
        assert len(np.unique(free)) == len(free), "a page is free twice"
