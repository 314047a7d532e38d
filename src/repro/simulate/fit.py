"""Fitting the free constants of a device to measured passes, and the error on held-out ones.

The one idea: for given constants each kernel of the model knows which of its times is the
longest; with that choice fixed a pass is linear in four unknowns,

    measured = fixed + bytes / bandwidth + flops / rate + factor * decoding,

so constants come from weighted least squares, and the choice is made anew until it stays.
Errors are relative, for steps of 2 and of 2000 milliseconds count alike.  What the points do
not determine (the rate of arithmetic at batch 1, say) keeps the value it had: a weak pull
towards the profile decides there.

``fixed`` is ``step_fixed_s + L * layer_fixed_s``: points of one model cannot tell them apart,
so both are scaled alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from repro.contract import FloatArray
from repro.simulate.cost import CostModel, PassWork
from repro.simulate.device import DeviceProfile, KernelCost
from repro.simulate.errors import SimulationError
from repro.simulate.model import SimulatedModel

MAX_ROUNDS = 50
# Our choice: the pull towards the profile, against relative errors of order one.
PULL = 1e-6
# Our choice: no constant is moved by more than this factor either way.
MOST = 100.0
UNKNOWNS = ("fixed", "bytes", "flops", "decode")


@dataclass(frozen=True)
class Point:
    """One measured pass.

    Args:
        work: what it read and computed, on the profile that is fitted.
        seconds: measured, waits excluded.
        batch: requests in it; decides what is fitted and what is held out.
        label: for reports.
    """

    work: PassWork
    seconds: float
    batch: int
    label: str = ""


@dataclass(frozen=True)
class Fit:
    """A fitted device and how well it predicts.

    Attributes:
        device: with fitted constants.
        factors: by which times of the profile were multiplied.
        fitted: relative error of each fitted point (predicted / measured - 1).
        held_out: the same of the others.
    """

    device: DeviceProfile
    factors: dict[str, float]
    fitted: tuple[float, ...]
    held_out: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Numbers for a record; largest and mean absolute relative errors."""
        return {
            "factors": self.factors,
            "fitted": _summary(self.fitted),
            "held_out": _summary(self.held_out),
            "device": self.device.to_json(),
        }


def fit_device(
    device: DeviceProfile,
    model: SimulatedModel,
    points: Sequence[Point],
    *,
    fit_batches: Sequence[int] = (1, 8),
    source: str = "fitted to measured passes",
) -> Fit:
    """Fit on the points of some batches only, and predict the others.

    Args:
        device: where the fit begins, and what it keeps where points say nothing.
        model: of the points.
        points: measured.
        fit_batches: batches that are fitted; all others are held out.
        source: stated beside the fitted constants.

    Raises:
        SimulationError: no point to fit, or a time that is not positive.
    """
    if any(not p.seconds > 0 for p in points):
        raise SimulationError("a measured time is not positive: leave the point out")
    chosen = [p for p in points if p.batch in fit_batches]
    if not chosen:
        raise SimulationError(
            f"no point has a batch of {tuple(fit_batches)}: nothing can be fitted"
        )
    seconds = np.array([p.seconds for p in chosen])
    factors, seen = np.ones(len(UNKNOWNS)), []
    for _ in range(MAX_ROUNDS):
        rows = np.array([_columns(device, factors, model, p.work) for p in chosen])
        new = _solve(rows / seconds[:, None])
        seen.append(new)
        if np.allclose(new, factors, rtol=1e-9, atol=0):
            break
        factors = new
    else:  # the choice of the longest alternates: take the one that predicts best
        factors = min(seen, key=lambda f: float(np.square(_errors(device, f, model, chosen)).sum()))
    names = dict(zip(UNKNOWNS, (float(f) for f in factors), strict=True))
    held = [p for p in points if p.batch not in fit_batches]
    return Fit(
        _scaled(device, factors).changed(source, **_numbers(device, factors)),
        names,
        tuple(_errors(device, factors, model, chosen)),
        tuple(_errors(device, factors, model, held)),
    )


def _numbers(device: DeviceProfile, factors: FloatArray) -> dict[str, Any]:
    fixed, read, flops, decode = (float(f) for f in factors)
    return {
        "step_fixed_s": device.step_fixed_s * fixed,
        "layer_fixed_s": device.layer_fixed_s * fixed,
        "hbm_bytes_per_s": device.hbm_bytes_per_s / read,
        "flops_per_s": device.flops_per_s / flops,
        "kernels": {
            name: KernelCost(cost.base_s * decode, cost.per_bit_s * decode)
            for name, cost in device.kernels.items()
        },
    }


def _scaled(device: DeviceProfile, factors: FloatArray) -> DeviceProfile:
    return replace(device, **_numbers(device, factors))


def _decoded(work: PassWork, factor: float) -> PassWork:
    """Decoding times of a work are those of the profile it was made with."""
    return replace(work, expert_decode=work.expert_decode * factor)


def _columns(
    device: DeviceProfile, factors: FloatArray, model: SimulatedModel, work: PassWork
) -> FloatArray:
    """What each unknown contributes to a pass: seconds at factor 1, as the longest is chosen."""
    cost = CostModel(device, model)
    row = np.zeros(len(UNKNOWNS))
    row[0] = device.step_fixed_s + model.n_layers * device.layer_fixed_s
    kernels = [np.stack(terms) for terms in cost.terms(work).values()]
    kernels.append(np.array([*cost.head_terms(work), 0.0])[:, None])
    for times in kernels:  # [3, L]: bytes, flops, decoding
        if device.combine == "max":
            longest = np.argmax(times * factors[1:, None], axis=0)
            times = times * (np.arange(3)[:, None] == longest)
        row[1:] += times.sum(axis=1)
    return row


def _solve(shares: FloatArray) -> FloatArray:
    """Factors for which every point's shares add up to 1, near 1 where that leaves a choice."""
    n = len(UNKNOWNS)
    pull = np.sqrt(PULL) * np.eye(n)
    matrix = np.vstack([shares, pull])
    wanted = np.concatenate([np.ones(len(shares)), np.full(n, np.sqrt(PULL))])
    found = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
    return np.clip(found, 1 / MOST, MOST)


def _errors(
    device: DeviceProfile, factors: FloatArray, model: SimulatedModel, points: Sequence[Point]
) -> list[float]:
    cost = CostModel(_scaled(device, factors), model)
    factor = float(factors[3])
    return [cost.pass_s(_decoded(p.work, factor)) / p.seconds - 1 for p in points]


def _summary(errors: Sequence[float]) -> dict[str, float]:
    size = np.abs(np.asarray(errors))
    if not len(size):
        return {"n": 0}
    return {"n": len(size), "mean": float(size.mean()), "worst": float(size.max())}
