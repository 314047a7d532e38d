"""One arena of pages; experts whose precision changes while serving; knows nothing of policies.

:class:`ExpertResidency` keeps :class:`repro.contract.Residency`; how a step boundary looks is
in :mod:`repro.residency.residency`, the life of a change in :mod:`repro.residency.transitions`.
Build it from payloads::

    payloads = [[BlockPayload.of_stack(stack) for stack in blocks] for blocks in layers]
    page = choose_page_bytes(payloads).page_bytes
    store = HostStore(payloads, page, mode="mirrored")
    for layer, blocks in enumerate(payloads):
        for block, payload in enumerate(blocks):
            store.put(layer, block, payload)
    residency = ExpertResidency(store, capacity_bytes=..., clock=clock)
"""

from repro.residency.arena import Arena
from repro.residency.budget import BudgetTracker
from repro.residency.errors import BudgetError, ClosedError, StepError, WorkerError
from repro.residency.host import HostStore
from repro.residency.limits import Limits
from repro.residency.links import (
    CopyFailed,
    DeviceLink,
    FailingLink,
    HangingLink,
    Link,
    SlowLink,
    WorkerKilled,
)
from repro.residency.page_size import PageSize, choose_page_bytes, page_fragmentation
from repro.residency.payload import BlockPayload
from repro.residency.plan import MemoryPlan, plan_memory
from repro.residency.residency import ExpertResidency

__all__ = [
    "Arena",
    "BlockPayload",
    "BudgetError",
    "BudgetTracker",
    "ClosedError",
    "CopyFailed",
    "DeviceLink",
    "ExpertResidency",
    "FailingLink",
    "HangingLink",
    "HostStore",
    "Limits",
    "Link",
    "MemoryPlan",
    "PageSize",
    "SlowLink",
    "StepError",
    "WorkerError",
    "WorkerKilled",
    "choose_page_bytes",
    "page_fragmentation",
    "plan_memory",
]
