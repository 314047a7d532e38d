"""Small parts to drive the paged KV cache by hand: a poisoned pool, a bench, exact models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from repro.contract import Reservation
from repro.models.tiny import tiny_model
from repro.residency import Arena
from repro.serving import forward
from repro.serving.kv_blocks import BlockTable
from repro.serving.kv_layout import probe
from repro.serving.paged_cache import PagedCache


class Pool:
    """A free list over an arena whose free pages are poisoned: NaN wherever nobody writes."""

    def __init__(
        self, page_bytes: int, n_pages: int, dtype: torch.dtype, device: Any = "cpu"
    ) -> None:
        self.arena = Arena(n_pages, page_bytes, device)
        self.dtype = dtype
        # neighbours in a table are no neighbours in memory
        self.free = np.random.default_rng(0).permutation(n_pages).tolist()
        self._poison(self.free)

    def _poison(self, pages: Sequence[int]) -> None:
        poison = torch.nan if self.dtype.is_floating_point else 255
        self.arena.as_dtype(self.dtype)[list(pages)] = poison

    def reserve(self, n_bytes: int, purpose: str) -> Reservation | None:
        n_pages = -(-n_bytes // self.arena.page_bytes)
        if n_pages > len(self.free):
            return None
        taken, self.free = self.free[:n_pages], self.free[n_pages:]
        return Reservation(purpose, tuple(taken))

    def release(self, reservation: Reservation) -> None:
        self._poison(reservation.pages)
        self.free.extend(reservation.pages)


class Bench:
    """A model with its paged cache, driven by hand."""

    def __init__(
        self, model: Any, page_bytes: int = 512, block_tokens: int = 4, n_pages: int = 2000
    ) -> None:
        self.model = model
        layout = probe(model, block_tokens)
        self.pool = Pool(page_bytes, n_pages, model.dtype, model.device)
        self.cache = PagedCache(layout, self.pool.arena)

    def table(self) -> BlockTable:
        return BlockTable(self.cache.plan, self.pool.reserve, self.pool.release)

    def run(self, chunks: Sequence[tuple[BlockTable, Sequence[int]]], **options: Any) -> Any:
        for table, tokens in chunks:
            assert table.extend(table.n_tokens + len(tokens))
        rows = [forward.Row(table, tokens) for table, tokens in chunks]
        return forward.run(self.model, self.cache, rows, **options)


def exact(arch: str, **overrides: Any) -> Any:
    model = tiny_model(arch, **overrides).to(torch.float64)
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    return model
