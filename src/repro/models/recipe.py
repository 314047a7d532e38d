"""The training recipe of the bundled models: every constant, in one frozen object."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from repro.errors import UnknownNameError, unknown_name

OPTIMIZERS = ("muon", "adamw")


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

    Raises:
        UnknownNameError: a constant has a value that makes no training.
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

    def __post_init__(self) -> None:
        sizes = ("batch_tokens", "short_tokens", "long_tokens")
        intervals = ("log_every", "validate_every", "checkpoint_every")
        for name in sizes + intervals:
            self._require(name, getattr(self, name) >= 1, "give at least 1")
        for name in ("short_steps", "long_steps", "warmup_steps"):
            self._require(name, getattr(self, name) >= 0, "give 0 or more")
        self._require("short_steps", self.n_steps >= 1, "leave at least one step to train")
        self._require("long_tokens", self.long_tokens >= self.short_tokens, "short_tokens is more")
        for name in ("short_tokens", "long_tokens"):
            whole_sequences = self.batch_tokens % getattr(self, name) == 0
            self._require("batch_tokens", whole_sequences, f"give a multiple of {name}")
        self._require("optimizer", self.optimizer in OPTIMIZERS, "use " + " or ".join(OPTIMIZERS))
        for name in ("learning_rate", "clip_norm", "decay_share", "balance_start"):
            self._require(name, 0 < getattr(self, name) < math.inf, "give a positive number")
        for name in ("weight_decay", "balance_rate", "balance_floor", "revive_below"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "give 0 or more")
        self._require("decay_share", self.decay_share <= 1, "give a share of at most 1")
        self._require(
            "balance_target", 0 < self.balance_target <= 1, "give a share between 0 and 1"
        )

    def _require(self, name: str, holds: bool, remedy: str) -> None:
        if not holds:
            raise UnknownNameError(
                f"recipe constant {name}={getattr(self, name)!r} is not possible: {remedy}"
            )

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
        UnknownNameError: no such model, no such constant, or an impossible value.
    """
    recipes = SECOND_STAGE if second_stage else RECIPES
    if model not in recipes:
        raise unknown_name("recipe", model, recipes)
    # The model is chosen by its name alone: another one's recipe would be recorded as its own.
    known = [f.name for f in fields(Recipe) if f.name != "model"]
    values = {}
    for name, value in (overrides or {}).items():
        if name not in known:
            raise unknown_name("recipe constant", name, known)
        kind = type(getattr(recipes[model], name))
        try:
            values[name] = kind(value)
        except (TypeError, ValueError) as error:
            wanted = "a whole number" if kind is int else "a number"
            raise UnknownNameError(
                f"recipe constant {name}={value!r} is not possible: give {wanted}"
            ) from error
    return replace(recipes[model], **values)
