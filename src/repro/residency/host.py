"""The host store: every expert's bytes in one slab, ready to be copied to the device as they lie.

The one idea: the slab is made of pages like the arena, and an expert's pages lie in the order
of its slots, so a copy is a slice.  ``mirrored`` keeps a clean copy of everything, and dropping
a plane costs nothing.  ``single`` keeps only what is not on the device: what leaves is copied
out first, what has arrived counts no longer.  The slab is pinned once, if it can be.

Letters: L layers, E experts, B blocks, S slots.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.errors import unknown_name
from repro.residency.errors import BudgetError, ClosedError
from repro.residency.payload import BlockPayload
from repro.residency.plan import layout_of
from repro.residency.slots import HostMode, SlotMap, Slots, slot_map

MODES = ("mirrored", "single")
Mask = npt.NDArray[np.bool_]


def empty_slab(n_pages: int, page_bytes: int, pin: bool) -> tuple[Tensor, bool]:
    """Zeroed host memory and whether it is pinned; pageable, with a warning, where pinning fails.

    Raises:
        BudgetError: the host has not that much memory at all.
    """
    shape = (n_pages, page_bytes)
    with torch.inference_mode(False):
        if pin and n_pages:
            try:
                return torch.zeros(shape, dtype=torch.uint8, pin_memory=True), True
            except RuntimeError as error:
                warnings.warn(
                    f"the host store of {n_pages * page_bytes} bytes is pageable, so copies will "
                    f"be slower: pinning it failed ({str(error).splitlines()[0]})",
                    RuntimeWarning,
                    stacklevel=3,
                )
        try:
            return torch.zeros(shape, dtype=torch.uint8), False
        except (RuntimeError, MemoryError) as error:
            raise BudgetError(
                f"the host store needs {n_pages * page_bytes} bytes of host memory: "
                "use fewer widths, or mode='single'"
            ) from error


class HostStore:
    """Bytes of all experts on the host.

    Args:
        payloads: ``[L][B]``, schemes suffice (:meth:`BlockPayload.without_tensors`).
        page_bytes: size of a page, that of the arena.
        mode: ``mirrored`` or ``single``.
        pin: ask for pinned memory; None: where there is a CUDA device.
        layer_ids: decoder layer of each row; None: 0 to L - 1.

    Raises:
        BudgetError: payloads that do not fit together.
        UnknownNameError: no such mode.
    """

    def __init__(
        self,
        payloads: Sequence[Sequence[BlockPayload]],
        page_bytes: int,
        mode: HostMode = "mirrored",
        pin: bool | None = None,
        layer_ids: Sequence[int] | None = None,
    ) -> None:
        if mode not in MODES:
            raise unknown_name("host mode", mode, MODES)
        self.layout = layout_of(payloads)
        self.mode = mode
        self.page_bytes = page_bytes
        self.payloads = tuple(tuple(p.without_tensors() for p in row) for row in payloads)
        self.layer_ids = tuple(range(len(payloads)) if layer_ids is None else layer_ids)
        if len(self.layer_ids) != len(self.payloads):
            raise BudgetError(f"{len(self.layer_ids)} layer ids for {len(self.payloads)} layers")
        self.maps: tuple[tuple[SlotMap, ...], ...] = tuple(
            tuple(slot_map(payload, page_bytes) for payload in row) for row in self.payloads
        )
        self.n_experts = self.payloads[0][0].n_experts
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._places: list[list[Slots]] = []
        self._base: list[list[int]] = []
        self._share: list[list[int]] = []  # pages of one expert
        n_pages = 0
        for row in self.maps:
            placed = [m.host_places(mode) for m in row]
            self._places.append([places for places, _ in placed])
            self._share.append([share for _, share in placed])
            self._base.append([])
            for _, share in placed:
                self._base[-1].append(n_pages)
                n_pages += share * self.n_experts
        self._n_pages = n_pages
        self._slab: Tensor | None = None
        self._incoming: dict[tuple[int, int], Tensor] = {}  # single mode, until it is settled
        self._filled: set[tuple[int, int]] = set()
        self._held: Mask | None = None  # single mode: [L, E, B, S] that the host holds
        self._held_pages = 0
        self.pinned = False
        self._closed = False
        if mode == "mirrored":
            self._slab, self.pinned = empty_slab(n_pages, page_bytes, self._pin)

    @property
    def slab(self) -> Tensor:
        """``uint8 [host pages, page_bytes]``.

        Raises:
            ClosedError: the store was closed, or (``single``) no residency was built on it yet.
        """
        if self._slab is None:
            raise ClosedError("the host store has no slab: it is closed, or not yet in use")
        return self._slab

    @property
    def nbytes(self) -> int:
        """Host bytes that are allocated."""
        waiting = sum(t.nbytes for t in self._incoming.values())
        return waiting + (self._slab.nbytes if self._slab is not None else 0)

    @property
    def held_bytes(self) -> int:
        """Host bytes that hold something, in whole pages; ``single``: what is off the device."""
        if self.mode == "mirrored":
            return self.nbytes
        return self._held_pages * self.page_bytes

    def put(self, layer: int, block: int, payload: BlockPayload) -> None:
        """Copy the bytes of one block of layer row ``layer`` in; the caller may then free them.

        Raises:
            BudgetError: a payload of another scheme than announced.
        """
        expected = self.payloads[layer][block]
        if payload.without_tensors() != expected or self._closed:
            raise BudgetError(
                f"layer {self.layer_ids[layer]}, block {block}: the payload is not the one the "
                "store was made for"
            )
        lies = self.maps[layer][block]
        if self.mode == "mirrored":
            target = self._mirror(layer, block)
        else:
            shape = (self.n_experts, lies.n_slots, self.page_bytes)
            target = torch.zeros(shape, dtype=torch.uint8)
            self._incoming[layer, block] = target
        rows = target.view(self.n_experts, -1)
        for item in lies.items:
            tensor = payload.tensor(item.n_bits, item.spec).detach().contiguous()
            data = tensor.reshape(self.n_experts, -1).view(torch.uint8)
            start = item.first * self.page_bytes
            rows[:, start : start + item.spec.n_bytes].copy_(data)
        self._filled.add((layer, block))

    def _mirror(self, layer: int, block: int) -> Tensor:
        base, n_slots = self._base[layer][block], self.maps[layer][block].n_slots
        rows = self.slab[base : base + self.n_experts * n_slots]
        return rows.view(self.n_experts, n_slots, self.page_bytes)

    def check_filled(self) -> None:
        """Raise BudgetError when a block was never put in, or was taken by a residency before."""
        every = {(i, b) for i, row in enumerate(self.maps) for b in range(len(row))}
        if missing := sorted(every - self._filled):
            raise BudgetError(
                f"{len(missing)} blocks are not in the host store, the first of them (layer, "
                f"block) {missing[0]}: put every block in, for one residency of mode 'single' "
                "anew"
            )

    def whole(self, layer: int, block: int) -> Tensor:
        """All bytes of a block before serving begins: ``uint8 [E, S, page_bytes]``."""
        if self.mode == "mirrored":
            return self._mirror(layer, block)
        return self._incoming[layer, block]

    def settle(self, resident: Mask) -> None:
        """Serving begins with these slots ``bool [L, E, B, S]`` on the device.

        ``single``: what is not goes into the slab, block by block, and the rest is freed.
        """
        if self.mode == "mirrored":
            return
        self._slab, self.pinned = empty_slab(self._n_pages, self.page_bytes, self._pin)
        self._held = np.zeros_like(resident)
        for (layer, block), data in sorted(self._incoming.items()):
            places = self._places[layer][block]
            n_slots = len(places)
            away = ~resident[layer, :, block, :n_slots] & (places >= 0)
            expert, slot = np.nonzero(away)
            share = self._share[layer][block]
            to = self._base[layer][block] + expert * share + places[slot]
            source = torch.from_numpy(expert * n_slots + slot)
            moved = data.view(-1, self.page_bytes).index_select(0, source)
            self._slab.index_copy_(0, torch.from_numpy(to), moved)
            self._held[layer, :, block, :n_slots] = away
            del self._incoming[layer, block], data
        self._held_pages = int(self._held.sum())
        self._filled.clear()

    def pages(self, layer: int, expert: int, block: int, slots: Slots) -> Slots:
        """Host pages of these slots."""
        first = self._base[layer][block] + expert * self._share[layer][block]
        return first + self._places[layer][block][slots]

    def holds(self, layer: int, expert: int, block: int, slots: Slots) -> bool:
        """Whether the host has the bytes of all these slots."""
        return self._held is None or bool(self._held[layer, expert, block, slots].all())

    def hold(self, layer: int, expert: int, block: int, slots: Slots, held: bool) -> None:
        """``single``: these slots were copied out, or have arrived on the device."""
        if self._held is not None:
            before = int(self._held[layer, expert, block, slots].sum())
            self._held[layer, expert, block, slots] = held
            self._held_pages += (len(slots) if held else 0) - before

    def close(self, *, unused: bool = True) -> None:
        """Give the host memory back, also if somebody still holds a view of it; twice is fine.

        Args:
            unused: nothing will read it any more, see :meth:`Arena.drop`.
        """
        self._closed = True
        if self._slab is not None:
            if unused and not self.pinned:  # pinned memory belongs to CUDA's own allocator
                self._slab.untyped_storage().resize_(0)
            self._slab.set_()  # type: ignore[call-overload]
        self._slab = None
        self._incoming.clear()
        self._filled.clear()
