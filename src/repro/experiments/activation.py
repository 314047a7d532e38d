"""DynaExq's Tables 1 and 2: which part of a layer's experts one step activates.

The one idea: one trace per model and workload answers for every batch size.  A batch is a
draw of prompts from the trace, and the ratio is the number of distinct experts they choose
in one step, over the layer's experts, averaged over the layers that have experts.

Protocols, because the published rows differ by them:
``decode_mean``  the average over all free-running decode steps;
``next_token``   the single next token after the prompt, no other step;
``prefill``      the whole prompts in one step.

The value is the mean over drawn batches, its interval a bootstrap over them.  Large batches
share prompts (64 prompts hold two disjoint batches of 32), so their interval says how far
batches drawn from these prompts scatter, and is too narrow for prompts in general.

Beside it stands the expectation if every token chose its experts evenly and independently:
1 - (1 - k/E) ** tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.experiments import statistics, traffic
from repro.experiments.traffic import Traffic
from repro.integration.traces import RoutingTrace
from repro.profiles import Profile
from repro.reporting import paper
from repro.reporting.records import Measurement, Record, RecordStore

EXPERIMENT = "activation"
TABLE_1, TABLE_2, LENGTH = "DynaExq Table 1", "DynaExq Table 2", "DynaExq Table 2 (length)"
SOURCES = ("repro.experiments.activation", "repro.experiments.statistics", *traffic.SOURCES)
LENGTH_BATCHES = (1, 8)


def run(
    profile: Profile,
    store: RecordStore,
    *,
    device: str = "cpu",
    force: bool = False,
    source: str = "embedded",
    save_traces: bool = False,
) -> list[Record]:
    """Records of all models and workloads of the profile, two points for each pair.

    Raises:
        UnknownNameError: no such source.
        DataUnavailableError: a model or a workload cannot be read from here.
    """
    flow = Traffic(profile, device=device, source=source)
    records: list[Record] = []
    for model in profile.models:
        for workload in flow.workloads.values():
            measurements = {"batch": measure_batches, "length": measure_lengths}
            for sweep, measure in measurements.items():
                records += store.measure_or_load(
                    EXPERIMENT,
                    _config(flow, model, workload, sweep),
                    partial(measure, flow, model, workload),
                    sources=SOURCES,
                    force=force,
                    device=device,
                )
    store.prune(EXPERIMENT, source=source, device=device)
    if save_traces:
        flow.save_all()
    return records


def _config(flow: Traffic, model: str, workload: str, sweep: str) -> dict[str, Any]:
    profile = flow.profile
    sampling = {"n_blocks": profile.n_blocks, "bootstrap_samples": profile.bootstrap_samples}
    common = {**flow.identity(model), **flow.workload_identity(workload), **sampling}
    if sweep == "length":
        shape = flow.shape("long-prefill")
        swept = {"n_prompts": shape["n_prompts"], "swept_lengths": list(profile.prefill_lengths)}
        return {"sweep": sweep, **common, **swept}
    more = {**flow.shape("decode"), **flow.decoding()}
    return {"sweep": sweep, **common, **more, "swept_batches": list(profile.batch_sizes)}


def measure_batches(flow: Traffic, model: str, workload: str) -> list[Measurement]:
    """Tables 1 and 2: against batch size."""
    decode = flow.trace(model, workload, "decode")
    prefill = flow.trace(model, workload, "prefill")
    found: list[Measurement] = []
    for batch in flow.profile.batch_sizes:
        # One draw of batches for all protocols, so that they compare like with like.
        ratios = {
            "decode_mean": step_ratios(decode, _draw(flow.profile, len(decode), batch)),
            "prefill": step_ratios(prefill, _draw(flow.profile, len(prefill), batch)),
        }
        ratios["next_token"] = ratios["decode_mean"][:, :1]
        for protocol, per_step in ratios.items():
            stage = "prefill" if protocol == "prefill" else "decode"
            n_tokens = prefill.n_tokens if stage == "prefill" else 1
            found += _measurements(
                flow.profile,
                TABLE_2 if stage == "prefill" else TABLE_1,
                per_step.mean(axis=1),
                batch * n_tokens,
                decode,
                {
                    "stage": stage,
                    "protocol": protocol,
                    "batch_size": batch,
                    "prompt_tokens": prefill.n_tokens,
                },
            )
    return found


def measure_lengths(flow: Traffic, model: str, workload: str) -> list[Measurement]:
    """Table 2 against prompt length: the first tokens of longer prompts."""
    trace = flow.trace(model, workload, "long-prefill")
    found: list[Measurement] = []
    for length in flow.profile.prefill_lengths:
        part = trace.select(tokens=slice(0, length))
        for batch in (b for b in LENGTH_BATCHES if b <= len(trace)):
            ratios = step_ratios(part, _draw(flow.profile, len(trace), batch))
            labels = {
                "stage": "prefill",
                "protocol": "prefill",
                "batch_size": batch,
                "prompt_tokens": length,
            }
            found += _measurements(
                flow.profile, LENGTH, ratios.mean(axis=1), batch * length, trace, labels
            )
    return found


def _draw(profile: Profile, n_prompts: int, batch: int) -> npt.NDArray[np.int64]:
    rng = np.random.default_rng([profile.seed, batch])
    return statistics.blocks(n_prompts, batch, profile.n_blocks, rng)


def step_ratios(trace: RoutingTrace, batches: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Activated share in percent of each batch ``[n, size]`` in each step: ``[n, steps]``."""
    presence = trace.presence()  # [S, steps, L, E]
    distinct = np.stack([presence[rows].any(axis=0).sum(axis=-1) for rows in batches])
    return np.asarray(100.0 * distinct.mean(axis=-1) / trace.n_experts)


def _measurements(
    profile: Profile,
    claim: str,
    per_batch: npt.NDArray[np.float64],
    n_tokens: int,
    trace: RoutingTrace,
    labels: dict[str, Any],
) -> list[Measurement]:
    rng = np.random.default_rng([profile.seed, n_tokens])
    low, high = statistics.mean_interval(per_batch, profile.bootstrap_samples, rng)
    p10, p50, p90 = (float(q) for q in np.quantile(per_batch, [0.1, 0.5, 0.9]))
    shape = {"n_experts": trace.n_experts, "top_k": trace.top_k, "n_layers": trace.n_layers}
    labels = {**labels, **shape}
    measured = Measurement(
        claim,
        "measured",
        "activation_ratio",
        float(per_batch.mean()),
        "percent",
        n=len(per_batch),
        p10=p10,
        p50=p50,
        p90=p90,
        ci_low=low,
        ci_high=high,
        labels=labels,
    )
    uniform = paper.uniform_activation(trace.n_experts, trace.top_k, n_tokens)
    bound = Measurement(
        claim, "derived", "activation_ratio_uniform", uniform, "percent", labels=labels
    )
    return [measured, bound]
