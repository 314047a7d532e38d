"""Which experts every token chooses: recorded traces at larger expert counts, and made-up ones.

The one idea: arithmetic does not depend on weights but everything else on routing, so routing is
replayed.  A trace recorded on a small model is mapped to more experts by :func:`expand_trace`;
synthetic traces (:class:`SyntheticRouting`) are there because theory says what must come out.

**The rule of the mapping**, given a seed.  Layer ``l`` follows source layer ``l mod L0``, with
sequences shifted by 8 for every time round so that layers do not move in step.  Each source
expert stands for a group of target experts, ``E / E0`` of them up to rounding, scattered over the
layer by a seeded permutation.  A token's source choices are taken in the router's order, round
after round, until there are k: round ``j`` takes the member ``(u + j) mod size`` of each chosen
group, ``u`` drawn once for every token, layer and choice.  So a group gets exactly the traffic of
its source expert at every moment: cumulative shares (skew) and their change over time (drift) are
those that were recorded, and inside a group all are alike.  What is *not* kept is how many
experts a batch activates (:func:`activation` reports it), since k / E differs.

Letters: S sequences, T tokens, L layers, E experts, k choices; a zero (L0, E0, k0) is the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from repro import paths
from repro.errors import unknown_name
from repro.integration.traces import RoutingTrace, index_dtype
from repro.simulate.errors import SimulationError
from repro.simulate.model import SimulatedModel

Choices = npt.NDArray[np.unsignedinteger[Any]]
SHIFT = 8  # sequences, for every time that source layers are used again
KINDS = ("uniform", "zipf", "drifting", "alternating")
POOL_TOKENS = 4096  # tokens that a synthetic trace is drawn from


@dataclass(frozen=True)
class Place:
    """A run of tokens of one request."""

    request: int
    n_prompt: int
    first: int  # position of the first token
    n_tokens: int
    workload: str = ""


class Routing(Protocol):
    """Answers what the routers choose."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(L, E, k)``."""
        ...

    def choices(self, places: Sequence[Place], number: int) -> Choices:
        """Choices of all these tokens in pass ``number``: ``[tokens, L, k]``."""
        ...


@dataclass
class TraceRouting:
    """Requests that walk through recorded sequences, each in an order of its own.

    A request's prompt takes prompt tokens of one sequence after another, its answer decode
    tokens likewise; the order of the sequences is drawn from the seed and the request's number.

    Args:
        prompts: by workload, ``[S, T, L, k]``.
        answers: by workload, ``[S, T', L, k]``.
        n_experts: E.
        seed: of the orders.
    """

    prompts: Mapping[str, Choices]
    answers: Mapping[str, Choices]
    n_experts: int
    seed: int = 0
    _orders: dict[tuple[str, int], npt.NDArray[np.intp]] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(L, E, k)``."""
        first = next(iter(self.prompts.values()))
        return int(first.shape[2]), self.n_experts, int(first.shape[3])

    def _order(self, workload: str, request: int) -> npt.NDArray[np.intp]:
        if workload not in self.prompts:
            raise unknown_name("workload of the traces", workload, self.prompts)
        key = (workload, request)
        if key not in self._orders:
            n = len(self.prompts[workload])
            self._orders[key] = np.random.default_rng([self.seed, request]).permutation(n)
        return self._orders[key]

    def choices(self, places: Sequence[Place], number: int) -> Choices:
        """See :class:`Routing`.

        Raises:
            UnknownNameError: a workload without a trace.
        """
        found = []
        for place in places:
            order = self._order(place.workload, place.request)
            at = np.arange(place.first, place.first + place.n_tokens)
            for source, some in (
                (self.prompts[place.workload], at[at < place.n_prompt]),
                (self.answers[place.workload], at[at >= place.n_prompt] - place.n_prompt),
            ):
                if len(some):
                    length = source.shape[1]
                    found.append(source[order[some // length % len(order)], some % length])
        return np.concatenate(found)


def expand_trace(
    trace: RoutingTrace, n_layers: int, n_experts: int, top_k: int, seed: int = 0
) -> Choices:
    """Map a trace to ``[S, T, n_layers, top_k]`` by the rule above.

    Raises:
        SimulationError: fewer experts than recorded, or groups too small for the choices.
    """
    before, per_token = trace.n_experts, trace.top_k
    rounds = -(-top_k // per_token)
    smallest = n_experts // before
    if smallest < rounds:
        raise SimulationError(
            f"{before} experts with {per_token} choices cannot stand for {n_experts} with {top_k}: "
            "take a trace of fewer experts or of more choices"
        )
    owner = np.arange(n_experts) * before // n_experts
    start = np.searchsorted(owner, np.arange(before))
    size = np.bincount(owner, minlength=before)
    rng = np.random.default_rng([seed, n_layers, n_experts, top_k])
    shape = (trace.n_sequences, trace.n_tokens, n_layers, top_k)
    result = np.empty(shape, dtype=index_dtype(n_experts))
    for layer in range(n_layers):
        names = rng.permutation(n_experts)
        turn, source = divmod(layer, trace.n_layers)
        chosen = np.roll(trace.top_k_index[:, :, source], turn * SHIFT, axis=0).astype(np.int64)
        offset = rng.integers(0, 1 << 16, size=chosen.shape)
        members = [
            names[start[chosen] + (offset + j) % size[chosen]] for j in range(rounds)
        ]  # each [S, T, k0]
        result[:, :, layer] = np.concatenate(members, axis=-1)[..., :top_k]
    return result


def recorded_routing(
    model: SimulatedModel,
    trace_model: str = "moe-fine",
    workloads: Sequence[str] = ("prose", "word-problems", "python"),
    seed: int = 0,
) -> TraceRouting:
    """The committed traces of a small model at the dimensions of ``model``.

    Raises:
        CheckpointError: no such trace.
        SimulationError: it cannot stand for so many experts.
    """
    prompts, answers = {}, {}
    for name in workloads:
        trace = RoutingTrace.load(paths.traces_dir() / trace_model / f"{name}.npz")
        found = expand_trace(trace, model.n_layers, model.n_experts, model.top_k, seed)
        n_prompt = trace.steps()[0]
        prompts[name], answers[name] = found[:, :n_prompt], found[:, n_prompt:]
    return TraceRouting(prompts, answers, model.n_experts, seed)


class SyntheticRouting:
    """Choices of distinct experts by a popularity that is known.

    - ``uniform``: all alike;
    - ``zipf``: the r-th most popular of a layer is chosen in proportion to ``r ** -exponent``;
    - ``drifting``: Zipf, and every ``period`` passes popularity moves on by one expert;
    - ``alternating``: Zipf under two orders of the experts that change places every ``period``
      passes (the worst case for whoever follows).

    Args:
        n_layers, n_experts, top_k: of the model.
        kind: one of the above.
        exponent: of Zipf's law.
        period: in passes.
        seed: of everything.

    Raises:
        UnknownNameError: no such kind.
        SimulationError: more choices than experts, or a period under one pass.
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        top_k: int,
        kind: str = "uniform",
        *,
        exponent: float = 1.0,
        period: int = 100,
        seed: int = 0,
    ) -> None:
        if kind not in KINDS:
            raise unknown_name("synthetic trace", kind, KINDS)
        if not 1 <= top_k <= n_experts or period < 1:
            raise SimulationError(
                f"top_k={top_k} of {n_experts} experts, period {period}: give 1 to {n_experts} "
                "choices and a period of at least 1"
            )
        self.shape = (n_layers, n_experts, top_k)
        self.kind, self.period, self._seed = kind, period, seed
        rng = np.random.default_rng([seed, KINDS.index(kind)])
        rank = np.arange(1, n_experts + 1, dtype=np.float64)
        weight = np.ones(n_experts) if kind == "uniform" else rank**-exponent
        self.popularity = weight / weight.sum()  # of a first choice, most popular first
        log = np.log(self.popularity)
        pool = np.empty((POOL_TOKENS, n_layers, top_k), dtype=index_dtype(n_experts))
        for layer in range(n_layers):  # k draws without replacement: the largest of log p + Gumbel
            keys = log + rng.gumbel(size=(POOL_TOKENS, n_experts))
            pool[:, layer] = np.argsort(-keys, axis=1)[:, :top_k]
        self._pool = pool
        self._orders = np.stack(
            [[rng.permutation(n_experts) for _ in range(n_layers)] for _ in range(2)]
        )  # [2, L, E]: expert of a rank

    def experts_of_rank(self, number: int) -> npt.NDArray[np.intp]:
        """Experts from the most to the least popular in pass ``number``: ``[L, E]``."""
        turn = number // self.period
        if self.kind == "alternating":
            return self._orders[turn % 2]
        if self.kind == "drifting":
            return np.roll(self._orders[0], turn, axis=1)
        return self._orders[0]

    def choices(self, places: Sequence[Place], number: int) -> Choices:
        """See :class:`Routing`."""
        rows = np.concatenate([_scatter(place, self._seed) for place in places]) % POOL_TOKENS
        ranks = self._pool[rows].astype(np.intp)
        layers = np.arange(self.shape[0])[None, :, None]
        found = self.experts_of_rank(number)[layers, ranks]
        return found.astype(self._pool.dtype)


def _scatter(place: Place, seed: int) -> npt.NDArray[np.uint64]:
    """A number for every token of a request, the same whenever it is asked for."""
    key = ((seed * 1_000_003 + place.request) * 2_654_435_761) % 2**64
    x = np.arange(place.first, place.first + place.n_tokens, dtype=np.uint64)
    x = (x + np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(x ^ (x >> np.uint64(32)))


def counts_of(choices: Choices, n_experts: int) -> npt.NDArray[np.int64]:
    """How often each expert was chosen: ``[L, E]`` of ``[tokens, L, k]``."""
    n_layers = choices.shape[1]
    slots = choices + np.arange(n_layers, dtype=np.int64)[None, :, None] * n_experts
    flat = np.bincount(slots.reshape(-1), minlength=n_layers * n_experts)
    return flat.reshape(n_layers, n_experts).astype(np.int64)


def activation(routing: Routing, batch: int, workload: str = "", n_passes: int = 32) -> float:
    """Share of a layer's experts that a decode step of ``batch`` requests uses, on average.

    To be stated beside every figure of speed; uniform routing has ``1 - (1 - k / E) ** batch``.
    """
    shares = []
    for number in range(n_passes):
        places = [Place(r, 0, number, 1, workload) for r in range(batch)]
        counts = counts_of(routing.choices(places, number), routing.shape[1])
        shares.append((counts > 0).mean())
    return float(np.mean(shares))
