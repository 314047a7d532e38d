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
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from repro.errors import CheckpointError
from repro.files import write_text
from repro.models.loading import load_model
from repro.models.train import LOG, MAX_SHARD

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
    """Move ``first`` towards ``second`` by ``share`` of the way, in place."""
    theirs = second.state_dict()
    ours = first.state_dict()
    for name, tensor in ours.items():
        tensor.lerp_(theirs[name], share)
    for layer, expert in revived:
        for part in _EXPERT_TENSORS:
            name = f"model.layers.{layer}.mlp.{part}"
            ours[name][expert] = theirs[name][expert]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m repro.models.average", description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, required=True, help="weight of the second stage")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    first, tokenizer = load_model(args.first, device="cpu", dtype="float32")
    second, _ = load_model(args.second, device="cpu", dtype="float32")
    average_weights(first, second, args.share, revived_experts(args.second))
    first.to(torch.bfloat16).save_pretrained(args.out, max_shard_size=MAX_SHARD)
    tokenizer.save_pretrained(args.out)
    for number, stage in enumerate((args.first, args.second), 1):
        shutil.copy(stage / LOG, args.out / f"training-stage{number}.jsonl")
    recipes = [json.loads((s / "recipe.json").read_text()) for s in (args.first, args.second)]
    recipe = {"stages": recipes, "share_of_second_stage": args.share}
    write_text(args.out / "recipe.json", json.dumps(recipe, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
