"""Blocks of KV memory on the pages of the arena, and the arithmetic that finds a token there.

The one idea: a request's KV is a list of blocks, each a list of page numbers; where a token's
keys and values lie in a block is the same for all blocks and known beforehand.  So the place
of every token of a batch is two look-ups and a multiplication, for all layers at once.

The arena is addressed in *units*, the largest piece that divides both a page and a token: so
neither has to divide the other.

Pages belong to one table from :meth:`BlockTable.extend` to :meth:`BlockTable.release` and are
never moved in between.

Letters: R rows, B blocks of the longest row, P pages of a block, L layers of a group, u units of
a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.contract import Reservation
from repro.serving.kv_sizes import KVError, KVLayout, StateSpec

Reserve = Callable[[int, str], Reservation | None]
Release = Callable[[Reservation], None]
Pages = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose tokens are cut alike and that see equally far back."""

    layers: tuple[int, ...]
    dtype: torch.dtype
    window: int | None
    unit_bytes: int
    units_per_token: int
    units_per_page: int
    page_of: Pages  # [block_tokens * L * u] which page of its block a unit lies on
    unit_of: Pages  # [block_tokens * L * u] and where on the page


@dataclass(frozen=True)
class StatePlace:
    """One recurrent state in the pages of a request's states."""

    spec: StateSpec
    start: int  # first byte


@dataclass(frozen=True)
class BlockPlan:
    """A layout on pages of one size: what is computed once for all requests."""

    layout: KVLayout
    page_bytes: int
    groups: tuple[LayerGroup, ...]
    states: tuple[StatePlace, ...]

    @classmethod
    def of(cls, layout: KVLayout, page_bytes: int) -> BlockPlan:
        """Plan ``layout`` on pages of ``page_bytes``.

        Raises:
            KVError: a page that is no multiple of 8 bytes.
        """
        if page_bytes < 8 or page_bytes % 8:
            raise KVError(f"page_bytes={page_bytes}: pages are multiples of 8 bytes")
        places = layout.places(page_bytes)
        alike: dict[tuple[int, torch.dtype, int | None], list[int]] = {}
        for index in places:
            layer = layout.layers[index]
            alike.setdefault((layer.token_bytes, layer.dtype, layer.window), []).append(index)
        groups = []
        for (token_bytes, dtype, window), layers in alike.items():
            unit = math.gcd(page_bytes, token_bytes)
            starts = np.array([places[index][0] for index in layers])
            tokens = np.arange(layout.block_tokens) * token_bytes
            units = np.arange(token_bytes // unit) * unit
            # [block_tokens, L, u]: a token's units of all layers are neighbours in the index
            at = tokens[:, None, None] + starts[None, :, None] + units[None, None, :]
            groups.append(
                LayerGroup(
                    tuple(layers),
                    dtype,
                    window,
                    unit,
                    len(units),
                    page_bytes // unit,
                    (at // page_bytes).ravel().astype(np.int64),
                    (at % page_bytes // unit).ravel().astype(np.int64),
                )
            )
        states, start = [], 0
        for spec in layout.states:
            states.append(StatePlace(spec, start))
            start += -(-spec.n_bytes // page_bytes) * page_bytes
        return cls(layout, page_bytes, tuple(groups), tuple(states))

    @property
    def block_bytes(self) -> int:
        """Whole pages of one block."""
        return self.layout.block_bytes(self.page_bytes)

    @property
    def block_pages(self) -> int:
        """Pages of one block."""
        return self.block_bytes // self.page_bytes

    @property
    def state_bytes(self) -> int:
        """Whole pages of one request's recurrent states."""
        return self.layout.state_bytes(self.page_bytes)


class BlockTable:
    """The KV memory of one request.

    Args:
        plan: of the model.
        reserve: called as ``reserve(n_bytes, "kv")``; pages, or None if there is no room.
        release: takes back what ``reserve`` gave, or some of its pages.
    """

    def __init__(self, plan: BlockPlan, reserve: Reserve, release: Release) -> None:
        self.plan = plan
        self.n_tokens = 0  # whose keys and values are complete
        self._reserve = reserve
        self._release = release
        self._reservations: list[Reservation] = []
        self._state: Reservation | None = None
        self._pages: Pages = np.zeros((0, plan.block_pages), dtype=np.int64)
        self._n_blocks = 0

    @property
    def n_blocks(self) -> int:
        """Blocks it has."""
        return self._n_blocks

    @property
    def capacity(self) -> int:
        """Tokens it has room for."""
        if not self.plan.block_pages:  # nothing is kept per token
            return np.iinfo(np.int64).max if self._state is not None else 0
        return self._n_blocks * self.plan.layout.block_tokens

    @property
    def n_bytes(self) -> int:
        """Whole pages it holds, recurrent states included."""
        held = self._n_blocks * self.plan.block_bytes
        return held + (self.plan.state_bytes if self._state is not None else 0)

    @property
    def pages(self) -> Pages:
        """Page numbers, ``[n_blocks, P]``; a view."""
        return self._pages[: self._n_blocks]

    @property
    def state_pages(self) -> Pages:
        """Page numbers of the recurrent states, in the order of their places."""
        return np.array(self._state.pages if self._state is not None else (), dtype=np.int64)

    def extend(self, n_tokens: int) -> bool:
        """Make room for ``n_tokens`` in all; False if there is none, and nothing has changed."""
        state = None
        if self.plan.state_bytes and self._state is None and n_tokens > 0:
            state = self._take(self.plan.state_bytes)
            if state is None:
                return False
        missing = self.plan.layout.blocks_for(n_tokens) - self._n_blocks
        if missing > 0:
            blocks = None
            try:
                blocks = self._take(missing * self.plan.block_bytes)
            finally:
                if blocks is None and state is not None:
                    self._release(state)
            if blocks is None:
                return False
            self._append(blocks, missing)
        if state is not None:
            self._state = state
        return True

    def _take(self, n_bytes: int) -> Reservation | None:
        reservation = self._reserve(n_bytes, "kv")
        if reservation is None:
            return None
        wanted = n_bytes // self.plan.page_bytes
        if len(reservation.pages) != wanted:
            self._release(reservation)
            raise KVError(
                f"{len(reservation.pages)} pages were given for {wanted}: "
                f"the allocator's pages are not of {self.plan.page_bytes} bytes"
            )
        return reservation

    def _append(self, reservation: Reservation, n_blocks: int) -> None:
        end = self._n_blocks + n_blocks
        if end > len(self._pages):
            grown = np.zeros((max(end, 2 * len(self._pages)), self.plan.block_pages), np.int64)
            grown[: self._n_blocks] = self.pages
            self._pages = grown
        self._pages[self._n_blocks : end] = np.reshape(reservation.pages, (n_blocks, -1))
        self._n_blocks = end
        self._reservations.append(reservation)

    def crop(self, n_tokens: int) -> None:
        """Forget what comes after the first ``n_tokens``; the blocks stay, see :meth:`trim`.

        Raises:
            KVError: more tokens than there are; or a recurrent state, which has gone on and can
                only be started anew (``n_tokens=0``).
        """
        if not 0 <= n_tokens <= self.n_tokens:
            raise KVError(f"cannot cut {self.n_tokens} cached tokens back to {n_tokens}")
        if 0 < n_tokens < self.n_tokens and self.plan.states:
            raise KVError(
                f"cannot cut {self.n_tokens} tokens back to {n_tokens}: the recurrent state has "
                "gone on; crop to 0 and compute the tokens again"
            )
        self.n_tokens = n_tokens

    def trim(self) -> int:
        """Give back the blocks beyond the cached tokens; returns their bytes."""
        surplus = self._n_blocks - self.plan.layout.blocks_for(self.n_tokens)
        freed = surplus * self.plan.block_bytes
        while surplus > 0:
            last = self._reservations.pop()
            n_pages = min(len(last.pages), surplus * self.plan.block_pages)
            kept = last.pages[: len(last.pages) - n_pages]
            if kept:
                self._reservations.append(replace(last, pages=kept))
            self._n_blocks -= n_pages // self.plan.block_pages
            surplus -= n_pages // self.plan.block_pages
            self._release(replace(last, pages=last.pages[len(kept) :]))
        return freed

    def release(self) -> None:
        """Give everything back at once; the table is then empty and may be used again."""
        self.n_tokens = self._n_blocks = 0
        state, self._state = self._state, None
        reservations, self._reservations = self._reservations, []
        for reservation in reservations if state is None else [*reservations, state]:
            self._release(reservation)


class UnitIndex:
    """Index arithmetic of a plan on one device."""

    def __init__(self, plan: BlockPlan, device: torch.device) -> None:
        self._plan = plan
        self.device = device
        self._places = [
            (torch.from_numpy(g.page_of).to(device), torch.from_numpy(g.unit_of).to(device))
            for g in plan.groups
        ]

    def upload(self, tables: Sequence[BlockTable]) -> Tensor:
        """Page numbers of all rows, ``[R, B, P]``; what a row lacks is page 0, never used."""
        n_blocks = max(table.n_blocks for table in tables)
        pages = np.zeros((len(tables), n_blocks, self._plan.block_pages), dtype=np.int64)
        for row, table in enumerate(tables):
            pages[row, : table.n_blocks] = table.pages
        return torch.from_numpy(pages).to(self.device)

    def units(self, group: int, pages: Tensor, tokens: Tensor) -> Tensor:
        """Units of the arena that hold ``tokens``, for each layer of a group.

        Args:
            group: index into the plan's groups.
            pages: from :meth:`upload`.
            tokens: ``int64[R, T]`` position of each token in its request.

        Returns:
            ``int64[L, R * T, u]``.
        """
        n_rows, n_blocks, n_pages = pages.shape
        block_tokens = self._plan.layout.block_tokens
        one = self._plan.groups[group]
        page_of, unit_of = self._places[group]
        units = pages.view(n_rows * n_blocks, n_pages).index_select(1, page_of)
        units.mul_(one.units_per_page).add_(unit_of)
        width = len(one.layers) * one.units_per_token
        starts = torch.arange(n_rows, device=self.device) * (n_blocks * block_tokens)
        places = (tokens + starts[:, None]).reshape(-1)
        units = units.view(n_rows * n_blocks * block_tokens, width).index_select(0, places)
        units = units.view(len(places), len(one.layers), one.units_per_token)
        return units.transpose(0, 1).contiguous()
