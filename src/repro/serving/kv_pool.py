"""KV memory as the scheduler sees it: blocks, taken from and given back to residency.

The one idea: there is no pool.  Blocks are pages of the arena that residency lends at this
moment, so what is free grows when a policy gives planes up and shrinks when they come back.
Peaks are kept here, for they say how much was needed.
"""

from __future__ import annotations

from typing import Any

from repro.contract import Reservation
from repro.serving.kv_blocks import BlockPlan, BlockTable
from repro.serving.kv_sizes import KVLayout


def kv_block_bytes(layout: KVLayout, page_bytes: int) -> int:
    """Whole pages of a block; of a request's states if the model keeps nothing per token."""
    return max(1, layout.block_bytes(page_bytes) or layout.state_bytes(page_bytes))


class PagedKvPool:
    """Satisfies :class:`repro.serving.scheduler.KvPool`.

    Args:
        plan: blocks of this model on pages of this arena.
        residency: lends pages for the purpose "kv".
    """

    def __init__(self, plan: BlockPlan, residency: Any) -> None:
        self.plan = plan
        self._residency = residency
        self._bytes_in_use = 0
        self._peak_bytes = 0

    def new_table(self) -> BlockTable:
        """An empty table."""
        return BlockTable(self.plan, self._reserve, self._give_back)

    def extend(self, table: BlockTable, n_tokens: int) -> bool:
        """Room for ``n_tokens`` in all, or nothing changed and False."""
        return table.extend(n_tokens)

    def release(self, table: BlockTable) -> None:
        """Give all its blocks back."""
        table.release()

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that hold so many tokens; recurrent states are rounded up to blocks."""
        n_bytes = self.plan.layout.request_bytes(n_tokens, self.plan.page_bytes)
        return -(-n_bytes // self.block_bytes)

    def blocks_of(self, table: BlockTable) -> int:
        """Blocks the table has."""
        return -(-table.n_bytes // self.block_bytes)

    def free_blocks(self) -> int:
        """Blocks that could be had right now."""
        return int(self._residency.free_bytes("kv")) // self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Whole pages of a block; of a request's states if the model keeps nothing per token."""
        return kv_block_bytes(self.plan.layout, self.plan.page_bytes)

    @property
    def blocks_in_use(self) -> int:
        """Blocks that tables hold."""
        return -(-self._bytes_in_use // self.block_bytes)

    @property
    def peak_blocks(self) -> int:
        """Most blocks that were in use at a time."""
        return -(-self._peak_bytes // self.block_bytes)

    def _reserve(self, n_bytes: int, purpose: str) -> Reservation | None:
        reservation: Reservation | None = self._residency.reserve(n_bytes, purpose)
        if reservation is not None:
            self._bytes_in_use += len(reservation.pages) * self.plan.page_bytes
            self._peak_bytes = max(self._peak_bytes, self._bytes_in_use)
        return reservation

    def _give_back(self, reservation: Reservation) -> None:
        self._bytes_in_use -= len(reservation.pages) * self.plan.page_bytes
        self._residency.release(reservation)
