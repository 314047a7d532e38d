"""A promotion while serving: what happens when, on a link so slow that steps overtake it.

The one idea: asynchrony is shown, not asserted.  The link is throttled until one copy takes as
long as several steps; a batch decodes on, and every step notes its time and the width of the
expert that is being changed.  Steps must go on at their pace on the old version until the
copy is complete, then the new one is read, then the old one's pages are free.

Both layouts: a second version (DynaExq) and further planes (PagedWeight).  Times are of this
machine; what is claimed is order and pace.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from repro.contract import Action, Outcome, State
from repro.experiments import serving_setup as setup
from repro.experiments.grids import significant
from repro.profiles import Profile
from repro.reporting.records import Measurement, Record, RecordStore
from repro.residency import SlowLink
from repro.serving import Engine

EXPERIMENT = "transitions"
CLAIM = "DynaExq 4: the forward path does not wait"
PICTURE = "DynaExq Figure 4"
MODEL = "moe-fine"
BATCH = 4
PROMPT_TOKENS = 24
STEPS_OF_A_COPY = 20  # the link is throttled until a copy takes as long as so many steps
BEFORE, AFTER = 24, 24  # steps on either side
FAST = 1e12  # bytes per second: no throttle
SOURCES = ("repro.experiments.serving_transitions", *setup.SOURCES)
WIDTHS = {"planes": (3, 8), "versions": (4, 16)}


def run(
    profile: Profile,
    store: RecordStore,
    *,
    device: str = "cpu",
    force: bool = False,
    source: str = "embedded",
) -> list[Record]:
    """One point per layout.

    Raises:
        DataUnavailableError: the model or its text cannot be read from here.
    """
    records: list[Record] = []
    for layout in setup.LAYOUTS:
        config = {
            **setup.identity(profile, MODEL, source, device),
            "layout": layout,
            "batch_size": BATCH,
            "prompt_tokens": PROMPT_TOKENS,
            "steps_of_a_copy": STEPS_OF_A_COPY,
        }
        measure = partial(measure_promotion, profile, layout, device, source)
        records.extend(
            store.measure_or_load(
                EXPERIMENT, config, measure, sources=SOURCES, force=force, device=device
            )
        )
    store.prune(EXPERIMENT, source=source, device=device)
    return records


class WatchedLink(SlowLink):
    """Notes when its first copy began and its last one ended, since it was made or reset."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s)
        self.reset()

    def reset(self) -> None:
        """Forget what was copied."""
        self.began: float | None = None
        self.ended: float | None = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """As a slow link does."""
        self.began = self.began or time.perf_counter()
        super().copy(target, source)
        self.ended = time.perf_counter()


class Watch:
    """Steps of an engine with their times and what they read of one expert."""

    def __init__(self, engine: Engine, layer: int, expert: int) -> None:
        self._engine = engine
        self._at = (layer, expert)
        self.start = time.perf_counter()
        self.began: list[float] = []
        self.ended: list[float] = []
        self.widths: list[int] = []
        self.states: list[State] = []

    def now(self) -> float:
        """Seconds since the watch began."""
        return time.perf_counter() - self.start

    def step(self) -> None:
        """One step; what is published at its boundary is what it reads."""
        self.began.append(self.now())
        self._engine.step()
        self.ended.append(self.now())
        residency = self._engine.residency
        self.widths.append(int(residency.n_bits[(*self._at, 0)]))
        self.states.append(residency.state(*self._at))

    def pace(self, first: int, last: int) -> np.ndarray[Any, Any]:
        """Durations of steps ``first`` to ``last``."""
        return np.asarray(self.ended[first:last]) - np.asarray(self.began[first:last])


def measure_promotion(profile: Profile, layout: str, device: str, source: str) -> list[Measurement]:
    """Decode; promote one expert over a slow link; decode on until its old pages are free."""
    low, high = WIDTHS[layout]
    link = WatchedLink(FAST)
    options: dict[str, Any] = {"link": link, "max_running": BATCH}
    if layout == "planes":
        options |= {"policy": "static", "n_bits": high}
    with setup.engine(MODEL, layout, device, **options) as engine, engine.frozen():
        layer, expert = _start_low(engine, layout, low)
        texts = setup.prompts(profile, MODEL, source, BATCH, PROMPT_TOKENS)
        n_new = BEFORE + 6 * STEPS_OF_A_COPY + AFTER
        for text in texts:
            engine.submit(text, n_new, ignore_eos=True)
        for _ in range(8):  # prompts, and the first steps of a warm process
            engine.step()
        watch = Watch(engine, layer, expert)
        for _ in range(BEFORE):
            watch.step()
        usual = float(np.median(watch.pace(0, BEFORE)))
        moved = engine.residency.snapshot()["bytes_moved"]["in"]
        link.bytes_per_s = _incoming_bytes(engine, layer, low, high) / (STEPS_OF_A_COPY * usual)
        link.reset()
        asked = watch.now()
        outcome = engine.residency.submit(Action(layer, expert, (high, high)))
        if outcome is not Outcome.ACCEPTED:
            raise RuntimeError(f"the promotion was {outcome.value}")
        while watch.widths[-1] != high and len(watch.began) < BEFORE + 5 * STEPS_OF_A_COPY:
            watch.step()
        assert link.began is not None and link.ended is not None
        copied = (link.began - watch.start, link.ended - watch.start)
        link.bytes_per_s = FAST
        for _ in range(AFTER):
            watch.step()
        moved = engine.residency.snapshot()["bytes_moved"]["in"] - moved
        waits = sum(step.weight_wait_s for step in engine.metrics.steps)
        state = _busy_state(engine, link, low, high) if layout == "versions" else None
    found = _summary(layout, watch, asked, copied, moved, waits, high)
    if state is not None:
        labels = {"layout": layout, "snapshot": state}
        found.append(Measurement(PICTURE, "measured", "engine_state", None, "state", labels=labels))
    return found


def _busy_state(engine: Engine, link: SlowLink, low: int, high: int) -> dict[str, Any]:
    """A snapshot with several changes under way: what DynaExq's Figure 4 is drawn from."""
    residency = engine.residency
    link.bytes_per_s = 1e5  # far slower than the step in which the picture is taken
    layer = residency.n_layers // 2
    widths = residency.n_bits[layer, :, 0]
    pairs = zip(np.flatnonzero(widths == high), np.flatnonzero(widths == low), strict=False)
    for wide, narrow in list(pairs)[:3]:
        residency.submit(Action(layer, int(wide), (low, low)))
        residency.submit(Action(layer, int(narrow), (high, high)))
    engine.step()
    found = engine.snapshot()
    link.bytes_per_s = FAST
    kept = ("capacity_bytes", "used_bytes", "pools", "n_bits", "states", "host", "worker",
            "staging", "page_bytes", "layout", "published")  # fmt: skip
    state = {name: found["residency"][name] for name in kept}
    return {
        **state,
        "policy": found["policy"]["name"],
        "format": found["format"],
        "kv": found["kv"],
        "fixed_bytes": found["fixed_bytes"]["total"],
        "running": found["requests"]["running"],
    }


def _start_low(engine: Engine, layout: str, low: int) -> tuple[int, int]:
    """An expert of a middle layer, brought to the low width."""
    residency = engine.residency
    layer = residency.n_layers // 2
    at_low = np.flatnonzero(residency.n_bits[layer, :, 0] == low)
    expert = int(at_low[0]) if len(at_low) else 0
    if layout == "versions":  # leave room for one more high version
        high = int(np.flatnonzero(residency.n_bits[layer, :, 0] != low)[0])
        residency.submit(Action(layer, high, (low, low)))
    else:
        residency.submit(Action(layer, expert, (low, low)))
    residency.advance_copies()
    residency.publish()
    return layer, expert


def _incoming_bytes(engine: Engine, layer: int, low: int, high: int) -> int:
    """What a promotion brings in: planes that are missing and a table, or a whole version."""
    total = 0
    for block in range(2):
        payload = engine.residency.payload(layer, block)
        here = set(payload.parts(low))
        total += sum(part.n_bytes for part in payload.parts(high) if part not in here)
    return total


def _summary(
    layout: str,
    watch: Watch,
    asked: float,
    copied: tuple[float, float],
    moved: int,
    waits: float,
    high: int,
) -> list[Measurement]:
    published = next((i for i, w in enumerate(watch.widths) if w == high), len(watch.widths))
    resident = next(
        (i for i in range(published, len(watch.states)) if watch.states[i] is State.RESIDENT),
        len(watch.states) - 1,
    )
    during = published - BEFORE
    labels = {"layout": layout}

    def one(metric: str, value: Any, unit: str, **more: Any) -> Measurement:
        return Measurement(CLAIM, "measured", metric, value, unit, labels=labels, **more)

    found = [
        one("steps_on_old_version", during, "steps"),
        one("weight_wait_s", significant(waits), "s"),
        one("bytes_moved", moved, "bytes"),
        one("submitted_s", significant(asked), "s"),
        one("copy_began_s", significant(copied[0]), "s"),
        one("copy_ended_s", significant(copied[1]), "s"),
        one("published_s", significant(watch.began[published]), "s"),
        one("reclaimed_s", significant(watch.ended[resident]), "s"),
        one("step_began_s", None, "s", series=[significant(t) for t in watch.began]),
        one("step_ended_s", None, "s", series=[significant(t) for t in watch.ended]),
        one("step_width", None, "bits", series=watch.widths),
    ]
    for name, first, last in (
        ("before", 0, BEFORE),
        ("during", BEFORE, published),
        ("after", published, len(watch.began)),
    ):
        pace = watch.pace(first, last)
        if len(pace):
            p10, p50, p90 = (significant(float(v)) for v in np.percentile(pace, [10, 50, 90]))
            found.append(one(f"step_s_{name}", p50, "s", n=len(pace), p10=p10, p50=p50, p90=p90))
    return found
