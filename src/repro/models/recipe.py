"""The training recipe of the bundled models: every constant, in one frozen object."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from repro.errors import UnknownNameError, unknown_name


@dataclass(frozen=True)
class Recipe:
    """How one bundled model is trained.

    Steps of ``batch_tokens`` tokens: ``short_steps`` at ``short_tokens`` per sequence, then
    ``long_steps`` at ``long_tokens``.  The learning rate rises over ``warmup_steps``, stays,
    and falls linearly to zero over the last ``decay_share`` of all steps.

    ``balance_target``: the balance coefficient of each layer is moved, slowly, so that the
    effective number of experts over mixed batches stays near this share of E.  A fixed
    coefficient either leaves experts unused or forbids them to specialise.  It never falls
    under ``balance_floor``.

    ``revive_below``: before the first step, experts with less than this share of the even
    traffic are replaced by copies of busy ones (``repro.models.revive``); 0 leaves them.
    """

    model: str = "moe-fine"
    seed: int = 0
    batch_tokens: int = 98_304
    short_tokens: int = 1024
    long_tokens: int = 4096
    short_steps: int = 7400
    long_steps: int = 1200
    optimizer: str = "muon"
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    warmup_steps: int = 150
    decay_share: float = 0.7
    clip_norm: float = 1.0
    balance_target: float = 0.66
    balance_start: float = 1e-3
    balance_rate: float = 0.02
    balance_floor: float = 1e-6
    revive_below: float = 0.0
    log_every: int = 100
    validate_every: int = 1000
    checkpoint_every: int = 2000

    @property
    def n_steps(self) -> int:
        """All steps of both phases."""
        return self.short_steps + self.long_steps

    def seq_tokens(self, step: int) -> int:
        """Sequence length at a step."""
        return self.short_tokens if step < self.short_steps else self.long_tokens

    def rate(self, step: int) -> float:
        """Learning rate at a step."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        left = (self.n_steps - step) / max(1.0, self.decay_share * self.n_steps)
        return self.learning_rate * min(1.0, left)

    def to_dict(self) -> dict[str, Any]:
        """All constants, JSON-able."""
        return asdict(self)


RECIPES: dict[str, Recipe] = {
    "moe-fine": Recipe("moe-fine"),
    "moe-shared": Recipe("moe-shared", batch_tokens=49_152),
}

# A second, short stage from the saved weights.  The first one let the balance coefficient
# fall to nothing and left 5 of 288 (moe-fine) and 2 of 64 experts (moe-shared) without traffic.
_SECOND_STAGE: dict[str, Any] = {
    "seed": 1,
    "short_steps": 500,
    "long_steps": 300,
    "learning_rate": 1e-3,
    "warmup_steps": 40,
    "decay_share": 0.9,
    "balance_start": 1e-3,
    "balance_floor": 3e-4,
    "revive_below": 0.005,
    "validate_every": 400,
}
SECOND_STAGE: dict[str, Recipe] = {
    name: replace(recipe, **_SECOND_STAGE) for name, recipe in RECIPES.items()
}


def get_recipe(
    model: str, overrides: dict[str, Any] | None = None, *, second_stage: bool = False
) -> Recipe:
    """The recipe of ``model`` (or its second stage) with some constants replaced.

    Raises:
        UnknownNameError: no such model or no such constant.
    """
    recipes = SECOND_STAGE if second_stage else RECIPES
    if model not in recipes:
        raise unknown_name("recipe", model, recipes)
    known = {f.name: f for f in fields(Recipe)}
    values = {}
    for name, value in (overrides or {}).items():
        if name not in known:
            raise unknown_name("recipe constant", name, known)
        kind = type(getattr(recipes[model], name))
        try:
            values[name] = kind(value)
        except (TypeError, ValueError) as error:
            raise UnknownNameError(
                f"recipe constant {name}={value!r} is not a {kind.__name__}: give a number"
            ) from error
    return replace(recipes[model], **values)
