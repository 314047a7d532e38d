"""Names of single blocks, and their weights in one orientation.

Letters: E experts, N rows (outputs), K columns (inputs), L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from repro.contract import Block
from repro.errors import UnknownNameError
from repro.integration.experts import ExpertsLayer


class BlockRef(NamedTuple):
    """One matrix of one expert; the layer is that of the decoder, dense layers counted."""

    layer_index: int
    expert: int
    block: Block


def block_weights(module: nn.Module) -> tuple[Tensor, Tensor]:
    """``gate_up`` and ``down`` of all experts as ``[E, N, K]``; views without a gradient."""
    flags: Any = module
    gate_up: Tensor = (flags.gate_up_proj if flags.has_gate else flags.up_proj).detach()
    down: Tensor = flags.down_proj.detach()
    if flags.is_transposed:
        return gate_up.transpose(1, 2), down.transpose(1, 2)
    return gate_up, down


def sample_blocks(
    layers: Sequence[ExpertsLayer], n_blocks: int, seed: int = 0
) -> tuple[BlockRef, ...]:
    """``n_blocks`` different blocks, drawn evenly from all of them (or all, if fewer)."""
    if n_blocks < 1:
        raise UnknownNameError(f"n_blocks={n_blocks} measures nothing: ask for at least 1")
    everything = [
        BlockRef(layer.layer_index, expert, block)
        for layer in layers
        for expert in range(layer.n_experts)
        for block in Block
    ]
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(everything))[:n_blocks]
    return tuple(everything[i] for i in sorted(chosen))
