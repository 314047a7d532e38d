"""The table that kernels read, and what a step sees of it.

The one idea: rows are written in place in one fixed array per device, but a step that has begun
keeps the table of its beginning.  A few host copies are kept, each with the list of rows that
changed since it was last brought up to date; publication renews an idle copy by those rows
alone, so beginning a step costs nothing and publishing costs what has changed.

Letters: L layers, E experts, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.contract import NO_PAGE
from repro.residency.row_writer import RowWriter

Rows = npt.NDArray[np.int32]
Flat = npt.NDArray[np.int64]
_MOST_STALE = 256  # lists of changed rows that an idle copy may collect before they are merged


@dataclass(eq=False)
class Snapshot:
    """A host copy of the table that steps may be reading."""

    rows: Rows  # [L * E * B, words]
    view: Rows  # the same, [L, E, B, words], read-only
    readers: int = 0
    stale: list[Flat] = field(default_factory=list)


class HandleTable:
    """``int32 [L, E, B, words]``: one handle per block; its place never changes, its row does."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        self.shape = shape
        self._rows: Rows = np.full((int(np.prod(shape[:3])), shape[3]), NO_PAGE, dtype=np.int32)
        self._writer: RowWriter | None = None
        with torch.inference_mode(False):
            table = torch.from_numpy(self._rows)
            if device.type == "cuda":
                table = table.to(device)
                self._writer = RowWriter(table)
            self.device_table: Tensor = table.view(shape)
        self._snapshots: list[Snapshot] = []
        self._current = self._another()

    @property
    def host(self) -> Rows:
        """What the next step will read: ``[L, E, B, words]``."""
        return self._rows.reshape(self.shape)

    def write(self, flat: Flat, rows: Rows) -> None:
        """Replace the rows of these handles (numbers in ``L * E * B``), whole.

        On CUDA the device's rows are rewritten on the current stream, between two steps.
        """
        if len(flat) == 0:
            return
        self._rows[flat] = rows
        if self._writer is not None:
            self._writer.write(flat, rows)
        if self._current.readers:
            idle = [s for s in self._snapshots if not s.readers]
            self._current = idle[0] if idle else self._another()
        for snapshot in self._snapshots:
            snapshot.stale.append(flat)
            if len(snapshot.stale) > _MOST_STALE:
                snapshot.stale = [np.unique(np.concatenate(snapshot.stale))]
        self._renew(self._current)

    def _another(self) -> Snapshot:
        rows = self._rows.copy()
        view = rows.reshape(self.shape)
        view.flags.writeable = False
        snapshot = Snapshot(rows, view)
        self._snapshots.append(snapshot)
        return snapshot

    def _renew(self, snapshot: Snapshot) -> None:
        for flat in snapshot.stale:
            snapshot.rows[flat] = self._rows[flat]
        snapshot.stale.clear()

    def begin(self) -> Snapshot:
        """The table as it is now; it does not change before :meth:`end`."""
        self._current.readers += 1
        return self._current

    def end(self, snapshot: Snapshot) -> None:
        """One reader less."""
        snapshot.readers -= 1

    def stats(self) -> dict[str, Any]:
        """Bytes of the table and of its host copies."""
        return {"bytes": self._rows.nbytes, "host_copies": len(self._snapshots)}
