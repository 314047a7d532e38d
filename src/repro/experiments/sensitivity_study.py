"""The measurements behind ``sensitivity``: one model calibrated, encoded, and damaged.

The one idea: all heavy work for a model is one call, :func:`study`, and its result is plain
arrays that everything else is computed from.  Predictions come from calibration windows; single
blocks are lowered, one at a time, on windows of the evaluated workloads.

Letters: L layers, E experts, B blocks, W widths, N rows, K columns, n measured blocks, P prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.calibration.blocks import block_weights, sample_blocks
from repro.calibration.collect import Calibration
from repro.calibration.damage import Damage, measure_damage
from repro.calibration.features import PromptFeatures, prompt_features
from repro.calibration.fisher import collect_fisher
from repro.calibration.second_order import SecondOrder, second_order
from repro.calibration.sensitivity import KINDS, Kind, sensitivity
from repro.calibration.table import LayerSensitivity, SensitivityTable, build_table
from repro.contract import Block
from repro.experiments import evaluation
from repro.experiments.evaluation import BATCH_TOKENS, IMPLEMENTATIONS, Evaluation, Stacks

FORMAT = "any-precision"
WIDTHS = (6, 5, 4, 3, 2)
FISHER_TOKENS = {"cpu": 8192, "cuda": 1 << 20}  # at most; a backward pass costs three others
FloatArray = npt.NDArray[np.float64]
SOURCES = (
    "repro.experiments.sensitivity_study",
    *evaluation.SOURCES,
    "repro.calibration.damage",
    "repro.calibration.divergence",
    "repro.calibration.features",
    "repro.calibration.fisher",
    "repro.calibration.passes",
    "repro.calibration.replay",
    "repro.calibration.second_order",
    "repro.calibration.sensitivity",
    "repro.calibration.table",
)
"""Modules whose code decides what is predicted and what is measured."""


@dataclass(frozen=True)
class Study:
    """What was predicted and what was measured, of one model."""

    tables: dict[str, SensitivityTable]  # by kind
    damage: Damage  # [n, W, P]
    features: PromptFeatures  # of the same prompts
    curvature: SecondOrder  # of the same prompts, labels drawn from the model
    slope: SecondOrder  # of the same prompts and their own labels
    domains: tuple[str, ...]  # [P]

    @property
    def mass(self) -> FloatArray:
        """Routing mass per token of the measured text, ``[L, E]``."""
        return np.asarray(self.features.mass.sum(axis=0) / self.features.n_tokens.sum())


def study(judge: Evaluation) -> Study:
    """Calibrate, encode, predict, lower single blocks: all the heavy work for one model."""
    profile, model = judge.profile, judge.model
    calibration = with_fisher(judge)
    stacks = judge.encode(FORMAT)
    texts = {
        domain: judge.windows(name, profile.damage_prompts, profile.damage_tokens)
        for domain, name in judge.workloads.items()
    }
    ids = torch.cat(list(texts.values()))
    micro_batch = max(1, BATCH_TOKENS[judge.device] // ids.shape[1])
    blocks = sample_blocks(judge.layers, profile.damage_blocks, profile.seed)
    errors = weight_errors(judge, stacks)
    curvature = second_order(model, ids, errors, seed=profile.seed, micro_batch=micro_batch)
    slope = second_order(model, ids, errors, labels="data", micro_batch=micro_batch)
    del errors
    pairs = {layer: tuple(here[block] for block in Block) for layer, here in stacks.items()}
    damage = measure_damage(
        model,
        pairs,
        blocks,
        WIDTHS,
        ids,
        batch=len(ids) if judge.device == "cuda" else None,
        implementation=IMPLEMENTATIONS[judge.device],
    )
    return Study(
        {kind: table(judge, calibration, stacks, kind) for kind in KINDS},
        damage,
        prompt_features(model, ids, micro_batch=micro_batch),
        curvature,
        slope,
        tuple(domain for domain, rows in texts.items() for _ in rows),
    )


def with_fisher(judge: Evaluation) -> Calibration:
    """The calibration with Fisher information of as many of its windows as are affordable."""
    ids = torch.cat([judge.calibration_windows(domain) for domain in judge.workloads])
    step = max(1, -(-ids.numel() // FISHER_TOKENS[judge.device]))
    chosen = ids[::step]
    found = collect_fisher(
        judge.model,
        chosen,
        seed=judge.profile.seed,
        micro_batch=max(1, BATCH_TOKENS[judge.device] // ids.shape[1]),
    )
    layers = []
    for stats in judge.calibration.layers:
        gate_up, down = found[stats.layer_index]
        layers.append(replace(stats, gate_up_fisher=gate_up, down_fisher=down))
    return replace(judge.calibration, layers=tuple(layers))


def weight_errors(judge: Evaluation, stacks: Stacks) -> dict[tuple[int, Block], Tensor]:
    """dW ``[W, E, N, K]`` of all blocks at :data:`WIDTHS`."""
    return {
        (layer.layer_index, block): torch.stack(
            [stacks[layer.layer_index][block].decode(n_bits) - weight for n_bits in WIDTHS]
        )
        for layer in judge.layers
        for block, weight in zip(Block, block_weights(layer.module), strict=True)
    }


def table(
    judge: Evaluation, calibration: Calibration, stacks: Stacks, kind: Kind
) -> SensitivityTable:
    """Predicted damage of all blocks at all widths."""
    found = []
    for layer in judge.layers:
        stats = calibration.layer(layer.layer_index)
        here = stacks[layer.layer_index]
        weights = zip(Block, block_weights(layer.module), strict=True)
        s = [sensitivity(weight, here[block], stats, block, kind) for block, weight in weights]
        found.append(
            LayerSensitivity(
                layer.layer_index,
                here[Block.DOWN].widths,
                np.stack(s, axis=1),
                stats.few_tokens.numpy(),
                stats.usage().numpy(),
                stats.mass.numpy() / max(stats.n_tokens, 1),
            )
        )
    return build_table(found, kind, {"model": calibration.meta["model"]})
