"""``dpllm``: every step reads each block at one of two widths, by an estimate of its error.

The one idea (DP-LLM, arXiv 2508.06041): which layers are sensitive changes from token to token,
so each block has a low and a high width and a threshold; a step reads it at the high one if the
estimated error of the low one exceeds the threshold.  Thresholds are quantiles of the estimates
on calibration prompts, placed so that the average width read is the one asked for.

What it saves is reading, not memory: planes up to the cap of a block stay resident, with the
tables of both widths.  So residency never changes (``decide`` wishes nothing); the engine asks
:meth:`DpLlmPolicy.step_bits` before a step and lets kernels read fewer planes.

Left out: learning each block's average width by fine-tuning (all blocks share one), and random
projections where the norm of the input predicts the error badly.

Letters: P prompts or steps, L layers, E experts, B blocks, W widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.contract import Action, FloatArray, IntArray, PolicyState
from repro.policies.allocation import allocate
from repro.policies.damage import ERROR_PER_BIT
from repro.policies.inventory import Bits, Inventory, PolicyInputError

Columns = npt.NDArray[np.intp]
# Our choice: half a bit under the cap, where a choice between two widths has most to give.
BELOW_CAP = 0.5


@dataclass(frozen=True)
class Selector:
    """Two widths and a threshold for every block, all ``[L, E, B]``."""

    low: Columns
    high: Columns
    slope: FloatArray  # estimated error = slope * norm + offset
    offset: FloatArray
    threshold: FloatArray

    def choose(self, norms: FloatArray) -> Columns:
        """Columns to read in a step with these input norms; blocks without input read low."""
        norms = np.asarray(norms, dtype=np.float64)
        estimate = self.slope * norms + self.offset
        return np.where((estimate > self.threshold) & (norms > 0), self.high, self.low)


def fit_selector(
    inventory: Inventory,
    cap: Columns,
    norms: FloatArray,
    average_bits: float,
    errors: FloatArray | None = None,
) -> Selector:
    """Thresholds from calibration.

    Args:
        inventory: widths.
        cap: ``[L, E, B]`` columns that are resident.
        norms: ``[P, L, E, B]`` input norms, zero where a block had no input.
        average_bits: width to read on average; blocks whose cap is lower read their cap.
        errors: ``[P, L, E, B]`` measured errors of the low width, to fit the estimate by least
            squares; without them the norm itself is the estimate.

    Raises:
        PolicyInputError: shapes that do not fit each other.
    """
    shape = (*inventory.shape, inventory.n_blocks)
    norms = np.asarray(norms, dtype=np.float64)
    if norms.ndim != 4 or norms.shape[1:] != shape:
        raise PolicyInputError(f"norms of shape {norms.shape}: give [P, {shape}]")
    widths = np.asarray(inventory.widths, dtype=np.float64)
    wanted = np.minimum(average_bits, widths[cap])
    low = np.clip(np.searchsorted(widths, wanted, side="right") - 1, 0, cap)
    high = np.minimum(low + (widths[low] < wanted), cap)
    span = widths[high] - widths[low]
    share = np.where(span > 0, (wanted - widths[low]) / np.where(span > 0, span, 1.0), 0.0)
    slope, offset = _line(norms, errors)
    estimate = np.where(norms > 0, slope * norms + offset, np.nan)
    return Selector(low, high, slope, offset, _quantile(estimate, 1 - share))


def _line(norms: FloatArray, errors: FloatArray | None) -> tuple[FloatArray, FloatArray]:
    """Least squares over the prompts on which a block had input."""
    if errors is None:
        return np.ones(norms.shape[1:]), np.zeros(norms.shape[1:])
    if np.shape(errors) != norms.shape:
        raise PolicyInputError("errors and norms must have one shape")
    seen = norms > 0
    n = np.maximum(seen.sum(axis=0), 1)
    x, y = np.where(seen, norms, 0.0), np.where(seen, errors, 0.0)
    mean_x, mean_y = x.sum(axis=0) / n, y.sum(axis=0) / n
    dx, dy = np.where(seen, x - mean_x, 0.0), np.where(seen, y - mean_y, 0.0)
    var = (dx * dx).sum(axis=0)
    # A falling line would read hard inputs at the low width: noise, so the mean instead.
    slope = np.maximum(0.0, (dx * dy).sum(axis=0) / np.where(var > 0, var, 1.0))
    return slope, mean_y - slope * mean_x


def _quantile(values: FloatArray, q: FloatArray) -> FloatArray:
    """The value that a share ``1 - q`` exceeds, per block over the first axis; NaN is unseen."""
    n = np.isfinite(values).sum(axis=0)
    ordered = np.sort(values, axis=0)  # NaN last
    place = np.clip(np.ceil(q * n - 1e-9).astype(np.intp) - 1, -1, np.maximum(n - 1, 0))
    found = np.take_along_axis(ordered, np.maximum(place, 0)[None], axis=0)[0]
    found = np.where(place < 0, -np.inf, found)
    return np.asarray(np.where(n > 0, found, np.inf))


class DpLlmPolicy:
    """Caps by sensitivity under the budget, widths by step.

    Args:
        inventory: with sensitivities, or caps are chosen as if all blocks were alike.
        average_bits: width to read on average; default half a bit under the mean cap.
        norms: ``[P, L, E, B]`` of calibration prompts, for the thresholds.
        errors: ``[P, L, E, B]`` beside them.
        table_bytes: ``[B, W]`` whole pages of the table of each width, part of ``block_bytes``;
            the low width's table is resident beside that of the cap.

    Raises:
        PolicyInputError: shapes that do not fit each other.
    """

    name = "dpllm"

    def __init__(
        self,
        inventory: Inventory,
        *,
        average_bits: float | None = None,
        norms: FloatArray | None = None,
        errors: FloatArray | None = None,
        table_bytes: IntArray | None = None,
    ) -> None:
        self._inventory = inventory
        self._average = average_bits
        self._norms, self._errors = norms, errors
        shape = (inventory.n_blocks, len(inventory.widths))
        if table_bytes is not None and np.shape(table_bytes) != shape:
            raise PolicyInputError(f"table_bytes of shape {np.shape(table_bytes)}, not {shape}")
        self._tables = table_bytes
        self.selector: Selector | None = None
        self._cap: Columns | None = None
        self._read = np.zeros(2)  # steps, sum of mean widths

    def initial_bits(self, budget_bytes: int) -> Bits:
        """Caps: the widest planes that the budget holds where they matter most.

        Raises:
            PolicyBudgetError: the narrowest widths do not fit.
        """
        inventory = self._inventory
        n_widths = len(inventory.widths)
        shape = (*inventory.shape, inventory.n_blocks, n_widths)
        sizes = np.broadcast_to(inventory.sizes[:, None], shape)
        if self._tables is not None:
            second = np.zeros(self._tables.shape, dtype=np.int64)
            second[:, 1:] = self._tables[:, :-1]
            sizes = sizes + second
        if inventory.sensitivity is None:
            curve = ERROR_PER_BIT ** -np.asarray(inventory.widths, dtype=np.float64)
            damage = np.broadcast_to(curve, shape)
        else:
            damage = np.asarray(inventory.sensitivity, dtype=np.float64)
        real = inventory.present[..., None, None]
        found = allocate(
            np.ascontiguousarray((damage * real).reshape(-1, n_widths)),
            np.ascontiguousarray((sizes * real).reshape(-1, n_widths)),
            budget_bytes,
        )
        self._cap = found.columns.reshape(shape[:-1])
        caps = inventory.bits(self._cap)
        if self._average is None:
            self._average = float(caps[inventory.present].mean()) - BELOW_CAP
        if self._norms is not None:
            self.selector = fit_selector(
                inventory, self._cap, self._norms, self._average, self._errors
            )
        return caps

    def step_bits(self, norms: FloatArray) -> Bits:
        """Widths ``[L, E, B]`` that this step should read, at most the resident ones.

        Args:
            norms: ``[L, E, B]`` largest input norm of the step's tokens, zero without input.

        Raises:
            PolicyInputError: asked before ``initial_bits``, or without calibration norms.
        """
        if self.selector is None:
            raise PolicyInputError(
                "dpllm has no thresholds: give it norms of calibration prompts and call "
                "initial_bits first"
            )
        bits = self._inventory.bits(self.selector.choose(norms))
        used = np.asarray(norms) > 0
        if used.any():
            self._read += (1.0, float(bits[used].mean()))
        return bits

    def due(self, now: float, kv_free_blocks: int, kv_needed_blocks: int = 0) -> bool:
        """Never: residency does not change."""
        return False

    def decide(self, state: PolicyState) -> list[Action]:
        """Nothing."""
        return []

    def report(self) -> dict[str, Any]:
        """JSON-able."""
        steps, total = self._read.tolist()
        return {
            "policy": self.name,
            "average_bits_wanted": self._average,
            "average_bits_read": total / steps if steps else None,
            "tables_counted": self._tables is not None,
        }
