"""Which blocks give up bits, and which get them back: greedy by damage per net byte.

The one idea (PagedWeight's planner): every block has a curve of damage over bytes.  Its lower
convex hull is cut into segments, all segments of all blocks are sorted by damage per byte, and
the cheapest are taken until the byte target is met.  A segment may span several widths: where
the next narrower width is a bad bargain and the one after it a good one, a block jumps.  The way
up is the mirror image.  Bytes are net: a plane less, and the difference of the two tables.

How good it is: with segments sorted, damage is at most that of the best plan plus that of the
last segment taken (the best plan is no better than the fractional one, which differs from
greedy in a part of this segment only).  On the way up, what is recovered is at least that of
the best plan less one segment.  Where all segments have the same size and the target is a
multiple of it, both are exact.

Equal bargains are taken in the order of block numbers; two bargains count as equal when they
differ by less than one part in a hundred million.

Letters: n blocks, S = W - 1 steps between neighbouring widths (step k joins columns k and k+1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.contract import FloatArray

BoolArray = npt.NDArray[np.bool_]
Columns = npt.NDArray[np.intp]
# Our choice: how many segments are looked at again to undo what overshoots, or to fill what is
# left; bounds the time of a plan.
MAX_TRIM = 256


@dataclass(frozen=True)
class Plan:
    """What greedy chose."""

    columns: Columns  # [n] widths after the plan
    n_bytes: int  # released, or taken on the way up
    damage: float  # predicted, added by the plan (negative: recovered)
    order: Columns  # blocks that change, best bargain first; a block may be named again
    worst_segment: float  # damage of one segment: how far from the best plan at most


@dataclass(frozen=True)
class Segments:
    """Pieces of the hulls, best bargain first; of one block in the order of the walk."""

    n_bytes: FloatArray
    damage: FloatArray  # negative on the way up
    place: Columns  # step of the walk times n, plus the block
    n: int
    first: int  # column reached by the first step of the walk ...
    sign: int  # ... and where the next ones lead

    def block(self, which: Any) -> Any:
        """Of these segments."""
        return self.place[which] % self.n

    def to(self, which: Any) -> Any:
        """Columns that these segments reach."""
        return self.first + self.sign * (self.place[which] // self.n)


def segments(
    damage: FloatArray, n_bytes: FloatArray, column: Columns, limit: Columns, *, up: bool = False
) -> Segments:
    """All segments between where blocks are and where they may go.

    Args:
        damage: ``[S, n]`` of each step down, not negative.
        n_bytes: ``[S, n]`` net bytes of the step, not negative.
        column: ``[n]`` where blocks are.
        limit: ``[n]`` floor, or ceiling on the way up; equal to ``column`` for blocks that stay.
        up: the way up; damages are then negative.
    """
    n_steps, n = damage.shape
    # In the order of the walk: the first step down starts at the widest width.
    if up:
        cost, size, k = -damage, n_bytes, np.arange(n_steps)[:, None]
        valid = (k >= column) & (k < limit)
    else:
        cost, size, k = damage[::-1], n_bytes[::-1], np.arange(n_steps)[::-1, None]
        valid = (k < column) & (k >= limit)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = cost / size
    # Bargains get worse along a convex curve; where they do not, the hull is needed.
    bent = (slope[1:] < slope[:-1]) & valid[1:] & valid[:-1]
    odd = bent.any(axis=0) | (valid & (size == 0)).any(axis=0)
    if odd.any():
        cost, size = cost.copy(), size.copy()
        where = np.flatnonzero(odd)
        cost[:, where], size[:, where], valid[:, where] = _hull(
            cost[:, where], size[:, where], valid[:, where]
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            slope[:, where] = cost[:, where] / size[:, where]
    place = _order(np.where(valid, slope, np.inf).reshape(-1))[: np.count_nonzero(valid)]
    first, sign = (1, 1) if up else (n_steps - 1, -1)
    return Segments(size.reshape(-1)[place], cost.reshape(-1)[place], place, n, first, sign)


def _order(slope: FloatArray) -> Columns:
    """Stable order of numbers without NaN, equal where they differ by less than 1 in 10**8.

    Each becomes one integer, its high bits the number and its low bits the place: sorting
    plain integers is several times faster than a stable sort of places by number.
    """
    n_bits = max(1, len(slope).bit_length())
    if n_bits > 24:  # too many places to leave the number exact enough
        return np.argsort(slope, kind="stable")
    raw = (slope + 0.0).view(np.int64)  # adding zero turns -0.0 into 0.0
    key = raw ^ ((raw >> 63) & np.int64(0x7FFF_FFFF_FFFF_FFFF))  # ascending as integers, too
    key &= np.int64(-1 << n_bits)
    key |= np.arange(len(slope))
    key.sort()
    key &= np.int64((1 << n_bits) - 1)
    return key


def _hull(
    cost: FloatArray, size: FloatArray, valid: BoolArray
) -> tuple[FloatArray, FloatArray, BoolArray]:
    """Convex pieces of curves ``[S, m]``, by the best bargain from each corner on.

    A piece stands where its last step was; the steps it swallowed are no longer valid.
    """
    n_steps, m = cost.shape
    x, y = np.zeros((n_steps + 1, m)), np.zeros((n_steps + 1, m))
    np.cumsum(np.where(valid, size, 0.0), axis=0, out=x[1:])
    np.cumsum(np.where(valid, cost, 0.0), axis=0, out=y[1:])
    pieces = np.zeros((n_steps, m)), np.zeros((n_steps, m)), np.zeros((n_steps, m), dtype=bool)
    at, rows = np.zeros(m, dtype=np.intp), np.arange(m)  # of the curves not yet at their end
    k = np.arange(n_steps)[:, None]
    for _ in range(n_steps):
        dx, dy = x[1:] - x[at, np.arange(len(at))], y[1:] - y[at, np.arange(len(at))]
        ahead = valid & (dx > 0) & (k >= at)
        with np.errstate(divide="ignore", invalid="ignore"):
            bargain = np.where(ahead, dy / dx, np.inf)
        step = bargain.argmin(axis=0)
        found = np.flatnonzero(ahead[step, np.arange(len(at))])
        if len(found) == 0:
            break
        step = step[found]
        pieces[0][step, rows[found]] = dy[step, found]
        pieces[1][step, rows[found]] = dx[step, found]
        pieces[2][step, rows[found]] = True
        at = step + 1
        if len(found) < len(rows):
            rows, x, y, valid = rows[found], x[:, found], y[:, found], valid[:, found]
    return pieces


def plan_down(
    damage: FloatArray, n_bytes: FloatArray, column: Columns, floor: Columns, target: int
) -> Plan:
    """Release ``target`` bytes at the least damage, or all there is above the floors.

    Args as :func:`segments`.
    """
    if target <= 0:
        return _nothing(column)
    found = segments(damage, n_bytes, column, floor)
    total = np.cumsum(found.n_bytes)
    n_taken = min(len(total), int(np.searchsorted(total, target)) + 1)
    if n_taken == 0:
        return _nothing(column)
    taken = np.ones(n_taken, dtype=bool)
    spare = float(total[n_taken - 1]) - target
    kept: set[int] = set()  # blocks whose deepest segment stays
    for i in range(n_taken - 1, max(-1, n_taken - 1 - MAX_TRIM), -1):
        if spare <= 0:
            break
        block = int(found.block(i))
        if block not in kept and found.n_bytes[i] <= spare:
            taken[i] = False
            spare -= float(found.n_bytes[i])
        else:
            kept.add(block)
    return _plan(column, found, np.flatnonzero(taken), float(found.damage[n_taken - 1]))


def plan_up(
    damage: FloatArray, n_bytes: FloatArray, column: Columns, ceiling: Columns, room: int
) -> Plan:
    """Spend at most ``room`` bytes where they recover the most damage.

    Args as :func:`segments`.
    """
    if room <= 0:
        return _nothing(column)
    return fill(segments(damage, n_bytes, column, ceiling, up=True), column, room)


def fill(found: Segments, column: Columns, room: int) -> Plan:
    """Take segments of the way up while they fit and recover anything."""
    n_useful = int(np.searchsorted(found.damage / found.n_bytes, 0.0))
    total = np.cumsum(found.n_bytes[:n_useful])
    n_taken = int(np.searchsorted(total, room, side="right"))
    chosen = list(range(n_taken))
    left = room - (float(total[n_taken - 1]) if n_taken else 0.0)
    passed: set[int] = set()  # a block that skipped a segment cannot take the next
    for i in range(n_taken, min(n_useful, n_taken + MAX_TRIM)):
        block = int(found.block(i))
        if block not in passed and found.n_bytes[i] <= left:
            chosen.append(i)
            left -= float(found.n_bytes[i])
        else:
            passed.add(block)
    worst = float(-found.damage[n_taken]) if n_taken < n_useful else 0.0
    return _plan(column, found, np.asarray(chosen, dtype=np.intp), worst)


def _plan(column: Columns, found: Segments, chosen: Columns, worst: float) -> Plan:
    columns, block = column.copy(), found.block(chosen)
    columns[block] = found.to(chosen)  # the last, and deepest, of a block counts
    return Plan(
        columns,
        round(found.n_bytes[chosen].sum()),
        float(found.damage[chosen].sum()),
        block,
        worst,
    )


def _nothing(column: Columns) -> Plan:
    return Plan(column.copy(), 0, 0.0, np.zeros(0, dtype=np.intp), 0.0)
