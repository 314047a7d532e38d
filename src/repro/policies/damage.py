"""What each step down costs: ``damage = mu * g * eta``, each factor with a switch.

The one idea (PagedWeight): g, the rise of the offline sensitivity, is what the step costs on
average; mu scales it by the traffic the expert gets now; eta by what the running prompts look
like.  A step joins neighbouring widths; a longer way down costs the sum of its steps.

Letters: L layers, E experts, B blocks, W widths, S = W - 1 steps, n = L E B blocks in that order.
"""

from __future__ import annotations

import numpy as np

from repro.contract import FloatArray
from repro.policies.inventory import Inventory, PolicyInputError
from repro.policies.residual import N_NORMS

# Our choice: without sensitivities a bit less costs four times the squared error, as uniform
# quantisation does; the same for all blocks, so that size and traffic alone decide.
ERROR_PER_BIT = 4.0


def step_bytes(inventory: Inventory) -> FloatArray:
    """Net bytes of each step ``[S, n]``; zero where no expert is."""
    sizes = np.diff(inventory.sizes, axis=2)  # [L, B, S]
    shape = (*inventory.shape, inventory.n_blocks, sizes.shape[2])
    every = np.broadcast_to(sizes[:, None], shape) * inventory.present[..., None, None]
    flat = every.reshape(int(np.prod(shape[:3])), shape[3])
    return np.ascontiguousarray(flat.T, dtype=np.float64)


def step_gain(inventory: Inventory, use_sensitivity: bool = True) -> FloatArray:
    """g of each step ``[S, n]``; a table that knows no step from another counts as none."""
    if use_sensitivity and inventory.sensitivity is not None:
        s = np.asarray(inventory.sensitivity, dtype=np.float64)
        if not np.isfinite(s).all():
            raise PolicyInputError("sensitivities that are not finite: calibrate the model again")
        g = np.maximum(0.0, s[..., :-1] - s[..., 1:])
        if g.any():
            return np.ascontiguousarray(g.reshape(int(np.prod(g.shape[:3])), g.shape[3]).T)
    curve = ERROR_PER_BIT ** -np.asarray(inventory.widths, dtype=np.float64)
    n = inventory.shape[0] * inventory.shape[1] * inventory.n_blocks
    return np.repeat((curve[:-1] - curve[1:])[:, None], n, axis=1)


def step_eta(
    inventory: Inventory, features: FloatArray | None, ratio: FloatArray
) -> FloatArray | None:
    """eta of each step ``[S, n]``; None without heads or features.

    Args:
        inventory: with heads.
        features: ``[L, E, B, 3]`` merged over requests.
        ratio: ``[L, E]`` traffic relative to calibration, the fourth feature of extended heads.
    """
    heads = inventory.heads
    if heads is None or features is None or len(inventory.widths) < 2:
        return None
    n_layers, n_experts = inventory.shape
    steps = [(high, low) for low, high in zip(inventory.widths, inventory.widths[1:], strict=False)]
    result = np.empty((len(steps), n_layers * n_experts, inventory.n_blocks))
    for block in range(inventory.n_blocks):
        seen = np.asarray(features, dtype=np.float64)[:, :, block].reshape(-1, N_NORMS)
        if heads.n_features > N_NORMS:
            seen = np.concatenate([seen, ratio.reshape(-1, 1)], axis=1)
        result[:, :, block] = heads.log_eta(block, steps, seen)
    return np.exp(result, out=result).reshape(len(steps), -1)


def per_block(values: FloatArray, n_blocks: int) -> FloatArray:
    """Per expert ``[L, E]`` to per block ``[n]``."""
    return np.repeat(values.reshape(-1), n_blocks)
