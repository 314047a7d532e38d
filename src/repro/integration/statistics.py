"""Counts and routing mass per (layer, expert), accumulated where the model runs.

The one idea: policies need to know how often each expert was chosen and with how much
weight, and must not make the forward pass wait for it.  So the sums stay on the device,
every shape is static and nothing is read back until somebody asks: the same calls can be
part of a captured CUDA graph and then go on counting when it is replayed.

Mass is added up in whole units of 2**-24 (one part of what float32 can tell apart just
below 1).  Integer sums do not depend on the order of additions, so two runs give the same
bits on a GPU as well, and decisions made from them repeat.

Only real tokens count: padding is excluded by the token mask of the current step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from repro.contract import RoutingStatistics
from repro.integration.experts import ExpertsLayer

MASS_UNIT = 2.0**-24


@dataclass
class _Table:
    counts: Tensor  # [E + 1]; the last is the mark of an absent expert
    mass_units: Tensor  # [E + 1]
    n_tokens: Tensor  # []


class DeviceStatistics:
    """Accumulates routing of one model; an observer for :func:`repro.integration.experts.observe`.

    The token mask of the step is set before the forward pass with :meth:`set_token_mask`.
    A mask of the same shape is copied into the same memory, which is what a replayed CUDA
    graph reads.
    """

    def __init__(self, layers: tuple[ExpertsLayer, ...]) -> None:
        self._n_experts = {layer.layer_index: layer.n_experts for layer in layers}
        self._tables: dict[int, _Table] = {}
        self._masks: dict[torch.device, Tensor] = {}
        self._mask: Tensor | None = None

    def set_token_mask(self, mask: Tensor | None) -> None:
        """Real tokens of the coming step: bool, T values in any shape; None: all are real."""
        if mask is None:
            self._mask = None
            return
        flat = mask.reshape(-1).to(torch.bool)
        same = self._mask is not None and self._mask.shape == flat.shape
        if same and self._mask is not None and self._mask.device == flat.device:
            self._mask.copy_(flat)
        else:
            with torch.inference_mode(False):
                self._mask = flat.clone()

    def __call__(
        self, module: nn.Module, layer_index: int, top_k_index: Tensor, top_k_weights: Tensor
    ) -> None:
        """Count one layer under the mask that was set."""
        self.add(layer_index, top_k_index, top_k_weights, self._mask)

    def add(
        self, layer_index: int, top_k_index: Tensor, top_k_weights: Tensor, mask: Tensor | None
    ) -> None:
        """Count one layer of one step: indices and weights ``[T, k]``, mask of T values."""
        table = self._tables.get(layer_index)
        if table is None:
            table = self._new_table(layer_index, top_k_index.device)
        index = top_k_index.reshape(-1).to(torch.int64)
        units = (top_k_weights.detach().to(torch.float64) / MASS_UNIT).round().to(torch.int64)
        if mask is None:
            ones = torch.ones_like(index)
            table.n_tokens += top_k_index.shape[0]
        else:
            real = mask.reshape(-1).to(index.device).to(torch.int64)
            if real.shape[0] != top_k_index.shape[0]:
                raise ValueError(
                    f"token mask of {real.shape[0]} for a step of {top_k_index.shape[0]} tokens"
                )
            table.n_tokens += real.sum()
            ones = real[:, None].expand(top_k_index.shape).reshape(-1)
            units = units * real[:, None]
        table.counts.scatter_add_(0, index, ones)
        table.mass_units.scatter_add_(0, index, units.reshape(-1))

    def _new_table(self, layer_index: int, device: torch.device) -> _Table:
        with torch.inference_mode(False):  # or later steps outside of it could not add
            width = self._n_experts[layer_index] + 1
            table = _Table(
                counts=torch.zeros(width, dtype=torch.int64, device=device),
                mass_units=torch.zeros(width, dtype=torch.int64, device=device),
                n_tokens=torch.zeros((), dtype=torch.int64, device=device),
            )
        self._tables[layer_index] = table
        return table

    def reset(self) -> None:
        """Start from zero, in the same memory."""
        for table in self._tables.values():
            table.counts.zero_()
            table.mass_units.zero_()
            table.n_tokens.zero_()

    def read(self) -> RoutingStatistics:
        """Copy to the host (waits for the device). Layers never seen read zero."""
        layer_ids = tuple(self._n_experts)
        width = max(self._n_experts.values())
        counts = np.zeros((len(layer_ids), width), dtype=np.int64)
        mass = np.zeros((len(layer_ids), width), dtype=np.float64)
        n_tokens = np.zeros(len(layer_ids), dtype=np.int64)
        absent = np.zeros(len(layer_ids), dtype=np.int64)
        for row, (layer_index, n_experts) in enumerate(self._n_experts.items()):
            table = self._tables.get(layer_index)
            if table is None:
                continue
            counted = table.counts.cpu().numpy()
            counts[row, :n_experts] = counted[:-1]
            absent[row] = counted[-1]
            mass[row, :n_experts] = table.mass_units.cpu().numpy()[:-1] * MASS_UNIT
            n_tokens[row] = int(table.n_tokens)
        return RoutingStatistics(layer_ids, counts, mass, n_tokens, absent)
