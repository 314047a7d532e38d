"""Residency in miniature: every page there is, eight bytes large.

The one idea: pools, queues, ledgers and tables count pages, so a page may be any size.  The
schemes of real dimensions are cut into pages of their real size, and each page is then stored
as :data:`PAGE` bytes: 48 GB of expert weights become a few megabytes, moved by the same
:class:`repro.residency.ExpertResidency` that serves.

Letters: L layers, E experts, B blocks, W widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from repro.contract import FormatId, IntArray, pages_of
from repro.formats.encoded import EncodedStack, TensorSpec, all_tensors
from repro.residency import (
    BlockPayload,
    HostStore,
)

PAGE = 8  # the smallest page an arena allows


@dataclass(frozen=True)
class MiniatureScheme:
    """A scheme whose tensors have :data:`PAGE` bytes for each page of the real ones."""

    real: Any
    page_bytes: int

    @property
    def name(self) -> str:
        """Of the real one."""
        return str(self.real.name)

    @property
    def format_id(self) -> FormatId:
        """Of the real one."""
        return FormatId(self.real.format_id)

    @property
    def nested(self) -> bool:
        """Of the real one."""
        return bool(self.real.nested)

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)`` of the real matrix."""
        rows, columns = self.real.shape
        return int(rows), int(columns)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the real one."""
        return tuple(self.real.widths)

    def tensors(self, n_bits: int) -> tuple[TensorSpec, ...]:
        """As many pages as the real tensors take."""
        real = self.real.tensors(n_bits)
        pages = pages_of((spec.part for spec in real), self.page_bytes)
        return tuple(
            replace(spec, dtype=torch.uint8, shape=(n * PAGE,))
            for spec, n in zip(real, pages, strict=True)
        )


Schemes = Sequence[Sequence[Any]]
"""Schemes of the blocks of an expert: ``[B]`` times one nested scheme, or one for each width."""


def real_payloads(schemes: Schemes, n_layers: int, n_experts: int) -> list[list[BlockPayload]]:
    """What real bytes would look like, without the bytes: ``[L][B]``."""
    return [[_payload(block, n_experts) for block in schemes] for _ in range(n_layers)]


def _by_width(block: Sequence[Any]) -> dict[int, Any]:
    return dict(sorted((w, scheme) for scheme in block for w in scheme.widths))


def _payload(block: Sequence[Any], n_experts: int) -> BlockPayload:
    return BlockPayload(_by_width(block), n_experts, bool(block[0].nested))


def block_sizes(payloads: list[list[BlockPayload]], page_bytes: int | None) -> IntArray:
    """``[L, B, W]`` bytes of a block at a width, in whole pages (None: what a kernel reads)."""
    found = [
        [
            [
                sum(part.n_bytes for part in block.parts(w))
                if page_bytes is None
                else sum(pages_of(block.parts(w), page_bytes)) * page_bytes
                for w in block.widths
            ]
            for block in row
        ]
        for row in payloads
    ]
    return np.asarray(found, dtype=np.int64)


def _stack(scheme: MiniatureScheme, n_experts: int, generator: torch.Generator) -> EncodedStack:
    tensors = {
        spec.name: torch.randint(
            0, 256, (n_experts, *spec.shape), dtype=torch.uint8, generator=generator
        )
        for spec in all_tensors(scheme)  # type: ignore[arg-type]
    }
    return EncodedStack(scheme, tensors)


def miniature_store(
    schemes: Schemes, n_layers: int, n_experts: int, page_bytes: int, mode: Any = "mirrored"
) -> HostStore:
    """A host store with a few random bytes for every page, so that what lies where can be seen."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(n_layers):
        row = []
        for block in schemes:
            stacks = [_stack(MiniatureScheme(s, page_bytes), n_experts, generator) for s in block]
            if len(stacks) == 1:
                row.append(BlockPayload.of_stack(stacks[0]))
            else:
                row.append(BlockPayload.of_versions({s.widths[0]: s for s in stacks}))
        rows.append(row)
    store = HostStore(rows, PAGE, mode=mode, pin=False)
    for layer, row in enumerate(rows):
        for number, payload in enumerate(row):
            store.put(layer, number, payload)
    return store
