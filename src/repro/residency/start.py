"""The widths that experts begin with.

The one idea: what fits is known before a byte is copied.  Planes begin at the widest width that
all experts can have; versions with the high tier full, because the pools are frozen and an
empty high block would serve nobody.

Letters: L layers, E experts, B blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from repro.residency.errors import BudgetError
from repro.residency.host import HostStore
from repro.residency.plan import MemoryPlan, expert_pages


def first_widths(
    asked: int | npt.ArrayLike | None, store: HostStore, plan: MemoryPlan
) -> npt.NDArray[np.int8]:
    """``[L, E, B]`` from what was asked.

    Raises:
        BudgetError: an array of another shape.
    """
    shape = (len(store.maps), store.n_experts, len(store.maps[0]))
    if asked is None:
        return _default(shape, store, plan)
    given: npt.NDArray[Any] = np.asarray(asked)
    if given.ndim == 2:
        given = given[:, :, None]
    try:
        return np.broadcast_to(given, shape).astype(np.int8)
    except ValueError as error:
        raise BudgetError(
            f"initial_bits of shape {given.shape} do not fit {shape} (layers, experts, blocks)"
        ) from error


def _default(
    shape: tuple[int, int, int], store: HostStore, plan: MemoryPlan
) -> npt.NDArray[np.int8]:
    widths = store.payloads[0][0].widths
    n_bits = np.full(shape, widths[0], dtype=np.int8)
    if plan.layout == "planes":
        fit = [
            w for w in widths if sum(expert_pages(store.maps, w)) * shape[1] <= plan.weight_pages
        ]
        n_bits[...] = fit[-1]
        return n_bits
    share, rest = divmod(plan.n_high, shape[0])
    for layer in range(shape[0]):
        n_bits[layer, : share + (layer < rest)] = widths[-1]
    return n_bits
