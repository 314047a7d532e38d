"""Writing rows of the device table without allocating and without waiting.

The one idea: rows cross the bus in small pinned buffers that exist from the start, because a
page-locked allocation between two steps would hold the device up.  A buffer is used again only
when the stream has passed what was sent from it; should all of them be on their way, one more
is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.residency.streams import is_done

_BUFFERS = 4
_ROWS = 64  # of a buffer


@dataclass(eq=False)
class _Buffer:
    index_host: Tensor  # int64 [rows], pinned
    rows_host: Tensor  # int32 [rows, words], pinned
    index: Tensor  # the same on the device
    rows: Tensor
    event: Any | None = None


class RowWriter:
    """Rewrites rows of ``table`` (``int32 [handles, words]`` on CUDA) on the current stream."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._buffers = [self._new() for _ in range(_BUFFERS)]

    def _new(self) -> _Buffer:
        shape, device = (_ROWS, self._table.shape[1]), self._table.device
        pin = device.type == "cuda"
        return _Buffer(
            torch.zeros(_ROWS, dtype=torch.int64, pin_memory=pin),
            torch.zeros(shape, dtype=torch.int32, pin_memory=pin),
            torch.zeros(_ROWS, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
        )

    def write(self, flat: npt.NDArray[np.int64], rows: npt.NDArray[np.int32]) -> None:
        """Row ``flat[i]`` becomes ``rows[i]`` for what is enqueued from now on."""
        for start in range(0, len(flat), _ROWS):
            n = min(_ROWS, len(flat) - start)
            buffer = self._idle()
            buffer.index_host[:n] = torch.from_numpy(flat[start : start + n])
            buffer.rows_host[:n] = torch.from_numpy(rows[start : start + n])
            buffer.index[:n].copy_(buffer.index_host[:n], non_blocking=True)
            buffer.rows[:n].copy_(buffer.rows_host[:n], non_blocking=True)
            self._table.index_copy_(0, buffer.index[:n], buffer.rows[:n])
            if self._table.is_cuda:
                buffer.event = torch.cuda.Event()
                buffer.event.record()

    def _idle(self) -> _Buffer:
        for buffer in self._buffers:
            if is_done(buffer.event):
                return buffer
        with torch.inference_mode(False):
            self._buffers.append(self._new())
        return self._buffers[-1]
