"""Signals of several requests as one: weighted by the KV blocks they hold.

The one idea (PagedWeight's batches): a plan serves all running requests, so their signals are
merged, and a request that holds more KV memory has more at stake.  Means merge as means, root
mean squares as squares, maxima as maxima; an expert that a request never chose has no say.

Letters: R requests, L layers, E experts, B blocks.
"""

from __future__ import annotations

import numpy as np

from repro.contract import FloatArray, IntArray
from repro.policies.inventory import PolicyInputError


def merge_features(features: FloatArray, mass: FloatArray, kv_blocks: IntArray) -> FloatArray:
    """Norms of all requests together, ``[L, E, B, 3]``; zeros where nobody chose the expert.

    Args:
        features: ``[R, L, E, B, 3]`` routing-weighted mean, root mean square and maximum of the
            input norms.
        mass: ``[R, L, E]`` routing mass.
        kv_blocks: ``[R]`` blocks each request holds.

    Raises:
        PolicyInputError: shapes that do not fit each other, or negative weights.
    """
    values, weight = np.asarray(features, dtype=np.float64), np.asarray(kv_blocks, dtype=np.float64)
    if values.ndim != 5 or values.shape[-1] != 3 or np.shape(mass) != values.shape[:3]:
        raise PolicyInputError(
            f"features of shape {values.shape} with mass of {np.shape(mass)}: "
            "give [R, L, E, B, 3] and [R, L, E]"
        )
    if weight.shape != values.shape[:1] or (weight < 0).any():
        raise PolicyInputError("kv_blocks must be one number per request, none negative")
    if not len(values):
        return np.zeros(values.shape[1:])
    share = weight[:, None, None] * (np.asarray(mass) > 0)  # [R, L, E]
    total = share.sum(axis=0)
    share = (share / np.where(total > 0, total, 1.0))[..., None]
    mean = (share * values[..., 0]).sum(axis=0)
    rms = np.sqrt((share * values[..., 1] ** 2).sum(axis=0))
    largest = np.where(share > 0, values[..., 2], 0.0).max(axis=0)
    return np.stack([mean, rms, largest], axis=-1)


def merge_mass(mass: FloatArray, n_tokens: IntArray, kv_blocks: IntArray) -> FloatArray:
    """Routing mass per token of all requests together, weighted by KV blocks: ``[L, E]``.

    Args:
        mass: ``[R, L, E]``.
        n_tokens: ``[R]`` real tokens that the mass was summed over.
        kv_blocks: ``[R]``.
    """
    weight = np.asarray(kv_blocks, dtype=np.float64)
    tokens = np.asarray(n_tokens, dtype=np.float64)
    weight = np.where(tokens > 0, weight, 0.0)
    if weight.sum() <= 0:
        return np.zeros(np.shape(mass)[1:])
    per_token = np.asarray(mass) / np.where(tokens > 0, tokens, 1.0)[:, None, None]
    return np.asarray(np.tensordot(weight / weight.sum(), per_token, axes=1))
