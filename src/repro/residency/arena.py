"""The arena: one allocation under which everything that the budget covers lives.

The one idea: memory is asked for once.  Weights, their tables, KV cache and staging are pages
of one tensor, a page is a row of it, and no allocator is called while serving.  The pages are
written to at the start, so that what the process occupies is what the ledger says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from repro.errors import MissingDeviceError
from repro.residency.errors import BudgetError, ClosedError


class Arena:
    """``uint8 [n_pages, page_bytes]`` on a device.

    Raises:
        BudgetError: no pages, pages that cannot hold a float64, or more memory than there is.
        MissingDeviceError: this machine has no such device.
    """

    def __init__(self, n_pages: int, page_bytes: int, device: torch.device | str = "cpu") -> None:
        if n_pages < 1 or page_bytes < 8 or page_bytes % 8:
            raise BudgetError(
                f"an arena of {n_pages} pages of {page_bytes} bytes: it needs at least one page, "
                "of a multiple of 8 bytes"
            )
        self.n_pages = n_pages
        self.page_bytes = page_bytes
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise MissingDeviceError("there is no CUDA device here: use device='cpu'")
        if self.device.type == "cuda" and self.device.index is None:
            # Threads have a current device of their own: name this one's.
            self.device = torch.device("cuda", torch.cuda.current_device())
        try:
            with torch.inference_mode(False):
                data = torch.empty((n_pages, page_bytes), dtype=torch.uint8, device=self.device)
                data.zero_()
        except (RuntimeError, MemoryError) as error:
            raise BudgetError(
                f"{n_pages * page_bytes} bytes cannot be allocated on {self.device}: "
                f"give a smaller budget ({str(error).splitlines()[0]})"
            ) from error
        self._data: Tensor | None = data
        self._views: dict[torch.dtype, Tensor] = {torch.uint8: data}

    @staticmethod
    def allocated(n_pages: int, page_bytes: int, device: torch.device) -> Tensor:
        """Untouched memory of an arena; to see beforehand whether it can be had, drop it again.

        Raises:
            BudgetError, MissingDeviceError: as :class:`Arena`.
        """
        if n_pages < 1 or page_bytes < 8 or page_bytes % 8:
            raise BudgetError(
                f"an arena of {n_pages} pages of {page_bytes} bytes: it needs at least one page, "
                "of a multiple of 8 bytes"
            )
        if device.type == "cuda" and not torch.cuda.is_available():
            raise MissingDeviceError("there is no CUDA device here: use device='cpu'")
        try:
            return torch.empty((n_pages, page_bytes), dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:
            raise BudgetError(
                f"{n_pages * page_bytes} bytes cannot be allocated on {device}: "
                f"give a smaller budget ({str(error).splitlines()[0]})"
            ) from error

    @property
    def data(self) -> Tensor:
        """The memory, a page per row.

        Raises:
            ClosedError: the arena was dropped.
        """
        if self._data is None:
            raise ClosedError("the arena is closed: its pages are gone")
        return self._data

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all pages."""
        return self.n_pages * self.page_bytes

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return self._data is None

    def as_dtype(self, dtype: torch.dtype) -> Tensor:
        """The same memory as ``[n_pages, page_bytes // itemsize]``."""
        if dtype not in self._views:
            with torch.inference_mode(False):  # or it could not be dropped outside of it
                self._views[dtype] = self.data.view(dtype)
        self.data  # noqa: B018  (raises when closed)
        return self._views[dtype]

    def read(self, pages: Sequence[int]) -> bytes:
        """The bytes of these pages in order, as a kernel would load them now."""
        index = torch.from_numpy(np.asarray(pages, dtype=np.int64)).to(self.device)
        return self.data.index_select(0, index).cpu().numpy().tobytes()

    def drop(self, *, unused: bool = True) -> None:
        """Give the memory back, also if somebody still holds a view of it.

        Args:
            unused: nothing will write to it any more; False (a copy that hangs may wake up)
                leaves it to whoever holds it last.
        """
        if unused:
            self.data.untyped_storage().resize_(0)
        for view in self._views.values():
            view.set_()  # type: ignore[call-overload]
        self._views.clear()
        self._data = None
