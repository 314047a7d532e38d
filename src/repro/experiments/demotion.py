"""DynaExq's Figure 3: perplexity against the share of each layer's experts that is demoted.

The one idea: a ranking that is frozen beforehand, and one weight changed for another.  Experts
are ranked by how often calibration windows of the same domain chose them; then the coldest
15, 30, ... 100 % of every layer are replaced by what their low tier decodes to, and the same
windows are read again.  The hottest first and a random order are controls: only against them
can one see whether it matters which experts are demoted.

Losses of one window under two states of the weights are nearly the same number, so intervals
are those of paired differences: a bootstrap over windows of the increase over no demotion.

Two numbers stand on every point: over all tokens of a window, and over its last ones given
the rest (the paper asks for 2,048 tokens in and 256 out, and does not say which are scored).
Endpoints are states of the whole model, measured once and shared by pairs and orders.

The public code set has too few long windows: with source "folder" held-out packages are read
in its place, and records say so.

Left out: more than one random order, and demotion by anything but counts (section 2.4).

Letters: L layers, E experts, P windows, S shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.calibration.blocks import block_weights
from repro.contract import Block
from repro.errors import DataUnavailableError
from repro.experiments import evaluation as ev
from repro.experiments import statistics
from repro.experiments.evaluation import Evaluation
from repro.formats.registry import format_name
from repro.formats.tiers import get_pair
from repro.integration.experts import ExpertsLayer, observe
from repro.profiles import Profile
from repro.reporting.demotion_curves import (
    CLAIM,
    COLDEST,
    COLUMNS,
    EXPERIMENT,
    HOTTEST,
    METRIC,
    ORDERS,
    PAIRS,
    RANDOM,
)
from repro.reporting.records import Measurement, Record, RecordStore

SHARES_PERCENT = (0, 15, 30, 45, 60, 75, 90, 100)  # those of the authors' series
LONG_WORKLOADS = {"folder": {"code": "python-heldout"}}
DIGITS = 6
SOURCES = (
    "repro.experiments.demotion",
    "repro.experiments.statistics",
    "repro.formats.dense",
    "repro.formats.tiers",
    "repro.integration.experts",
    *ev.SOURCES,
)

Floats = npt.NDArray[np.float64]
Decoded = dict[int, dict[Block, Tensor]]  # weights [E, N, K] by layer and block
Ranking = Mapping[int, npt.NDArray[np.int64]]  # experts of a layer, first demoted first


def run(
    profile: Profile,
    store: RecordStore,
    *,
    device: str = "cpu",
    force: bool = False,
    source: str = "embedded",
) -> list[Record]:
    """Records of all models: one point, and one record, per domain and pair.

    Raises:
        UnknownNameError: no such source.
        DataUnavailableError: a model or a workload cannot be read from here, or it holds fewer
            than two windows.
    """
    if device == "cpu":
        torch.set_num_threads(profile.n_threads)
    records: list[Record] = []
    for model in profile.models:
        evaluation = Evaluation(profile, model, device=device, source=source)
        tiers = Tiers(evaluation)
        for domain, workload in workloads_of(evaluation).items():
            sweep = Sweep(tiers, domain, workload)
            for pair in PAIRS:
                config = {
                    **evaluation.identity(),
                    **evaluation.workload_identity(workload),
                    "pair": pair,
                    "shares_percent": SHARES_PERCENT,
                    "prompts_asked": profile.demotion_prompts,
                    "context_tokens": profile.demotion_context_tokens,
                    "scored_tokens": profile.demotion_scored_tokens,
                    "bootstrap_samples": profile.bootstrap_samples,
                }
                records += store.measure_or_load(
                    EXPERIMENT,
                    config,
                    partial(measure_pair, sweep, pair),
                    sources=SOURCES,
                    force=force,
                    device=device,
                )
    store.prune(EXPERIMENT, source=source, device=device)
    return records


def workloads_of(evaluation: Evaluation) -> dict[str, str]:
    """The workload of every domain, long enough for the windows of this experiment."""
    return evaluation.workloads | LONG_WORKLOADS.get(evaluation.source, {})


# Ranking -------------------------------------------------------------------------------------


def routing_counts(evaluation: Evaluation, domain: str) -> dict[int, npt.NDArray[np.int64]]:
    """How often the domain's calibration windows chose each expert, ``[E]`` by layer."""
    model, ids = evaluation.model, evaluation.calibration_windows(domain)
    counts = {
        layer.layer_index: torch.zeros(layer.n_experts, dtype=torch.int64, device=ids.device)
        for layer in evaluation.layers
    }

    def count(_: Any, layer_index: int, chosen: Tensor, weights: Tensor) -> None:
        n_experts = len(counts[layer_index])
        counts[layer_index] += torch.bincount(chosen.flatten(), minlength=n_experts)

    step = max(1, ev.BATCH_TOKENS[evaluation.device] // ids.shape[1])
    implementation = ev.IMPLEMENTATIONS[evaluation.device]
    with torch.no_grad(), observe(model, count, implementation):
        for start in range(0, len(ids), step):
            model(ids[start : start + step], use_cache=False, logits_to_keep=1)
    return {layer: found.cpu().numpy() for layer, found in counts.items()}


def rankings(
    counts: Mapping[int, npt.NDArray[np.int64]], seed: Sequence[int]
) -> dict[str, dict[int, npt.NDArray[np.int64]]]:
    """The orders in which each layer's experts are demoted; of equals the lower number first."""
    coldest = {layer: np.argsort(found, kind="stable") for layer, found in counts.items()}
    return {
        COLDEST: coldest,
        HOTTEST: {layer: order[::-1].copy() for layer, order in coldest.items()},
        RANDOM: {
            layer: np.random.default_rng([*seed, layer]).permutation(len(found))
            for layer, found in counts.items()
        },
    }


def n_demoted(share_percent: float, n_experts: int) -> int:
    """Experts per layer at a share."""
    return round(share_percent * n_experts / 100)


# Weights -------------------------------------------------------------------------------------


class Tiers:
    """What every tier of one model decodes to; each is encoded once."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        self._decoded: dict[str, Decoded] = {}

    def decoded(self, tier: str) -> Decoded:
        """Weights ``[E, N, K]`` of the format of that name, by layer and block."""
        if tier not in self._decoded:
            self._decoded[tier] = {
                layer: {block: stack.decode(stack.widths[0]) for block, stack in blocks.items()}
                for layer, blocks in self.evaluation.encode(tier).items()
            }
        return self._decoded[tier]


class Placement:
    """The tier that every expert has now; only experts whose tier changes are written.

    To be used inside ``Evaluation.restored``; ``decoded`` are both tiers by name, made before,
    for encoding reads the model's own weights.
    """

    def __init__(self, layers: Sequence[ExpertsLayer], decoded: Mapping[str, Decoded]) -> None:
        self._layers, self._decoded = layers, decoded
        self._now = {
            layer.layer_index: np.full(layer.n_experts, "", dtype=object) for layer in layers
        }

    def put(self, high: str, low: str, demoted: Ranking) -> None:
        """``low`` for the experts in ``demoted``, ``high`` for all others."""
        for layer in self._layers:
            now = self._now[layer.layer_index]
            wanted = np.full(len(now), high, dtype=object)
            wanted[demoted[layer.layer_index]] = low
            for tier in (high, low):
                experts = np.flatnonzero((wanted == tier) & (now != tier))
                if not len(experts):
                    continue
                rows = torch.from_numpy(experts)
                source = self._decoded[tier][layer.layer_index]
                for block, weight in zip(Block, block_weights(layer.module), strict=True):
                    at = rows.to(weight.device)
                    weight[at] = source[block][at].to(weight.dtype)
            self._now[layer.layer_index] = wanted


# Measuring -----------------------------------------------------------------------------------


class Sweep:
    """Losses of one model on one domain, by state of the weights."""

    def __init__(self, tiers: Tiers, domain: str, workload: str) -> None:
        self.tiers, self.domain, self.workload = tiers, domain, workload
        self.profile = tiers.evaluation.profile
        self._states: dict[tuple[str, ...], Floats] = {}

    @cached_property
    def windows(self) -> Tensor:
        """The windows that are read, ``[P, T]``."""
        p = self.profile
        length = p.demotion_context_tokens + p.demotion_scored_tokens
        found = self.tiers.evaluation.windows(self.workload, p.demotion_prompts, length)
        if len(found) < 2:
            raise DataUnavailableError(
                f"workload {self.workload!r} holds one window of {length} tokens, and an "
                "interval needs two: use shorter ones"
            )
        return found

    @cached_property
    def rankings(self) -> dict[str, dict[int, npt.NDArray[np.int64]]]:
        """By order; frozen, from windows that are not read here."""
        counts = routing_counts(self.tiers.evaluation, self.domain)
        return rankings(counts, [self.profile.seed, *self.domain.encode()])

    @cached_property
    def draws(self) -> Floats:
        """Share of each window in each resample ``[R, P]``: one set, so that points compare."""
        rng = np.random.default_rng([self.profile.seed, *self.workload.encode()])
        n = len(self.windows)
        return statistics.resample(n, self.profile.bootstrap_samples, rng) / n

    def losses(self, high: str, low: str) -> dict[str, Floats]:
        """By order, mean losses ``[S, 2, P]``: all tokens of a window, then its last ones."""
        evaluation, orders = self.tiers.evaluation, self.rankings
        decoded = {tier: self.tiers.decoded(tier) for tier in (high, low)}
        with evaluation.restored():
            placement = Placement(evaluation.layers, decoded)
            return {
                order: np.stack(
                    [
                        self._state(placement, high, low, order, ranking, share)
                        for share in SHARES_PERCENT
                    ]
                )
                for order, ranking in orders.items()
            }

    def _state(
        self, placement: Placement, high: str, low: str, order: str, ranking: Ranking, share: int
    ) -> Floats:
        demoted = {
            layer: experts[: n_demoted(share, len(experts))] for layer, experts in ranking.items()
        }
        n_low = sum(map(len, demoted.values()))
        n_all = sum(map(len, ranking.values()))
        key = (high, low, order, str(share)) if 0 < n_low < n_all else (low if n_low else high,)
        if key not in self._states:
            placement.put(high, low, demoted)
            losses = self.tiers.evaluation.token_losses(self.windows)
            last = losses[:, -self.profile.demotion_scored_tokens :]
            self._states[key] = np.stack([losses.mean(axis=1), last.mean(axis=1)])
        return self._states[key]


def measure_pair(sweep: Sweep, pair: str) -> list[Measurement]:
    """One record: the curves of one pair of tiers, one for each order."""
    chosen = get_pair(pair)
    losses = sweep.losses(format_name(chosen.high), format_name(chosen.low))
    n_experts = len(next(iter(sweep.rankings[COLDEST].values())))  # all layers have as many
    series: list[float] = []
    for order in ORDERS:
        table = curve(losses[order], losses[COLDEST], sweep.draws, n_experts)
        rows = zip(*(table[name] for name in COLUMNS[order]), strict=True)
        series += [significant(number) for row in rows for number in row]
    low, value, high = (
        significant(table[name][-1]) for name in ("increase_low", "increase", "increase_high")
    )
    return [
        Measurement(
            CLAIM,
            "measured",
            METRIC,
            value,
            "nats",
            n=len(sweep.windows),
            ci_low=low,
            ci_high=high,
            series=series,
            labels={
                "orders": ORDERS,
                "columns": {order: list(COLUMNS[order]) for order in ORDERS},
                "n_experts": n_experts,
                "n_demoted": [n_demoted(share, n_experts) for share in SHARES_PERCENT],
            },
        )
    ]


def curve(losses: Floats, coldest: Floats, draws: Floats, n_experts: int) -> dict[str, Floats]:
    """All columns of one curve from losses ``[S, 2, P]``; see ``demotion_curves``.

    ``coldest`` are the losses of the coldest-first order of the same pair.
    """
    loss = losses[:, 0]  # [S, P]
    increase = loss - loss[0]
    fraction = np.array([n_demoted(s, n_experts) / n_experts for s in SHARES_PERCENT])
    above_line = increase - fraction[:, None] * increase[-1]
    steps = np.diff(loss, axis=0, prepend=loss[:1])
    last = losses[:, 1]
    columns = {
        "perplexity": np.exp(loss.mean(axis=1)),
        "increase": increase.mean(axis=1),
        "step_error": _errors(steps),
        "line_error": _errors(above_line),
        "coldest_error": _errors(loss - coldest[:, 0]),
        "last_perplexity": np.exp(last.mean(axis=1)),
        "last_increase": (last - last[0]).mean(axis=1),
    }
    low, high = _intervals(loss, draws)
    columns |= {"perplexity_low": np.exp(low), "perplexity_high": np.exp(high)}
    columns["increase_low"], columns["increase_high"] = _intervals(increase, draws)
    columns["last_low"], columns["last_high"] = _intervals(last - last[0], draws)
    return columns


def _intervals(values: Floats, draws: Floats) -> tuple[Floats, Floats]:
    """Ends of the interval of each row's mean ``[S, P] -> [S], [S]``."""
    ends = np.array([statistics.interval(float(row.mean()), draws @ row) for row in values])
    return ends[:, 0], ends[:, 1]


def _errors(values: Floats) -> Floats:
    """Standard error of each row's mean."""
    return np.asarray(values.std(axis=1, ddof=1) / np.sqrt(values.shape[1]))


def significant(number: float) -> float:
    """Rounded to the digits that a record keeps."""
    return float(f"{number:.{DIGITS}g}")
