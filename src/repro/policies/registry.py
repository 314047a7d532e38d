"""Policies by name.

The one idea: whoever assembles an engine asks first what a policy needs (:func:`traits`), then
builds it for an inventory (:func:`make_policy`); names and options that do not exist are refused
with the nearest ones that do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.contract import FloatArray, IntArray
from repro.errors import unknown_name
from repro.policies.base import TRAIT_NAMES, Layout, ServingPolicy, Traits
from repro.policies.caps import CappedPolicy
from repro.policies.dpllm import DpLlmPolicy
from repro.policies.dynaexq import DynaExqPolicy
from repro.policies.inventory import Inventory
from repro.policies.offload import OffloadPolicy
from repro.policies.pagedweight import PagedWeightPolicy
from repro.policies.residual import ResidualHeads
from repro.policies.static import DensePolicy, StaticPolicy
from repro.policies.static_mixed import StaticMixedPolicy


def _traits(layout: Layout, n_widths: int | None = None, *what: str) -> Traits:
    return Traits(layout, n_widths, **{name: name in what for name in TRAIT_NAMES})


POLICIES: dict[str, tuple[Callable[..., ServingPolicy], Traits]] = {
    "dense": (DensePolicy, _traits("any", 1)),
    "static": (StaticPolicy, _traits("any")),
    "static_mixed": (StaticMixedPolicy, _traits("any", None, "uses_sensitivity")),
    "dynaexq": (DynaExqPolicy, _traits("versions", 2, "uses_routing", "changes")),
    "pagedweight": (
        PagedWeightPolicy,
        _traits(
            "planes", None, "shares_kv_pages", "uses_routing", "uses_sensitivity",
            "uses_features", "changes",
        ),
    ),
    "pagedweight_caps": (
        CappedPolicy, _traits("any", None, "uses_routing", "uses_sensitivity", "changes")
    ),
    "dpllm": (DpLlmPolicy, _traits("planes", None, "uses_sensitivity", "chooses_per_step")),
    "offload": (OffloadPolicy, _traits("any", 1, "chooses_per_step")),
}  # fmt: skip


def _entry(name: str) -> tuple[Callable[..., ServingPolicy], Traits]:
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    return POLICIES[name]


def traits(name: str) -> Traits:
    """What a policy needs of the mechanism.

    Raises:
        UnknownNameError: no such policy.
    """
    return _entry(name)[1]


def policy_options(name: str) -> tuple[str, ...]:
    """Names of the options a policy takes.

    Raises:
        UnknownNameError: no such policy.
    """
    parameters = inspect.signature(_entry(name)[0]).parameters
    return tuple(key for key in parameters if key != "inventory")


def make_policy(
    name: str,
    *,
    shape: tuple[int, int],
    widths: tuple[int, ...],
    block_bytes: IntArray,
    sensitivity: FloatArray | None = None,
    calibration_mass: FloatArray | None = None,
    heads: ResidualHeads | None = None,
    exists: npt.NDArray[np.bool_] | None = None,
    **options: Any,
) -> ServingPolicy:
    """Build a policy for a model.

    Args:
        name: see :data:`POLICIES`.
        shape: ``(L, E)``.
        widths: ascending.
        block_bytes: ``[B, W]`` or ``[L, B, W]``, whole pages with tables.
        sensitivity: ``[L, E, B, W]``.
        calibration_mass: ``[L, E]`` of the texts the sensitivity was measured on.
        heads: prompt residual heads.
        exists: ``[L, E]``, False for padding.
        options: of the policy, see :func:`policy_options`.

    Raises:
        UnknownNameError: no such policy or option.
        PolicyInputError: arrays or options that do not belong together.
    """
    build = _entry(name)[0]
    known = policy_options(name)
    for key in options:
        if key not in known:
            raise unknown_name(f"option of policy {name!r}", key, known or ["none"])
    inventory = Inventory(
        shape, tuple(widths), block_bytes, sensitivity, calibration_mass, heads, exists
    )
    return build(inventory, **options)
