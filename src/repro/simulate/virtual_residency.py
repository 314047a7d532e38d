"""Serving's residency on virtual time, spoken to in real bytes.

The one idea: policies and schedulers think in real bytes, the miniature holds eight for each
page, and the only thing between them is one factor.

Letters: L layers, E experts, B blocks, W widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.contract import Action, Health, IntArray, Outcome, Reservation, Step
from repro.residency import ExpertResidency, Limits, choose_page_bytes, plan_memory
from repro.simulate.device import DeviceProfile
from repro.simulate.miniature import PAGE, Schemes, block_sizes, miniature_store, real_payloads
from repro.simulate.virtual_time import CopyPump, VirtualClock, VirtualLink


class VirtualResidency:
    """:class:`repro.residency.ExpertResidency` in miniature, spoken to in real bytes.

    Args:
        schemes: of the blocks of one expert.
        n_layers: L.
        n_experts: E.
        capacity_bytes: real; rounded down to whole pages.
        kv_bytes: initial KV partition, real.
        clock: virtual.
        device: rates of the link.
        initial_bits: see :class:`repro.residency.ExpertResidency`.
        page_bytes: real; None: chosen as serving does.
        limits: of the mechanism.
        host: mode of the host store.
        n_high, slack: see :func:`repro.residency.plan_memory`.

    Raises:
        BudgetError: the experts do not fit.
    """

    def __init__(
        self,
        schemes: Schemes,
        n_layers: int,
        n_experts: int,
        *,
        capacity_bytes: int,
        kv_bytes: int,
        clock: VirtualClock,
        device: DeviceProfile,
        initial_bits: Any = None,
        page_bytes: int | None = None,
        limits: Limits | None = None,
        host: str = "mirrored",
        n_high: int | None = None,
        slack: int | None = None,
    ) -> None:
        payloads = real_payloads(schemes, n_layers, n_experts)
        self.page_bytes = page_bytes or choose_page_bytes(payloads[:1]).page_bytes
        self.scale = self.page_bytes // PAGE
        self.read_bytes = block_sizes(payloads, None)
        self.layer_block_bytes = block_sizes(payloads, self.page_bytes)
        self.link = VirtualLink(
            device.h2d_bytes_per_s, device.d2h_bytes_per_s, device.copy_fixed_s, self.scale
        )
        plan = plan_memory(
            payloads,
            capacity_bytes=capacity_bytes // self.page_bytes * self.page_bytes,
            page_bytes=self.page_bytes,
            kv_bytes=kv_bytes,
            slack=slack,
            n_high=n_high,
        )
        self.inner = ExpertResidency(
            miniature_store(schemes, n_layers, n_experts, self.page_bytes, host),
            capacity_bytes=capacity_bytes // self.page_bytes * PAGE,
            initial_bits=initial_bits,
            clock=clock,
            worker="manual",
            kv_bytes=-(-kv_bytes // self.page_bytes) * PAGE,
            staging_bytes=plan.staging_pages * PAGE,  # its default is in bytes of real pages
            staging_slots=plan.staging_slots,
            limits=limits,
            n_high=n_high,
            slack=slack,
            link=self.link,
        )
        self.link.attach(self.inner.store.slab)
        self.pump = CopyPump(self.inner, self.link, clock)

    # in real bytes -----------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """The hard cap."""
        return self.inner.capacity_bytes * self.scale

    def used_bytes(self) -> int:
        """Pages in use times their size."""
        return self.inner.used_bytes() * self.scale

    def free_bytes(self, purpose: str = "kv") -> int:
        """What :meth:`reserve` could give."""
        return self.inner.free_bytes(purpose) * self.scale

    def lendable_bytes(self) -> int:
        """Free, or free once every expert is at its narrowest width."""
        return self.inner.lendable_bytes() * self.scale

    def reclaiming_bytes(self) -> int:
        """Of switched versions that are not free yet."""
        return self.inner.reclaiming_bytes() * self.scale

    @property
    def weight_budget_bytes(self) -> int:
        """What a policy may fill."""
        return self.inner.weight_budget_bytes * self.scale

    @property
    def block_bytes(self) -> IntArray:
        """``[B, W]`` whole pages."""
        return np.asarray(self.inner.block_bytes * self.scale)

    def reserve(self, n_bytes: int, purpose: str) -> Reservation | None:
        """Pages for ``n_bytes``, all or none."""
        return self.inner.reserve(-(-n_bytes // self.page_bytes) * PAGE, purpose)

    def release(self, reservation: Reservation) -> None:
        """Give the pages back."""
        self.inner.release(reservation)

    def bytes_moved(self) -> dict[str, int]:
        """Over the link, by direction."""
        moved = self.inner.transitions.supervisor.bytes_moved()
        return {name: n * self.scale for name, n in moved.items()}

    # as they are -------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """``planes`` or ``versions``."""
        return str(self.inner.layout)

    @property
    def widths(self) -> tuple[int, ...]:
        """Ascending."""
        return self.inner.widths

    @property
    def n_bits(self) -> npt.NDArray[np.int8]:
        """``[L, E, B]`` published."""
        return self.inner.n_bits

    @property
    def in_transition(self) -> npt.NDArray[np.bool_]:
        """``[L, E]``."""
        return self.inner.in_transition

    def targets(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """Widths that changes under way lead to."""
        return self.inner.targets()

    def submit(self, action: Action) -> Outcome:
        """Ask for a change."""
        return self.inner.submit(action)

    def publish(self) -> tuple[tuple[int, int], ...]:
        """Switch what is complete."""
        return self.inner.publish()

    def begin_step(self) -> Step:
        """A pass begins."""
        return self.inner.begin_step()

    def end_step(self, step: Step) -> None:
        """It has ended."""
        self.inner.end_step(step)

    def health(self) -> Health:
        """Of the worker."""
        return self.inner.health()

    def check(self) -> None:
        """Raise AssertionError unless ledger, free lists and owners of pages agree."""
        self.inner.check()

    def close(self) -> None:
        """Give everything back."""
        self.inner.close()
