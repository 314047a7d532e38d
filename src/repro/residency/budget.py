"""The ledger: who may use how many pages, and who does.

The one idea: admission asks the ledger, never the free lists.  A partition has a quota and a
count of pages in use; a reservation that does not fit changes nothing; borders between
partitions move by free pages only, and not at all when they are frozen (DynaExq isolates its
pools from the KV cache, arXiv 2511.15015 section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from repro.residency.errors import BudgetError


@dataclass
class Partition:
    """Pages that one purpose may use."""

    quota: int
    used: int = 0

    @property
    def free(self) -> int:
        """Pages of the quota that nobody uses."""
        return self.quota - self.used


class BudgetTracker:
    """Quotas and use of all partitions, in pages.

    Raises:
        BudgetError: quotas that are negative or do not add up to the capacity.
    """

    def __init__(self, n_pages: int, quotas: Mapping[str, int], *, frozen: bool) -> None:
        if min(quotas.values()) < 0 or sum(quotas.values()) != n_pages:
            raise BudgetError(f"quotas {dict(quotas)} do not make {n_pages} pages")
        self.n_pages = n_pages
        self.frozen = frozen
        self.peak = 0  # most pages that were in use at a time
        self._partitions = {name: Partition(quota) for name, quota in quotas.items()}

    def __getitem__(self, name: str) -> Partition:
        return self._partitions[name]

    def __contains__(self, name: str) -> bool:
        return name in self._partitions

    @property
    def names(self) -> tuple[str, ...]:
        """All partitions."""
        return tuple(self._partitions)

    @property
    def used(self) -> int:
        """Pages in use, whoever uses them."""
        return sum(p.used for p in self._partitions.values())

    def try_reserve(self, name: str, n_pages: int) -> bool:
        """Charge ``n_pages``, or change nothing and say no."""
        partition = self._partitions[name]
        if n_pages > partition.free:
            return False
        partition.used += n_pages
        self.peak = max(self.peak, self.used)
        return True

    def release(self, name: str, n_pages: int) -> None:
        """Pages that were charged are free again."""
        partition = self._partitions[name]
        assert n_pages <= partition.used, f"{name}: {n_pages} given back of {partition.used}"
        partition.used -= n_pages

    def move_border(self, source: str, target: str, n_pages: int) -> bool:
        """Hand free pages of one partition to another, or change nothing and say no."""
        giver = self._partitions[source]
        if self.frozen or n_pages > giver.free:
            return False
        giver.quota -= n_pages
        self._partitions[target].quota += n_pages
        return True

    def check(self) -> None:
        """Raise AssertionError when the books do not add up."""
        for name, partition in self._partitions.items():
            assert 0 <= partition.used <= partition.quota, f"{name}: {partition}"
        assert sum(p.quota for p in self._partitions.values()) == self.n_pages
