"""Quality against bytes: what every format loses, and what it weighs with everything counted.

The one idea: formats are compared at equal bytes, not at equal widths.  Bytes are those of
all experts with planes, codes, tables and scales; quality is the rise of the mean loss of
fixed windows over that of the unchanged weights.  Between two neighbouring widths of one
kind of table the loss is interpolated linearly in bytes: a model may keep some blocks at one
width and the rest at the next.

Every group-affine point up to ``LIMIT_BITS`` is compared with the any-precision curve at
its own bytes, window by window, so that the interval (a bootstrap over windows) is that of
the difference.  The second curve takes, at each size, the table sharing that loses least.

On a CPU a part of the formats is measured (``CPU_FORMATS``), on a GPU all of them.
Beside the curve stand :mod:`repro.experiments.format_bytes`: bytes at published dimensions,
unused bytes of pages, speed of encoding.

Letters: P windows, S points (format and width), W widths, G tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.calibration.blocks import block_weights
from repro.calibration.statistics import importance
from repro.contract import Block
from repro.experiments import evaluation, format_bytes, statistics
from repro.experiments.evaluation import Evaluation, Stacks, expert_bytes, n_weights
from repro.formats.encoded import EncodedStack
from repro.profiles import Profile
from repro.reporting.records import Measurement, Record, RecordStore

EXPERIMENT = "format-curve"
CLAIM = "Formats: quality against bytes"
LIMIT_BITS = 4.5  # bits per weight up to which formats are compared
NESTED = "any-precision"  # names that begin so have a curve over widths
DEFAULT, BEST = "any-precision", "best of all tables"
CURVES = (DEFAULT, BEST)
WIDTHS = (2, 3, 4, 5, 6, 8)
NARROW = (2, 3, 4)
SOURCES = ("repro.experiments.format_curve", "repro.experiments.statistics", *evaluation.SOURCES)

Formats = dict[str, tuple[int, ...]]
Losses = npt.NDArray[np.float64]


def _integers(widths: Sequence[int], groups: Sequence[int], suffix: str = "") -> Formats:
    return {f"int{b}-g{g}{suffix}": (b,) for b in widths for g in groups}


ALL_FORMATS: Formats = {
    "fp16": (16,),
    "bf16": (16,),
    **dict.fromkeys((NESTED, "any-precision-r1", "any-precision-r16", "any-precision-r0"), WIDTHS),
    **_integers(NARROW, (128, 64, 32)),
    **_integers(NARROW, (128, 64, 32), "-asym"),
    **_integers((8,), (128,)),
    **_integers(NARROW, (64, 32), "-gptq"),
}
CPU_FORMATS: Formats = {
    "bf16": (16,),
    NESTED: WIDTHS,
    "any-precision-r1": NARROW,
    **_integers(NARROW, (128, 64, 32)),
    **_integers((3,), (64,), "-asym"),
    **_integers((3,), (64,), "-gptq"),
}
FORMATS = {"cpu": CPU_FORMATS, "cuda": ALL_FORMATS}


@dataclass(frozen=True)
class Point:
    """One format at one width."""

    name: str
    n_bits: int
    n_bytes: int  # of all experts
    bits_per_weight: float
    losses: Mapping[str, Losses]  # mean loss of each window [P], by domain

    @property
    def label(self) -> str:
        """``any-precision@3``; a format of one width is its name."""
        return f"{self.name}@{self.n_bits}" if self.name.startswith(NESTED) else self.name


def run(
    profile: Profile,
    store: RecordStore,
    *,
    device: str = "cpu",
    force: bool = False,
    source: str = "embedded",
) -> list[Record]:
    """One point per model, and the points of :mod:`repro.experiments.format_bytes`.

    Raises:
        UnknownNameError: no such source.
        DataUnavailableError: a model or a workload cannot be read from here.
    """
    if device == "cpu":
        torch.set_num_threads(profile.n_threads)
    records: list[Record] = []

    def point(config: dict[str, Any], fn: Callable[[], list[Measurement]], *more: str) -> None:
        records.extend(
            store.measure_or_load(
                EXPERIMENT, config, fn, sources=(*SOURCES, *more), force=force, device=device
            )
        )

    for model in profile.models:
        measured = Evaluation(profile, model, device=device, source=source)
        texts = {
            name: measured.workload_identity(name)["workload_sha256"]
            for name in measured.workloads.values()
        }
        config = {
            **measured.identity(),
            "workloads_sha256": texts,
            "eval_prompts": profile.eval_prompts,
            "eval_tokens": profile.eval_tokens,
            "bootstrap_samples": profile.bootstrap_samples,
        }
        point(config, partial(measure_model, measured))
    place = {"source": source, "device": device, "seed": profile.seed}
    for config, fn in format_bytes.points(profile, device):
        point(place | config, fn, *format_bytes.SOURCES)
    store.prune(EXPERIMENT, source=source, device=device)
    return records


def measure_model(model: Evaluation, formats: Formats | None = None) -> list[Measurement]:
    """All formats on all domains of one model."""
    profile = model.profile
    windows = {
        domain: model.windows(name, profile.eval_prompts, profile.eval_tokens)
        for domain, name in model.workloads.items()
    }
    reference = _losses(model, windows)
    points: list[Point] = []
    found: list[Measurement] = []
    for name, widths in (formats or FORMATS[model.device]).items():
        stacks = model.encode(name)
        if name.startswith(NESTED):
            found.append(falling(model, name, stacks))
        for n_bits in widths:
            with model.restored():
                model.put(stacks, n_bits)
                losses = _losses(model, windows)
            size = expert_bytes(stacks, n_bits)
            points.append(Point(name, n_bits, size, 8 * size / n_weights(stacks), losses))
    labels = {"points": [point.label for point in points], "n_weights": n_weights(stacks)}
    found.append(
        Measurement(CLAIM, "derived", "expert_bytes", None, "bytes", labels=labels,
                    series=[point.n_bytes for point in points])
    )  # fmt: skip
    for domain, name in model.workloads.items():
        where = {
            **model.workload_identity(name),
            "windows": len(windows[domain]),
            "window_tokens": windows[domain].shape[1],
        }
        rng = np.random.default_rng([profile.seed, *name.encode()])
        draws = statistics.resample(len(windows[domain]), profile.bootstrap_samples, rng)
        found += increases(points, reference[domain], domain, draws, where)
        found += comparisons(points, domain, draws, where)
    return found


def _losses(model: Evaluation, windows: Mapping[str, Tensor]) -> dict[str, Losses]:
    return {domain: model.token_losses(ids).mean(axis=1) for domain, ids in windows.items()}


def increases(
    points: Sequence[Point],
    reference: Losses,
    domain: str,
    draws: npt.NDArray[np.float64],
    where: Mapping[str, Any],
) -> list[Measurement]:
    """Rise of the loss at every point, and its interval: rows of one series."""
    rises = [_with_interval(point.losses[domain] - reference, draws) for point in points]
    labels = {**where, "points": [point.label for point in points], "rows": list(ROWS)}
    return [
        Measurement(CLAIM, "measured", "reference_loss", float(reference.mean()), "nats per token",
                    n=len(reference), labels=where),
        Measurement(CLAIM, "measured", "loss_increase", None, "nats per token",
                    n=len(reference), series=_rows(rises), labels=labels),
    ]  # fmt: skip


ROWS = ("value", "low", "high")
"""What a series of points holds: all values, then all lower and all upper interval ends."""


def _rows(triples: Sequence[tuple[float, float, float]]) -> list[float]:
    return [float(f"{triple[row]:.6g}") for row in range(len(ROWS)) for triple in triples]


def _with_interval(
    differences: Losses, draws: npt.NDArray[np.float64]
) -> tuple[float, float, float]:
    """Mean of paired differences ``[P]`` and its bootstrap interval."""
    value = float(differences.mean())
    if (differences == differences[0]).all():
        return value, value, value
    means = draws @ differences / len(differences)
    tail = (1 - statistics.LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return value, float(low), float(high)


def at_bytes(points: Sequence[Point], n_bytes: int, domain: str) -> Losses | None:
    """Losses ``[P]`` of one format at a size between those of two of its widths.

    None outside of what was measured: nothing is extrapolated.
    """
    ordered = sorted(points, key=lambda point: point.n_bytes)
    for below, above in zip(ordered[:-1], ordered[1:], strict=True):
        if below.n_bytes <= n_bytes <= above.n_bytes:
            share = (n_bytes - below.n_bytes) / (above.n_bytes - below.n_bytes)
            return (1 - share) * below.losses[domain] + share * above.losses[domain]
    return None


def comparisons(
    points: Sequence[Point],
    domain: str,
    draws: npt.NDArray[np.float64],
    where: Mapping[str, Any],
) -> list[Measurement]:
    """Loss of each any-precision curve less that of each group-affine point, at its bytes."""
    families: dict[str, list[Point]] = {}
    for point in points:
        if point.name.startswith(NESTED):
            families.setdefault(point.name, []).append(point)
    others = [
        p for p in points if p.name.startswith("int") and p.bits_per_weight <= LIMIT_BITS
    ]  # fmt: skip
    found = []
    for curve in CURVES:
        chosen = families if curve == BEST else {curve: families.get(curve, [])}
        compared, triples = [], []
        for other in others:
            curves = (at_bytes(family, other.n_bytes, domain) for family in chosen.values())
            known = [losses for losses in curves if losses is not None]
            if known:
                best = min(known, key=lambda losses: float(losses.mean()))
                compared.append(other.label)
                triples.append(_with_interval(best - other.losses[domain], draws))
        if compared:
            labels = {**where, "curve": curve, "points": compared, "rows": list(ROWS)}
            found.append(
                Measurement(CLAIM, "measured", "curve_difference", None, "nats per token",
                            n=draws.shape[1], series=_rows(triples), labels=labels)
            )  # fmt: skip
    return found


RISE = 1e-3  # of an error, that rounding a table to float16 may cause
FLOOR = 1e-6  # of the mean square: below it only that rounding is left


def falling(model: Evaluation, name: str, stacks: Stacks) -> Measurement:
    """Whether the error of every look-up table falls with each further bit.

    The value counts tables with a width at which it does not; the series is the relative
    (weighted) squared error of all tables together at 2, 3, ..., 8 bits.
    """
    not_falling = n_tables = 0
    total: Tensor | None = None
    for layer in model.layers:
        layer_statistics = model.calibration.layer(layer.layer_index)
        for block, weight in zip(Block, block_weights(layer.module), strict=True):
            matters = importance(layer_statistics, block).to(weight.device)
            stack = stacks[layer.layer_index][block]
            errors, power = table_errors(stack, weight.detach(), matters)
            before, after = errors[..., :-1], errors[..., 1:]
            rises = (after > (1 + RISE) * before) & (after > FLOOR * power[..., None])
            not_falling += int(rises.any(dim=-1).sum())
            n_tables += power.numel()
            relative = torch.cat([errors, power[..., None]], dim=-1).flatten(0, -2).sum(dim=0)
            total = relative if total is None else total + relative
    assert total is not None  # a model without experts is refused when it is loaded
    series = [float(f"{value:.6g}") for value in (total[:-1] / total[-1]).tolist()]
    return Measurement(
        CLAIM, "measured", "tables_not_falling", not_falling, "tables", n=n_tables, series=series,
        labels={"format": name, "widths": list(stack.widths)},
    )  # fmt: skip


def table_errors(stack: EncodedStack, weight: Tensor, matters: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted squared errors ``[E, G, W]`` of the values of each table, and squares ``[E, G]``."""
    scheme = stack.scheme
    missing = scheme.n_groups * scheme.rows_per_lut - scheme.n_rows

    def by_table(squares: Tensor) -> Tensor:
        rows = (squares * matters).to(torch.float64).sum(dim=-1)
        padded = torch.nn.functional.pad(rows, (0, missing))
        return padded.unflatten(-1, (scheme.n_groups, -1)).sum(dim=-1)

    errors = [by_table((stack.decode(n_bits) - weight).square()) for n_bits in stack.widths]
    return torch.stack(errors, dim=-1), by_table(weight.to(torch.float32).square())
