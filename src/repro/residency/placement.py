"""Where every resident byte lies: pages by slot, published widths, rows of the table.

The one idea: one array ``[L, E, B, S]`` says on which arena page a slot lies, or that it is not
resident.  The row of a block is a selection from it, so switching an expert is two writes: the
pages that came in, and the row.

Letters: L layers, E experts, B blocks, S slots, W widths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from repro.contract import HEADER_WORDS, NO_PAGE, Action, TableRow, unpack_row
from repro.residency.arena import Arena
from repro.residency.changes import Change, Owner
from repro.residency.errors import BudgetError
from repro.residency.host import HostStore
from repro.residency.jobs import Chunk
from repro.residency.memory import Intake, Memory
from repro.residency.pages import Pages
from repro.residency.slots import Slots, runs
from repro.residency.table import HandleTable

Bits = npt.NDArray[np.int8]


class Placement:
    """Pages, widths and table rows of all experts."""

    def __init__(self, store: HostStore, arena: Arena) -> None:
        self.store = store
        self._arena = arena
        self.n_layers, self.n_experts = len(store.maps), store.n_experts
        self.n_blocks = len(store.maps[0])
        self.widths = store.payloads[0][0].widths
        self.n_slots = max(m.n_slots for row in store.maps for m in row)
        shape = (self.n_layers, self.n_experts, self.n_blocks)
        self._pages: npt.NDArray[np.int32] = np.full((*shape, self.n_slots), NO_PAGE, np.int32)
        self.n_bits: Bits = np.zeros(shape, dtype=np.int8)
        self._generation = np.zeros(shape, dtype=np.int32)
        # [L, B, W]: pages, and bytes that are not padding
        self.width_pages = np.array(
            [[[m.n_pages(w) for w in self.widths] for m in row] for row in store.maps]
        )
        self.width_bytes = np.array(
            [
                [[sum(p.n_bytes for p in block.parts(w)) for w in self.widths] for block in row]
                for row in store.payloads
            ]
        )
        words = HEADER_WORDS + int(self.width_pages.max())
        self.table = HandleTable((*shape, words), arena.device)

    def load(self, n_bits: Bits, memory: Memory) -> None:
        """Bring every expert in at its first width, before serving begins.

        Raises:
            BudgetError: they do not fit; says by how many bytes or experts.
        """
        store = self.store
        store.check_filled()
        self._check_room(n_bits, memory)
        for layer in range(self.n_layers):
            for expert in range(self.n_experts):
                widths = tuple(int(w) for w in n_bits[layer, expert])
                slots = [
                    lies.change(None, width)[0]
                    for lies, width in zip(store.maps[layer], widths, strict=True)
                ]
                intake = Intake(sum(map(len, slots)), max(widths), frees=False)
                pages = memory.take(intake)
                memory.retarget(-1, max(widths))
                start = 0
                for block, some in enumerate(slots):
                    here = pages[start : start + len(some)]
                    self._pages[layer, expert, block, some] = here
                    start += len(some)
                    self._fill(layer, expert, block, some, here)
        self.n_bits[...] = n_bits
        owners = [(i, e) for i in range(self.n_layers) for e in range(self.n_experts)]
        self._write(owners)
        store.settle(self._pages != NO_PAGE)

    def _check_room(self, n_bits: Bits, memory: Memory) -> None:
        unknown = sorted(set(np.unique(n_bits).tolist()) - set(self.widths))
        if unknown:
            raise BudgetError(f"initial widths {unknown} are not among {self.widths}")
        which = np.searchsorted(self.widths, n_bits)
        layers = np.arange(self.n_layers)[:, None, None]
        blocks = np.arange(self.n_blocks)
        need = int(self.width_pages[layers, blocks, which].sum())
        if self.store.layout == "planes":
            room = memory.budget["planes"].free
            if need > room:
                page = self.store.page_bytes
                raise BudgetError(
                    f"the experts at their initial widths take {need * page} bytes, "
                    f"{(need - room) * page} more than the budget leaves for them: start at "
                    "narrower widths or give a larger budget"
                )
            return
        if (n_bits != n_bits[:, :, :1]).any():
            raise BudgetError("both blocks of an expert have one version: give them one width")
        if len(self.widths) == 1:
            return
        budget, n_high = memory.budget, int((n_bits[:, :, 0] == self.widths[-1]).sum())
        per_high, per_low = (int(self.width_pages[:, :, i].sum(axis=1).max()) for i in (-1, 0))
        room_high = budget["high"].quota // per_high
        room_low = budget["low"].quota // per_low
        n_low = n_bits[:, :, 0].size - n_high
        if n_high > room_high or n_low > room_low:
            raise BudgetError(
                f"{n_high} experts are to start high and {n_low} low, the frozen pools hold "
                f"{room_high} and {room_low}: leave initial_bits out, or pass n_high={n_high}"
            )

    def _fill(self, layer: int, expert: int, block: int, slots: Slots, pages: Pages) -> None:
        whole = self.store.whole(layer, block)[expert]
        data = self._arena.data
        if len(pages) and int(pages[-1]) - int(pages[0]) == len(pages) - 1:
            first = int(pages[0])
            for cut in runs(slots, len(slots)):
                source = whole[int(slots[cut.start]) : int(slots[cut.stop - 1]) + 1]
                data[first + cut.start : first + cut.stop].copy_(source)
        elif len(pages):
            index = torch.from_numpy(pages.astype(np.int64)).to(data.device)
            source = whole.index_select(0, torch.from_numpy(slots)).to(data.device)
            data.index_copy_(0, index, source)

    # rows ------------------------------------------------------------------------------------

    def switch(self, changes: list[Change]) -> list[tuple[tuple[int, Slots], ...]]:
        """Publish these changes.  Returns the (block, slots) that each leaves behind."""
        left = []
        for change in changes:
            layer, expert = change.owner
            for block, slots, pages in change.incoming:
                self._pages[layer, expert, block, slots] = pages
            out = []
            for block, new in enumerate(change.n_bits):
                old = int(self.n_bits[layer, expert, block])
                out.append((block, self.store.maps[layer][block].change(old, new)[1]))
            self.n_bits[layer, expert] = change.n_bits
            self._generation[layer, expert] += 1
            left.append(tuple((block, slots) for block, slots in out if len(slots)))
        self._write([change.owner for change in changes])
        return left

    def forget(self, owner: Owner, left: Iterable[tuple[int, Slots]]) -> Pages:
        """These slots are no longer resident; their pages, which steps may still read."""
        pages = []
        for block, slots in left:
            pages.append(self._pages[owner[0], owner[1], block, slots])
            self._pages[owner[0], owner[1], block, slots] = NO_PAGE
        return np.concatenate(pages) if pages else np.empty(0, dtype=np.int32)

    def _write(self, owners: list[Owner]) -> None:
        n_blocks, words = self.n_blocks, self.table.shape[3]
        rows = np.full((len(owners) * n_blocks, words), NO_PAGE, dtype=np.int32)
        flat = np.empty(len(rows), dtype=np.int64)
        for i, (layer, expert) in enumerate(owners):
            for block in range(n_blocks):
                row = rows[i * n_blocks + block]
                n_bits = int(self.n_bits[layer, expert, block])
                order = self.store.maps[layer][block].order[n_bits]
                row[0] = self.store.payloads[layer][block].format_id(n_bits)
                row[1] = n_bits
                row[2] = self._generation[layer, expert, block]
                row[3] = len(order)
                row[HEADER_WORDS : HEADER_WORDS + len(order)] = self._pages[
                    layer, expert, block, order
                ]
                flat[i * n_blocks + block] = (layer * self.n_experts + expert) * n_blocks + block
        self.table.write(flat, rows)

    def resolve(self, layer: int, expert: int) -> tuple[TableRow, ...]:
        """The handle of an expert: the row of each block."""
        return tuple(unpack_row(row) for row in self.table.host[layer, expert])

    # what a change needs ---------------------------------------------------------------------

    def has_widths(self, n_bits: tuple[int, ...]) -> bool:
        """Whether an expert can have these; both blocks of a version have the same."""
        if len(n_bits) != self.n_blocks or not set(n_bits) <= set(self.widths):
            return False
        return self.store.layout == "planes" or len(set(n_bits)) == 1

    def incoming(self, action: Action) -> list[tuple[int, Slots]]:
        """(block, slots) that are missing for these widths; blocks that miss none are left out."""
        layer, expert, n_bits = action
        found = []
        for block, new in enumerate(n_bits):
            old = int(self.n_bits[layer, expert, block])
            slots = self.store.maps[layer][block].change(old, new)[0]
            if len(slots):
                found.append((block, slots))
        return found

    def n_outgoing(self, action: Action) -> int:
        """Pages that will be free once these widths are published."""
        layer, expert, n_bits = action
        olds = self.n_bits[layer, expert].tolist()
        return sum(
            len(self.store.maps[layer][block].change(old, new)[1])
            for block, (old, new) in enumerate(zip(olds, n_bits, strict=True))
        )

    def chunks(
        self, owner: Owner, block: int, slots: Slots, pages: Pages, slot_pages: int
    ) -> deque[Chunk]:
        """Copies that bring these slots in or out, each at most a staging slot long.

        Without staging (``slot_pages`` 0) every run of neighbouring pages is one.
        """
        host = self.store.pages(*owner, block, slots)
        longest = len(slots)
        found: deque[Chunk] = deque()
        for cut in runs(host, slot_pages or longest):
            inner = pages[cut]
            cuts = [slice(0, len(inner))] if slot_pages else runs(inner.astype(np.int64), longest)
            for piece in cuts:
                start = int(host[cut.start]) + piece.start
                stop = start + piece.stop - piece.start
                found.append(Chunk(slice(start, stop), inner[piece]))
        return found

    def resident_pages(self, n_bits: Bits | None = None) -> int:
        """Pages of all experts at these widths (None: the published ones)."""
        return int(self._sum(self.width_pages, n_bits))

    def fragmentation(self) -> float:
        """Share of the resident pages that holds nothing (0 to 1)."""
        pages = self._sum(self.width_pages) * self.store.page_bytes
        return 1 - self._sum(self.width_bytes) / pages if pages else 0.0

    def _sum(self, per_width: npt.NDArray[np.int64], n_bits: Bits | None = None) -> int:
        which = np.searchsorted(self.widths, self.n_bits if n_bits is None else n_bits)
        layers = np.arange(self.n_layers)[:, None, None]
        return int(per_width[layers, np.arange(self.n_blocks), which].sum())

    def owned_pages(self) -> Pages:
        """Every page of a published version, for checks."""
        return self._pages[self._pages != NO_PAGE]
