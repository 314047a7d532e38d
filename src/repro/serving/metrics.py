"""What a user of a server feels, in the field's terms.

TTFT is the time from arrival to the first token, TPOP (time per output token, also TPOT) the
mean time of each further one, end-to-end the time from arrival to the last.  Throughput of
prefill and decode counts tokens of steps that did only that, over their time.

Waiting is kept apart by its cause: for weights (the forward pass stood still until a copy was
there; zero by design for every policy but offloading) and for KV memory (a request could not
take part in a step).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from repro.serving.request import Completion


@dataclass(frozen=True)
class StepRecord:
    """One step of the engine."""

    number: int
    kind: str  # "prefill", "decode" or "mixed"
    n_requests: int
    n_tokens: int  # real ones
    wall_s: float
    weight_wait_s: float
    n_stalled: int  # running requests left out for want of KV memory


def summary(values: Iterable[float]) -> dict[str, float]:
    """Mean, median, 99th percentile and number; without values only the number."""
    array = np.asarray([v for v in values if not np.isnan(v)], dtype=np.float64)
    if not len(array):
        return {"n": 0}
    p50, p99 = np.percentile(array, [50, 99])
    return {"n": len(array), "mean": float(array.mean()), "p50": float(p50), "p99": float(p99)}


@dataclass
class Metrics:
    """Accumulates; the engine writes, ``report`` reads."""

    steps: list[StepRecord] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    n_finished: dict[str, int] = field(default_factory=dict)
    n_preemptions: int = 0
    n_conversation_evictions: int = 0
    n_kv_stalls: int = 0  # request-steps
    idle_wait_s: float = 0.0  # nobody could run
    keep: int = 100_000  # of steps and of completions

    def add_step(self, record: StepRecord) -> None:
        """Count one step."""
        self.steps.append(record)
        self.n_kv_stalls += record.n_stalled
        if len(self.steps) > self.keep:
            del self.steps[: self.keep // 2]

    def add_completion(self, completion: Completion) -> None:
        """Count one finished request."""
        self.completions.append(completion)
        reason = completion.finish_reason
        self.n_finished[reason] = self.n_finished.get(reason, 0) + 1
        if len(self.completions) > self.keep:
            del self.completions[: self.keep // 2]

    def reset(self) -> None:
        """Forget everything, as after a warm-up."""
        fresh = Metrics(keep=self.keep)
        self.__dict__.update(fresh.__dict__)

    def _throughput(self, kind: str) -> float:
        steps = [s for s in self.steps if s.kind == kind]
        seconds = sum(s.wall_s for s in steps)
        return sum(s.n_tokens for s in steps) / seconds if seconds else float("nan")

    def report(self) -> dict[str, Any]:
        """JSON-able summary; times in seconds, throughput in tokens per second."""
        done = [c for c in self.completions if c.finish_reason in ("length", "stop", "eos")]
        numbers: dict[str, Any] = {
            "n_finished": dict(self.n_finished),
            "n_steps": len(self.steps),
            "ttft_s": summary(c.ttft_s for c in done),
            "tpot_s": summary(c.tpot_s for c in done),
            "e2e_s": summary(c.e2e_s for c in done),
            "step_s": summary(s.wall_s for s in self.steps if s.kind == "decode"),
            "weight_wait_s": sum(s.weight_wait_s for s in self.steps),
            "kv_stall_s": summary(c.kv_stall_s for c in self.completions),
            "n_kv_stalls": self.n_kv_stalls,
            "idle_wait_s": self.idle_wait_s,
            "n_preemptions": self.n_preemptions,
            "n_conversation_evictions": self.n_conversation_evictions,
        }
        for kind in ("prefill", "decode"):
            speed = self._throughput(kind)
            numbers[f"{kind}_tokens_per_s"] = None if np.isnan(speed) else speed
        return numbers
