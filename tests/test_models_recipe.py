"""Recipes: what is recorded beside the models is what the code says, and nothing else passes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_training import small_recipe

from repro.errors import UnknownNameError
from repro.models.recipe import RECIPES, SECOND_STAGE, Recipe, get_recipe
from repro.models.specs import CONTEXT_TOKENS, EOS_ID, PAD_ID, SPECS, get_spec

BUNDLED = sorted(SPECS)


def recorded(root: Path, name: str) -> dict[str, Any]:
    content = (root / "data" / "models" / name / "recipe.json").read_text(encoding="utf-8")
    return json.loads(content)


@pytest.mark.parametrize("name", BUNDLED)
def test_the_recorded_stages_are_the_recipes(name: str, root: Path) -> None:
    """Stage 1 was recorded before two constants had names; their defaults do what it did."""
    first, second = recorded(root, name)["stages"]
    assert first == {key: get_recipe(name).to_dict()[key] for key in first}
    left = {key: v for key, v in get_recipe(name).to_dict().items() if key not in first}
    assert left in ({}, {"balance_floor": 1e-6, "revive_below": 0.0})
    assert second == get_recipe(name, second_stage=True).to_dict()


@pytest.mark.parametrize("name", BUNDLED)
def test_the_logs_are_of_these_recipes(name: str, root: Path) -> None:
    folder = root / "data" / "models" / name
    for stage, recipe in ((1, RECIPES[name]), (2, SECOND_STAGE[name])):
        lines = (folder / f"training-stage{stage}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        if recipe.revive_below > 0:
            revived = rows.pop(0)["revived_layer_expert_source"]
            config = get_spec(name).config()
            assert 0 < len(revived) < config.num_hidden_layers * config.num_experts // 4
        steps = [row["step"] for row in rows]
        expected = [1, *range(recipe.log_every, recipe.n_steps + 1, recipe.log_every)]
        assert steps == expected
        for row in rows:
            assert row["of"] == recipe.n_steps
            assert row["tokens"] == row["step"] * recipe.batch_tokens
            assert len(row["effective_share"]) == get_spec(name).config().num_hidden_layers
            due = row["step"] % recipe.validate_every == 0 or row["step"] == recipe.n_steps
            assert due == ("validation_nats" in row)
        assert rows[-1]["loss_nats"] < rows[0]["loss_nats"]


@pytest.mark.parametrize("name", BUNDLED)
def test_the_saved_configuration_is_the_specification(name: str, root: Path) -> None:
    saved = json.loads((root / "data" / "models" / name / "config.json").read_text())
    specified = get_spec(name).config().to_dict()
    made_by_saving = ("architectures", "dtype", "transformers_version")
    assert {k: specified[k] for k in saved if k not in made_by_saving} == {
        k: v for k, v in saved.items() if k not in made_by_saving
    }
    assert (saved["eos_token_id"], saved["pad_token_id"]) == (EOS_ID, PAD_ID)
    assert saved["max_position_embeddings"] == CONTEXT_TOKENS


def test_unknown_specification_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"'moe-fin' \(did you mean 'moe-fine'\?\)"):
        get_spec("moe-fin")


# --- schedule


@given(
    short=st.integers(0, 60),
    long=st.integers(1, 60),
    warmup=st.integers(0, 30),
    share=st.floats(0.05, 1.0),
)
def test_the_rate_rises_stays_and_falls_to_nothing(
    short: int, long: int, warmup: int, share: float
) -> None:
    recipe = small_recipe(
        short_steps=short, long_steps=long, warmup_steps=warmup, decay_share=share
    )
    rates = [recipe.rate(step) for step in range(recipe.n_steps)]
    peak = recipe.learning_rate
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    rising, rest = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert rest == sorted(rest, reverse=True)
    if warmup == 0 and share * recipe.n_steps >= 1:
        assert rates[0] == pytest.approx(peak * min(1, 1 / share))
    if rest:
        assert rest[-1] <= peak / max(1.0, share * recipe.n_steps) * (1 + 1e-12)


def test_sequences_become_long_in_the_last_phase() -> None:
    recipe = get_recipe("moe-fine")
    assert recipe.seq_tokens(0) == recipe.seq_tokens(7399) == 1024
    assert recipe.seq_tokens(7400) == recipe.seq_tokens(recipe.n_steps - 1) == CONTEXT_TOKENS


# --- names and values


def test_constants_are_replaced_from_text() -> None:
    recipe = get_recipe("moe-shared", {"seed": "3", "learning_rate": "2e-3", "optimizer": "adamw"})
    assert (recipe.seed, recipe.learning_rate, recipe.optimizer) == (3, 2e-3, "adamw")
    assert recipe.batch_tokens == RECIPES["moe-shared"].batch_tokens
    assert type(recipe.seed) is int


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"sead": 1}, r"unknown recipe constant 'sead' \(did you mean 'seed'\?\)"),
        ({"model": "moe-fine"}, "unknown recipe constant 'model'"),
        ({"seed": "1e3"}, "seed='1e3' is not possible: give a whole number"),
        ({"learning_rate": "fast"}, "learning_rate='fast' is not possible: give a number"),
        ({"learning_rate": "nan"}, "learning_rate=nan is not possible: give a positive number"),
        ({"learning_rate": 0}, "learning_rate=0.0 is not possible: give a positive number"),
        ({"log_every": 0}, "log_every=0 is not possible: give at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1 is not possible: give 0 or more"),
        ({"short_steps": 0, "long_steps": 0}, "short_steps=0 is not possible: leave at least one"),
        ({"batch_tokens": 1000}, "batch_tokens=1000 is not possible: give a multiple of short_"),
        ({"batch_tokens": 5120}, "batch_tokens=5120 is not possible: give a multiple of long_tok"),
        ({"short_tokens": 8192}, "long_tokens=4096 is not possible: short_tokens is more"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is not possible: use muon or adamw"),
        ({"decay_share": 1.5}, "decay_share=1.5 is not possible: give a share of at most 1"),
        ({"balance_target": 2}, "balance_target=2.0 is not possible: give a share between"),
        ({"revive_below": -0.1}, "revive_below=-0.1 is not possible: give 0 or more"),
    ],
)
def test_bad_constants_are_one_sentence(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownNameError, match=said) as caught:
        get_recipe("moe-fine", overrides)
    assert "\n" not in str(caught.value)


def test_unknown_model() -> None:
    with pytest.raises(UnknownNameError, match="unknown recipe 'moe-fin'"):
        get_recipe("moe-fin")


def test_both_stages_exist_for_every_bundled_model() -> None:
    assert set(RECIPES) == set(SECOND_STAGE) == set(SPECS)
    for name in SPECS:
        assert RECIPES[name].model == SECOND_STAGE[name].model == name
        assert RECIPES[name].seed != SECOND_STAGE[name].seed  # generated text must be new
        assert isinstance(RECIPES[name], Recipe)
