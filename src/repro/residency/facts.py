"""What can be asked of residency without changing it: sizes, widths, free bytes, and its books.

The one idea: answers are read from the parts that do the work; nothing is kept twice.

Letters: L layers, E experts, B blocks, W widths.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from repro.residency.arena import Arena
from repro.residency.errors import BudgetError, ClosedError
from repro.residency.history import History
from repro.residency.host import HostStore
from repro.residency.memory import Memory
from repro.residency.payload import BlockPayload
from repro.residency.placement import Placement
from repro.residency.plan import Layout, MemoryPlan
from repro.residency.reclaim import Epochs
from repro.residency.transitions import Transitions


class Facts:
    """The questions; :class:`repro.residency.ExpertResidency` sets the parts."""

    store: HostStore
    plan: MemoryPlan
    arena: Arena
    memory: Memory
    placement: Placement
    transitions: Transitions
    layout: Layout
    _epochs: Epochs
    _reserved: npt.NDArray[np.bool_]  # [pages]
    _closed: bool

    def _open(self) -> Transitions:
        if self._closed:
            raise ClosedError("residency is closed: build an engine anew")
        return self.transitions

    @property
    def page_bytes(self) -> int:
        """Size of a page."""
        return self.plan.page_bytes

    @property
    def capacity_bytes(self) -> int:
        """The hard cap: size of the arena."""
        return self.plan.capacity_bytes

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Decoder layer of each row of the table."""
        return self.store.layer_ids

    @property
    def n_layers(self) -> int:
        """L."""
        return self.placement.n_layers

    @property
    def n_experts(self) -> int:
        """E."""
        return self.placement.n_experts

    @property
    def widths(self) -> tuple[int, ...]:
        """The W widths there are, ascending."""
        return self.placement.widths

    def payload(self, layer: int, block: int) -> BlockPayload:
        """Schemes of one block of layer row ``layer``."""
        return self.store.payloads[layer][block]

    @property
    def block_bytes(self) -> npt.NDArray[np.int64]:
        """``[B, W]``: whole pages of a block at a width, tables included; of the largest layer."""
        pages = self.placement.width_pages.max(axis=0)
        return pages.astype(np.int64) * self.page_bytes

    @property
    def weight_budget_bytes(self) -> int:
        """What a policy may fill with weights and tables right now (planes: borders move)."""
        if self.layout == "planes":
            pages = self.memory.budget["planes"].used + self.memory.free_for_weights()
            return pages * self.page_bytes
        return self.plan.weight_budget_bytes

    @property
    def n_bits(self) -> npt.NDArray[np.int8]:
        """``[L, E, B]``: published widths, a copy."""
        return self.placement.n_bits.copy()

    @property
    def in_transition(self) -> npt.NDArray[np.bool_]:
        """``[L, E]``: experts that are not RESIDENT."""
        found: npt.NDArray[np.bool_] = self.transitions.in_transition()
        return found

    def targets(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Widths that changes under way lead to, by (layer, expert)."""
        return {owner: change.n_bits for owner, change in self._open().changes.items()}

    @property
    def device_table(self) -> Tensor:
        """``int32 [L, E, B, words]`` in device memory; its address never changes."""
        return self.placement.table.device_table

    @property
    def n_steps(self) -> int:
        """Steps begun."""
        return self._epochs.last

    @property
    def n_running_steps(self) -> int:
        """Steps under way."""
        return self._epochs.n_running

    def used_bytes(self) -> int:
        """Pages in use times their size, whoever uses them."""
        self._open().settle()
        return self.memory.budget.used * self.page_bytes

    def free_bytes(self, purpose: str = "kv") -> int:
        """What :meth:`reserve` could give right now; ``"weights"``: what a promotion could take."""
        self._open().settle()
        weights = purpose == "weights"
        pages = self.memory.free_for_weights() if weights else self.memory.free_for_kv()
        return pages * self.page_bytes

    def lendable_bytes(self) -> int:
        """Free now, and what demoting every expert to its narrowest width would free."""
        free = self.free_bytes("kv")
        if self.layout == "versions":
            return free
        narrowest = np.full_like(self.placement.n_bits, self.widths[0])
        gain = self.placement.resident_pages() - self.placement.resident_pages(narrowest)
        return free + gain * self.page_bytes

    @property
    def history(self) -> History:
        """The last events of transitions, oldest first: iterate over it."""
        return self._open().history

    def check_bytes(self) -> None:
        """Raise AssertionError unless every published version equals the host's clean copy.

        Raises:
            BudgetError: the host keeps no copy of what is resident (mode ``single``).
        """
        self._open()
        if self.store.mode == "single":
            raise BudgetError("only mode='mirrored' keeps a copy to compare with")
        for layer, expert in np.ndindex(self.n_layers, self.n_experts):
            for block, row in enumerate(self.placement.resolve(layer, expert)):
                slots = self.store.maps[layer][block].order[row.n_bits]
                host = self.store.pages(layer, expert, block, slots)
                right = self.store.slab[host].numpy().tobytes()
                where = f"layer row {layer}, expert {expert}, block {block}"
                assert self.arena.read(row.pages) == right, f"{where}: not the bytes of its width"

    def reclaiming_bytes(self) -> int:
        """Bytes of switched versions that are not free yet: steps read them, or they leave."""
        self._open().settle()
        return self.transitions.evictions.reclaimer.n_pages * self.page_bytes

    def check(self) -> None:
        """Raise AssertionError unless ledger, free lists and owners of pages agree."""
        transitions = self._open()
        transitions.settle()
        self.memory.check()
        reserved = np.flatnonzero(self._reserved).astype(np.int32)
        taken = np.concatenate(
            [
                self.placement.owned_pages(),
                transitions.pages_under_way(),
                reserved,
            ]
        )
        free = self.memory.free_pages()
        both = np.concatenate([taken, free])
        owners = np.bincount(both, minlength=1)
        assert owners.max(initial=0) <= 1, "a page has two owners"
        assert both.min(initial=self.plan.staging_pages) >= self.plan.staging_pages
        there = self.plan.n_pages - self.plan.staging_pages
        assert self.memory.charged(taken) + len(free) == there, "a page is lost"
        assert self.used_bytes() <= self.capacity_bytes
