"""How large a page is: as large as possible while little of it stays empty.

The one idea: large pages make short tables and long copies, but every tensor begins on a page
of its own, so small ones (scales, shared tables) leave the rest of theirs unused.  The largest
power of two is taken at which no width of any block wastes more than the limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from repro.formats.layout import fragmentation
from repro.residency.payload import BlockPayload

LIMIT = 0.05
SIZES = tuple(1 << n for n in range(6, 18))  # 64 bytes to 128 KiB


@dataclass(frozen=True)
class PageSize:
    """A page size and what it wastes."""

    page_bytes: int
    fragmentation: float  # largest share of a block's pages that holds nothing, at any width


def page_fragmentation(payloads: Iterable[Iterable[BlockPayload]], page_bytes: int) -> float:
    """Largest share of a block's pages that holds nothing, over blocks and widths (0 to 1).

    Args:
        payloads: blocks of one expert, for every layer.
        page_bytes: size of a page.
    """
    blocks = {tuple(block.schemes.items()): block for row in payloads for block in row}
    return max(
        fragmentation(block.parts(n_bits), page_bytes)
        for block in blocks.values()
        for n_bits in block.widths
    )


def choose_page_bytes(payloads: Iterable[Iterable[BlockPayload]], limit: float = LIMIT) -> PageSize:
    """The largest page that wastes at most ``limit`` at every width, tables included.

    Where even the smallest page wastes more, the one that wastes least is taken: small models
    have tables of a few bytes.
    """
    rows = [tuple(blocks) for blocks in payloads]
    choices = [PageSize(size, page_fragmentation(rows, size)) for size in SIZES]
    good = [choice for choice in choices if choice.fragmentation <= limit]
    return good[-1] if good else min(choices, key=lambda choice: choice.fragmentation)
