"""From a policy's name to the mechanism that carries it out, at the dimensions of a model.

The one idea: everything that a simulation chooses is one frozen object, so a record that holds
it can be repeated.  What is split is the arena: ``capacity_bytes`` holds experts, tables, KV
cache, staging and slack, as in serving; dense weights and a workspace stand beside it.

Letters: L layers, E experts, B blocks, W widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.contract import FloatArray
from repro.errors import unknown_name
from repro.policies import Inventory, make_policy, traits
from repro.policies.damage import ERROR_PER_BIT
from repro.policies.offload import OffloadPolicy
from repro.residency import Limits, choose_page_bytes, plan_memory
from repro.simulate.cost import ExpertCosts
from repro.simulate.device import DeviceProfile
from repro.simulate.errors import SimulationError
from repro.simulate.expert_cache import ExpertCache
from repro.simulate.mechanism import Mechanism, Offloaded, Resident
from repro.simulate.miniature import (
    PAGE,
    block_sizes,
    real_payloads,
)
from repro.simulate.model import SimulatedModel
from repro.simulate.virtual_residency import VirtualResidency
from repro.simulate.virtual_time import VirtualClock, VirtualLink

#: How experts are stored unless a setup says otherwise.
FORMATS = {
    "dense": "fp16",
    "static": "int4-g128",
    "static_mixed": "any-precision",
    "dynaexq": "fp16/int4",
    "pagedweight": "any-precision",
    "pagedweight_caps": "any-precision",
    "offload": "fp16",
}
# Our choice: activations, logits and the runtime beside dense weights.
WORKSPACE_BYTES = 1 << 30


@dataclass(frozen=True)
class Setup:
    """One simulated server.

    Args:
        policy: a name of :data:`FORMATS`.
        capacity_bytes: of the arena.
        kv_bytes: its KV partition at the start.
        experts: format or pair of tiers; None: :data:`FORMATS`.
        options: of the policy.
        max_running: requests at a time.
        max_step_tokens: of one step.
        prefetch: ``offload`` only, accuracy of the predictor in [0, 1]; None: no fetching ahead.
        frozen: the map of widths stays as it begins.
        host: host store, ``mirrored`` or ``single``.
        bytes_per_s: limit on background copies; None: none.
        slack: see :func:`repro.residency.plan_memory`; None: its default.
        update_queue: see :class:`repro.serving.control.Control`; None: its default.
        seed: of the predictor's mistakes.
    """

    policy: str
    capacity_bytes: int
    kv_bytes: int
    experts: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    max_running: int = 32
    max_step_tokens: int = 2048
    prefetch: float | None = 1.0
    frozen: bool = False
    host: str = "mirrored"
    bytes_per_s: float | None = None
    slack: int | None = None
    update_queue: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        traits(self.policy)  # raises for a name there is not
        if self.policy not in FORMATS:
            raise unknown_name("policy that is simulated", self.policy, FORMATS)

    @property
    def format_name(self) -> str:
        """How experts are stored."""
        return self.experts or FORMATS[self.policy]

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "options": dict(self.options), "experts": self.format_name}


def arena_bytes(device: DeviceProfile, model: SimulatedModel, device_bytes: int = 0) -> int:
    """What a cap on the whole device leaves for the arena.

    Args:
        device: its memory is the cap unless ``device_bytes`` is given.
        model: dense weights stand beside the arena.
        device_bytes: the cap; 0: all of the device.

    Raises:
        SimulationError: nothing is left.
    """
    cap = device_bytes or device.memory_bytes
    left = cap - model.fixed_bytes - WORKSPACE_BYTES
    if left <= 0:
        raise SimulationError(
            f"{cap} bytes are less than the {cap - left} of dense weights and workspace: raise it"
        )
    return left


def default_damage(shape: tuple[int, int], n_blocks: int, widths: tuple[int, ...]) -> FloatArray:
    """Damage of one use, ``[L, E, B, W]``: a bit less costs four times the squared error."""
    curve = ERROR_PER_BIT ** -np.asarray(widths, dtype=np.float64)
    return np.broadcast_to(curve, (*shape, n_blocks, len(widths)))


@dataclass(frozen=True, eq=False)
class Built:
    """A mechanism with what the results are judged by."""

    mechanism: Mechanism
    inventory: Inventory
    damage_per_use: FloatArray  # [L, E, B, W]
    weight_budget_bytes: int
    n_slots: int = 0  # of an expert cache; 0 where there is none
    resident: npt.NDArray[np.bool_] | None = None  # [L, E] that it begins with


def build(
    setup: Setup,
    model: SimulatedModel,
    device: DeviceProfile,
    clock: VirtualClock,
    *,
    sensitivity: FloatArray | None = None,
    calibration_mass: FloatArray | None = None,
    damage_per_use: FloatArray | None = None,
) -> Built:
    """The mechanism of a setup.

    Args:
        setup: what is chosen.
        model: dimensions.
        device: rates.
        clock: virtual.
        sensitivity: ``[L, E, B, W]`` shown to the policy.
        calibration_mass: ``[L, E]`` shown to the policy.
        damage_per_use: ``[L, E, B, W]`` by which results are judged; None:
            :func:`default_damage`.

    Raises:
        BudgetError, PolicyBudgetError, SimulationError: it does not fit.
        UnknownNameError: an option or format there is not.
    """
    schemes = model.schemes(setup.format_name)
    shape = (model.n_layers, model.n_experts)
    payloads = real_payloads(schemes, *shape)
    page = choose_page_bytes(payloads[:1]).page_bytes
    widths = payloads[0][0].widths
    sizes = block_sizes(payloads, page)
    policy = make_policy(
        setup.policy,
        shape=shape,
        widths=widths,
        block_bytes=sizes,
        sensitivity=sensitivity,
        calibration_mass=calibration_mass,
        **_clocked(setup),
    )
    inventory = Inventory(shape, widths, sizes, sensitivity, calibration_mass)
    damage = damage_per_use
    if damage is None:
        damage = default_damage(shape, len(schemes), widths)
    names = [payloads[0][0].scheme(w).name for w in widths]
    costs = ExpertCosts(device, model, names, widths, block_sizes(payloads, None))
    kv_block = model.kv.fitted(page).block_bytes(page)
    if isinstance(policy, OffloadPolicy):
        link = VirtualLink(device.h2d_bytes_per_s, device.d2h_bytes_per_s, device.copy_fixed_s)
        experts = ExpertCache(
            policy,
            inventory,
            capacity_bytes=setup.capacity_bytes,
            kv_bytes=setup.kv_bytes,
            page_bytes=page,
            link=link,
            clock=clock,
            read_ahead=setup.prefetch is not None,
            accuracy=1.0 if setup.prefetch is None else setup.prefetch,
            seed=setup.seed,
        )
        budget = experts.n_slots * experts.expert_bytes
        offloaded = Offloaded(experts, clock, costs, damage[..., -1])
        first = experts.cache.resident.copy()
        return Built(offloaded, inventory, damage, budget, experts.n_slots, first)
    budget = _weight_budget(payloads, setup, model, page)
    residency = VirtualResidency(
        schemes,
        *shape,
        capacity_bytes=setup.capacity_bytes,
        kv_bytes=setup.kv_bytes,
        clock=clock,
        device=device,
        initial_bits=policy.initial_bits(budget),
        page_bytes=page,
        limits=Limits(bytes_per_unit=_limit(setup, page)),
        host=setup.host,
        slack=setup.slack,
        n_high=_n_high(setup, model),
    )
    resident = Resident(
        residency, policy, clock, costs, damage, sensitivity, kv_block, model.top_k,
        frozen=setup.frozen, update_queue=setup.update_queue,
    )  # fmt: skip
    return Built(resident, inventory, damage, budget)


def _weight_budget(payloads: Any, setup: Setup, model: SimulatedModel, page: int) -> int:
    plan = plan_memory(
        payloads,
        capacity_bytes=setup.capacity_bytes // page * page,
        page_bytes=page,
        kv_bytes=setup.kv_bytes,
        slack=setup.slack,
        n_high=_n_high(setup, model),
    )
    return plan.weight_budget_bytes


def _n_high(setup: Setup, model: SimulatedModel) -> int | None:
    """Of all layers; the option of the policy is per layer."""
    per_layer = setup.options.get("n_high")
    return None if per_layer is None else int(per_layer) * model.n_layers


def _limit(setup: Setup, page: int) -> float | None:
    """In bytes of the miniature."""
    return None if setup.bytes_per_s is None else setup.bytes_per_s / page * PAGE


def _clocked(setup: Setup) -> dict[str, Any]:
    """Options, with the unit of the virtual clock where a policy asks for one."""
    options = dict(setup.options)
    if setup.policy in ("dynaexq", "pagedweight"):
        options.setdefault("clock_unit", "s")
    return options
