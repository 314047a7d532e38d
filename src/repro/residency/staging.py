"""The staging ring: contiguous pages of the arena that copies pass through.

The one idea: the bus likes long contiguous copies and the pages of an expert are scattered, so
bytes arrive in a slot of this ring and are scattered from there on the device.  A slot is
handed out again only after the completion event of what passed through it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from repro.residency.pages import Pages


@dataclass(frozen=True, eq=False)
class Slot:
    """One place in the ring, with the page numbers its bytes are scattered to."""

    number: int
    data: Tensor  # uint8 [slot_pages, page_bytes], rows of the arena
    index: Tensor  # int64 [slot_pages] on the device
    index_host: Tensor  # the same on the host, pinned where copies are asynchronous

    def point_at(self, pages: Pages) -> Tensor:
        """Page numbers as an index on the device; enqueued like any copy."""
        n_pages = len(pages)
        self.index_host[:n_pages] = torch.from_numpy(pages.astype(np.int64))
        if self.index_host is not self.index:
            self.index[:n_pages].copy_(self.index_host[:n_pages], non_blocking=True)
        return self.index[:n_pages]


class StagingRing:
    """Slots cut from the first pages of an arena; shared by a worker and its successor."""

    def __init__(self, data: Tensor, n_slots: int, slot_pages: int) -> None:
        self.slot_pages = slot_pages
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self.n_slots = n_slots
        for number in range(n_slots):
            rows = data[number * slot_pages : (number + 1) * slot_pages]
            index = torch.zeros(slot_pages, dtype=torch.int64, device=data.device)
            host = index
            if data.device.type == "cuda":
                host = torch.zeros(slot_pages, dtype=torch.int64, pin_memory=True)
            self._free.append(Slot(number, rows, index, host))

    @property
    def n_pages(self) -> int:
        """Arena pages of all slots, the first ones."""
        return self.n_slots * self.slot_pages

    @property
    def n_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    def acquire(self) -> Slot | None:
        """A slot through which nothing is passing, or None."""
        with self._lock:
            return self._free.pop(0) if self._free else None

    def release(self, slot: Slot) -> None:
        """Called once the completion event of the slot's copy has passed."""
        with self._lock:
            self._free.append(slot)
