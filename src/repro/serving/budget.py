"""How a budget is split before anything is allocated, and what does not fit.

The one idea: ``budget_bytes`` is the arena, and everything that changes its size lives in it.
What is left of a device beside it (dense weights, biases, activations, the scratch of the
reference path) is ``fixed``: measured, reported, and subtracted when a whole-device cap is
given instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from repro.integration.experts import ExpertsLayer
from repro.integration.paged_experts import original_weights
from repro.residency.errors import BudgetError


@dataclass(frozen=True)
class FixedBytes:
    """M_fixed: what no policy can move."""

    dense_weights: int  # attention, routers, embeddings, norms, dense layers, shared experts
    shared_experts: int  # of these: experts every token passes; they are not paged
    expert_biases: int
    workspace: int  # decoded experts and gathered KV at most, plus activations if measured

    @property
    def total(self) -> int:
        """Sum, shared experts counted once."""
        return self.dense_weights + self.expert_biases + self.workspace

    def report(self) -> dict[str, int]:
        """JSON-able."""
        return {**asdict(self), "total": self.total}


def measure_fixed(model: nn.Module, layers: tuple[ExpertsLayer, ...], workspace: int) -> FixedBytes:
    """Bytes of everything in the model but the stacked weights of its experts."""
    paged = {id(weight) for layer in layers for weight in original_weights(layer)}
    inside = {id(t) for layer in layers for t in layer.module.parameters(recurse=False)}
    dense = shared = biases = 0
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) in paged or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        n_bytes = tensor.numel() * tensor.element_size()
        if id(tensor) in inside:
            biases += n_bytes
            continue
        dense += n_bytes
        if "shared_expert" in name:  # shared_expert, shared_experts, shared_expert_gate
            shared += n_bytes
    return FixedBytes(dense, shared, biases, workspace)


def split_device(device_bytes: int, fixed: FixedBytes) -> int:
    """What a whole-device cap leaves for the arena.

    Raises:
        BudgetError: nothing; says by how many bytes.
    """
    left = device_bytes - fixed.total
    if left <= 0:
        raise BudgetError(
            f"device_bytes={device_bytes:,} is {-left:,} bytes less than what does not move "
            f"({fixed.total:,} bytes of dense weights and workspace): raise it by more than that"
        )
    return left


def default_kv_bytes(block_bytes: int, tokens_per_block: int, n_requests: int) -> int:
    """KV blocks for ``n_requests`` of 512 tokens, if the user does not say otherwise."""
    return n_requests * -(-512 // tokens_per_block) * block_bytes


def device_report(device: torch.device) -> dict[str, Any]:
    """What the driver says, beside our own ledger."""
    if device.type != "cuda":
        return {"device": str(device)}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "driver_used_bytes": total - free,
    }
