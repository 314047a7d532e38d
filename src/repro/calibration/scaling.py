"""One measured factor per layer and width for predicted damages.

The one idea: what statistics of a layer cannot know is how much the rest of the model makes of
an error.  Squared errors miss most of it where an error tips the choice of experts in later
routers: then the damage grows with the error itself, not with its square, and the more so the
earlier the layer and the narrower the error.  A sample of measured blocks tells it: the factor
of a (layer, width) is the geometric mean of measured over predicted damage,

    log factor = (n m_layer + n0 m_all) / (n + n0),      n blocks of the layer in the sample

m the mean of the log ratios.  The table is then in nats per scored token, whatever it was in.

Letters: L layers, E experts, B blocks, W widths, P prompts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from repro.calibration.damage import Damage
from repro.calibration.table import SensitivityTable
from repro.errors import UnknownNameError

PRIOR_BLOCKS = 2
SUFFIX = "+measured"


def layer_factors(
    table: SensitivityTable,
    damage: Damage,
    prompts: npt.NDArray[np.bool_] | None = None,
    *,
    prior_blocks: float = PRIOR_BLOCKS,
) -> npt.NDArray[np.float64]:
    """Factors ``[L, W]``; 1 for widths at which nothing was measured.

    Args:
        table: predictions.
        damage: of single blocks.
        prompts: which of its prompts count, ``[P]``; default all.
        prior_blocks: how many blocks the mean over all layers counts for (n0).

    Raises:
        UnknownNameError: a measured layer that the table does not have.
    """
    weights = damage.n_scored.astype(np.float64)
    if prompts is not None:
        weights = weights * prompts
    measured = damage.kl @ (weights / max(weights.sum(), 1.0))  # [n, W]
    rows = []
    for ref in damage.blocks:
        if ref.layer_index not in table.layer_ids:
            raise UnknownNameError(
                f"layer {ref.layer_index} was measured but is none of the table's "
                f"{list(table.layer_ids)}: give damage and table of one model"
            )
        rows.append((table.layer_ids.index(ref.layer_index), ref.expert, int(ref.block)))
    layer, expert, block = np.asarray(rows, dtype=int).reshape(-1, 3).T
    factors = np.ones((len(table.layer_ids), len(table.widths)))
    for column, n_bits in enumerate(table.widths):
        if n_bits not in damage.widths:
            continue
        truth = measured[:, damage.widths.index(n_bits)]
        predicted = table.s[layer, expert, block, column]
        usable = (truth > 0) & (predicted > 0)
        if not usable.any():
            continue
        ratio = np.log(truth[usable]) - np.log(predicted[usable])
        n = np.bincount(layer[usable], minlength=len(table.layer_ids))
        sums = np.bincount(layer[usable], weights=ratio, minlength=len(table.layer_ids))
        factors[:, column] = np.exp((sums + prior_blocks * ratio.mean()) / (n + prior_blocks))
    return factors


def scale_by_layer(
    table: SensitivityTable,
    damage: Damage,
    prompts: npt.NDArray[np.bool_] | None = None,
    *,
    prior_blocks: float = PRIOR_BLOCKS,
) -> SensitivityTable:
    """The table times :func:`layer_factors`; its kind says so."""
    factors = layer_factors(table, damage, prompts, prior_blocks=prior_blocks)
    return replace(
        table,
        s=table.s * factors[:, None, None, :],
        kind=table.kind.removesuffix(SUFFIX) + SUFFIX,
        meta={**table.meta, "layer_factors": factors.round(6).tolist()},
    )
