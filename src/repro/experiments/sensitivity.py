"""How well the damage of lowering a block is known before: statistics, layers, prompt heads.

The one idea: single blocks are lowered for real on texts that nothing was calibrated on, and
every prediction is held against what that did: predictors without knowledge of the text, the
same with the text's routing mass, with factors of measured layers (every block judged without
itself), and with heads that see a prompt's norms (judged on held-out prompts).

Divergence from the unchanged model is the yardstick.  The increase of the loss is shown beside
it: of one block it is mostly of first order.  On a text that the model itself could have written
that part is noise of known size - with D the divergence and n scored tokens its standard
deviation is sqrt(2 D / n) - and the records state what any predictor of the loss could reach
against it.  On other texts the loss has a slope of its own, which more tokens do not remove.

Records of many numbers are grids: ``series`` row by row, with labels ``rows`` and ``columns``.

Letters: L layers, E experts, B blocks, W widths, n measured blocks, P prompts, T tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from repro.calibration.agreement import change, compare, predictions
from repro.calibration.scaling import layer_factors
from repro.calibration.scores import rank_correlation, resampled_rank_correlation
from repro.experiments import sensitivity_study, statistics
from repro.experiments.evaluation import Evaluation
from repro.experiments.grids import grid_record, significant
from repro.experiments.sensitivity_heads import TRANSITIONS, head_records, transition_name
from repro.experiments.sensitivity_study import FISHER_TOKENS, FORMAT, WIDTHS, Study, study
from repro.profiles import Profile
from repro.reporting.records import Measurement, Record, RecordStore

EXPERIMENT = "sensitivity"
DAMAGE_CLAIM = "PagedWeight sensitivity"
HOT_BITS = 3  # at which sensitivity is compared with routing mass
BEST = "fisher x mass x layer"
NATS = "nats per token"
FloatArray = npt.NDArray[np.float64]
SOURCES = (
    "repro.experiments.sensitivity",
    "repro.experiments.grids",
    "repro.experiments.sensitivity_heads",
    *sensitivity_study.SOURCES,
    "repro.calibration.agreement",
    "repro.calibration.heads",
    "repro.calibration.ridge",
    "repro.calibration.scaling",
    "repro.calibration.scores",
    "repro.calibration.training",
)


def run(
    profile: Profile,
    store: RecordStore,
    *,
    device: str = "cpu",
    force: bool = False,
    source: str = "embedded",
) -> list[Record]:
    """Records of all models, one point each.

    Raises:
        UnknownNameError: no such source.
        DataUnavailableError: a model or a workload cannot be read from here.
    """
    records: list[Record] = []
    for model in profile.models:
        if device == "cpu":
            torch.set_num_threads(profile.n_threads)
        judge = Evaluation(profile, model, device=device, source=source)
        config = {
            **judge.identity(),
            "format": FORMAT,
            "widths": WIDTHS,
            "damage_blocks": profile.damage_blocks,
            "damage_prompts": profile.damage_prompts,
            "damage_tokens": profile.damage_tokens,
            "fisher_tokens": FISHER_TOKENS[device],
            "bootstrap_samples": profile.bootstrap_samples,
            "workloads_sha256": {
                name: judge.workload_identity(name)["workload_sha256"]
                for name in judge.workloads.values()
            },
        }
        records += store.measure_or_load(
            EXPERIMENT,
            config,
            partial(_measure, judge),
            sources=SOURCES,
            force=force,
            device=device,
        )
    store.prune(EXPERIMENT, source=source, device=device)
    return records


def _measure(judge: Evaluation) -> list[Measurement]:
    return measurements(study(judge), judge.profile)


# What is made of it -------------------------------------------------------------------------


def measurements(found: Study, profile: Profile) -> list[Measurement]:
    """All records of one model."""
    n_resamples, seed = profile.bootstrap_samples, profile.seed
    return [
        *_agreements(found, n_resamples, seed),
        *_points(found),
        *_loss_noise(found, n_resamples, seed),
        *_growth(found, n_resamples, seed),
        *_hot(found, n_resamples, seed),
        *head_records(found, seed),
    ]


NAMES = tuple(transition_name(*transition) for transition in TRANSITIONS)


def predictors(found: Study) -> dict[str, FloatArray]:
    """Predicted divergence ``[n, W]`` of every predictor, from the least to the most informed."""
    fisher = found.tables["fisher"]
    result = {kind: predictions(found.tables[kind], found.damage) for kind in ("weight", "output")}
    result["covariance"] = predictions(found.tables["covariance"], found.damage)
    result["fisher"] = predictions(fisher, found.damage)
    result["fisher x mass"] = predictions(fisher, found.damage, mass=found.mass)
    result[BEST] = predictions(fisher, found.damage, mass=found.mass, scaled=True)
    result["curvature of the text"] = _along(found.curvature.quadratic, found)
    scaled = replace(fisher, s=found.curvature.quadratic, widths=WIDTHS)
    result["curvature x layer"] = predictions(scaled, found.damage, scaled=True)
    return result


def _along(values: FloatArray, found: Study) -> FloatArray:
    """``[L, E, B, W]`` at the measured blocks, ``[n, W]``."""
    ids = found.tables["fisher"].layer_ids
    return np.stack(
        [values[ids.index(r.layer_index), r.expert, r.block] for r in found.damage.blocks]
    )


def loss_predictors(found: Study) -> dict[str, FloatArray]:
    """The same of the increase of the loss; the slope is that of the measured text itself."""
    known = predictors(found)
    slope = _along(found.slope.linear, found)
    return {
        "fisher": known["fisher"],
        BEST: known[BEST],
        "slope of the text": slope,
        "slope + " + BEST: slope + known[BEST],
        "measured divergence": found.damage.mean("kl"),
    }


def _agreements(found: Study, n_resamples: int, seed: int) -> list[Measurement]:
    """One record for each measured quantity: predictors x (transitions with their intervals)."""
    columns = [f"{name}{end}" for name in NAMES for end in ("", " low", " high")]
    result = []
    for what, named in (("kl", predictors(found)), ("loss", loss_predictors(found))):
        truth = found.damage.mean(what)
        rows = []
        for name, predicted in named.items():
            row = []
            for transition in TRANSITIONS:
                gain = _bounded(change(predicted, WIDTHS, *transition), name)
                rank = compare(change(truth, WIDTHS, *transition), gain, n_resamples, seed)
                row += [rank["rank_correlation"], rank["low"], rank["high"]]
            rows.append(row)
        result.append(
            grid_record(
                DAMAGE_CLAIM, "rank_correlation", list(named), columns, rows, n=len(truth),
                target="divergence" if what == "kl" else "loss", digits=4,
            )
        )  # fmt: skip
    return result


def _bounded(gain: FloatArray, name: str) -> FloatArray:
    """Gains are not negative (PagedWeight's g); what knows the slope of a loss may be."""
    return gain if name.startswith("slope") else np.maximum(0.0, gain)


def _points(found: Study) -> list[Measurement]:
    """What the scatter plots show, for every measured block; and the factors of the layers."""
    measured, predicted = found.damage.mean("kl"), predictors(found)[BEST]
    rows = [[ref.layer_index for ref in found.damage.blocks]]
    rows += [[ref.expert for ref in found.damage.blocks]]
    rows += [[int(ref.block) for ref in found.damage.blocks]]
    for values in (measured, predicted):
        rows += [change(values, WIDTHS, *transition).tolist() for transition in TRANSITIONS]
    names = ["layer", "expert", "block", *(f"{name} measured" for name in NAMES)]
    names += [f"{name} predicted" for name in NAMES]
    n = len(measured)
    blocks = grid_record(
        DAMAGE_CLAIM, "block_damage", names, "blocks", rows, n=n, unit=NATS, digits=3
    )
    fisher = found.tables["fisher"]
    factors = layer_factors(fisher, found.damage)
    columns = [fisher.width_index(n_bits) for n_bits in WIDTHS]
    ids, bits = [str(i) for i in fisher.layer_ids], [str(n_bits) for n_bits in WIDTHS]
    layers = grid_record(
        DAMAGE_CLAIM, "layer_factors", ids, bits, factors[:, columns], n=n, unit="ratio"
    )
    return [blocks, layers]


def _loss_noise(found: Study, n_resamples: int, seed: int) -> list[Measurement]:
    """What first-order noise leaves of the increase of the loss, lowered from unchanged."""
    rng = np.random.default_rng(seed)
    n_scored = int(found.damage.n_scored.sum())
    rows = []
    names = []
    for n_from, n_to in TRANSITIONS:
        if n_from < 16:
            continue
        names.append(transition_name(n_from, n_to))
        kl = change(found.damage.mean("kl"), WIDTHS, n_from, n_to)
        loss = change(found.damage.mean("loss"), WIDTHS, n_from, n_to)
        noise = np.sqrt(2 * kl / n_scored)
        draws = kl + noise * rng.standard_normal((min(n_resamples, 200), len(kl)))
        ceiling = float(np.mean([rank_correlation(kl, draw) for draw in draws]))
        spread = float(np.sqrt(np.mean((loss - kl) ** 2) / np.mean(noise**2)))
        rows.append([np.median(kl), np.median(noise), np.mean(kl > 2 * noise), ceiling, spread])
    columns = ("median divergence", "median noise", "share above 2 noise", "best rank", "ratio")
    return [
        grid_record(
            DAMAGE_CLAIM,
            "loss_noise",
            names,
            columns,
            rows,
            n=n_scored,
            unit="see columns",
            kind="derived",
        )
    ]


def _growth(found: Study, n_resamples: int, seed: int) -> list[Measurement]:
    """Mean damage of a block by width, and how many blocks suffer more at every step down."""
    columns, parts = [], []
    for name, what in (("divergence", "kl"), ("loss", "loss")):
        values = found.damage.mean(what)
        rng = np.random.default_rng(seed)
        parts.append(
            [
                [column.mean(), *statistics.mean_interval(column, n_resamples, rng)]
                for column in values.T
            ]
        )
        columns += [name, f"{name} low", f"{name} high"]
    rows, bits = np.concatenate(parts, axis=1), [str(n) for n in WIDTHS]
    kl = found.damage.mean("kl")
    rising = float((np.diff(kl, axis=1) > 0).all(axis=1).mean())
    name, n = "share_growing_at_every_step", len(kl)
    return [
        grid_record(DAMAGE_CLAIM, "mean_damage", bits, columns, rows, n=n, unit=NATS),
        Measurement(DAMAGE_CLAIM, "measured", name, significant(rising), "share", n=n),
    ]


def _hot(found: Study, n_resamples: int, seed: int) -> list[Measurement]:
    """Routing mass of experts against their damage per token and their damage in all."""
    fisher = found.tables["fisher"]
    total = fisher.s[..., fisher.width_index(HOT_BITS)].sum(axis=2)  # [L, E]
    per_token = total / fisher.usage
    layers, experts = [str(i) for i in fisher.layer_ids], "experts"
    result = [
        grid_record(
            DAMAGE_CLAIM, metric, layers, experts, values, n=values.size, unit=unit, digits=4,
            kind="derived", n_bits=HOT_BITS,
        )
        for metric, values, unit in (
            ("routing_mass", fisher.mass, "weight per token"),
            ("sensitivity_per_token", per_token, "nats per routed token"),
        )
    ]  # fmt: skip
    for metric, values in (("mass_vs_per_token", per_token), ("mass_vs_total", total)):
        rng = np.random.default_rng(seed)
        found_ranks = _by_layer(fisher.mass, values)
        n = values.shape[1]
        counts = rng.multinomial(n, np.full(n, 1.0 / n), size=n_resamples)
        pairs = zip(fisher.mass, values, strict=True)
        draws = np.mean([resampled_rank_correlation(a, b, counts) for a, b in pairs], axis=0)
        mean = float(found_ranks.mean())
        low, high = statistics.interval(mean, draws, bounds=(-1.0, 1.0)) or (None, None)
        result.append(
            Measurement(
                DAMAGE_CLAIM,
                "derived",
                metric,
                significant(mean),
                "rank correlation",
                n=values.size,
                ci_low=low,
                ci_high=high,
                series=[significant(value) for value in found_ranks.tolist()],
                labels={"n_bits": HOT_BITS, "series_of": "layers"},
            )
        )
    return result


def _by_layer(a: FloatArray, b: FloatArray) -> FloatArray:
    return np.array([rank_correlation(x, y) for x, y in zip(a, b, strict=True)])
