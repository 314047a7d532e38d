"""A Transformers cache whose keys and values live on pages of the arena.

The one idea: a model sees an ordinary padded batch.  Rows have different pasts and different
numbers of new tokens, all padded on the left, so that decoding, a chunk of a prompt and any
mixture of them are one case:

    past and new tokens    . . a a a a | a      a row of 4 cached tokens and 1 new one
    of three rows          b b b b b b | b      6 and 1
                           . . . . . c | c      nothing cached: two new tokens of three columns

A padded column reads the row's own first token: finite, hidden by the mask, and nobody else's,
so no page that is free or another's is ever read (0 times NaN is NaN).

The gathered copy of one layer is the scratch of the reference path: see
:meth:`KVLayout.scratch_bytes` and ``peak_scratch_bytes``.

Letters: R rows, Tq columns of new tokens, Tk of new and past ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from repro.serving.kv_blocks import BlockPlan, BlockTable, UnitIndex
from repro.serving.kv_sizes import KVError, KVLayout
from repro.serving.paged_layers import GroupPass, NoLayer, PagedLayer, Pass
from repro.serving.recurrent import RecurrentStates


class ArenaMemory(Protocol):
    """What is used of :class:`repro.residency.Arena`."""

    page_bytes: int
    device: torch.device

    def as_dtype(self, dtype: torch.dtype) -> Tensor:
        """``[n_pages, page_bytes // itemsize]``."""
        ...


class PageReader(Protocol):
    """Attention that reads pages itself; :class:`repro.serving.attention.Installed`."""

    def begin(self, n_past: Any, n_new: Any, pages: Tensor) -> frozenset[int]:
        """Layers for which nothing is to be gathered in this pass."""
        ...

    def check(self) -> None:
        """Raises if a layer has not stored its token."""
        ...

    def end(self) -> None:
        """The pass is over."""
        ...


class PagedCache(Cache):
    """The KV cache of one model, for one pass after the other.

    Args:
        layout: of the model, see :func:`repro.serving.kv_layout.probe`.
        arena: the memory; views of it are held during a pass only.
    """

    def __init__(self, layout: KVLayout, arena: ArenaMemory) -> None:
        self.layout = layout
        self.plan = BlockPlan.of(layout, arena.page_bytes)
        self.peak_scratch_bytes = 0
        self.reader: PageReader | None = None
        self._arena = arena
        self._index = UnitIndex(self.plan, torch.device(arena.device))
        self._pass: Pass | None = None
        places = {
            layer: (number, place)
            for number, group in enumerate(self.plan.groups)
            for place, layer in enumerate(group.layers)
        }
        super().__init__(
            layers=[
                PagedLayer(self, layer, *places[i]) if i in places else NoLayer(self)
                for i, layer in enumerate(layout.layers)
            ]
        )
        self._sliding = [layer.kind == "sliding" for layer in layout.layers]
        self._linear = [layer.kind == "recurrent" for layer in layout.layers]
        self._none = [layer.kind == "none" for layer in layout.layers]

    # a pass --------------------------------------------------------------------------------

    @property
    def current(self) -> Pass:
        """The pass under way.

        Raises:
            KVError: there is none.
        """
        if self._pass is None:
            raise KVError("the paged cache is used outside a pass: call repro.serving.forward.run")
        return self._pass

    def begin(self, tables: Sequence[BlockTable], n_new: Sequence[int]) -> Pass:
        """Prepare a pass over ``tables``, each with so many new tokens.

        Raises:
            KVError: no rows, a row without new tokens or without room for them, one table
                twice, rows that cannot go together (see :mod:`repro.serving.recurrent`).
        """
        _check_rows(tables, n_new, self.plan)
        past = np.array([table.n_tokens for table in tables], dtype=np.int64)
        new = np.array(n_new, dtype=np.int64)
        n_query, n_columns = int(new.max()), int((past + new).max())
        padding = torch.from_numpy(n_columns - past - new).to(self._index.device)
        real = _real_tokens(new, n_query)
        real = None if real is None else real.to(self._index.device)
        tokens = _tokens_to_read(padding, n_columns)
        gather = real is not None or int(past.max()) > 0
        groups = []
        pages = self._index.upload(tables)
        paged = frozenset() if self.reader is None else self.reader.begin(past, new, pages)
        for number, group in enumerate(self.plan.groups):
            if paged.issuperset(group.layers):
                groups.append(self._untouched(number, n_columns, n_query))
            else:
                groups.append(self._group(number, pages, tokens, n_query, real, gather))
        states = None
        if self.plan.states:
            states = RecurrentStates(self.plan, self._arena.as_dtype(torch.uint8), tables)
            for index, layer in states.layers.items():
                self.layers[index] = layer
        self._pass = Pass(len(tables), n_query, n_columns, real, padding, tuple(groups), states)
        return self._pass

    def _group(
        self,
        number: int,
        pages: Tensor,
        tokens: Tensor,
        n_query: int,
        real: Tensor | None,
        gather: bool,
    ) -> GroupPass:
        group, n_rows = self.plan.groups[number], len(tokens)
        n_columns = self._columns(number, tokens.shape[1], n_query)
        wanted = n_columns if gather else n_query
        units = self._index.units(number, pages, tokens[:, -wanted:])
        n_layers, n_units = len(group.layers), group.units_per_token
        new = units.view(n_layers, n_rows, wanted, n_units)[:, :, -n_query:]
        new = new.reshape(n_layers, n_rows * n_query, n_units)
        if real is not None:
            new = new.index_select(1, real)
        arena = self._arena.as_dtype(group.dtype)
        return GroupPass(
            arena.view(-1, group.unit_bytes // group.dtype.itemsize),
            new.reshape(n_layers, -1),
            units.view(n_layers, -1) if gather else None,
            n_columns,
        )

    def _columns(self, number: int, n_columns: int, n_query: int) -> int:
        window = self.plan.groups[number].window
        return n_columns if window is None else min(n_columns, window - 1 + n_query)

    def _untouched(self, number: int, n_columns: int, n_query: int) -> GroupPass:
        """A group whose layers' attention reads pages: no index is made."""
        none = torch.empty(0, dtype=torch.int64, device=self._index.device)
        columns = self._columns(number, n_columns, n_query)
        return GroupPass(self.memory(self.plan.groups[number].dtype), none, None, columns)

    def memory(self, dtype: torch.dtype) -> Tensor:
        """The arena as ``[n_pages, page_bytes // itemsize]``."""
        return self._arena.as_dtype(dtype)

    def commit(self, tables: Sequence[BlockTable], n_new: Sequence[int]) -> None:
        """The pass has been computed: its tokens are cached now."""
        states = self.current.states
        if self.reader is not None:
            self.reader.check()
        if states is not None:
            self.count_scratch(states)
            states.write_back()
        for table, n in zip(tables, n_new, strict=True):
            table.n_tokens += n

    def end(self) -> None:
        """Let go of the arena; what was not committed counts as never computed."""
        self._pass = None
        if self.reader is not None:
            self.reader.end()
        for index, linear in enumerate(self._linear):
            if linear:
                self.layers[index] = NoLayer(self)

    def count_scratch(self, gathered: Any) -> None:
        """Note the size of a gathered copy."""
        n_bytes = gathered.n_bytes if hasattr(gathered, "n_bytes") else gathered.nbytes
        self.peak_scratch_bytes = max(self.peak_scratch_bytes, n_bytes)

    # what Transformers asks ------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the new ones."""
        return 0 if self._pass is None else self._pass.n_columns - self._pass.n_new

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns of keys in a layer, and how many are left out before them."""
        layer = self.layers[layer_idx]
        if isinstance(layer, PagedLayer):
            return layer.get_mask_sizes(query_length)
        return self.current.n_columns, 0

    @property
    def is_sliding(self) -> list[bool]:
        """By layer."""
        return self._sliding

    @property
    def is_linear(self) -> list[bool]:
        """By layer."""
        return self._linear

    @property
    def is_dummy(self) -> list[bool]:
        """By layer."""
        return self._none

    @property
    def is_compileable(self) -> bool:
        """No: shapes change with every pass."""
        return False


def _real_tokens(n_new: npt.NDArray[np.int64], n_query: int) -> Tensor | None:
    """Which of the ``R * Tq`` new tokens are real; None if all are."""
    if int(n_new.min()) == n_query:
        return None
    mask = np.arange(n_query)[None, :] >= (n_query - n_new)[:, None]
    return torch.from_numpy(np.flatnonzero(mask))


def _tokens_to_read(padding: Tensor, n_columns: int) -> Tensor:
    """``[R, Tk]``: the token behind each column; behind padding, the first one of its own row.

    Whatever else lies in memory may be NaN, and a mask does not help against that.
    """
    tokens = torch.arange(n_columns, device=padding.device) - padding[:, None]
    return tokens.clamp_(min=0)


def _check_rows(tables: Sequence[BlockTable], n_new: Sequence[int], plan: BlockPlan) -> None:
    if not tables or len(tables) != len(n_new):
        raise KVError(f"{len(tables)} tables with {len(n_new)} chunks: give one chunk per table")
    if len({id(table) for table in tables}) < len(tables):
        raise KVError("one request twice in a pass: its tokens would overwrite each other")
    for row, (table, n) in enumerate(zip(tables, n_new, strict=True)):
        if n < 1:
            raise KVError(f"row {row} has no new token: leave it out of the pass")
        if table.n_tokens + n > table.capacity:
            raise KVError(
                f"row {row} has room for {table.capacity} tokens and would have "
                f"{table.n_tokens + n}: extend its table first"
            )
    if plan.states and len({(t.n_tokens > 0, n) for t, n in zip(tables, n_new, strict=True)}) > 1:
        raise KVError(
            "rows with recurrent states have equally many new tokens and all or none of them a "
            "past: put the others into a pass of their own"
        )
