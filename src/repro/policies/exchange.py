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
    columns = column.copy()
    order: list[int] = []
    paid, change, total = 0, 0.0, float(room)
    rose: set[int] = set()
    fell: set[int] = set()
    for i in range(min(limit, len(up.place))):
        block, gain, cost = int(up.block(i)), -float(up.damage[i]), float(up.n_bytes[i])
        if block in fell or gain <= 0:
            break
        payers: list[int] = []
        j, income, loss = paid, 0.0, 0.0
        while total + income < cost and j < len(down.place):
            if int(down.block(j)) not in rose and int(down.block(j)) != block:
                payers.append(j)
                income += float(down.n_bytes[j])
                loss += float(down.damage[j])
            j += 1
        # Per byte, for the worst payer too: what is left over of its bytes may find no use.
        worst = max((float(down.damage[k] / down.n_bytes[k]) for k in payers), default=0.0)
        if total + income < cost or gain <= margin * max(loss, worst * cost):
            break
        for k in payers:
            fallen = int(down.block(k))
            columns[fallen] = int(down.to(k))
            order.append(fallen)
            fell.add(fallen)
        columns[block] = int(up.to(i))
        order.append(block)
        rose.add(block)
        total += income - cost
        change += loss - gain
        paid = j
    return Plan(columns, round(room - total), change, np.asarray(order, dtype=np.intp), 0.0)
