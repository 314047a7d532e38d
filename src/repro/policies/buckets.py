"""Hotness buckets: how much more a hot expert's damage counts, and how far it may fall.

The one idea (PagedWeight's mu): experts are sorted into buckets by how much traffic they get;
a hotter bucket has a larger multiplier on damage and a higher floor of bits.  Buckets instead
of the traffic itself keep plans from following every wiggle of it.

The paper's number of buckets, thresholds, multipliers and floors are not known to us.

Letters: L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro.contract import FloatArray
from repro.policies.hotness import shares_of
from repro.policies.inventory import PolicyInputError

# Our choice: thresholds on (share now) / (share in calibration), half a decade apart.  Damage is
# about proportional to mass (residual heads are trained on that), so a bucket is wrong by at most
# the fourth root of ten either way, which is less than sensitivities are wrong by.
EDGES = (0.1, 0.316, 1.0, 3.16)
# Our choice: the geometric middle of each bucket; the outer two a half decade beyond.
MULTIPLIERS = (0.0562, 0.178, 0.562, 1.78, 5.62)
# Our choice: only experts with over three times the mean traffic are kept from the narrowest
# width: they are few, so floors hardly ever keep a byte target from being met.
FLOOR_EDGES = (3.0,)  # on share x number of experts
FLOOR_STEPS = (0, 1)  # widths above the narrowest
# Our choice: an expert that calibration hardly saw counts as seen a tenth of the mean.
LEAST_USAGE = 0.1


@dataclass(frozen=True)
class Buckets:
    """Thresholds and what follows from them.

    Raises:
        PolicyInputError: numbers that do not belong together.
    """

    edges: tuple[float, ...] = EDGES
    multipliers: tuple[float, ...] = MULTIPLIERS
    floor_edges: tuple[float, ...] = FLOOR_EDGES
    floor_steps: tuple[int, ...] = FLOOR_STEPS

    def __post_init__(self) -> None:
        for edges, values, what in (
            (self.edges, self.multipliers, "multipliers"),
            (self.floor_edges, self.floor_steps, "floor_steps"),
        ):
            if len(values) != len(edges) + 1 or list(edges) != sorted(edges):
                raise PolicyInputError(
                    f"{len(values)} {what} for {len(edges)} ascending edges: give one more than "
                    "there are edges"
                )
            if list(values) != sorted(values) or values[0] < 0:
                raise PolicyInputError(
                    f"{what} {values} must not fall: a hotter bucket counts more"
                )

    def multiplier(self, ratio: FloatArray) -> FloatArray:
        """mu for traffic relative to calibration, same shape."""
        return np.asarray(self.multipliers)[np.digitize(ratio, self.edges)]

    def floor(self, relative: FloatArray, n_widths: int) -> npt.NDArray[np.intp]:
        """Lowest column for traffic relative to the layer's mean, same shape."""
        steps = np.asarray(self.floor_steps)[np.digitize(relative, self.floor_edges)]
        return np.minimum(steps, n_widths - 1).astype(np.intp)


def mass_ratio(
    shares: FloatArray, calibration_mass: FloatArray | None, n_present: npt.NDArray[np.integer]
) -> FloatArray:
    """Traffic relative to calibration's ``[L, E]``; 1 in layers where there was none yet.

    Without calibration's mass relative to the layer's mean: sensitivities are then taken as
    per use.
    """
    mean = 1.0 / n_present[:, None]
    if calibration_mass is None:
        before = np.broadcast_to(mean, shares.shape)
    else:
        before = shares_of(np.asarray(calibration_mass, dtype=np.float64))
        before = np.maximum(before, LEAST_USAGE * mean)
    silent = shares.sum(axis=1, keepdims=True) <= 0
    return np.asarray(np.where(silent, 1.0, shares / before))
