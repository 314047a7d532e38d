"""Give experts that no token reaches a second life.

A router row that loses every comparison gets no gradient: once dead, an expert stays
dead.  Reviving copies a busy expert into the idle slot and moves the two router rows
apart, one each way along a random direction, so that tokens of the busy one divide between both and
training separates them further (the idea of expert cloning in sparse upcycling).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def revive_experts(
    model: Any, counts: Tensor, below: float, generator: torch.Generator, spread: float = 0.3
) -> list[tuple[int, int, int]]:
    """Replace every expert whose traffic is under ``below`` times an even share.

    Args:
        model: a Transformers MoE model with ``model.layers[i].mlp.{gate, experts}``.
        counts: routed tokens ``[layers, E]``.
        below: threshold as a share of the even traffic (1 / E).
        generator: of the random directions, on the model's device.
        spread: length of the direction relative to the copied router row.

    Returns:
        ``(layer, idle expert, copied expert)`` of each replacement.
    """
    replaced = []
    for layer_id, layer in enumerate(model.model.layers):
        row = counts[layer_id].double()
        even = row.sum() / row.numel()
        idle = [i for i in range(row.numel()) if row[i] < below * even]
        busy = row.argsort(descending=True).tolist()
        for slot, expert in enumerate(idle):
            source = busy[slot]
            gate, experts = layer.mlp.gate.weight, layer.mlp.experts
            for stack in (experts.gate_up_proj, experts.down_proj):
                noise = torch.randn(
                    stack.shape[1:], generator=generator, device=stack.device, dtype=torch.float32
                )
                stack[expert] = stack[source] + 0.05 * stack[source].std() * noise
            direction = torch.randn(
                gate.shape[1], generator=generator, device=gate.device, dtype=torch.float32
            )
            direction *= spread * gate[source].norm() / direction.norm()
            gate[expert] = gate[source] + direction
            gate[source] -= direction
            replaced.append((layer_id, expert, source))
    return replaced
