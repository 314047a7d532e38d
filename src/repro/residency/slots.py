"""Slots: the pages of one block at all its widths, numbered once and for all.

The one idea: lay every tensor that a block has at any width end to end, each beginning on a
page of its own; the number of a page in that row is its *slot*.  A width is then a list of
slots, a change from one width to another a list of slots that must come in and one of slots
that may go, and the page of the host store that holds a slot follows from its number.  All are
NumPy arrays made once, so nothing later loops over pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from repro.contract import Part, pages_of
from repro.formats.encoded import TensorSpec
from repro.residency.payload import BlockPayload

HostMode = Literal["mirrored", "single"]
Slots = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Item:
    """One tensor of a block and the slots it fills."""

    spec: TensorSpec
    n_bits: int  # a width that reads it
    first: int
    n_pages: int

    @property
    def slots(self) -> range:
        """Its slots."""
        return range(self.first, self.first + self.n_pages)


@dataclass(frozen=True)
class SlotMap:
    """The slots of one block of a layer (all experts alike)."""

    page_bytes: int
    nested: bool
    items: tuple[Item, ...]
    order: dict[int, Slots]  # by width, in the order of the table's row
    n_slots: int
    _changes: dict[tuple[int | None, int], tuple[Slots, Slots]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def n_pages(self, n_bits: int) -> int:
        """Pages of one expert's block at this width, tables included."""
        return len(self.order[n_bits])

    def change(self, old: int | None, new: int) -> tuple[Slots, Slots]:
        """Slots that must come in and slots that may go, ascending; ``old`` None: nothing is in."""
        key = (old, new)
        if key not in self._changes:
            before = self.order[old] if old is not None else np.empty(0, dtype=np.int64)
            after = self.order[new]
            self._changes[key] = (np.setdiff1d(after, before), np.setdiff1d(before, after))
        return self._changes[key]

    def host_places(self, mode: HostMode) -> tuple[Slots, int]:
        """For each slot its page in an expert's share of the host store, and that share's pages.

        ``mirrored``: every slot has a place.  ``single``: -1 where a slot never leaves the
        device (every width reads it); and versions share one place, for exactly one of the two
        is off the device.
        """
        everything = np.arange(self.n_slots, dtype=np.int64)
        if mode == "mirrored":
            return everything, self.n_slots
        always = everything
        for slots in self.order.values():
            always = np.intersect1d(always, slots)
        places = np.full(self.n_slots, -1, dtype=np.int64)
        if self.nested:
            leaving = np.setdiff1d(everything, always)
            places[leaving] = np.arange(len(leaving))
            return places, len(leaving)
        for slots in self.order.values():
            leaving = np.setdiff1d(slots, always)
            places[leaving] = np.arange(len(leaving))
        return places, int(places.max(initial=-1)) + 1


def slot_map(payload: BlockPayload, page_bytes: int) -> SlotMap:
    """Number the slots of a block; equal payloads share one map."""
    tensors = tuple((w, payload.tensors(w)) for w in payload.widths)
    return _slot_map(tensors, payload.nested, page_bytes)


@cache
def _slot_map(
    tensors: tuple[tuple[int, tuple[TensorSpec, ...]], ...], nested: bool, page_bytes: int
) -> SlotMap:
    items: dict[Part, Item] = {}
    first = 0
    # The widest first: its planes lie together, most significant first.
    for n_bits, specs in reversed(tensors):
        for spec, n_pages in zip(specs, pages_of((s.part for s in specs), page_bytes), strict=True):
            if spec.part not in items:
                items[spec.part] = Item(spec, n_bits, first, n_pages)
                first += n_pages
    order = {
        n_bits: np.concatenate([np.asarray(items[s.part].slots, dtype=np.int64) for s in specs])
        for n_bits, specs in tensors
    }
    return SlotMap(page_bytes, nested, tuple(items.values()), order, first)


def runs(numbers: Slots, longest: int) -> list[slice]:
    """Cut ``numbers`` where they are not consecutive, and every ``longest``."""
    if len(numbers) == 0:
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    found = []
    for start, stop in zip((0, *cuts.tolist()), (*cuts.tolist(), len(numbers)), strict=True):
        found += [slice(i, min(i + longest, stop)) for i in range(start, stop, longest)]
    return found
