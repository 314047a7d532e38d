"""``calibrate``: from a file of prompts to everything a planner reads, in one folder.

The one idea: stages that are each resumable by layer (see ``job``), so that an interrupted run
goes on where it stopped and ends with the files of an uninterrupted one:

    statistics/layer-XXX.npz    what the experts saw
    layers/layer-XXX.npz        sensitivity of all blocks of the layer at all widths
    damage/layer-XXX.npz        measured damage of a seeded sample of its blocks
    sensitivity.npz, heads.json, summary.json

With ``streamed`` the model's weights are in memory one decoder layer at a time; then there is
nothing to differentiate or to run again, and Fisher information, damage and heads are left
out and the summary says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from repro.calibration.blocks import block_weights, sample_blocks
from repro.calibration.collect import layer_file
from repro.calibration.damage import Damage
from repro.calibration.features import prompt_features
from repro.calibration.fingerprints import model_fingerprint
from repro.calibration.job import Job, Options, StackFormat
from repro.calibration.progress import Ticker
from repro.calibration.prompts import Prompts, encode_prompts, read_prompts
from repro.calibration.scaling import scale_by_layer
from repro.calibration.sensitivity import KINDS, Kind
from repro.calibration.statistics import LayerStatistics
from repro.calibration.table import LayerSensitivity
from repro.calibration.training import HELD_OUT, held_out_prompts, train_heads
from repro.errors import CheckpointError, DataUnavailableError, unknown_name
from repro.formats.any_precision import AnyPrecision
from repro.integration.experts import experts_layers
from repro.models.integrity import fingerprint as file_fingerprint
from repro.models.loading import load_model, resolve_device
from repro.models.streaming import CheckpointReader, streamed_model


def calibrate(
    model_name_or_path: str | Path,
    prompts_file: str | Path,
    out_dir: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    streamed: bool = False,
    options: Options | None = None,
    encoder: StackFormat | None = None,
    progress: Callable[[str], Callable[[int, int], None]] | None = None,
) -> dict[str, Any]:
    """Train sensitivity and prompt heads on the operator's own prompts.

    Args:
        model_name_or_path: as for :func:`repro.load_model`; a folder or bundled name if streamed.
        prompts_file: see :func:`repro.calibration.prompts.read_prompts`.
        out_dir: where everything goes; a run that stopped there is continued.
        device: where it computes.
        dtype: of the weights.
        streamed: keep one decoder layer in memory at a time.
        options: see :class:`Options`.
        encoder: the format whose widths are judged; default :class:`AnyPrecision`.
        progress: gives a callback for a stage's name; default prints to standard error.

    Returns:
        the summary, as written to ``summary.json``.

    Raises:
        DataUnavailableError: prompts that cannot be read, or too short for what is asked.
        CheckpointError: a folder with the work of another model, other prompts or options.
        OutputError: the folder cannot be written.
    """
    chosen, out, ticks = options or Options(), Path(out_dir), progress or Ticker()
    kind = _kind(chosen.kind, streamed)
    texts = read_prompts(prompts_file)
    job = Job(out, chosen, kind, encoder or AnyPrecision(), ticks)
    if streamed:
        return _calibrate_streamed(job, model_name_or_path, texts, device, dtype)
    model, tokenizer = load_model(model_name_or_path, device=device, dtype=dtype)
    prompts = encode_prompts(tokenizer, texts, chosen.max_tokens)
    no_heads = "" if chosen.n_blocks > 0 and chosen.damage_prompts > 0 else "none were asked for"
    if not bool((prompts.mask.sum(dim=1) > 1).any()):  # a prompt's first token is never scored
        no_heads = "no prompt has two tokens: nothing can be scored"
        job = replace(job, kind=_unscored(chosen.kind, kind))
    calibration = job.statistics(model, prompts, _fingerprint(model), streamed=False)
    layers = experts_layers(model)
    sample = () if no_heads else sample_blocks(layers, chosen.n_blocks, chosen.seed)
    n = min(chosen.damage_prompts, len(prompts.input_ids))
    rows = np.arange(n) * len(prompts.input_ids) // n if n else np.arange(0)
    ids, mask = prompts.input_ids[rows], prompts.mask[rows]
    tick = ticks("layers")
    found: list[LayerSensitivity] = []
    measured: list[Damage] = []
    for done, layer in enumerate(layers, 1):
        stats = calibration.layer(layer.layer_index)
        here = tuple(ref for ref in sample if ref.layer_index == layer.layer_index)
        encoded = job.encoded(stats, block_weights(layer.module))
        found.append(job.sensitivity(stats, encoded, calibration))
        if here:
            measured.append(job.damage(model, encoded, here, ids, mask, calibration))
        tick(done, len(layers))
    table = job.table(found, calibration)
    report: list[dict[str, Any]] = []
    if measured:
        damage = _join(measured)
        domains = None if prompts.domains is None else [prompts.domains[i] for i in rows]
        judges = held_out_prompts(n, HELD_OUT, chosen.seed, domains)
        table = scale_by_layer(table, damage, ~judges)
        features = prompt_features(model, ids, mask, micro_batch=chosen.micro_batch)
        heads, report = train_heads(
            table,
            damage,
            features,
            held_out=judges,
            seed=chosen.seed,
            meta={"model": calibration.meta["model"], "prompts": calibration.meta["prompts"]},
        )
        heads.save(out / "heads.json")
    table.save(out / "sensitivity.npz")
    return job.summary(table, prompts, report, no_heads)


def _calibrate_streamed(
    job: Job, folder: str | Path, texts: Prompts, device: str, dtype: str
) -> dict[str, Any]:
    reader = CheckpointReader(folder)
    with streamed_model(
        folder, device=device, dtype=dtype, micro_batch=job.options.micro_batch
    ) as (model, tokenizer):
        if tokenizer is None:
            raise CheckpointError(
                f"checkpoint {reader.label!r} brings no tokenizer: add its tokenizer.json"
            )
        prompts = encode_prompts(tokenizer, texts, job.options.max_tokens)
        calibration = job.statistics(model, prompts, reader.fingerprint(), streamed=True)
    tick, target = job.ticks("layers"), resolve_device(device)
    found, layer_ids = [], reader.layout.moe_layer_ids
    for done, layer_index in enumerate(layer_ids, 1):
        stats, _ = LayerStatistics.load(layer_file(job.statistics_folder, layer_index))
        stack = reader.expert_stack(layer_index)
        encoded = job.encoded(stats, (stack.gate_up.to(target), stack.down.to(target)))
        found.append(job.sensitivity(stats, encoded, calibration))
        tick(done, len(layer_ids))
    table = job.table(found, calibration)
    table.save(job.out / "sensitivity.npz")
    reason = "the model was streamed: damage and heads need its weights in memory"
    return job.summary(table, prompts, [], reason)


def _fingerprint(model: Any) -> str:
    """That of the checkpoint's files where there are some, as a streamed run has it."""
    folder = Path(str(model.config._name_or_path))
    return file_fingerprint(folder) if folder.is_dir() else model_fingerprint(model)


def _kind(name: str, streamed: bool) -> Kind:
    if name == "auto":
        return "output" if streamed else "fisher"
    for kind in KINDS:
        if kind == name:
            return kind
    raise unknown_name("kind of sensitivity", name, ("auto", *KINDS))


def _unscored(wanted: str, kind: Kind) -> Kind:
    """What stands in for Fisher information where no token is scored: it would be all zero."""
    if kind != "fisher":
        return kind
    if wanted == "auto":
        return "output"
    raise DataUnavailableError(
        "no prompt has two tokens, so Fisher information has nothing to score: "
        "give longer prompts, or kind='output'"
    )


def _join(parts: list[Damage]) -> Damage:
    """The damage of several layers' blocks on the same prompts."""
    return Damage(
        tuple(ref for part in parts for ref in part.blocks),
        parts[0].widths,
        np.concatenate([part.kl for part in parts]),
        np.concatenate([part.loss for part in parts]),
        parts[0].n_scored,
        parts[0].reference_loss,
        parts[0].meta,
    )


__all__ = ["Options", "calibrate"]
