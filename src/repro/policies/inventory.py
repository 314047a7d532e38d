"""What does not change while serving: how many experts, at which widths, of how many bytes.

The one idea: a policy is built for an inventory and afterwards sees only what changes.  Sizes
are whole pages with the table of the width, so that a sum of them is what memory has to hold.

Letters: L layers, E experts, B blocks of one expert, W widths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from repro.contract import FloatArray, IntArray, PolicyState
from repro.errors import ReproError, unknown_name
from repro.policies.residual import ResidualHeads

Bits = npt.NDArray[np.int8]


class PolicyBudgetError(ReproError, ValueError):
    """A budget that not even the narrowest widths fit into."""


class PolicyInputError(ReproError, ValueError):
    """Arrays or options that do not belong together."""


@dataclass(frozen=True, eq=False)
class Inventory:
    """The experts of a model as policies see them.

    Args:
        shape: ``(L, E)``.
        widths: ascending.
        block_bytes: ``[B, W]``, or ``[L, B, W]`` where layers differ; whole pages, the table of
            the width included.
        sensitivity: ``[L, E, B, W]`` damage of reading a block at a width.
        calibration_mass: ``[L, E]`` routing mass per token (or any multiple of it) of the texts
            on which the sensitivity was measured.
        heads: prompt residual heads.
        exists: ``[L, E]``; False pads layers that have fewer experts.

    Raises:
        PolicyInputError: shapes that do not fit each other.
    """

    shape: tuple[int, int]
    widths: tuple[int, ...]
    block_bytes: IntArray
    sensitivity: FloatArray | None = None
    calibration_mass: FloatArray | None = None
    heads: ResidualHeads | None = None
    exists: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if tuple(sorted(set(self.widths))) != tuple(self.widths) or not self.widths:
            raise PolicyInputError(f"widths {self.widths} must ascend: sort them")
        sizes = np.asarray(self.block_bytes)
        if sizes.ndim not in (2, 3) or sizes.shape[-1] != len(self.widths):
            raise PolicyInputError(
                f"block_bytes of shape {sizes.shape} for {len(self.widths)} widths: "
                "give [B, W] or [L, B, W]"
            )
        if sizes.ndim == 3 and sizes.shape[0] != self.shape[0]:
            raise PolicyInputError(f"block_bytes of {sizes.shape[0]} layers, not {self.shape[0]}")
        if (np.diff(sizes, axis=-1) < 0).any():
            raise PolicyInputError("block_bytes fall with the width: a wider block must not shrink")
        wanted = {
            "sensitivity": (*self.shape, sizes.shape[-2], len(self.widths)),
            "calibration_mass": self.shape,
            "exists": self.shape,
        }
        for name, shape in wanted.items():
            array = getattr(self, name)
            if array is not None and np.shape(array) != shape:
                raise PolicyInputError(f"{name} of shape {np.shape(array)}: it must be {shape}")

    @property
    def n_blocks(self) -> int:
        """B."""
        return int(np.asarray(self.block_bytes).shape[-2])

    @cached_property
    def sizes(self) -> IntArray:
        """``[L, B, W]``."""
        sizes = np.asarray(self.block_bytes, dtype=np.int64)
        return np.ascontiguousarray(np.broadcast_to(sizes, (self.shape[0], *sizes.shape[-2:])))

    @cached_property
    def expert_bytes(self) -> IntArray:
        """``[L, W]`` of one expert, all blocks at the same width."""
        return np.asarray(self.sizes.sum(axis=1))

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """``[L, E]``."""
        if self.exists is not None:
            return np.asarray(self.exists, dtype=bool)
        return np.ones(self.shape, dtype=bool)

    @cached_property
    def n_present(self) -> IntArray:
        """``[L]`` experts of each layer."""
        return self.present.sum(axis=1).astype(np.int64)

    @cached_property
    def _columns(self) -> npt.NDArray[np.intp]:
        columns = np.full(max(self.widths) + 1, -1, dtype=np.intp)
        columns[list(self.widths)] = np.arange(len(self.widths))
        return columns

    def columns(self, n_bits: npt.NDArray[np.integer]) -> npt.NDArray[np.intp]:
        """Which of the widths: same shape as ``n_bits``.

        Raises:
            PolicyInputError: a width that is none of them.
        """
        bits = np.asarray(n_bits)
        inside = (bits >= 0) & (bits < len(self._columns))
        found = self._columns[np.where(inside, bits, 0)]
        if bits.size and (not inside.all() or int(found.min()) < 0):
            wrong = sorted(set(np.unique(bits).tolist()) - set(self.widths))
            raise PolicyInputError(f"width {wrong[0]} is none of {self.widths}")
        return found

    def width_column(self, n_bits: int) -> int:
        """Which of the widths.

        Raises:
            UnknownNameError: none of them.
        """
        if n_bits not in self.widths:
            raise unknown_name("width", n_bits, map(str, self.widths))
        return self.widths.index(n_bits)

    def bytes_of(self, columns: npt.NDArray[np.intp]) -> IntArray:
        """Bytes of each block at these widths, ``[L, E, B]``; zero where no expert is."""
        n_layers, _, n_blocks = columns.shape
        layer = np.arange(n_layers)[:, None, None]
        found = self.sizes[layer, np.arange(n_blocks), columns]
        return np.asarray(found * self.present[..., None])

    def used_bytes(self, n_bits: Bits) -> int:
        """Bytes of all experts at these widths ``[L, E, B]``."""
        return int(self.bytes_of(self.columns(n_bits)).sum())

    def uniform_bytes(self, column: int) -> int:
        """Bytes of all experts at one width."""
        return int((self.expert_bytes[:, column] * self.n_present).sum())

    @property
    def floor_bytes(self) -> int:
        """All experts at the narrowest width."""
        return self.uniform_bytes(0)

    def filled(self, n_bits: int) -> Bits:
        """``[L, E, B]`` all at one width."""
        return np.full((*self.shape, self.n_blocks), n_bits, dtype=np.int8)

    def bits(self, columns: npt.NDArray[np.intp]) -> Bits:
        """Widths ``[L, E, B]`` of columns ``[n]`` or ``[L, E, B]``."""
        widths = np.asarray(self.widths, dtype=np.int8)
        return np.asarray(widths[columns].reshape(*self.shape, self.n_blocks))

    def check_budget(self, budget_bytes: int) -> None:
        """The narrowest widths must fit.

        Raises:
            PolicyBudgetError: says by how many bytes they do not.
        """
        missing = self.floor_bytes - budget_bytes
        if missing > 0:
            raise PolicyBudgetError(
                f"a budget of {budget_bytes:,} bytes is {missing:,} bytes less than all experts at "
                f"{self.widths[0]} bits need: raise it, or offer a narrower width"
            )

    def of_state(self, state: PolicyState) -> Inventory:
        """This inventory with the sensitivity of the state, if it has none of its own."""
        if self.sensitivity is not None:
            return self
        return replace(self, sensitivity=np.asarray(state.sensitivity, dtype=np.float64))
