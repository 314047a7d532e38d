"""Free lists: of single pages, and of blocks that are contiguous runs of pages.

The one idea: a free list is a stack in one array.  Taking and giving back any number of pages
is one copy of that many integers; nothing is searched, nothing is allocated.  What was freed
last is taken first and in the same order, so runs of neighbouring pages tend to survive.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class PageStack:
    """Free pages of ``[first, last)``, in O(1) per call and page."""

    def __init__(self, first: int, last: int) -> None:
        self._stack = np.arange(last - 1, first - 1, -1, dtype=np.int32)
        self._n_free = last - first

    @property
    def n_free(self) -> int:
        """Pages that can be taken."""
        return self._n_free

    @property
    def n_pages(self) -> int:
        """Pages there are, taken or not."""
        return len(self._stack)

    def take(self, n_pages: int) -> Pages:
        """The next pages.  The caller has asked the ledger: there are enough."""
        assert n_pages <= self._n_free, f"{n_pages} pages asked of {self._n_free}"
        start = self._n_free - n_pages
        taken = self._stack[start : self._n_free][::-1].copy()
        self._n_free = start
        return taken

    def give(self, pages: Pages) -> None:
        """Pages come back."""
        end = self._n_free + len(pages)
        assert end <= len(self._stack), "more pages given back than were taken"
        self._stack[self._n_free : end] = pages[::-1]
        self._n_free = end

    def free(self) -> Pages:
        """All free pages, for checks."""
        return self._stack[: self._n_free].copy()


class BlockPool:
    """Blocks of ``block_pages`` pages each, one after the other from ``first``."""

    def __init__(self, first: int, n_blocks: int, block_pages: int) -> None:
        self.first = first
        self.n_blocks = n_blocks
        self.block_pages = block_pages
        self._blocks = PageStack(0, n_blocks)

    @property
    def last(self) -> int:
        """The page after the pool."""
        return self.first + self.n_blocks * self.block_pages

    @property
    def n_free(self) -> int:
        """Blocks that can be taken."""
        return self._blocks.n_free

    def owns(self, page: int) -> bool:
        """Whether a page belongs to this pool."""
        return self.first <= page < self.last

    def take(self) -> Pages:
        """A contiguous run of ``block_pages`` pages."""
        start = self.first + int(self._blocks.take(1)[0]) * self.block_pages
        return np.arange(start, start + self.block_pages, dtype=np.int32)

    def give(self, page: int) -> None:
        """The block that contains ``page`` comes back."""
        block = (page - self.first) // self.block_pages
        self._blocks.give(np.asarray([block], dtype=np.int32))

    def free(self) -> Pages:
        """Pages of all free blocks, for checks."""
        starts = self.first + self._blocks.free() * self.block_pages
        pages = starts[:, None] + np.arange(self.block_pages)
        return pages.reshape(-1).astype(np.int32)
