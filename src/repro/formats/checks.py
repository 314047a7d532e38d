"""What no encoder may be given: weights that are not numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from repro.errors import CheckpointError

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_weight(weight: Tensor, n_dimensions: int, name: str = "weight") -> None:
    """Refuse what cannot be encoded.

    Args:
        weight: ``[N, K]`` or ``[E, N, K]``.
        n_dimensions: how many dimensions it must have.
        name: what to call it in the message.

    Raises:
        CheckpointError: another rank, an empty matrix, integers, NaN or infinity; names the
            first offending expert and row.
    """
    if weight.dim() != n_dimensions or 0 in weight.shape:
        raise CheckpointError(
            f"{name} of shape {tuple(weight.shape)} cannot be encoded: "
            f"give {n_dimensions} dimensions, none of them empty"
        )
    if weight.dtype not in _FLOATS:
        raise CheckpointError(
            f"{name} is stored as {weight.dtype}: "
            "give floating-point weights, not codes of a quantised checkpoint"
        )
    low, high = torch.aminmax(weight, dim=-1)  # NaN passes through; needs no copy of the weight
    bad = ~(torch.isfinite(low) & torch.isfinite(high))
    if bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        where = f"row {first[-1]}" if len(first) == 1 else f"expert {first[0]}, row {first[1]}"
        raise CheckpointError(
            f"{name} has NaN or infinite values in {int(bad.sum())} row(s), first in {where}: "
            "copy the checkpoint again or leave the model out"
        )


def check_importance(importance: Tensor, weight: Tensor, name: str = "importance") -> Tensor:
    """Importance as float32, broadcast to the weight.

    Raises:
        CheckpointError: negative, not finite, or of a shape that does not fit.
    """
    try:
        spread = importance.to(device=weight.device, dtype=torch.float32).expand(weight.shape)
    except RuntimeError as error:
        raise CheckpointError(
            f"{name} of shape {tuple(importance.shape)} does not fit weights of shape "
            f"{tuple(weight.shape)}: give one value per weight or per input channel"
        ) from error
    if not bool(torch.isfinite(importance).all()) or bool((importance < 0).any()):
        raise CheckpointError(
            f"{name} has negative, NaN or infinite values: calibrate again with finite inputs"
        )
    return spread
