"""Model cards say what is recorded beside the weights, and nothing else."""

from __future__ import annotations

import json

import pytest

from repro.models.card import model_card
from repro.models.corpus import SOURCES
from repro.models.integrity import fingerprint
from repro.paths import models_dir

BUNDLED = ("moe-fine", "moe-shared")


@pytest.mark.parametrize("name", BUNDLED)
def test_the_committed_card_follows_from_the_records(name: str) -> None:
    folder = models_dir() / name
    assert (folder / "README.md").read_text(encoding="utf-8") == model_card(folder), (
        "run `python -m repro.models.card`"
    )


@pytest.mark.parametrize("name", BUNDLED)
def test_the_measured_quality_is_that_of_the_committed_weights(name: str) -> None:
    folder = models_dir() / name
    quality = json.loads((folder / "quality.json").read_text(encoding="utf-8"))
    assert quality["provenance"]["checkpoint_sha256"] == fingerprint(folder)


def test_the_mixture_adds_up_to_one_and_every_source_names_its_licence() -> None:
    assert sum(source.weight for source in SOURCES) == pytest.approx(1.0)
    assert all(source.licence for source in SOURCES)


@pytest.mark.parametrize("name", BUNDLED)
def test_the_recipe_accounts_for_the_tokens_of_the_log(name: str) -> None:
    folder = models_dir() / name
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    for number, stage in enumerate(recipe["stages"], 1):
        log = (folder / f"training-stage{number}.jsonl").read_text(encoding="utf-8")
        last = json.loads(log.splitlines()[-1])
        n_steps = stage["short_steps"] + stage["long_steps"]
        assert last["step"] == n_steps
        assert last["tokens"] == n_steps * stage["batch_tokens"]
