"""Options of an engine beside its policy's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from repro.errors import ReproError
from repro.residency.limits import Limits
from repro.residency.slots import HostMode


class OptionError(ReproError, ValueError):
    """An option out of range."""


@dataclass(frozen=True)
class Options:
    """How an engine stores, moves and schedules.

    Args:
        format: how experts are encoded: a format ("any-precision", "int4-g128") or a pair of
            tiers ("fp16/int4"); by default what the policy needs.
        experts: a folder that ``repro quantize`` made of this model, or what
            ``repro.serving.encode_experts`` returned; nothing is encoded then.
        calibration: a folder that ``repro calibrate`` made: importance for encoding,
            sensitivities and prompt heads for the planner.
        importance: instead, a function of the layer, see ``repro.serving.payloads``.
        kv_bytes: initial KV partition; with planes it grows and shrinks.
        block_tokens: tokens of a KV block; by default 16, or more where pages would waste 5 %.
        max_running: requests in a step at most.
        max_step_tokens: tokens of a step at most, the size of prompt chunks.
        page_bytes: by default the largest that wastes at most 5 %.
        staging_bytes, slack: memory for changes under way, see ``repro.residency``.
        host_mode: ``mirrored`` (the host keeps a copy of everything) or ``single``.
        pin: pinned host memory; by default where there is a GPU.
        worker: ``thread``, or ``manual``: copies are made at step boundaries, so that a run
            repeats to the bit.
        copies_per_step: with ``manual``, copies completed at each boundary; None: all.
        clock: of policy and limits; by default wall time.
        limits, link: see ``repro.residency``.
        attention: ``auto`` (a kernel that reads pages, where there is a GPU and it fits the
            model), ``gathered`` (keys and values are copied together first) or ``paged``.
        scratch_bytes: decoded experts at a time on the reference path.
    """

    format: str | None = None
    experts: Any = None
    calibration: Any = None
    importance: Any = None
    kv_bytes: int | None = None
    block_tokens: int | None = None
    max_running: int = 32
    max_step_tokens: int = 512
    page_bytes: int | None = None
    staging_bytes: int | None = None
    slack: int | None = None
    host_mode: HostMode = "mirrored"
    pin: bool | None = None
    worker: Literal["thread", "manual"] = "thread"
    copies_per_step: int | None = None
    clock: Any = None
    limits: Any = None
    link: Any = None
    attention: Literal["auto", "gathered", "paged"] = "auto"
    scratch_bytes: int | None = None

    def __post_init__(self) -> None:
        sizes = ("max_running", "max_step_tokens", "page_bytes", "scratch_bytes", "block_tokens")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value}: give at least 1")
        if self.attention not in ("auto", "gathered", "paged"):
            raise OptionError(f"attention={self.attention!r}: use 'auto', 'gathered' or 'paged'")
        if self.clock is not None and not (
            hasattr(self.clock, "now") and hasattr(self.clock, "unit")
        ):
            raise OptionError(f"clock={self.clock!r}: give a clock, see repro.serving.clocks")
        if self.limits is not None and not isinstance(self.limits, Limits):
            raise OptionError(f"limits={self.limits!r}: give a repro.residency.Limits")
        if self.worker not in ("thread", "manual"):
            raise OptionError(f"worker={self.worker!r}: use 'thread' or 'manual'")

    @classmethod
    def split(cls, given: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
        """These options, and what is left for the policy."""
        names = {f.name for f in fields(cls)}
        mine = {k: v for k, v in given.items() if k in names}
        return cls(**mine), {k: v for k, v in given.items() if k not in names}
