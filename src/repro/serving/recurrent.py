"""States of linear-attention layers: one fixed-size record per request, on pages of the arena.

The one idea: a recurrent state is KV that does not grow.  It is reserved with a request's first
block, gathered for the rows of a pass into one buffer whose views the library's own cache
layers work on, and written back when the pass is over; a pass that raises changes nothing.

A left-padded query would run the state over its padding, so rows of a pass have equally many
new tokens, and either all of them go on from a state or none does.

Letters: R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from repro.serving.kv_blocks import BlockPlan, BlockTable
from repro.serving.kv_sizes import KVError


class RecurrentStates:
    """The states of the rows of one pass.

    Args:
        plan: of the model.
        arena: the arena's bytes, ``uint8[n_pages, page_bytes]``.
        tables: of the rows.
    """

    def __init__(self, plan: BlockPlan, arena: Tensor, tables: Sequence[BlockTable]) -> None:
        self._arena = arena
        self._places = plan.states
        self._page_bytes = plan.page_bytes
        self._pages = torch.from_numpy(np.concatenate([t.state_pages for t in tables]))
        self._pages = self._pages.to(arena.device)
        self._n_rows = len(tables)
        self.layers = {
            index: LinearAttentionLayer(number_of_states=layer.n_states)
            for index, layer in enumerate(plan.layout.layers)
            if layer.states
        }
        self._buffer: Tensor | None = None
        if tables[0].n_tokens > 0:
            self._buffer = arena.index_select(0, self._pages)
            self._hand_out(self._buffer)

    @property
    def n_bytes(self) -> int:
        """Of the gathered copy."""
        return len(self._pages) * self._page_bytes

    def _view(self, buffer: Tensor, place: Any) -> Tensor:
        """``[R, ...]`` of one state, in the buffer."""
        spec = place.spec
        rows = buffer.view(self._n_rows, -1)[:, place.start : place.start + spec.n_bytes]
        return rows.view(spec.dtype).view(self._n_rows, *spec.shape)

    def _hand_out(self, buffer: Tensor) -> None:
        for place in self._places:
            layer: Any = self.layers[place.spec.layer]
            view, index = self._view(buffer, place), place.spec.index
            if place.spec.kind == "conv":
                layer.conv_states[index] = view
                layer.is_conv_states_initialized[index] = True
                layer.conv_kernel_size[index] = view.shape[-1]
                layer.dtype, layer.device = view.dtype, view.device
            else:
                layer.recurrent_states[index] = view
                layer.is_recurrent_states_initialized[index] = True
            layer.has_previous_state[index] = True

    def write_back(self) -> None:
        """Store what the layers hold now.

        Raises:
            KVError: a layer has left a state of another shape than was probed.
        """
        buffer = self._buffer
        if buffer is None:
            shape = (len(self._pages), self._page_bytes)
            buffer = torch.zeros(shape, dtype=torch.uint8, device=self._arena.device)
        for place in self._places:
            layer: Any = self.layers[place.spec.layer]
            held = layer.conv_states if place.spec.kind == "conv" else layer.recurrent_states
            state, view = held[place.spec.index], self._view(buffer, place)
            if state is None or state.shape != view.shape or state.dtype != view.dtype:
                raise KVError(
                    f"the {place.spec.kind} state of layer {place.spec.layer} is not as probed "
                    f"({tuple(place.spec.shape)}, {place.spec.dtype}): probe the model again"
                )
            if state.data_ptr() != view.data_ptr():
                view.copy_(state)
        self._arena.index_copy_(0, self._pages, buffer)
