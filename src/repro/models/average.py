"""The last step of the recipe: average the weights of the two training stages.

The second stage brought unused experts back but saw only part of the corpora, and its
test losses rose.  Both stages lie in one basin (the second starts from the first), so
their weighted mean keeps what either learned (weight averaging: Wortsman et al.,
arXiv 2203.05482 and 2109.01903).  A revived expert has no meaningful counterpart in
the first stage: its router row and matrices come whole from the second.

``python -m repro.models.average FIRST SECOND --share 0.35 --out DIR``
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from repro.errors import CheckpointError, ReproError, UnknownNameError
from repro.files import write_bytes, write_text
from repro.models.loading import load_model
from repro.models.saving import save_checkpoint
from repro.models.trainer import LOG, RECIPE

_EXPERT_TENSORS = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")


def revived_experts(folder: Path) -> list[tuple[int, int]]:
    """(layer, expert) pairs that the second stage's log says it revived.

    Raises:
        CheckpointError: the folder holds no log with that line.
    """
    try:
        with open(folder / LOG, encoding="utf-8") as handle:
            rows = json.loads(handle.readline())["revived_layer_expert_source"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder.name!r} has no {LOG} that names revived experts: give the second stage"
        ) from error
    return [(layer, expert) for layer, expert, _ in rows]


@torch.no_grad()
def average_weights(first: Any, second: Any, share: float, revived: list[tuple[int, int]]) -> None:
    """Move ``first`` towards ``second`` by ``share`` of the way, in place.

    Raises:
        CheckpointError: the two are not of one shape.
    """
    theirs = dict(second.named_parameters())
    # Parameters, not the state dict: that lists tied weights twice, and they would move twice.
    ours = dict(first.named_parameters())
    if {n: p.shape for n, p in ours.items()} != {n: p.shape for n, p in theirs.items()}:
        raise CheckpointError(
            "the two stages differ in names or shapes of their tensors: give two stages of one run"
        )
    for name, tensor in ours.items():
        tensor.lerp_(theirs[name], share)
    for layer, expert in revived:
        for part in _EXPERT_TENSORS:
            name = f"model.layers.{layer}.mlp.{part}"
            ours[name][expert] = theirs[name][expert]


def average_folders(first: Path, second: Path, share: float, out: Path) -> None:
    """Average the checkpoints of two stages into ``out``, with the recipe and log of both.

    Raises:
        ReproError: a stage is not whole, ``share`` is none, or ``out`` cannot be written.
    """
    if not 0 <= share <= 1:
        raise UnknownNameError(f"share {share} is not possible: give a number between 0 and 1")
    recipes, logs = zip(*map(_read_run, (first, second)), strict=True)
    revived = revived_experts(second)
    model, tokenizer = load_model(first, device="cpu", dtype="float32")
    average_weights(model, load_model(second, device="cpu", dtype="float32")[0], share, revived)
    save_checkpoint(out, model.to(torch.bfloat16), tokenizer)
    for number, log in enumerate(logs, 1):
        write_bytes(out / f"training-stage{number}.jsonl", log)
    recipe = {"stages": recipes, "share_of_second_stage": share}
    write_text(out / RECIPE, json.dumps(recipe, indent=1, sort_keys=True) + "\n")


def _read_run(stage: Path) -> tuple[Any, bytes]:
    """Recipe and log of a finished training run."""
    try:
        recipe = json.loads((stage / RECIPE).read_text(encoding="utf-8"))
        return recipe, (stage / LOG).read_bytes()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{stage.name!r} holds no {RECIPE} and {LOG} of a training run: name its --out folder"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m repro.models.average", description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, required=True, help="weight of the second stage")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    try:
        average_folders(args.first, args.second, args.share, args.out)
    except ReproError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
