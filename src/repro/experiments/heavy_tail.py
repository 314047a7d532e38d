"""DynaExq's Figure 2: how unevenly experts are used, and whether workloads agree on the hot ones.

The one idea: two separate statements.  Skew (cumulative share, Gini, effective experts, Hill
index, share of the ten busiest) does not care which experts are hot; overlap of the ten
busiest does.  A static placement needs both: skew, and hot sets that stay.

Counts are of all tokens of the prompts (prefill).  Intervals are a bootstrap over prompts:
whole prompts are drawn again, because tokens of one prompt are alike.  Resamples look more
skewed than what they are drawn from, so the interval is their spread placed at the value.

Mixed traffic, all workloads in equal parts, stands under a claim of its own: it is what a
server without a workload sees, and no row of the figure.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.experiments import statistics, traffic
from repro.experiments.traffic import Traffic
from repro.profiles import Profile
from repro.reporting.records import Measurement, Record, RecordStore

EXPERIMENT = "heavy-tail"
CLAIM = "DynaExq Figure 2"
MIXED_CLAIM = "DynaExq Figure 2 (mixed traffic)"
MIXED = "mixed"
SOURCES = ("repro.experiments.heavy_tail", "repro.experiments.statistics", *traffic.SOURCES)

Counts = npt.NDArray[Any]


def _effective_fraction(counts: Counts) -> npt.NDArray[np.float64]:
    return statistics.effective_experts(counts) / counts.shape[-1]


SKEW: dict[str, tuple[Callable[[Counts], npt.NDArray[np.float64]], str, float]] = {
    "gini": (statistics.gini, "1", 1.0),
    "effective_experts_fraction": (_effective_fraction, "share", 1.0),
    "hill_index": (statistics.hill_index, "1", np.inf),
    "top10_share": (statistics.top_share, "share", 1.0),
}
"""Metrics of one layer's counts ``[..., E]``, their units, and what they cannot exceed."""


def run(
    profile: Profile,
    store: RecordStore,
    *,
    device: str = "cpu",
    force: bool = False,
    source: str = "embedded",
    save_traces: bool = False,
) -> list[Record]:
    """Records of all models: one point per workload, one for mixed traffic, one for overlaps.

    Raises:
        UnknownNameError: no such source.
        DataUnavailableError: a model or a workload cannot be read from here.
    """
    flow = Traffic(profile, device=device, source=source)
    names = list(flow.workloads.values())
    records: list[Record] = []

    def point(config: dict[str, Any], fn: Callable[[], list[Measurement]]) -> None:
        records.extend(
            store.measure_or_load(
                EXPERIMENT, config, fn, sources=SOURCES, force=force, device=device
            )
        )

    sampling = {"bootstrap_samples": profile.bootstrap_samples}
    for model in profile.models:
        common = {**flow.identity(model), **flow.shape("prefill"), **sampling}
        for name in names:
            config = {**common, **flow.workload_identity(name)}
            point(config, partial(measure_workload, flow, model, name))
        texts = {name: flow.workload_identity(name)["workload_sha256"] for name in names}
        config = {**common, "workload": MIXED, "domain": MIXED, "workloads_sha256": texts}
        point(config, partial(measure_mixed, flow, model, names))
        config = {**common, "workloads_sha256": texts}
        point(config, partial(measure_overlaps, flow, model, names))
    store.prune(EXPERIMENT, source=source, device=device)
    if save_traces:
        flow.save_all()
    return records


def measure_workload(flow: Traffic, model: str, workload: str) -> list[Measurement]:
    """Skew of every layer on one workload."""
    trace = flow.trace(model, workload, "prefill")
    weights = _resamples(flow.profile, len(trace), workload)
    counts = trace.counts_per_sequence()
    shape = {"n_experts": trace.n_experts, "top_k": trace.top_k}
    resampled = statistics.resampled_counts(counts, weights)
    return skew(CLAIM, trace.layer_ids, counts.sum(axis=0), resampled, len(trace), shape)


def measure_mixed(flow: Traffic, model: str, workloads: list[str]) -> list[Measurement]:
    """The same with all workloads together, each with as many prompts (drawn within each)."""
    traces = {name: flow.trace(model, name, "prefill") for name in workloads}
    first = next(iter(traces.values()))
    total: Counts = np.zeros((first.n_layers, first.n_experts))
    resampled: Counts = np.zeros((flow.profile.bootstrap_samples, *total.shape))
    for name, trace in traces.items():
        counts = trace.counts_per_sequence()
        weights = _resamples(flow.profile, len(trace), name)
        total = total + counts.sum(axis=0)
        resampled = resampled + statistics.resampled_counts(counts, weights)
    shape = {"n_experts": first.n_experts, "top_k": first.top_k}
    n_prompts = sum(map(len, traces.values()))
    return skew(MIXED_CLAIM, first.layer_ids, total, resampled, n_prompts, shape)


def measure_overlaps(flow: Traffic, model: str, workloads: list[str]) -> list[Measurement]:
    """Shared experts among the ten busiest of two workloads, for every layer and pair."""
    counts, resampled = {}, {}
    for name in workloads:
        trace = flow.trace(model, name, "prefill")
        per_prompt = trace.counts_per_sequence()
        counts[name] = per_prompt.sum(axis=0)
        weights = _resamples(flow.profile, len(trace), name)
        resampled[name] = statistics.resampled_counts(per_prompt, weights)
    found: list[Measurement] = []
    for a, b in combinations(workloads, 2):
        shared = statistics.top_overlap(counts[a], counts[b])
        samples = statistics.top_overlap(resampled[a], resampled[b])
        for row, layer in enumerate(trace.layer_ids):
            most = float(min(statistics.TOP, trace.n_experts))
            low, high = statistics.interval(
                float(shared[row]), samples[:, row], bounds=(0.0, most)
            ) or (None, None)
            found.append(
                Measurement(
                    CLAIM,
                    "measured",
                    "top10_overlap",
                    int(shared[row]),
                    "experts",
                    n=len(trace),
                    ci_low=low,
                    ci_high=high,
                    labels={
                        "workload_a": a,
                        "workload_b": b,
                        "layer": layer,
                        "n_experts": trace.n_experts,
                        "top_k": trace.top_k,
                    },
                )
            )
    return found


def _resamples(profile: Profile, n_prompts: int, workload: str) -> npt.NDArray[np.float64]:
    """Draws of prompts; each workload has its own, or their errors would move together."""
    rng = np.random.default_rng([profile.seed, *workload.encode()])
    return statistics.resample(n_prompts, profile.bootstrap_samples, rng)


def skew(
    claim: str,
    layer_ids: list[int],
    counts: Counts,
    resampled: Counts,
    n_prompts: int,
    shape: dict[str, int],
) -> list[Measurement]:
    """All skew metrics of counts ``[L, E]`` with intervals from resampled ones ``[R, L, E]``."""
    found: list[Measurement] = []
    for row, layer in enumerate(layer_ids):
        labels = {"layer": layer, **shape}
        for metric, (function, unit, most) in SKEW.items():
            value = float(function(counts[row]))
            samples = function(resampled[:, row])
            low, high = statistics.interval(value, samples, bounds=(0.0, most)) or (None, None)
            found.append(
                Measurement(
                    claim,
                    "measured",
                    metric,
                    value if np.isfinite(value) else None,
                    unit,
                    n=n_prompts,
                    ci_low=low,
                    ci_high=high,
                    labels=labels,
                )
            )
        curve = statistics.cumulative_share(counts[row])
        busiest = statistics.top_experts(counts[row])
        top = float(statistics.top_share(counts[row]))
        found += [
            Measurement(
                claim,
                "measured",
                "cumulative_share",
                top,
                "share",
                n=n_prompts,
                series=curve.tolist(),
                labels=labels,
            ),
            Measurement(
                claim,
                "measured",
                "top10_experts",
                None,
                "expert ids",
                n=n_prompts,
                series=busiest.tolist(),
                labels=labels,
            ),
        ]
    return found
