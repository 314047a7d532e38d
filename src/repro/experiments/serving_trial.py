"""Serving on the reference kernels, with transitions on and off, in both layouts.

The one idea: the cost of changing precision while serving is the difference between two runs
that differ in nothing else.  One batch decodes on; phases in which experts change at every step
alternate with phases in which none does, so that drift of the machine falls on both alike.
Changes are forced and seeded (more than any policy asks for); then the layout's own policy
serves fresh requests on wall time, and its own figures are recorded.

Speed here is that of plain PyTorch.  What is claimed is the ratio, that nothing waits, that
memory stays under the cap by the driver's own figure, and that experts come back bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from repro.contract import Action, Outcome
from repro.experiments import serving_setup as setup
from repro.experiments.grids import significant
from repro.profiles import Profile
from repro.reporting.records import Measurement, Record, RecordStore
from repro.serving import Engine
from repro.serving.metrics import StepRecord

EXPERIMENT = "serving"
CLAIM = "DynaExq C1-C3: serving while experts change"
BATCH = 8
PROMPT_TOKENS = 64
PHASES = {"cpu": (6, 12), "cuda": (6, 30)}  # pairs, steps of each; 512 tokens of KV hold them
NEW_TOKENS = {"cpu": 24, "cuda": 64}  # of requests served under the policy
CHANGES_PER_STEP = 2
NARROW = 5  # planes: experts go between this and the widest
POLICY_INTERVAL_S = 0.25
SOURCES = ("repro.experiments.serving_trial", *setup.SOURCES)


def run(
    profile: Profile,
    store: RecordStore,
    *,
    device: str = "cpu",
    force: bool = False,
    source: str = "embedded",
) -> list[Record]:
    """One point per model and layout.

    Raises:
        DataUnavailableError: a model or its text cannot be read from here.
    """
    records: list[Record] = []
    for model in profile.models:
        for layout in setup.LAYOUTS:
            config = {
                **setup.identity(profile, model, source, device),
                "layout": layout,
                "batch_size": BATCH,
                "prompt_tokens": PROMPT_TOKENS,
                "phases": list(PHASES[device]),
                "changes_per_step": CHANGES_PER_STEP,
                "kernels": "plain PyTorch",
            }
            measure = partial(measure_serving, profile, model, layout, device, source)
            records.extend(
                store.measure_or_load(
                    EXPERIMENT, config, measure, sources=SOURCES, force=force, device=device
                )
            )
    store.prune(EXPERIMENT, source=source, device=device)
    return records


def measure_serving(
    profile: Profile, model: str, layout: str, device: str, source: str
) -> list[Measurement]:
    """Alternate, come back to the first widths, then let the policy serve."""
    if layout == "planes":
        setup.codes(model, device)  # encoded before memory is looked at
    base = torch.cuda.memory_allocated() if device == "cuda" else 0
    options = {"max_running": BATCH, "interval": POLICY_INTERVAL_S}
    labels = {"layout": layout}
    with setup.engine(model, layout, device, **options) as engine:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        texts = setup.prompts(profile, model, source, BATCH, PROMPT_TOKENS)
        with engine.frozen():
            before = engine.score(texts)
            first = engine.residency.n_bits
            steps, asked = _alternate(engine, layout, profile.seed, device, texts)
            _restore(engine, first)
            after = engine.score(texts)
        equal = [s.token_log_likelihoods for s in before] == [
            s.token_log_likelihoods for s in after
        ]
        forced = engine.snapshot()
        found = _ratios(steps, labels)
        engine.metrics.reset()
        engine.generate(texts, NEW_TOKENS[device], ignore_eos=True)
        served = engine.snapshot()
        found += _scalars(forced, served, asked, equal, labels)
        found += _memory(served, base, device, labels)
    return found


def _alternate(
    engine: Engine, layout: str, seed: int, device: str, texts: list[list[int]]
) -> tuple[dict[str, list[StepRecord]], dict[str, int]]:
    """Steps with changes and without, in turns."""
    n_phases, n_steps = PHASES[device]
    rng = np.random.default_rng([seed, 5])
    n_new = 2 * n_phases * n_steps + 8
    requests = [engine.submit(text, n_new, ignore_eos=True) for text in texts]
    for _ in range(8):
        engine.step()
    steps: dict[str, list[StepRecord]] = {"on": [], "off": []}
    asked = {outcome.value: 0 for outcome in Outcome}
    for phase in range(2 * n_phases):
        kind = "off" if phase % 2 else "on"
        for _ in range(n_steps):
            if kind == "on":
                for action in _changes(engine, layout, rng):
                    asked[engine.residency.submit(action).value] += 1
            engine.step()
            steps[kind].append(engine.metrics.steps[-1])
        if kind == "on":  # what is under way belongs to this phase
            engine.residency.advance_copies()
    if engine.metrics.n_preemptions:
        raise RuntimeError("a request was sent back: steps are of different batches")
    for request in requests:
        engine.cancel(request)
    engine.step()
    return steps, asked


def _changes(engine: Engine, layout: str, rng: np.random.Generator) -> list[Action]:
    """Seeded wishes: swaps of two experts, or an expert down and another up."""
    residency = engine.residency
    n_bits, widest = residency.n_bits[:, :, 0], residency.widths[-1]
    narrow = residency.widths[0] if layout == "versions" else NARROW
    resting = ~residency.in_transition
    found = []
    for _ in range(CHANGES_PER_STEP // 2):
        layer = int(rng.integers(residency.n_layers))
        wide = np.flatnonzero((n_bits[layer] == widest) & resting[layer])
        slim = np.flatnonzero((n_bits[layer] == narrow) & resting[layer])
        if len(wide):
            found.append(Action(layer, int(rng.choice(wide)), (narrow, narrow)))
        if len(slim):
            found.append(Action(layer, int(rng.choice(slim)), (widest, widest)))
    return found


def _restore(engine: Engine, first: Any) -> None:
    """Bring every expert back to where it began, demotions first."""
    residency = engine.residency
    for _ in range(1000):
        residency.advance_copies()
        residency.publish()
        now = residency.n_bits
        if (now == first).all() and not residency.in_transition.any():
            return
        order = np.argsort(first.sum(axis=2) - now.sum(axis=2), axis=None, kind="stable")
        for flat in order:
            at = divmod(int(flat), residency.n_experts)
            if (now[at] != first[at]).any():
                residency.submit(Action(at[0], at[1], tuple(int(w) for w in first[at])))
        engine.step()
    raise RuntimeError("the first widths could not be restored")


def _ratios(steps: dict[str, list[StepRecord]], labels: dict[str, Any]) -> list[Measurement]:
    found = []
    for kind, records in steps.items():
        times = np.array([step.wall_s for step in records])
        p10, p50, p90, p99 = (float(v) for v in np.percentile(times, [10, 50, 90, 99]))
        found.append(
            Measurement(
                CLAIM, "measured", "step_s", significant(float(times.mean())), "s", n=len(times),
                p10=significant(p10), p50=significant(p50), p90=significant(p90),
                series=[significant(float(t), 4) for t in times],
                labels={**labels, "transitions": kind, "p99": significant(p99)},
            )
        )  # fmt: skip
    on, off = (np.array([s.wall_s for s in steps[kind]]) for kind in ("on", "off"))
    ratio = float(np.median(on) / np.median(off))
    waits = sum(step.weight_wait_s for records in steps.values() for step in records)
    return [
        *found,
        Measurement(CLAIM, "derived", "step_ratio_on_off", significant(ratio), "ratio",
                    n=len(on), labels=labels),
        Measurement(CLAIM, "measured", "weight_wait_s", significant(waits), "s", labels=labels),
    ]  # fmt: skip


def _scalars(
    forced: dict[str, Any],
    served: dict[str, Any],
    asked: dict[str, int],
    equal: bool,
    labels: dict[str, Any],
) -> list[Measurement]:
    residency, metrics = forced["residency"], served["metrics"]
    values: list[tuple[str, Any, str]] = [
        ("budget_bytes", forced["budget_bytes"], "bytes"),
        ("peak_used_bytes", served["residency"]["peak_used_bytes"], "bytes"),
        ("host_bytes", residency["host"]["bytes"], "bytes"),
        ("forced_wishes", sum(asked.values()), "count"),
        ("forced_accepted", asked["accepted"], "count"),
        (
            "changes_accepted",
            sum(residency["transitions"][k]["accepted"] for k in ("promotion", "demotion")),
            "count",
        ),
        ("changes_published", sum(residency["published"].values()), "count"),
        ("forced_bytes_moved", residency["bytes_moved"]["in"], "bytes"),
        ("restored_bit_for_bit", equal, "bool"),
        (
            "policy_published",
            sum(served["residency"]["published"].values()) - sum(residency["published"].values()),
            "count",
        ),
        ("policy_weight_wait_s", significant(metrics["weight_wait_s"]), "s"),
        ("kv_stalls", metrics["n_kv_stalls"], "request steps"),
        ("preemptions", metrics["n_preemptions"], "count"),
        ("prefill_tokens_per_s", significant(metrics["prefill_tokens_per_s"]), "tokens/s"),
        ("decode_tokens_per_s", significant(metrics["decode_tokens_per_s"]), "tokens/s"),
    ]
    found = [
        Measurement(CLAIM, "measured", name, value, unit, labels=labels)
        for name, value, unit in values
    ]
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        numbers = metrics[name]
        found.append(
            Measurement(
                CLAIM, "measured", name, significant(numbers["mean"]), "s", n=numbers["n"],
                p50=significant(numbers["p50"]),
                labels={**labels, "p99": significant(numbers["p99"])},
            )
        )  # fmt: skip
    return found


def _memory(
    served: dict[str, Any], base: int, device: str, labels: dict[str, Any]
) -> list[Measurement]:
    """Device memory by the library's and the driver's figures, beside our ledger."""
    if device != "cuda":
        return []
    driver, fixed = served["driver"], served["fixed_bytes"]
    ledger = served["budget_bytes"] + fixed["dense_weights"] + fixed["expert_biases"]
    values = [
        ("device_ledger_bytes", ledger),
        ("device_workspace_bytes", fixed["workspace"]),
        ("device_peak_bytes", driver["peak_allocated_bytes"] - base),
        ("device_driver_bytes", driver["driver_used_bytes"]),
    ]
    return [
        Measurement(CLAIM, "measured", name, int(value), "bytes", labels=labels)
        for name, value in values
    ]
