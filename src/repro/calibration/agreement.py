"""How well predicted damage orders blocks, transition by transition.

The one idea: policies compare blocks with each other, so what counts is the rank correlation
between predicted gain and measured damage over a sample of blocks.  Where predictions were
scaled by measured layers (see ``scaling``), every block is judged with factors from which it
was left out itself, so nothing is scored on what it was fitted to.

Letters: L layers, E experts, B blocks, W widths, n measured blocks, P prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.calibration.damage import Damage
from repro.calibration.heads import Transition
from repro.calibration.scaling import PRIOR_BLOCKS
from repro.calibration.scores import rank_correlation, resampled_rank_correlation
from repro.calibration.table import SensitivityTable
from repro.calibration.training import UNCHANGED, all_transitions

FloatArray = npt.NDArray[np.float64]


def agreement(
    table: SensitivityTable,
    damage: Damage,
    *,
    what: str = "kl",
    transitions: Sequence[Transition] | None = None,
    mass: FloatArray | None = None,
    scaled: bool = False,
    n_resamples: int = 1000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One row per transition: Spearman's correlation with a 95 % bootstrap interval over blocks.

    Args:
        table: predictions, not yet scaled by measured layers.
        damage: of a sample of blocks.
        what: "kl" or "loss", the measured quantity.
        transitions: default all between the measured widths, and from unchanged.
        mass: see :func:`predictions`.
        scaled: see :func:`predictions`.
        n_resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    predicted = predictions(table, damage, mass=mass, scaled=scaled)
    rows = []
    for n_from, n_to in transitions or all_transitions(damage.widths):
        truth = change(damage.mean(what), damage.widths, n_from, n_to)
        gain = np.maximum(0.0, change(predicted, damage.widths, n_from, n_to))
        rows.append({"from": n_from, "to": n_to, **compare(truth, gain, n_resamples, seed)})
    return rows


def predictions(
    table: SensitivityTable,
    damage: Damage,
    *,
    mass: FloatArray | None = None,
    scaled: bool = False,
) -> FloatArray:
    """Predicted damage of the measured blocks at the measured widths, ``[n, W]``.

    Args:
        table: predictions, not yet scaled by measured layers.
        damage: of a sample of blocks.
        mass: routing mass per token ``[L, E]`` of the measured prompts: predictions are
            multiplied by its ratio to that of calibration, as policies do online.
        scaled: with factors of measured layers, each block left out of its own.
    """
    layer = np.array([table.layer_ids.index(ref.layer_index) for ref in damage.blocks])
    expert = np.array([ref.expert for ref in damage.blocks])
    block = np.array([int(ref.block) for ref in damage.blocks])
    predicted = np.stack(
        [table.s[layer, expert, block, table.width_index(w)] for w in damage.widths], axis=1
    )
    if mass is not None:
        usual = table.mass[layer, expert]
        now = mass[layer, expert]
        predicted = predicted * np.where(usual > 0, now / np.where(usual > 0, usual, 1), 1)[:, None]
    if scaled:
        predicted = predicted * _left_out(predicted, damage.mean("kl"), layer)
    return np.asarray(predicted)


def change(values: FloatArray, widths: Sequence[int], n_from: int, n_to: int) -> FloatArray:
    """``[n, W]`` at one width less that at another, ``[n]``; 16 or more means unchanged."""
    after = values[:, widths.index(n_to)]
    return after if n_from >= UNCHANGED else after - values[:, widths.index(n_from)]


def compare(
    truth: FloatArray, predicted: FloatArray, n_resamples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Spearman's correlation of two sets of n numbers, with its interval."""
    low, high = _interval(truth, predicted, n_resamples, seed)
    return {
        "n_blocks": len(truth),
        "rank_correlation": rank_correlation(truth, predicted),
        "low": low,
        "high": high,
    }


def _left_out(predicted: FloatArray, measured: FloatArray, layer: npt.NDArray[Any]) -> FloatArray:
    """Factors of scaling.py for every block without itself, ``[n, W]``."""
    usable = (predicted > 0) & (measured > 0)
    ratio = np.log(np.where(usable, measured, 1)) - np.log(np.where(usable, predicted, 1))
    others = 1.0 - np.eye(len(layer))  # numbers: a product of booleans would not count
    same = others * (layer[:, None] == layer[None, :])
    n_same, n_all = same @ usable, others @ usable
    mean_all = (others @ ratio) / np.maximum(n_all, 1)
    factors = (same @ ratio + PRIOR_BLOCKS * mean_all) / (n_same + PRIOR_BLOCKS)
    return np.asarray(np.exp(factors))


def _interval(
    truth: FloatArray, predicted: FloatArray, n_resamples: int, seed: int
) -> tuple[float, float]:
    n = len(truth)
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), size=n_resamples)
    values = resampled_rank_correlation(truth, predicted, draws)
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
