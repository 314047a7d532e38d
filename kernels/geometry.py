"""Where the bytes of one block lie on its pages: the numbers that kernels compute with.

The one idea: a table row lists pages only; how many belong to planes, scales and tables, and
which byte of which page holds a word, follows from N, K, the rows per table and the page size.
The layout itself is that of ``repro.formats.layout`` (version 1, ``any-precision``), written
here in integers alone, so that kernels depend on no format code.

Letters: N rows, K columns, W words of a row of a plane, b bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from repro.errors import ReproError

WORD_BITS = 32
WIDTHS = tuple(range(2, 9))
_TABLE_BYTES = 2 << max(WIDTHS)  # of the widest table: no table may straddle two pages


class KernelInputError(ReproError, ValueError):
    """A shape, type, device or page size that the kernels do not take."""


@dataclass(frozen=True)
class PlaneGeometry:
    """One block in bit-planes.

    Args:
        n_rows: N, outputs.
        n_columns: K, inputs.
        rows_per_lut: rows that share a table.
        has_scales: whether there is a scale for each row.
        page_bytes: size of a page of the arena.

    Raises:
        KernelInputError: an empty matrix, or pages that are no multiple of 512 bytes (a table
            would straddle two pages).
    """

    n_rows: int
    n_columns: int
    rows_per_lut: int
    has_scales: bool
    page_bytes: int

    def __post_init__(self) -> None:
        if min(self.n_rows, self.n_columns, self.rows_per_lut) < 1:
            raise KernelInputError(
                f"a matrix of {self.n_rows} x {self.n_columns} with {self.rows_per_lut} rows per "
                "table has nothing to multiply: use positive sizes"
            )
        if self.page_bytes < _TABLE_BYTES or self.page_bytes % _TABLE_BYTES:
            raise KernelInputError(
                f"pages of {self.page_bytes} bytes cut look-up tables in two: use a multiple of "
                f"{_TABLE_BYTES} bytes"
            )

    @property
    def row_words(self) -> int:
        """W: words of one row of a plane."""
        return -(-self.n_columns // WORD_BITS)

    @property
    def n_groups(self) -> int:
        """Tables of one width."""
        return -(-self.n_rows // self.rows_per_lut)

    @property
    def plane_pages(self) -> int:
        """Pages of one plane."""
        return self._pages(4 * self.n_rows * self.row_words)

    @property
    def scale_pages(self) -> int:
        """Pages of the scales of all rows; 0 without scales."""
        return self._pages(2 * self.n_rows) if self.has_scales else 0

    def lut_pages(self, n_bits: int) -> int:
        """Pages of the tables of one width."""
        return self._pages(2 * self.n_groups << n_bits)

    def n_pages(self, n_bits: int) -> int:
        """Pages of a table row at this width: planes, scales, tables."""
        return n_bits * self.plane_pages + self.scale_pages + self.lut_pages(n_bits)

    def _pages(self, n_bytes: int) -> int:
        return -(-n_bytes // self.page_bytes)
