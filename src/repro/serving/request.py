"""Requests: what was asked, how far it is, and what came of it.

The one idea: a request owns its tokens and its block table and nothing else.  Whatever happens
to it (stalled, preempted, cancelled, failed), these two say how to go on or what to release.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch

from repro.errors import ReproError

FinishReason = Literal["length", "stop", "eos", "cancelled", "error"]


class RequestError(ReproError, ValueError):
    """A request that cannot be served as it was asked."""


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"  # holds no KV memory
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; greedy by default.

    Args:
        temperature: 0 is greedy (ties: the lowest id).
        top_k: keep that many of the likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens that together have this probability.
        seed: of this request's own random numbers; by default from the engine's seed and the
            request's number, so that results do not depend on what runs beside it.

    Raises:
        RequestError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        usable = self.temperature == 0.0 or 1e-6 <= self.temperature < float("inf")
        if not usable:
            raise RequestError(
                f"temperature={self.temperature}: give 0 (greedy), or a number from 1e-6 up"
            )
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise RequestError(f"seed={self.seed}: give a number of 63 bits")
        if self.top_k < 0:
            raise RequestError(f"top_k={self.top_k}: give 0 (all tokens) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p={self.top_p}: give more than 0 and at most 1")


@dataclass(frozen=True)
class Completion:
    """What became of one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    n_prompt_tokens: int
    ttft_s: float  # arrival to first token; NaN without one
    tpot_s: float  # mean time of each further token; NaN with fewer than two
    e2e_s: float  # arrival to end
    n_preemptions: int = 0
    kv_stall_s: float = 0.0  # time it waited for KV memory
    error: str | None = None  # why it failed, if finish_reason is "error"


@dataclass(frozen=True)
class Score:
    """How likely a text is under the model."""

    n_tokens: int  # scored tokens: all but the first
    log_likelihood: float  # natural logarithm, summed over them
    token_log_likelihoods: tuple[float, ...] = field(default=(), repr=False)


@dataclass
class Timing:
    """Wall times of a request, in seconds of the engine's timer."""

    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    stalled_since: float | None = None
    kv_stall_s: float = 0.0


_NUMBERS = itertools.count()


@dataclass(eq=False)
class Request:
    """One prompt under way.

    ``tokens`` are prompt and answer together; the first ``n_prompt`` came from the user.  The
    table holds KV of the first ``table.n_tokens`` of them.
    """

    tokens: list[int]
    n_prompt: int
    max_new_tokens: int
    sampling: SamplingParams
    timing: Timing
    stop: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    on_token: Callable[[str, int], Any] | None = None  # piece of text, token id
    score: bool = False  # only the likelihood of the prompt is wanted
    conversation: Any = None  # keeps the table when the request ends
    table: Any = None
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    n_preemptions: int = 0
    stopper: Any = None
    generator: torch.Generator | None = None
    log_likelihoods: list[float] = field(default_factory=list)
    number: int = field(default_factory=lambda: next(_NUMBERS))
    cancel_asked: bool = False
    undelivered: list[tuple[str, int]] = field(default_factory=list)  # for on_token

    @property
    def n_cached(self) -> int:
        """Tokens whose KV is in pages."""
        return 0 if self.table is None else int(self.table.n_tokens)

    @property
    def n_pending(self) -> int:
        """Tokens the model has not seen yet; 1 while decoding."""
        return len(self.tokens) - self.n_cached

    @property
    def decoding(self) -> bool:
        """Whether its next step makes a token from the one before."""
        return not self.score and len(self.tokens) > self.n_prompt and self.n_pending == 1

    @property
    def n_new(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.n_prompt

    def new_ids(self) -> tuple[int, ...]:
        """The generated tokens."""
        return tuple(self.tokens[self.n_prompt :])


def check_prompt(ids: Sequence[int], max_new_tokens: int, context: int, vocab: int) -> None:
    """Refuse what no engine could serve.

    Raises:
        RequestError: an empty prompt, one that is longer than the model's context, an unknown
            token, no token to make.
    """
    if not ids:
        raise RequestError("the prompt is empty: give at least one token")
    if not isinstance(max_new_tokens, int):
        raise RequestError(f"max_new_tokens={max_new_tokens!r}: give a whole number")
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens={max_new_tokens}: ask for at least one")
    if len(ids) + max_new_tokens > context:
        raise RequestError(
            f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones exceed the model's "
            f"context of {context}: shorten the prompt or ask for fewer"
        )
    worst = max(ids) if min(ids) >= 0 else min(ids)
    if not 0 <= worst < vocab:
        raise RequestError(
            f"token id {worst} is not in the vocabulary of {vocab}: "
            "encode the prompt with this model's tokenizer"
        )
