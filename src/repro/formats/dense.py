"""``Dense``: a matrix as floating-point numbers, the format every other is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from repro.contract import FormatId
from repro.errors import CheckpointError, unknown_name
from repro.formats.checks import check_weight
from repro.formats.encoded import EncodedMatrix, EncodedStack, TensorSpec, register_scheme

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@register_scheme
@dataclass(frozen=True)
class DenseScheme:
    """``N * K`` numbers, row by row."""

    n_rows: int
    n_columns: int
    dtype: str

    name: ClassVar[str] = "dense"
    format_id: ClassVar[FormatId] = FormatId.DENSE
    nested: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.n_rows, self.n_columns

    @property
    def widths(self) -> tuple[int, ...]:
        """16 or 32."""
        return (8 * DTYPES[self.dtype].itemsize,)

    def tensors(self, n_bits: int) -> tuple[TensorSpec, ...]:
        """The matrix."""
        return (TensorSpec("matrix", "matrix", n_bits, DTYPES[self.dtype], self.shape),)

    def decode(self, tensors: Mapping[str, Tensor], n_bits: int) -> Tensor:
        """The stored numbers as float32."""
        return tensors["matrix"].to(torch.float32)


@dataclass(frozen=True)
class Dense:
    """Stores weights as they are, rounded to ``dtype``.

    DynaExq's FP16 tier (section 2.2) is ``Dense("float16")``; a bfloat16 checkpoint kept in
    ``"bfloat16"`` loses nothing.
    """

    dtype: Literal["float16", "bfloat16", "float32"] = "float16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", str(self.dtype), DTYPES)

    def encode_stack(self, weight: Tensor, importance: Tensor | None = None) -> EncodedStack:
        """Encode ``weight[E, N, K]``; importance changes nothing, all is stored.

        Raises:
            CheckpointError: NaN or infinite weights, or finite ones beyond the dtype's range.
        """
        check_weight(weight, 3)
        matrix = weight.to(DTYPES[self.dtype])
        finite = torch.isfinite(matrix)
        if not bool(finite.all()):
            expert, row, column = (~finite).nonzero()[0].tolist()
            value = float(weight[expert, row, column])
            raise CheckpointError(
                f"a weight of {value:.4g} (expert {expert}, row {row}) "
                f"overflows {self.dtype}: use a format of a wider range, bf16 or fp32"
            )
        _, n_rows, n_columns = weight.shape
        vanished = int(((matrix == 0) & (weight != 0)).sum())
        return EncodedStack(
            DenseScheme(n_rows, n_columns, self.dtype),
            {"matrix": matrix.contiguous()},
            {"vanished_weights": vanished} if vanished else {},
        )

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> EncodedMatrix:
        """Encode one matrix ``[N, K]``; errors as :meth:`encode_stack`."""
        check_weight(weight, 2)
        return self.encode_stack(weight[None])[0]
