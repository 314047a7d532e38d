"""The contract between the rooms: what formats, kernels, residency and policies may rely on.

The one idea: kernels see tables, not tensors.  For every (layer, expert, block) one row of
a table in device memory says in which format and at how many bits the block is stored and
on which pages its parts lie.  Residency changes rows at step boundaries, kernels read them,
policies ask for changes, formats say what the parts are.  None of them sees more of another
than what is written here, so each can be built and tested alone.

Everything is a small dataclass or a protocol: an implementation inherits from nothing, and
``tests/test_contract.py`` states what each must guarantee.  NumPy only, so that policies
and the simulator need no torch.

Letters: L layers, E experts, B blocks of one expert, W widths, N rows and K columns of a
weight matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class Block(IntEnum):
    """The two matrices of a gated expert; the unit whose width can change."""

    GATE_UP = 0
    DOWN = 1


class FormatId(IntEnum):
    """How the bytes of a block are to be read; a word of its table row."""

    DENSE = 1  # one floating-point matrix
    GROUP_AFFINE = 2  # integer codes, scale and zero per group of columns
    ANY_PRECISION = 3  # nested codes as bit-planes, one look-up table per width


# Formats --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A run of bytes of an encoded matrix that is placed, moved and dropped as a whole."""

    kind: Literal["plane", "lut", "matrix", "codes", "scales"]
    index: int  # of a plane: 0 is the most significant bit; else the width it belongs to
    n_bytes: int


class EncodedWeight(Protocol):
    """One matrix ``[N, K]`` in a format, at all the widths it can be read at."""

    @property
    def format_id(self) -> FormatId:
        """How a kernel must read the parts."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``: rows are outputs, columns are inputs."""
        ...

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits per weight it can be read at, ascending."""
        ...

    @property
    def nested(self) -> bool:
        """Whether the planes of a width are the first planes of every larger one."""
        ...

    def slices(self, n_bits: int) -> tuple[Part, ...]:
        """The parts a kernel needs at this width: planes (most significant first), then tables."""
        ...

    def read(self, part: Part) -> bytes:
        """The bytes of one part; the same for every width that names the part."""
        ...

    def nbytes(self, n_bits: int) -> int:
        """Sum of the parts at this width: all of it counts, tables and scales too."""
        ...

    def decode(self, n_bits: int, parts: Mapping[Part, bytes] | None = None) -> Any:
        """The matrix ``[N, K]`` as a kernel must see it: the reference of every kernel.

        With ``parts``, from these bytes alone (as read back from pages).
        """
        ...


class Format(Protocol):
    """Makes encoded weights: ``AnyPrecision``, ``GroupAffine``, ``Dense``."""

    def encode(self, weight: Any, importance: Any | None = None) -> EncodedWeight:
        """Encode ``weight[N, K]``; ``importance[N, K]`` says which errors matter more.

        Importance that is zero everywhere (an expert never routed in calibration) is legal
        and means that all errors matter alike.
        """
        ...


# The table that kernels read -----------------------------------------------------------

HEADER_WORDS = 4  # format, width, generation, number of pages
NO_PAGE = -1


@dataclass(frozen=True)
class TableRow:
    """What a kernel needs to read one block: the row's words, spelled out."""

    format_id: FormatId
    n_bits: int
    generation: int  # grows by one with every publication of this block
    pages: tuple[int, ...]  # of the parts in the order of ``slices(n_bits)``


def pack_row(row: TableRow, n_words: int) -> npt.NDArray[np.int32]:
    """A row as ``int32[n_words]``; unused page words hold :data:`NO_PAGE`.

    Raises:
        ValueError: the row has more pages than fit.
    """
    if HEADER_WORDS + len(row.pages) > n_words:
        raise ValueError(f"{len(row.pages)} pages in a row of {n_words} words")
    words = np.full(n_words, NO_PAGE, dtype=np.int32)
    words[:HEADER_WORDS] = (row.format_id, row.n_bits, row.generation, len(row.pages))
    words[HEADER_WORDS : HEADER_WORDS + len(row.pages)] = row.pages
    return words


def unpack_row(words: npt.NDArray[np.int32]) -> TableRow:
    """The inverse of :func:`pack_row`."""
    format_id, n_bits, generation, n_pages = (int(w) for w in words[:HEADER_WORDS])
    pages = tuple(int(w) for w in words[HEADER_WORDS : HEADER_WORDS + n_pages])
    return TableRow(FormatId(format_id), n_bits, generation, pages)


def pages_of(parts: Iterable[Part], page_bytes: int) -> list[int]:
    """How many pages each part takes: a part begins on a page of its own."""
    return [-(-part.n_bytes // page_bytes) for part in parts]


# Residency -------------------------------------------------------------------------------


class State(Enum):
    """Of one expert.  DynaExq's two resident states are RESIDENT at its high and low width."""

    RESIDENT = "resident"
    PROMOTING = "promoting"  # more bits on their way in, the old version is used
    DEMOTING = "demoting"  # fewer bits on their way in, the old version is used
    EVICTING = "evicting"  # switched; steps under way still read the old version


class Outcome(Enum):
    """The mechanism's answer to an action."""

    ACCEPTED = "accepted"
    DEFERRED = "deferred"  # not now: ask again at a later step
    REFUSED = "refused"  # no room or no such width; nothing was changed


class Action(NamedTuple):
    """A wish of a policy: these widths for the blocks of one expert, published together."""

    layer: int
    expert: int
    n_bits: tuple[int, ...]  # [B]


@dataclass(frozen=True)
class Reservation:
    """Pages taken out of the common arena, for KV cache, staging or workspace."""

    purpose: str
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A forward pass under way: it reads this table to its end, whatever is published."""

    number: int
    table: npt.NDArray[np.int32]  # [L, E, B, words]


@dataclass(frozen=True)
class Health:
    """Whether the background work makes progress."""

    ok: bool
    message: str = ""


class Residency(Protocol):
    """Bytes and events; knows nothing of policies.

    One arena of pages under a hard cap holds weights, their tables, KV cache and staging.
    """

    @property
    def page_bytes(self) -> int:
        """Size of a page: one kernel tile of one plane."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """The hard cap: size of the arena."""
        ...

    def used_bytes(self) -> int:
        """Pages in use times their size, whoever uses them and however full they are."""
        ...

    def resolve(self, layer: int, expert: int) -> tuple[TableRow, ...]:
        """The handle: the complete version of each block that the next step will read."""
        ...

    def state(self, layer: int, expert: int) -> State:
        """Where the expert stands between two versions."""
        ...

    def read_pages(self, pages: Sequence[int]) -> bytes:
        """Bytes of these pages in order, as a kernel would load them now."""
        ...

    def begin_step(self) -> Step:
        """Enqueue a step. Several may be under way, as a CPU runs ahead of its GPU."""
        ...

    def end_step(self, step: Step) -> None:
        """The step has finished reading: what only it still used can be reclaimed."""
        ...

    def submit(self, action: Action) -> Outcome:
        """Ask for a change. Room for what comes in is reserved here or the answer is not yes."""
        ...

    def advance_copies(self, limit: int | None = None) -> int:
        """Let up to ``limit`` copies complete (all: None); returns how many did."""
        ...

    def publish(self) -> tuple[tuple[int, int], ...]:
        """Write the rows of all changes whose copies have completed: (layer, expert) of each.

        Called at a step boundary.  Steps that have begun do not see it.
        """
        ...

    def reserve(self, n_bytes: int, purpose: str) -> Reservation | None:
        """Pages for ``n_bytes``, all or none: None changes nothing."""
        ...

    def release(self, reservation: Reservation) -> None:
        """Give the pages back."""
        ...

    def health(self) -> Health:
        """Not ok once a copy has been under way for longer than the clock allows."""
        ...


# Clocks, statistics, policies --------------------------------------------------------------


class Clock(Protocol):
    """Wall time for serving, steps for quality experiments, virtual time for the simulator."""

    @property
    def unit(self) -> Literal["s", "steps"]:
        """What :meth:`now` counts."""
        ...

    def now(self) -> float:
        """Never goes back."""
        ...


@dataclass(frozen=True)
class RoutingStatistics:
    """What the routers chose since the last reset, real tokens only, on the host."""

    layer_ids: tuple[int, ...]
    counts: IntArray  # [L, E] how often chosen
    mass: FloatArray  # [L, E] sum of routing weights
    n_tokens: IntArray  # [L] real tokens that passed
    absent: IntArray  # [L] choices of experts that live on another device


class Statistics(Protocol):
    """Accumulates on the device; the token mask of the step is set before it."""

    def set_token_mask(self, mask: Any | None) -> None:
        """Real tokens of the coming step; None: all are real."""
        ...

    def add(self, layer_index: int, top_k_index: Any, top_k_weights: Any, mask: Any) -> None:
        """One layer of one step: ``[T, k]`` twice and a mask of T values, or None."""
        ...

    def read(self) -> RoutingStatistics:
        """What was counted since the last reset; waits for the device."""
        ...

    def reset(self) -> None:
        """Count from zero again."""
        ...


@dataclass(frozen=True)
class PolicyState:
    """Everything a policy may look at, as arrays."""

    now: float  # of the injected clock
    counts: IntArray  # [L, E] since the last decision
    mass: FloatArray  # [L, E]
    n_bits: npt.NDArray[np.int8]  # [L, E, B] what the next step reads
    in_transition: npt.NDArray[np.bool_]  # [L, E]
    widths: tuple[int, ...]  # the W widths there are, ascending
    block_bytes: IntArray  # [B, W] whole pages, tables of the width included
    sensitivity: FloatArray  # [L, E, B, W] damage of reading the block at that width
    budget_bytes: int  # cap on expert weights and their tables
    kv_free_blocks: int
    # Where weights and KV cache share pages; zero where they do not.
    kv_needed_blocks: int = 0  # that requests lack right now; free ones are not subtracted
    kv_block_bytes: int = 0  # whole pages of one KV block
    reclaiming_bytes: int = 0  # of switched versions that steps under way still read
    # What is known of changes under way and of sizes; None where nobody says.
    target_bits: npt.NDArray[np.int8] | None = None  # [L, E, B] once all of them are published
    layer_block_bytes: IntArray | None = None  # [L, B, W] where layers differ
    # Prompt signal of the running requests: mean, RMS and maximum input norm, zeros if unknown.
    features: FloatArray | None = None  # [L, E, B, 3] merged by KV blocks


class Policy(Protocol):
    """Decisions only: state in, actions out, most important first."""

    def decide(self, state: PolicyState) -> list[Action]:
        """What to change now; the mechanism may refuse or defer each wish."""
        ...

    def report(self) -> dict[str, Any]:
        """JSON-able statistics of the policy, for ``engine.snapshot()``."""
        ...
