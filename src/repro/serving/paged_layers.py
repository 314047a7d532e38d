"""Layers of the paged cache: what a model's attention calls during a pass.

The one idea: ``update()`` scatters the real new tokens of all rows into their pages and gathers
everything the rows have into one padded copy.  Where the tokens are was computed once for the
pass, so a layer is one scatter and one gather.

Letters: R rows, Tq columns of new tokens, Tk of new and past ones, H heads, D size of a head, L
layers of a group, u units of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from repro.serving.kv_sizes import KVError, LayerLayout
from repro.serving.recurrent import RecurrentStates

if TYPE_CHECKING:
    from repro.serving.paged_cache import PagedCache


@dataclass
class GroupPass:
    """Where the layers of one group find their tokens in this pass."""

    units: Tensor  # the arena, [n_units, values of a unit]
    new: Tensor  # [L, real new tokens * u]
    all: Tensor | None  # [L, R * Tk * u]; None: nothing is cached and nothing padded
    n_columns: int  # Tk, or what a sliding window needs of it


@dataclass
class Pass:
    """One forward pass over some rows."""

    n_rows: int
    n_new: int  # Tq
    n_columns: int  # Tk
    real: Tensor | None  # which of the R * Tq new tokens are real; None: all
    padding: Tensor  # [R] padded columns of Tk
    groups: tuple[GroupPass, ...]
    states: RecurrentStates | None


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer."""

    def __init__(self, cache: PagedCache, layout: LayerLayout, group: int, place: int) -> None:
        super().__init__()
        self.is_sliding = layout.kind == "sliding"
        self.is_initialized = True
        self._cache, self._layout, self._group, self._place = cache, layout, group, place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the memory is the arena's."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new ``[R, H, Tq, D]``, return all ``[R, H, Tk, D]`` as a copy."""
        now, layout = self._cache.current, self._layout
        _check(layout, key_states, value_states, now)
        group = now.groups[self._group]
        new = torch.cat(
            [key_states.transpose(1, 2).flatten(2), value_states.transpose(1, 2).flatten(2)], -1
        ).flatten(0, 1)
        if now.real is not None:
            new = new.index_select(0, now.real)
        group.units.index_copy_(0, group.new[self._place], new.view(-1, group.units.shape[1]))
        if group.all is None:
            return key_states, value_states
        both = group.units.index_select(0, group.all[self._place])
        self._cache.count_scratch(both)
        both = both.view(now.n_rows, group.n_columns, -1)
        n_key = layout.key_shape[0] * layout.key_shape[1]
        keys = both[..., :n_key].unflatten(-1, layout.key_shape)
        values = both[..., n_key:].unflatten(-1, layout.value_shape)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of keys, and how many are left out before them."""
        now = self._cache.current
        n_columns = now.groups[self._group].n_columns
        return n_columns, now.n_columns - n_columns

    def get_seq_length(self) -> int:
        """Columns before the new ones."""
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


def _check(layout: LayerLayout, keys: Tensor, values: Tensor, now: Pass) -> None:
    heads, size = layout.key_shape
    value_heads, value_size = layout.value_shape
    if (
        keys.shape != (now.n_rows, heads, now.n_new, size)
        or values.shape != (now.n_rows, value_heads, now.n_new, value_size)
        or keys.dtype != layout.dtype
        or values.dtype != layout.dtype
    ):
        raise KVError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} of {keys.dtype} are not "
            f"what the model was probed with ({layout.key_shape}, {layout.value_shape}, "
            f"{layout.dtype}): probe it again after changing its type"
        )


class NoLayer(CacheLayerMixin):
    """A layer that reads another's keys and values and caches none."""

    is_sliding = False

    def __init__(self, cache: PagedCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Refused: the probe saw nothing here."""
        raise KVError("a cache layer that was empty when probed is used now: probe the model again")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns."""
        return self._cache.current.n_columns, 0

    def get_seq_length(self) -> int:
        """Columns before the new ones."""
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1
