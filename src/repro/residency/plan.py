"""How a budget is split before anything is allocated, and whether it suffices.

The one idea: the split is arithmetic on page counts, done once.  Planes: KV, staging and slack
get what was asked and the weights the rest; borders may move later.  Versions: what is left for
weights becomes ``n_high`` blocks of the high version and one low block for every other expert,
plus blocks of slack in both pools; borders are frozen (DynaExq, arXiv 2511.15015 section 4).

Letters: L layers, E experts, B blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from repro.residency.errors import BudgetError
from repro.residency.payload import BlockPayload
from repro.residency.slots import SlotMap, slot_map

Layout = Literal["planes", "versions"]
DEFAULT_SLOTS = 2
SLOT_BYTES = 2 << 20  # of a staging slot, where the budget is large
_TABLES = 8  # experts whose new tables the default slack holds
_DEFAULT_SHARE = 64  # defaults of staging and slack take at most 1/64 of the budget each


@dataclass(frozen=True)
class MemoryPlan:
    """Pages of everything in an arena of ``n_pages``."""

    layout: Layout
    n_pages: int
    page_bytes: int
    kv_pages: int
    staging_slots: int
    slot_pages: int
    weight_pages: int  # planes: the partition; versions: both pools with their slack
    slack_pages: int  # planes only
    n_high: int = 0  # versions: experts of all layers that may be high at rest
    n_low: int = 0
    high_blocks: int = 0  # slack included
    low_blocks: int = 0
    high_pages: int = 0  # of one block
    low_pages: int = 0

    @property
    def staging_pages(self) -> int:
        """Pages of the staging ring."""
        return self.staging_slots * self.slot_pages

    @property
    def capacity_bytes(self) -> int:
        """The hard cap."""
        return self.n_pages * self.page_bytes

    @property
    def weight_budget_bytes(self) -> int:
        """What a policy may fill with weights and tables: no slack, no staging, no KV."""
        if self.layout == "planes":
            return self.weight_pages * self.page_bytes
        at_rest = self.n_high * self.high_pages + self.n_low * self.low_pages
        return at_rest * self.page_bytes


def layout_of(payloads: Sequence[Sequence[BlockPayload]]) -> Layout:
    """``planes`` if all blocks are nested, ``versions`` if none is.

    Raises:
        BudgetError: no layers, a mixture, or blocks that differ in widths or experts.
    """
    blocks = [payload for layer in payloads for payload in layer]
    if not blocks:
        raise BudgetError("there are no experts to hold: the model has no MoE layer")
    if len({len(layer) for layer in payloads}) > 1:
        raise BudgetError("layers differ in their number of blocks: encode them alike")
    facts = {(payload.widths, payload.n_experts, payload.nested) for payload in blocks}
    if len(facts) > 1:
        raise BudgetError(
            f"blocks differ in widths, experts or layout ({sorted(facts)}): encode them alike"
        )
    return "planes" if blocks[0].nested else "versions"


def plan_memory(
    payloads: Sequence[Sequence[BlockPayload]],
    *,
    capacity_bytes: int,
    page_bytes: int,
    kv_bytes: int = 0,
    staging_bytes: int | None = None,
    staging_slots: int = DEFAULT_SLOTS,
    slack_bytes: int | None = None,
    slack: int | None = None,
    n_high: int | None = None,
) -> MemoryPlan:
    """Split ``capacity_bytes``.

    Args:
        payloads: blocks of one expert by layer, ``[L][B]``; schemes suffice.
        capacity_bytes: the hard cap, whole pages.
        page_bytes: size of a page.
        kv_bytes: initial KV partition.
        staging_bytes: staging ring; None: small against the budget; 0: no ring, every run of
            neighbouring pages is copied on its own.
        staging_slots: slots that the ring is cut into.
        slack: experts that can change at once when nothing is free.  Versions: blocks beyond
            those at rest, in both pools (None: two).  Planes: room for the tables that a
            demotion needs first (None: a few, small against the budget).
        slack_bytes: planes only, the same in bytes.
        n_high: versions only, experts of all layers at the high width; None: all that fit.

    Raises:
        BudgetError: no whole number of pages, or less than the floor (says by how many bytes).
    """
    layout = layout_of(payloads)
    if page_bytes < 1 or capacity_bytes < 1 or capacity_bytes % page_bytes:
        whole = max(1, capacity_bytes // max(1, page_bytes)) * page_bytes
        raise BudgetError(
            f"a budget of {capacity_bytes} bytes is no whole number of pages of {page_bytes} "
            f"bytes: use {whole}"
        )
    given = {
        "kv_bytes": kv_bytes,
        "staging_bytes": staging_bytes,
        "staging_slots": staging_slots,
        "slack_bytes": slack_bytes,
        "slack": slack,
    }
    for name, value in given.items():
        if value is not None and value < 0:
            raise BudgetError(f"{name}={value}: it cannot be negative")
    maps = [[slot_map(payload, page_bytes) for payload in layer] for layer in payloads]
    kv_pages = -(-kv_bytes // page_bytes)

    def plan(n_pages: int) -> MemoryPlan:
        slots, slot_pages = _staging(staging_bytes, staging_slots, n_pages, page_bytes)
        split = _Split(n_pages, page_bytes, kv_pages, slots, slot_pages)
        if layout == "planes":
            return _planes(maps, payloads, split, slack, slack_bytes)
        return _versions(maps, payloads, split, slack, n_high)

    n_pages = capacity_bytes // page_bytes
    try:
        return plan(n_pages)
    except _TooLittle as first:
        enough = n_pages + first.pages
        while True:  # what is measured by the budget grows with it
            try:
                plan(enough)
                break
            except _TooLittle as more:
                enough += more.pages
        raise BudgetError(
            f"the budget of {capacity_bytes} bytes is {(enough - n_pages) * page_bytes} bytes "
            f"below the floor ({first.what}): give at least {enough * page_bytes}"
        ) from None


@dataclass(frozen=True)
class _Split:
    """Pages of everything but weights."""

    n_pages: int
    page_bytes: int
    kv_pages: int
    slots: int
    slot_pages: int

    def too_little(self, short: int, floor: int, slack: int) -> _TooLittle:
        others = {"KV": self.kv_pages, "staging": self.slots * self.slot_pages, "slack": slack}
        what = f"experts at their narrowest {floor * self.page_bytes}" + "".join(
            f", {name} {pages * self.page_bytes}" for name, pages in others.items() if pages
        )
        return _TooLittle(short, what)


class _TooLittle(Exception):
    """So many pages are missing."""

    def __init__(self, pages: int, what: str) -> None:
        super().__init__(what)
        self.pages, self.what = pages, what


def expert_pages(maps: Sequence[Sequence[SlotMap]], n_bits: int) -> list[int]:
    """Pages of one expert at this width, by layer."""
    return [sum(m.n_pages(n_bits) for m in layer) for layer in maps]


def _staging(
    staging_bytes: int | None, most_slots: int, n_pages: int, page_bytes: int
) -> tuple[int, int]:
    if staging_bytes is None:
        n = min(n_pages // _DEFAULT_SHARE, most_slots * max(1, SLOT_BYTES // page_bytes))
    else:
        n = -(-staging_bytes // page_bytes)
    slots = min(most_slots, n)
    return slots, (n // slots if slots else 0)


def _planes(
    maps: list[list[SlotMap]],
    payloads: Sequence[Sequence[BlockPayload]],
    split: _Split,
    slack: int | None,
    slack_bytes: int | None,
) -> MemoryPlan:
    widths = payloads[0][0].widths
    # Most pages that must come in before a narrower width can take over: its tables.
    down = [(old, new) for old in widths for new in widths if new < old]
    largest = max(
        sum(max((len(m.change(old, new)[0]) for old, new in down), default=0) for m in layer)
        for layer in maps
    )
    if slack_bytes is not None:
        slack_pages = -(-slack_bytes // split.page_bytes)
    elif slack is not None:
        slack_pages = slack * largest
    else:
        slack_pages = min(_TABLES * largest, split.n_pages // _DEFAULT_SHARE)
    floor = sum(expert_pages(maps, widths[0])) * payloads[0][0].n_experts
    rest = split.n_pages - split.kv_pages - split.slots * split.slot_pages - slack_pages
    if rest < floor:
        raise split.too_little(floor - rest, floor, slack_pages)
    return MemoryPlan(
        "planes",
        split.n_pages,
        split.page_bytes,
        split.kv_pages,
        split.slots,
        split.slot_pages,
        rest,
        slack_pages,
    )


def _versions(
    maps: list[list[SlotMap]],
    payloads: Sequence[Sequence[BlockPayload]],
    split: _Split,
    slack: int | None,
    n_high: int | None,
) -> MemoryPlan:
    payload, n_layers = payloads[0][0], len(payloads)
    n_all = n_layers * payload.n_experts
    high, low = (max(expert_pages(maps, w)) for w in (payload.widths[-1], payload.widths[0]))
    room = split.n_pages - split.kv_pages - split.slots * split.slot_pages
    one_width = len(payload.widths) == 1
    spare = 0 if one_width else 2 if slack is None else slack
    if one_width:
        n_high = n_all
    elif n_high is None:
        fit = (room - spare * high - (n_all + spare) * low) // max(1, high - low)
        n_high = max(0, min(n_all, fit)) // n_layers * n_layers
    elif not 0 <= n_high <= n_all:
        raise BudgetError(f"n_high={n_high}: there are {n_all} experts in all layers")
    spare = spare if n_high else 0  # nothing can change without a high pool
    high_blocks = n_high + spare
    low_blocks = 0 if one_width else n_all - n_high + spare
    weight_pages = high_blocks * high + low_blocks * low
    if weight_pages > room:
        floor = n_high * high + (n_all - n_high) * low
        raise split.too_little(weight_pages - room, floor, weight_pages - floor)
    return MemoryPlan(
        "versions",
        split.n_pages,
        split.page_bytes,
        split.kv_pages + room - weight_pages,  # too little for another block: KV cache
        split.slots,
        split.slot_pages,
        weight_pages,
        0,
        n_high,
        n_all - n_high,
        high_blocks,
        low_blocks,
        high,
        low,
    )
