"""Bits change places: from where they help little to where they help more, at the same bytes.

The one idea: best bargains on the way up are paid for by the cheapest ones on the way down, as
long as what is recovered per byte exceeds what is lost by a clear margin.  Ours, not
PagedWeight's: without memory pressure its rules would leave bits where an earlier traffic put
them.

Letters: S steps, n blocks.
"""

from __future__ import annotations

import numpy as np

from repro.contract import FloatArray
from repro.policies.planner import Columns, Plan, Segments, segments

# Our choice: segments on the way down that are looked at for each one on the way up; a table and
# a plane of the widest width are paid for by far fewer.
MAX_PAYERS = 16


def exchange(
    up: Segments,
    damage: FloatArray,
    n_bytes: FloatArray,
    column: Columns,
    floor: Columns,
    *,
    margin: float,
    room: int,
    limit: int,
) -> Plan:
    """Demotions that pay for promotions; bytes in use do not grow by more than ``room``.

    Args:
        up: segments of the way up.
        damage: ``[S, n]`` of each step down.
        n_bytes: ``[S, n]`` net.
        column: ``[n]`` where blocks are.
        floor: ``[n]``.
        margin: damage recovered per byte over damage done per byte, at least.
        room: bytes that may be spent beyond what is released.
        limit: promotions at most.

    Returns:
        A plan whose ``order`` names payers before the promotion they pay for.
    """
    down = segments(damage, n_bytes, column, floor)
    # Plain lists: the walk looks at single numbers.
    ups = _first(up, limit)
    payers = _first(down, MAX_PAYERS * limit)
    columns = column.copy()
    order: list[int] = []
    paid, change, total = 0, 0.0, float(room)
    rose: set[int] = set()
    fell: set[int] = set()
    for block, to, cost, change_up in ups:
        gain = -change_up
        if block in fell or gain <= 0:
            break
        chosen, j, income, loss, worst = [], paid, 0.0, 0.0, 0.0
        while total + income < cost and j < len(payers):
            payer, _, released, harm = payers[j]
            if payer not in rose and payer != block:
                chosen.append(j)
                income += released
                loss += harm
                worst = max(worst, harm / released)
            j += 1
        # Per byte, for the worst payer too: what is left over of its bytes may find no use.
        if total + income < cost or gain <= margin * max(loss, worst * cost):
            break
        for k in chosen:
            columns[payers[k][0]] = payers[k][1]
            order.append(payers[k][0])
            fell.add(payers[k][0])
        columns[block] = to
        order.append(block)
        rose.add(block)
        total += income - cost
        change += loss - gain
        paid = j
    return Plan(columns, round(room - total), change, np.asarray(order, dtype=np.intp), 0.0)


def _first(found: Segments, n: int) -> list[tuple[int, int, float, float]]:
    """(block, column reached, bytes, damage) of the best ``n`` segments."""
    some = slice(0, n)
    return list(
        zip(
            found.block(some).tolist(),
            found.to(some).tolist(),
            found.n_bytes[some].tolist(),
            found.damage[some].tolist(),
            strict=True,
        )
    )
