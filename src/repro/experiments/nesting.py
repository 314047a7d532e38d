"""What nesting costs: the error of nested codes against exact codes of the same width.

The one idea: a nested code pays twice.  Its narrow codes are the top bits of wide ones, so a
cluster can only be split, never cut anew; and a table may be shared by rows.  Both are held
against the least error that any code with as many levels can have
(:mod:`repro.formats.exact`), row by row, with a table per row (the published format), shared
by 64 rows, and shared by all rows; the shared ones include what sharing costs.

Rows are Gaussian, Student-t with 5 degrees of freedom (both unweighted), and blocks of the
measured models joined to rows of 1,024, where every squared error counts as much as the mean
square of its input channel.  Blocks of one expert are one matrix, so "all rows" are its own.

Letters: E matrices, N rows, M values of a row, R rows per table (0: all), W widths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repro.calibration.blocks import block_weights
from repro.calibration.collect import collect
from repro.calibration.statistics import importance
from repro.contract import Block
from repro.experiments.evaluation import BATCH_TOKENS, Evaluation
from repro.experiments.traffic import model_digest
from repro.formats.any_precision import AnyPrecision
from repro.formats.exact import exact_errors
from repro.profiles import Profile
from repro.reporting.records import Measurement, Record, RecordStore

EXPERIMENT = "nesting"
CLAIM = "Nested codes against exact codes"
WIDTHS = (2, 3, 4, 5, 6)
TABLES = (1, 64, 0)  # rows per table; 0: all rows of the matrix
JOINED = 1024  # length of the rows that blocks are joined to
ROW_LENGTHS = {"cpu": (64, 256, 1024), "cuda": (64, 256, 1024, 2048)}
N_ROWS = {"cpu": 128, "cuda": 256}  # of a synthetic matrix; all are compared
SAMPLED_EXPERTS = {"cpu": 48, "cuda": 128}  # of a model; one row of each block is compared
# An exact code of 64 levels for 1,024 values is 63 times a million sums: on a CPU the widths
# beyond those that have a bound are compared on fewer rows.
NARROW = (2, 3, 4)
WIDE_ROWS = {"cpu": 16, "cuda": 256}
STUDENT_DEGREES = 5
VALUES_PER_LEVEL = 4  # fewer, and an exact code leaves (almost) no error to compare with
SOURCES = (
    "repro.experiments.nesting",
    "repro.formats.any_precision",
    "repro.formats.exact",
    "repro.formats.kmeans",
    "repro.formats.row_scales",
)


def run(
    profile: Profile,
    store: RecordStore,
    *,
    device: str = "cpu",
    force: bool = False,
    source: str = "embedded",
) -> list[Record]:
    """One point per distribution, and one per model with both of its blocks.

    Raises:
        UnknownNameError: no such source.
        DataUnavailableError: a model or a calibration text cannot be read from here.
    """
    if device == "cpu":
        torch.set_num_threads(profile.n_threads)
    records: list[Record] = []

    def point(config: dict[str, Any], fn: Callable[[], list[Measurement]]) -> None:
        shared = {"seed": profile.seed, "source": source, "device": device}
        records.extend(
            store.measure_or_load(
                EXPERIMENT, shared | config, fn, sources=SOURCES, force=force, device=device
            )
        )

    for data in ("gaussian", "student-t5"):
        point({"data": data}, partial(measure_rows, data, profile.seed, device))
    for model in profile.models:
        config = {
            "data": "blocks",
            "model": model,
            "model_digest": model_digest(model),
            "calibration_prompts": profile.calibration_prompts,
            "calibration_tokens": profile.calibration_tokens,
        }
        point(config, partial(measure_blocks, profile, model, device, source))
    store.prune(EXPERIMENT, source=source, device=device)
    return records


def draw(data: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random rows, float32, the same on every device."""
    rng = np.random.default_rng([seed, shape[-1], *data.encode()])
    numbers = rng.standard_normal(shape)
    if data == "student-t5":
        numbers = rng.standard_t(STUDENT_DEGREES, shape)
    return torch.from_numpy(numbers.astype(np.float32))


def measure_rows(data: str, seed: int, device: str) -> list[Measurement]:
    """One distribution at all row lengths, unweighted."""
    lengths = ROW_LENGTHS[device]
    n_rows = N_ROWS[device]
    errors = []
    for length in lengths:
        rows = draw(data, (1, n_rows, length), seed).to(device)
        # Short rows are cheap, and their ratios scatter more.
        n_wide = WIDE_ROWS[device] * max(1, JOINED // length)
        errors.append(compare(rows, torch.ones_like(rows), n_rows, n_wide))
    labels = {"weighted": False, "rows": n_rows}
    return summaries(lengths, errors, labels)


def measure_blocks(profile: Profile, model: str, device: str, source: str) -> list[Measurement]:
    """Both blocks of a model, joined to long rows and weighted."""
    evaluation = Evaluation(profile, model, device=device, source=source)
    ids = torch.cat([evaluation.calibration_windows(domain) for domain in evaluation.workloads])
    micro_batch = max(1, BATCH_TOKENS[device] // ids.shape[1])
    statistics = collect(
        evaluation.model, ids, micro_batch=micro_batch, fingerprint=model_digest(model)
    )
    weights = {layer.layer_index: block_weights(layer.module) for layer in evaluation.layers}
    experts = [
        (layer.layer_index, e) for layer in evaluation.layers for e in range(layer.n_experts)
    ]
    order = np.random.default_rng(profile.seed).permutation(len(experts))
    chosen = [experts[place] for place in order[: SAMPLED_EXPERTS[device]]]
    found: list[Measurement] = []
    for block in Block:
        rows, counts = [], []
        for layer, expert in chosen:
            weight = weights[layer][block][expert].to(torch.float32)
            matters = importance(statistics.layer(layer), block)[expert].to(device)
            rows.append(joined(weight))
            counts.append(joined(matters.expand(weight.shape)))
        errors = compare(torch.stack(rows), torch.stack(counts), 1, WIDE_ROWS[device])
        labels = {"weighted": True, "block": block.name.lower(), "rows": rows[0].shape[0]}
        found += summaries((JOINED,), [errors], labels)
    return found


def joined(matrix: Tensor) -> Tensor:
    """Rows of :data:`JOINED` values from a matrix ``[N, K]``; a rest is left out."""
    flat = matrix.reshape(-1)
    return flat[: flat.numel() // JOINED * JOINED].view(-1, JOINED)


def compare(rows: Tensor, weights: Tensor, n_rows: int, n_wide: int) -> dict[int | str, Tensor]:
    """Errors ``[E * n_rows, W]`` of the exact code and of the nested ones by rows per table.

    ``rows [E, N, M]`` are E matrices; the last ``n_rows`` rows of each are compared, all shape
    the tables.  Exact errors are NaN for wide codes beyond ``n_wide`` rows.
    """
    values, counts = rows[:, -n_rows:], weights[:, -n_rows:]
    flat, flat_counts = values.flatten(0, 1), counts.flatten(0, 1)
    narrow = exact_errors(flat, flat_counts, [1 << n_bits for n_bits in NARROW])
    wide_bits = [n_bits for n_bits in WIDTHS if n_bits not in NARROW]
    wide = torch.full((len(flat), len(wide_bits)), torch.nan, dtype=flat.dtype).to(narrow)
    levels = [1 << n_bits for n_bits in wide_bits]
    wide[:n_wide] = exact_errors(flat[:n_wide], flat_counts[:n_wide], levels)
    found: dict[int | str, Tensor] = {"exact": torch.cat([narrow, wide], dim=-1)}
    for rows_per_lut in TABLES:
        stack = AnyPrecision(rows_per_lut=rows_per_lut).encode_stack(rows, weights)
        errors = []
        for n_bits in WIDTHS:
            wrong = (stack.decode(n_bits)[:, -n_rows:] - values).to(torch.float64)
            errors.append((wrong.square() * counts).sum(dim=-1).flatten())
        found[rows_per_lut] = torch.stack(errors, dim=-1)
    return found


def summaries(
    lengths: tuple[int, ...], errors: list[dict[int | str, Tensor]], labels: dict[str, Any]
) -> list[Measurement]:
    """Ratios to the exact code: of pooled errors, and mean and largest of single rows.

    The series holds one number for every ``[row length, width]`` in the label ``places``.
    """
    places = [
        (number, length, place, n_bits)
        for number, length in enumerate(lengths)
        for place, n_bits in enumerate(WIDTHS)
        if length >= VALUES_PER_LEVEL << n_bits
    ]
    found: list[Measurement] = []
    for rows_per_lut in TABLES:
        ratios: dict[str, list[float]] = {"pooled": [], "mean": [], "max": []}
        for number, _, place, _ in places:
            exact = errors[number]["exact"][:, place]
            compared = ~exact.isnan()
            exact, mine = exact[compared], errors[number][rows_per_lut][compared, place]
            single = mine / exact
            ratios["pooled"].append(float(mine.sum() / exact.sum()))
            ratios["mean"].append(float(single.mean()))
            ratios["max"].append(float(single.amax()))
        for statistic, series in ratios.items():
            if statistic != "pooled" and rows_per_lut != 1:
                continue  # a shared table is fitted to all its rows, not to any one
            found.append(
                Measurement(
                    CLAIM,
                    "measured",
                    f"penalty_{statistic}",
                    None,
                    "ratio of squared errors",
                    series=[float(f"{value:.6g}") for value in series],
                    labels={
                        **labels,
                        "rows_per_lut": rows_per_lut,
                        "places": [[length, n_bits] for _, length, _, n_bits in places],
                        "compared_rows": [
                            int((~errors[number]["exact"][:, place].isnan()).sum())
                            for number, _, place, _ in places
                        ],
                    },
                )
            )
    return found
