"""KV pressure: requests grow to four times the memory that KV cache began with.

The one idea: the same requests, at the same concurrency throughout, on the same budget, served
by weights that give way (PagedWeight) and by weights that do not (static at the same starting
width).  The first must finish all without sending one back; what it pays in bits, and that it
gets them back, is recorded step by step.

Everything is decided on a step clock and copied at step boundaries, so bits and blocks repeat to
the last one; only times are of this machine.  Quality is measured afterwards: widths of sampled
steps are set up in an engine that has room, and fixed texts are scored with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.contract import Action
from repro.experiments import serving_setup as setup
from repro.experiments.grids import grid_record, significant
from repro.profiles import Profile
from repro.reporting.records import Measurement, Record, RecordStore
from repro.serving import Engine, Request
from repro.serving.clocks import StepClock
from repro.workloads.tokens import bits_per_byte

EXPERIMENT = "kv-pressure"
CLAIM = "PagedWeight: weights give memory to the KV cache"
MODEL = "moe-fine"
POLICIES = ("pagedweight", "static")
GROWTH = 4  # KV blocks at the end over KV blocks at the start
N_REQUESTS = 12
BLOCKS_AT_START = 2  # of each request
PROMPT_TOKENS = 8
SAMPLES = 14  # steps whose widths are kept and scored
TEXTS, TEXT_TOKENS = 4, 192
QUIET_STEPS = 400  # without requests, for bits to come back
LIMIT_STEPS = 4000
SOURCES = ("repro.experiments.serving_pressure", *setup.SOURCES)

Bits = npt.NDArray[np.int8]


def run(
    profile: Profile,
    store: RecordStore,
    *,
    device: str = "cpu",
    force: bool = False,
    source: str = "embedded",
) -> list[Record]:
    """One point per policy.

    Raises:
        DataUnavailableError: the model or its text cannot be read from here.
    """
    records: list[Record] = []
    for policy in POLICIES:
        config = {
            **setup.identity(profile, MODEL, source, device),
            "policy": policy,
            "growth": GROWTH,
            "n_requests": N_REQUESTS,
            "prompt_tokens": PROMPT_TOKENS,
            "scored_texts": TEXTS,
            "scored_tokens": TEXT_TOKENS,
        }
        measure = partial(measure_pressure, profile, policy, device, source)
        records.extend(
            store.measure_or_load(
                EXPERIMENT, config, measure, sources=SOURCES, force=force, device=device
            )
        )
    store.prune(EXPERIMENT, source=source, device=device)
    return records


@dataclass
class Timeline:
    """What was seen after every step."""

    free_blocks: list[int] = field(default_factory=list)
    blocks_in_use: list[int] = field(default_factory=list)
    weight_bytes: list[int] = field(default_factory=list)
    used_bytes: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    n_ended: list[int] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    bits: list[Bits] = field(default_factory=list)

    def note(self, engine: Engine, step_s: float) -> None:
        """Look at the engine between two steps."""
        snapshot = engine.snapshot()
        residency, kv = snapshot["residency"], snapshot["kv"]
        self.free_blocks.append(kv["free_blocks"])
        self.blocks_in_use.append(kv["blocks_in_use"])
        self.weight_bytes.append(residency["pools"]["planes"]["used_bytes"])
        self.used_bytes.append(residency["used_bytes"])
        self.running.append(snapshot["requests"]["running"])
        self.n_ended.append(sum(snapshot["metrics"]["n_finished"].values()))
        self.step_s.append(step_s)
        self.bits.append(engine.residency.n_bits)

    def least_running(self) -> int:
        """Fewest requests in memory between the first step and the first end of one."""
        last = next((i for i, n in enumerate(self.n_ended) if n), len(self.n_ended))
        return min(self.running[1:last])

    @property
    def mean_bits(self) -> list[float]:
        """Of all blocks."""
        return [float(bits.mean()) for bits in self.bits]


def measure_pressure(profile: Profile, policy: str, device: str, source: str) -> list[Measurement]:
    """Serve, watch, wait for bits to come back, compare with an untouched engine."""
    line = Timeline()
    with _engine(policy, device) as engine, _unannounced():
        block_tokens = engine.snapshot()["kv"]["block_tokens"]
        n_new = GROWTH * BLOCKS_AT_START * block_tokens - PROMPT_TOKENS
        prompts = setup.prompts(profile, MODEL, source, N_REQUESTS, PROMPT_TOKENS)
        first = engine.residency.n_bits
        requests = [engine.submit(p, n_new, ignore_eos=True) for p in prompts]
        line.note(engine, 0.0)
        while any(r.finish_reason is None for r in requests):
            start = time.perf_counter()
            engine.step()
            line.note(engine, time.perf_counter() - start)
            if len(line.bits) > LIMIT_STEPS:
                raise RuntimeError(f"not finished after {LIMIT_STEPS} steps")
        served = len(line.bits)
        for _ in range(QUIET_STEPS):
            if (engine.residency.n_bits == first).all():
                break
            engine.step()
            line.note(engine, 0.0)
        equal = (engine.residency.n_bits == first).all() and _scores_alike(
            engine, policy, profile, device, source
        )
        snapshot = engine.snapshot()
    found = _scalars(policy, line, served, requests, snapshot, bool(equal))
    found += _series(policy, line, served)
    if policy == "pagedweight":
        found += _quality(profile, device, source, line, served)
    return found


@contextmanager
def _unannounced() -> Iterator[None]:
    """Preemptions are counted here, so they need not be announced one by one."""
    logger = logging.getLogger("repro.serving")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _engine(policy: str, device: str, **options: Any) -> Engine:
    """All weights at full width, and a KV cache of exactly the blocks it begins with."""
    with setup.engine(MODEL, "planes", device, policy="static") as probe:
        snapshot = probe.snapshot()
        widest = snapshot["residency"]["pools"]["planes"]["used_bytes"]
        block = snapshot["kv"]["block_bytes"]
    kv_bytes = N_REQUESTS * BLOCKS_AT_START * block
    staging = 64 * probe_page(block)
    budget = widest + kv_bytes + staging + 4 * block
    return setup.engine(
        MODEL, "planes", device, policy=policy, budget_bytes=budget, kv_bytes=kv_bytes,
        staging_bytes=staging, max_running=N_REQUESTS, clock=StepClock(), worker="manual",
        **options,
    )  # fmt: skip


def probe_page(block_bytes: int) -> int:
    """A size that every page size divides, small against a block."""
    return max(1024, block_bytes // 64)


def _scores_alike(engine: Engine, policy: str, profile: Profile, device: str, source: str) -> bool:
    """Fresh texts in the same batches score alike to the last bit in an untouched engine."""
    texts = setup.prompts(profile, MODEL, source, TEXTS, TEXT_TOKENS)
    with engine.frozen():
        found = engine.score(texts)
    with _engine(policy, device) as untouched, untouched.frozen():
        expected = untouched.score(texts)
    return [s.token_log_likelihoods for s in found] == [s.token_log_likelihoods for s in expected]


def _scalars(
    policy: str,
    line: Timeline,
    served: int,
    requests: list[Request],
    snapshot: dict[str, Any],
    equal: bool,
) -> list[Measurement]:
    budget = snapshot["budget_bytes"]
    at_start = N_REQUESTS * BLOCKS_AT_START
    lent = 1.0 - min(line.weight_bytes) / line.weight_bytes[0]
    metrics, residency = snapshot["metrics"], snapshot["residency"]
    finished = sum(r.finish_reason == "length" for r in requests)
    values: list[tuple[str, Any, str]] = [
        ("budget_bytes", budget, "bytes"),
        ("peak_used_bytes", max(line.used_bytes), "bytes"),
        ("kv_blocks_at_start", at_start, "blocks"),
        ("peak_kv_blocks", max(line.blocks_in_use), "blocks"),
        ("lent_share_at_peak", significant(lent), "share"),
        ("lowest_mean_bits", significant(min(line.mean_bits)), "bits"),
        ("final_mean_bits", significant(line.mean_bits[-1]), "bits"),
        ("first_mean_bits", significant(line.mean_bits[0]), "bits"),
        ("requests_finished", finished, "requests"),
        ("concurrent_throughout", line.least_running(), "requests"),
        ("preemptions", metrics["n_preemptions"], "count"),
        ("kv_stalls", metrics["n_kv_stalls"], "request steps"),
        ("steps", served - 1, "steps"),
        ("promotions", residency["published"]["promotions"], "count"),
        ("demotions", residency["published"]["demotions"], "count"),
        ("restored_bit_for_bit", equal, "bool"),
    ]
    labels = {"policy": policy}
    return [
        Measurement(CLAIM, "measured", name, value, unit, n=N_REQUESTS, labels=labels)
        for name, value, unit in values
    ]


def _series(policy: str, line: Timeline, served: int) -> list[Measurement]:
    series: dict[str, tuple[str, list[Any]]] = {
        "free_blocks": ("blocks", line.free_blocks),
        "blocks_in_use": ("blocks", line.blocks_in_use),
        "weight_bytes": ("bytes", line.weight_bytes),
        "used_bytes": ("bytes", line.used_bytes),
        "mean_bits": ("bits", [significant(b, 4) for b in line.mean_bits]),
        "running": ("requests", line.running),
        "step_s": ("s", [significant(s, 4) for s in line.step_s[:served]]),
    }
    labels = {"policy": policy, "served_steps": served}
    return [
        Measurement(CLAIM, "measured", name, None, unit, series=values, labels=labels)
        for name, (unit, values) in series.items()
    ]


def _quality(
    profile: Profile, device: str, source: str, line: Timeline, served: int
) -> list[Measurement]:
    """Widths of sampled steps, and what fixed texts cost with them."""
    samples = np.unique(np.linspace(0, len(line.bits) - 1, SAMPLES).round().astype(int))
    samples = np.unique(np.append(samples, int(np.argmin(line.mean_bits))))
    texts = setup.prompts(profile, MODEL, source, TEXTS, TEXT_TOKENS)
    n_bytes = setup.scored_bytes(MODEL, texts)
    costs = []
    options = {"policy": "static", "clock": StepClock(), "worker": "manual"}
    with setup.engine(MODEL, "planes", device, **options) as engine, engine.frozen():
        for step in samples:
            set_widths(engine, line.bits[step])
            nats = -sum(score.log_likelihood for score in engine.score(texts))
            costs.append(bits_per_byte(nats, n_bytes))
    layers, experts, blocks = line.bits[0].shape
    labels: dict[str, Any] = {"policy": "pagedweight", "served_steps": served}
    steps = [str(step) for step in samples]
    by_block = [line.bits[step].reshape(-1) for step in samples]
    return [
        Measurement(
            CLAIM, "measured", "bits_per_byte", significant(max(costs) - costs[0]), "bits per byte",
            n=n_bytes, series=[significant(c) for c in costs],
            labels={**labels, "sampled_steps": [int(s) for s in samples]},
        ),
        grid_record(
            CLAIM, "block_bits", steps, "block", by_block, n=layers * experts * blocks,
            unit="bits", layers=layers, **labels,
        ),
    ]  # fmt: skip


def set_widths(engine: Engine, n_bits: Bits) -> None:
    """Bring every expert to these widths, copies included."""
    residency = engine.residency
    for layer, expert in zip(*np.nonzero((residency.n_bits != n_bits).any(axis=2)), strict=True):
        widths = tuple(int(w) for w in n_bits[layer, expert])
        residency.submit(Action(int(layer), int(expert), widths))
    residency.advance_copies()
    residency.publish()
    if not (residency.n_bits == n_bits).all():
        raise RuntimeError("the widths could not be set: the engine has no room for them")
