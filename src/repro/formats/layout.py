"""The byte layout that kernels read: fields in words, planes, tables, pages.  Version 1.

One expert has two blocks, ``gate_up [2I, H]`` and ``down [H, I]``, each a matrix ``[N, K]``
of N outputs (rows) and K inputs (columns).  A block is stored as *parts*: runs of bytes that
are placed, moved and dropped as a whole.  All integers are little-endian.

Fields.  Codes are cut into fields of 1, 2, 4 or 8 bits and packed into 32-bit words along a
row; a row begins with a new word, so ``W = ceil(K * field_bits / 32)`` and the unused fields
of its last word are zero.  They are never read as weights: K says where the row ends. ::

    a row of a plane (fields of 1 bit), K = 40, so W = 2

    word 0  bit 31 ........................ bit 1  bit 0
            column 31 ................... column 1  column 0
    word 1  bit 31 ...... bit 8  bit 7 ............. bit 0
            zero ......... zero  column 39 ..... column 32

``any-precision``.  Planes, most significant first; the code of width b is read from the
first b planes alone, so a narrower weight is a prefix of a wider one. ::

    part          bytes                     holds
    plane 0       N * W * 4                 most significant bit of every code
    plane 1       N * W * 4                 ...
    plane b-1     N * W * 4                 last one that width b reads
    scales        N * 2       (bfloat16)    one scale per row, the same for every width
    lut b         G * 2**b * 2 (float16)    one table per group of rows, in code order

    weight[n, k] = scale[n] * lut_b[n // rows_per_lut][code_b[n, k]]

    G = ceil(N / rows_per_lut).  With one table per row (``rows_per_lut = 1``, the published
    format) there are no scales, unless a table would not fit into float16.
    Only the table of the width in use has to be resident.

``group-affine``.  An integer width is cut into fields of a power of two, high bits first:
8 = 8, 6 = 4 + 2, 5 = 4 + 1, 4 = 4, 3 = 2 + 1, 2 = 2.  The pieces follow each other in one
part, each a matrix ``[N, W]`` of words. ::

    codes         pieces, N * W * 4 each
    scales        N * C * 2   (bfloat16)    C = ceil(K / group_size) groups of columns;
                + N * C * 2   (bfloat16)    zeros, after all scales, in the same part; only
                                            if asymmetric, else zero = 2**(bits - 1)

    weight[n, k] = scale[n, k // group] * (code[n, k] - zero[n, k // group])

``dense``.  One part, ``N * K`` floating-point numbers, row by row.

Scales are bfloat16 because their range is that of float32: weights that overflow or vanish
in float16 keep a finite scale.  Rounding a scale costs nothing, for codes and tables are
fitted after it was rounded.

Pages.  A part begins on a page of its own (:func:`repro.contract.pages_of`) and its rows
follow each other without a gap, so a page of ``page_bytes`` holds ``page_bytes / (4 W)``
rows of a plane: 32 rows of K = 2048 in 8 KiB.  :func:`fragmentation` counts what a page
size leaves unused; scales and shared tables are small parts, so pages of 16 KiB would leave
more than 5 % of a narrow expert's 2-bit version empty.

Left out: permutations of columns inside a word.  A kernel that merges four planes into
nibbles sees columns in another order and permutes the activations alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from repro.contract import Part, pages_of

LAYOUT_VERSION = 1
WORD_BITS = 32
FIELD_BITS = (1, 2, 4, 8)


def row_words(n_columns: int, field_bits: int = 1) -> int:
    """Words of one row: ``ceil(K * field_bits / 32)``."""
    return -(-n_columns * field_bits // WORD_BITS)


def pack_fields(codes: Tensor, field_bits: int) -> Tensor:
    """Pack ``uint8 [..., K]`` into ``int32 [..., W]``; column 0 in the lowest bits.

    Raises:
        ValueError: no such field width, or a code that does not fit into it.
    """
    _check_field(field_bits)
    if codes.numel() and int(codes.max()) >> field_bits:
        raise ValueError(f"code {int(codes.max())} does not fit into {field_bits} bits")
    per_byte = 8 // field_bits
    n_columns = codes.shape[-1]
    n_bytes = 4 * row_words(n_columns, field_bits)
    padded = torch.zeros(
        (*codes.shape[:-1], n_bytes, per_byte), dtype=torch.uint8, device=codes.device
    )
    padded.view(*codes.shape[:-1], n_bytes * per_byte)[..., :n_columns] = codes
    packed = padded[..., 0]
    for field in range(1, per_byte):
        packed = packed | (padded[..., field] << (field * field_bits))
    # Every machine that torch and CUDA run on is little-endian: bytes in order are words.
    return packed.contiguous().view(torch.int32)


def unpack_fields(words: Tensor, field_bits: int, n_columns: int) -> Tensor:
    """The inverse of :func:`pack_fields`: ``int32 [..., W]`` to ``uint8 [..., K]``."""
    _check_field(field_bits)
    per_byte = 8 // field_bits
    packed = words.contiguous().view(torch.uint8)
    shifts = torch.arange(per_byte, dtype=torch.uint8, device=words.device) * field_bits
    fields = (packed[..., None] >> shifts) & ((1 << field_bits) - 1)
    return fields.flatten(-2)[..., :n_columns]


def pack_planes(codes: Tensor, n_bits: int) -> list[Tensor]:
    """``n_bits`` planes ``int32 [..., W]`` of ``uint8 [..., K]``, most significant first."""
    return [pack_fields((codes >> (n_bits - 1 - plane)) & 1, 1) for plane in range(n_bits)]


def unpack_planes(planes: Sequence[Tensor], n_columns: int) -> Tensor:
    """Codes of width ``len(planes)`` from the first planes: ``uint8 [..., K]``."""
    codes = unpack_fields(planes[0], 1, n_columns)
    for plane in planes[1:]:
        codes = (codes << 1) | unpack_fields(plane, 1, n_columns)
    return codes


def code_pieces(n_bits: int) -> tuple[int, ...]:
    """Field widths whose sum is ``n_bits``, powers of two, largest first."""
    return tuple(size for size in reversed(FIELD_BITS) if n_bits & size)


def fragmentation(parts: Iterable[Part], page_bytes: int) -> float:
    """Share of the pages of these parts that holds nothing (0 to 1)."""
    parts = tuple(parts)
    taken = sum(pages_of(parts, page_bytes)) * page_bytes
    return 1 - sum(part.n_bytes for part in parts) / taken


def _check_field(field_bits: int) -> None:
    if field_bits not in FIELD_BITS:
        raise ValueError(f"fields of {field_bits} bits do not exist: use one of {FIELD_BITS}")
