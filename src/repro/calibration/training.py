"""Training the heads on measured damage, and what they are worth on prompts not seen.

The one idea: an example is one block on one prompt.  Its target is

    log residual = log(measured damage of the prompt) - log(g * mass ratio)

where the mass ratio is the routing mass per token of this prompt over that of the calibration
set.  Blocks a prompt never chose, damages of nothing but rounding and transitions predicted
to cost nothing have no logarithm: they are left out and counted.  A share of the prompts is held
out from everything; the stored heads are the ones judged on it.

Scores are of the logarithm of the damage.  Predictions without a head get one constant fitted
on the training prompts, for the units of g are arbitrary; a head brings its own.

Letters: n examples, P prompts, L layers, E experts, B blocks, W widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.calibration.damage import Damage
from repro.calibration.features import PromptFeatures
from repro.calibration.heads import EXTENDED_NAMES, FEATURE_NAMES, Head, Heads, Transition
from repro.calibration.ridge import fit_ridge
from repro.calibration.scores import correlation, r_squared, rank_correlation
from repro.calibration.table import SensitivityTable
from repro.contract import Block
from repro.errors import UnknownNameError

UNCHANGED = 16
HELD_OUT = 0.25
ROUNDING_NATS = 1e-11  # what float32 logits leave where nothing changed
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Examples:
    """All blocks of one type on all prompts, for one transition."""

    features: FloatArray  # [n, F]
    log_damage: FloatArray  # [n]
    log_gain: FloatArray  # [n]
    log_mass_ratio: FloatArray  # [n]
    prompt: npt.NDArray[np.int64]  # [n]
    block: npt.NDArray[np.int64]  # [n] which of the measured blocks
    excluded: dict[str, int]

    @property
    def residual(self) -> FloatArray:
        """What the global term leaves unexplained."""
        return self.log_damage - self.log_gain - self.log_mass_ratio

    def at(self, chosen: npt.NDArray[np.bool_]) -> Examples:
        """Some of them."""
        return Examples(
            self.features[chosen],
            self.log_damage[chosen],
            self.log_gain[chosen],
            self.log_mass_ratio[chosen],
            self.prompt[chosen],
            self.block[chosen],
            self.excluded,
        )


def examples(
    table: SensitivityTable,
    damage: Damage,
    features: PromptFeatures,
    block: Block,
    transition: Transition,
    *,
    extended: bool = False,
) -> Examples:
    """The examples of one head; ``extended`` adds the mass ratio to the three norms.

    Raises:
        UnknownNameError: a width that was not measured, or is not in the table.
    """
    n_from, n_to = transition
    measured = _measured(damage, n_to)
    if n_from < UNCHANGED:
        measured = measured - _measured(damage, n_from)  # [n, P]
    at = [i for i, ref in enumerate(damage.blocks) if ref.block == block]
    layer = np.array([table.layer_ids.index(damage.blocks[i].layer_index) for i in at], dtype=int)
    expert = np.array([damage.blocks[i].expert for i in at], dtype=int)
    gain = table.gain(n_from, n_to)[layer, expert, int(block)]  # [b]
    tokens = np.maximum(features.n_tokens, 1)[:, None]
    ratio = np.zeros((len(at), len(features.n_tokens)))
    average = table.mass[layer, expert][:, None]
    mass = (features.mass[:, layer, expert] / tokens).T  # [b, P]
    np.divide(mass, average, out=ratio, where=average > 0)
    target = measured[at]
    scored = np.broadcast_to(damage.n_scored > 0, target.shape)
    tests = {
        "nothing scored": ~scored,
        "not routed by the prompt": mass <= 0,
        "not routed in calibration": np.broadcast_to(average <= 0, target.shape),
        "no damage predicted": np.broadcast_to(gain[:, None] <= 0, target.shape),
        "no damage measured": target <= ROUNDING_NATS,
    }
    kept = np.ones(target.shape, dtype=bool)
    excluded = {}
    for reason, fails in tests.items():
        excluded[reason] = int((kept & fails).sum())
        kept &= ~fails
    rows, prompts = np.nonzero(kept)
    seen = features.values[prompts, layer[rows], expert[rows], int(block)]
    if extended:
        seen = np.concatenate([seen, ratio[rows, prompts, None]], axis=1)
    return Examples(
        seen,
        np.log(target[rows, prompts]),
        np.log(gain[rows]),
        np.log(ratio[rows, prompts]),
        prompts.astype(np.int64),
        np.asarray(at, dtype=np.int64)[rows],
        {reason: count for reason, count in excluded.items() if count},
    )


def _measured(damage: Damage, n_bits: int) -> FloatArray:
    if n_bits not in damage.widths:
        raise UnknownNameError(
            f"damage at {n_bits} bits was not measured: choose among {list(damage.widths)}"
        )
    return damage.kl[:, damage.widths.index(n_bits)]


def all_transitions(widths: Sequence[int]) -> tuple[Transition, ...]:
    """Every way down, from unchanged and between widths."""
    ordered = sorted(widths, reverse=True)
    return tuple((i, j) for i in (UNCHANGED, *ordered) for j in ordered if j < i)


def held_out_prompts(
    n_prompts: int, share: float, seed: int, domains: Sequence[str] | None = None
) -> npt.NDArray[np.bool_]:
    """Which prompts are held out, ``[P]``: the same share of every domain, at least one each.

    A domain with a single prompt keeps it for training.
    """
    names = np.asarray(domains if domains is not None else [""] * n_prompts)
    rng = np.random.default_rng(seed)
    held = np.zeros(n_prompts, dtype=bool)
    for name in sorted(set(names.tolist())):
        members = rng.permutation(np.nonzero(names == name)[0])
        n = min(max(1, round(share * len(members))), len(members) - 1) if share > 0 else 0
        held[members[:n]] = True
    return held


def train_heads(
    table: SensitivityTable,
    damage: Damage,
    features: PromptFeatures,
    *,
    transitions: Sequence[Transition] | None = None,
    held_out: npt.NDArray[np.bool_] | None = None,
    extended: bool = False,
    seed: int = 0,
    meta: Mapping[str, Any] | None = None,
) -> tuple[Heads, list[dict[str, Any]]]:
    """Heads for every block type and transition, and a report row for each.

    Args:
        table: the global term.
        damage: of single blocks, per prompt.
        features: of the same prompts.
        transitions: default all between the measured widths, and from unchanged.
        held_out: the prompts ``[P]`` that only judge; default a quarter, drawn by ``seed``.
        extended: heads that see the mass ratio, too.
        seed: of that split and of the folds.
        meta: kept with the heads, e.g. fingerprints.

    Raises:
        UnknownNameError: prompts that do not fit each other; a width that was not measured.
    """
    n_prompts = damage.kl.shape[2]
    if features.values.shape[0] != n_prompts:
        raise UnknownNameError(
            f"features of {features.values.shape[0]} prompts do not fit damage of {n_prompts}: "
            "compute both on the same prompts"
        )
    test = held_out if held_out is not None else held_out_prompts(n_prompts, HELD_OUT, seed)
    heads, report = {}, []
    for block in Block:
        for transition in transitions or all_transitions(damage.widths):
            found = examples(table, damage, features, block, transition, extended=extended)
            train, unseen = found.at(~test[found.prompt]), found.at(test[found.prompt])
            fit = fit_ridge(train.features, train.residual, train.prompt, seed=seed)
            key = (block, *transition)
            heads[key] = Head(block, *transition, fit, len(train.prompt), found.excluded)
            report.append({**_row(heads[key]), **_judge(heads[key], train, unseen)})
    names = EXTENDED_NAMES if extended else FEATURE_NAMES
    return Heads(heads, dict(meta or {}), names), report


def _row(head: Head) -> dict[str, Any]:
    return {
        "block": head.block.name.lower(),
        "from": head.n_from,
        "to": head.n_to,
        "alpha": head.fit.alpha,
        "confidence": head.fit.confidence,
        "clip": list(head.fit.clip),
        "excluded": dict(head.excluded),
    }


def _judge(head: Head, train: Examples, test: Examples) -> dict[str, Any]:
    """Scores on held-out prompts; None where there is nothing to score."""
    scores: dict[str, Any] = {"n_train": len(train.prompt), "n_test": len(test.prompt)}
    if not len(train.prompt) or not len(test.prompt):
        return scores
    log_eta = head.fit.log_eta(test.features)
    scores["r2_log_residual"] = r_squared(test.residual, log_eta, float(train.residual.mean()))
    predictions = {
        "g": (train.log_gain, test.log_gain),
        "g_mass": (
            train.log_gain + train.log_mass_ratio,
            test.log_gain + test.log_mass_ratio,
        ),
    }
    centre = float(train.log_damage.mean())
    for name, (seen, unseen) in predictions.items():
        offset = float((train.log_damage - seen).mean())
        scores[f"r2_{name}"] = r_squared(test.log_damage, unseen + offset, centre)
        scores[f"rank_{name}"] = rank_correlation(test.log_damage, unseen)
    full = predictions["g_mass"][1] + log_eta
    scores["r2_g_mass_eta"] = r_squared(test.log_damage, full, centre)
    scores["rank_g_mass_eta"] = rank_correlation(test.log_damage, full)
    # Between prompts alone, every block's own mean taken out, where g says nothing; and between
    # blocks of one prompt, which is what a planner compares.
    for view, group in (("block", test.block), ("prompt", test.prompt)):
        inside = _within(test.log_damage, group)
        for name, values in (("g_mass", predictions["g_mass"][1]), ("g_mass_eta", full)):
            scores[f"within_{view}_{name}"] = correlation(inside, _within(values, group))
    finite = {k: v for k, v in scores.items() if not isinstance(v, float) or np.isfinite(v)}
    return {k: finite.get(k) for k in scores}


def _within(values: FloatArray, group: npt.NDArray[np.int64]) -> FloatArray:
    _, index = np.unique(group, return_inverse=True)
    sums = np.bincount(index, weights=values)
    return np.asarray(values - (sums / np.bincount(index))[index])
