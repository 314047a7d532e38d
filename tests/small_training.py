"""Corpora, tokenizer and configurations small enough to train on in a second (no test file)."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from repro.models.corpus import SKIP_LINES, SOURCES
from repro.models.recipe import Recipe
from repro.models.specs import get_spec
from repro.models.tokenizer import train_from_texts
from repro.models.trainer import Trainer

VOCAB_SIZE = 384
STREAMS = {"task_characters": 20_000, "n_word_problems": 60}
_WORDS = "the cat saw a red house and 12 birds near river 7 while old dogs ran over hills".split()


def sentences(rng: random.Random, n: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(n))


def write_corpora(folder: Path, n_rows: int = 120) -> Path:
    """Every file of the mixture in its own layout, with seeded nonsense in it."""
    rng = random.Random(0)
    for source in SOURCES:
        if source.file is None:
            continue
        path = folder / source.file
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.fields:
            rows = [{f: sentences(rng, 12) for f in source.fields} for _ in range(n_rows)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
        else:
            text = "\n".join(sentences(rng, 12) for _ in range(n_rows))
        data = text.encode()
        path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    (folder / SKIP_LINES).write_text("[0, 3]")
    return folder


def small_tokenizer() -> PreTrainedTokenizerFast:
    rng = random.Random(1)
    return train_from_texts([sentences(rng, 50) for _ in range(20)], VOCAB_SIZE)


def small_config(name: str, **changes: Any) -> Any:
    """The configuration of a bundled model, as small as its architecture stays itself."""
    config = get_spec(name).config()
    shared = {"shared_expert_intermediate_size": 24} if name == "moe-shared" else {"head_dim": 8}
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        **shared,
        **changes,
    }
    fields = {**config.to_dict(), **sizes}
    fields.pop("num_local_experts", None)  # the same field under its other name
    fields.pop("layer_types", None)  # as long as the layers of the original
    return type(config)(**fields)


class SmallSpec:
    """Stands in for a bundled model's specification where only its name reaches the trainer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def config(self) -> Any:
        return small_config(self.name)


def small_recipe(model: str = "moe-fine", **changes: Any) -> Recipe:
    constants: dict[str, Any] = {
        "batch_tokens": 256,
        "short_tokens": 32,
        "long_tokens": 64,
        "short_steps": 4,
        "long_steps": 3,
        "warmup_steps": 2,
        "log_every": 2,
        "validate_every": 4,
        "checkpoint_every": 2,
        **changes,
    }
    return Recipe(model, **constants)


def small_trainer(
    recipe: Recipe, data: Path, out: Path, *, start_from: Path | None = None, config: Any = None
) -> Trainer:
    import torch

    out.mkdir(parents=True, exist_ok=True)
    return Trainer(
        recipe,
        small_tokenizer(),
        data,
        out,
        data / "cache",
        torch.device("cpu"),
        compiled=False,
        stream_settings=STREAMS,
        start_from=start_from,
        config=config or small_config(recipe.model),
    )
