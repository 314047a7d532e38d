"""Train a bundled model: ``python -m repro.models.train MODEL --tokenizer DIR --out DIR``.

Seeded, logged (one JSON line each ``log_every`` steps), resumable (a checkpoint is
replaced atomically; the same command continues from it), and the same code on a CPU
(tests) and a GPU.  Writes bf16 safetensors, tokenizer, config, ``recipe.json`` and
``training.jsonl`` into OUT; ``repro.models.quality`` measures the result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from repro.errors import ReproError, UnknownNameError
from repro.files import output_error
from repro.models.corpus import training_folder
from repro.models.loading import resolve_device
from repro.models.recipe import get_recipe
from repro.models.tokenizer import load_tokenizer
from repro.models.trainer import Trainer

INTERRUPTED = 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m repro.models.train", description=__doc__)
    parser.add_argument("model", help="bundled model: moe-fine or moe-shared")
    parser.add_argument("--data", type=Path, help="folder of the corpora (REPRO_DATA_DIR)")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--cache", type=Path, help="token streams (default OUT/streams)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--no-compile", action="store_true", help="on a GPU: run layers as they are"
    )
    parser.add_argument("--stop-after", type=int, help="only to this step, for a look at the log")
    parser.add_argument("--start-from", type=Path, help="second stage from this checkpoint")
    parser.add_argument("constants", nargs="*", help="recipe constants, NAME=VALUE")
    return parser


def _overrides(constants: Sequence[str]) -> dict[str, str]:
    for constant in constants:
        if "=" not in constant:
            raise UnknownNameError(f"recipe constant {constant!r} has no value: write NAME=VALUE")
    return dict(constant.split("=", 1) for constant in constants)


def _train(args: argparse.Namespace) -> None:
    recipe = get_recipe(
        args.model, _overrides(args.constants), second_stage=args.start_from is not None
    )
    device = resolve_device(args.device)
    data_dir, tokenizer = training_folder(args.data), load_tokenizer(args.tokenizer)
    torch.set_float32_matmul_precision("high")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise output_error(args.out, error) from error
    trainer = Trainer(
        recipe,
        tokenizer,
        data_dir,
        args.out,
        args.cache or args.out / "streams",
        device,
        compiled=device.type == "cuda" and not args.no_compile,
        start_from=args.start_from,
    )
    if trainer.resume():
        print(f"resuming at step {trainer.step} of {recipe.n_steps}", flush=True)
    trainer.run(args.stop_after)
    if trainer.step < recipe.n_steps:
        print(
            f"stopped at step {trainer.step} of {recipe.n_steps}: without --stop-after it goes on"
        )
        return
    trainer.save_model()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the training program."""
    args = _parser().parse_intermixed_args(arguments)
    try:
        _train(args)
    except ReproError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "\ninterrupted: run the same command to go on from the last checkpoint", file=sys.stderr
        )
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
