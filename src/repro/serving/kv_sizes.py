"""What keys, values and states of a model weigh, per token, per block of tokens, per request.

The one idea: a *block* holds ``block_tokens`` tokens of all layers on whole pages.  A recurrent
state has a fixed size per request, whatever its length.

Letters: H heads, D size of a head.  Bytes everywhere, of one device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from repro.errors import ReproError

BLOCK_TOKENS = 16


class KVError(ReproError):
    """A KV cache that cannot do what it was asked."""


@dataclass(frozen=True)
class StateSpec:
    """One recurrent state of one layer of one request."""

    layer: int
    kind: Literal["conv", "recurrent"]
    index: int  # a layer may have several of a kind
    shape: tuple[int, ...]  # without the batch
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Of one request."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerLayout:
    """What one cache layer keeps."""

    kind: Literal["full", "sliding", "recurrent", "none"]
    key_shape: tuple[int, int] = (0, 0)  # (H, D)
    value_shape: tuple[int, int] = (0, 0)
    dtype: torch.dtype = torch.float32
    window: int | None = None  # tokens a query of a sliding layer can see, itself included
    states: tuple[StateSpec, ...] = ()
    n_states: int = 0  # the library numbers the states of a recurrent layer 0 to here

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token; 0 if the layer keeps none."""
        return (math.prod(self.key_shape) + math.prod(self.value_shape)) * self.dtype.itemsize


@dataclass(frozen=True)
class KVLayout:
    """Sizes of the KV cache of one model."""

    layers: tuple[LayerLayout, ...]
    block_tokens: int = BLOCK_TOKENS
    can_chunk: bool = True  # whether a prompt may be computed in pieces
    shares_kv: bool = False  # decoder layers without cache of their own read another's

    @property
    def recurrent(self) -> bool:
        """Whether requests carry a state that cannot be cut back."""
        return any(layer.states for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return sum(layer.token_bytes for layer in self.layers)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """All recurrent states of one request."""
        return tuple(state for layer in self.layers for state in layer.states)

    def block_bytes(self, page_bytes: int) -> int:
        """Whole pages of one block of all layers."""
        return _pages(self.used_block_bytes(page_bytes), page_bytes) * page_bytes

    def state_bytes(self, page_bytes: int) -> int:
        """Whole pages of one request's recurrent states; each state begins on a page."""
        return sum(_pages(s.n_bytes, page_bytes) for s in self.states) * page_bytes

    def used_block_bytes(self, page_bytes: int) -> int:
        """End of the last layer in a block: what is left of the last page is fragmentation."""
        return max((start + n for start, n in self.places(page_bytes).values()), default=0)

    def places(self, page_bytes: int) -> dict[int, tuple[int, int]]:
        """Where each layer lies in a block: layer -> (first byte, bytes).

        Layers of equal token size are neighbours.  Each group begins at a multiple of what
        its tokens have in common with a page, so that a token is cut into few pieces.
        """
        places: dict[int, tuple[int, int]] = {}
        end = 0
        order = sorted(
            (i for i, layer in enumerate(self.layers) if layer.token_bytes),
            key=lambda i: -self.layers[i].token_bytes,
        )
        for index in order:
            token = self.layers[index].token_bytes
            end = _round_up(end, math.gcd(token, page_bytes))
            places[index] = (end, token * self.block_tokens)
            end += token * self.block_tokens
        return places

    def fragmentation(self, page_bytes: int) -> float:
        """Share of a block's pages that holds nothing."""
        total = self.block_bytes(page_bytes)
        return 1.0 - self.token_bytes * self.block_tokens / total if total else 0.0

    def fitted(self, page_bytes: int, limit: float = 0.05) -> KVLayout:
        """With the smallest multiple of ``block_tokens`` that wastes at most ``limit``.

        Should none up to 64 times as many do, the one that wastes least.
        """
        sizes = [replace(self, block_tokens=self.block_tokens * k) for k in range(1, 65)]
        good = [size for size in sizes if size.fragmentation(page_bytes) <= limit]
        return good[0] if good else min(sizes, key=lambda s: s.fragmentation(page_bytes))

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-n_tokens // self.block_tokens) if self.token_bytes else 0

    def request_bytes(self, n_tokens: int, page_bytes: int) -> int:
        """Whole pages of a request of so many tokens, recurrent states included."""
        blocks = self.blocks_for(n_tokens) * self.block_bytes(page_bytes)
        return blocks + self.state_bytes(page_bytes)

    def scratch_bytes(self, n_rows: int, n_tokens: int) -> int:
        """Gathered copies at their largest: of one layer, all indices, and all states.

        One index per token and layer: pages that cut tokens into pieces need one per piece.
        ``n_tokens`` is the longest row.  Models that share keys and values between layers keep
        the shared ones as long as the pass lasts.
        """
        sizes = [layer.token_bytes for layer in self.layers]
        one = sum(sizes) if self.shares_kv else max(sizes, default=0)
        indices = 8 * sum(1 for size in sizes if size)
        states = sum(state.n_bytes for state in self.states)
        return n_rows * (n_tokens * (one + indices) + states)


def _pages(n_bytes: int, page_bytes: int) -> int:
    return -(-n_bytes // page_bytes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
