"""Putting an engine together: plan, encode, place, bind.

The one idea: everything that can be refused is refused before a weight is touched.  Shapes and
schemes give the plan of memory; only when the floor fits are layers encoded one by one, their
originals freed on the way, and the model's experts bound to pages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from repro.contract import Block, FloatArray
from repro.errors import unknown_name
from repro.integration.experts import ExpertsLayer, experts_layers
from repro.integration.page_reader import PageReader
from repro.integration.paged_experts import StepContext, bind, read_from_pages, unbind
from repro.integration.prompt_signals import PromptSignals
from repro.integration.statistics import DeviceStatistics
from repro.models.loading import resolve_device
from repro.policies import POLICIES, ResidualHeads, ServingPolicy, make_policy, policy_options
from repro.policies import traits as traits_of
from repro.policies.pagedweight import HIGH_WATERMARK, LOW_WATERMARK
from repro.residency import Arena, BlockPayload, ExpertResidency, HostStore, choose_page_bytes
from repro.residency.errors import BudgetError
from repro.residency.plan import plan_memory
from repro.residency.slots import slot_map
from repro.serving.attention import Installed, install
from repro.serving.budget import FixedBytes, default_kv_bytes, measure_fixed, split_device
from repro.serving.calibrated import Calibrated, calibrated
from repro.serving.clocks import StepClock, WallClock
from repro.serving.control import Control
from repro.serving.kv_layout import BLOCK_TOKENS, KVLayout, probe
from repro.serving.kv_pool import PagedKvPool, kv_block_bytes
from repro.serving.options import Options
from repro.serving.paged_cache import PagedCache
from repro.serving.payloads import Recipe, Source, fill
from repro.serving.request import Request, RequestError
from repro.serving.scheduler import Scheduler

# Decoded experts at a time on the reference path: a CPU's cache; enough work for a GPU.
_SCRATCH_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}


@dataclass
class Parts:
    """What an engine is made of."""

    model: Any
    layers: tuple[ExpertsLayer, ...]
    device: torch.device
    policy_name: str
    format_name: str
    residency: ExpertResidency
    context: StepContext
    cache: PagedCache
    attention: Installed
    kv: PagedKvPool
    scheduler: Scheduler
    control: Control
    clock: Any
    fixed: FixedBytes
    manual: bool  # copies are made between steps, not by a thread
    copies_per_step: int | None
    context_length: int
    vocab_size: int
    eos_ids: frozenset[int]

    def boundary(self) -> None:
        """Between two steps: time goes on, finished changes become the current version."""
        if isinstance(self.clock, StepClock):
            self.clock.tick()
        if self.manual:  # whoever copies between steps keeps them waiting
            start = time.perf_counter()
            if self.residency.advance_copies(self.copies_per_step):
                self.context.weight_wait_s += time.perf_counter() - start
        self.residency.publish()

    def forget_signals(self, request: Request) -> None:
        """What its prompt did to the experts counts no more."""
        if self.context.signals is not None:
            self.context.signals.forget(request.number)

    def check_fits(self, n_tokens: int) -> None:
        """Refuse a request that no state of the memory could hold.

        Raises:
            RequestError: says how many tokens would fit.
        """
        blocks = self.kv.blocks_for(n_tokens)
        most = self.residency.lendable_bytes() + self.kv.blocks_in_use * self.kv.block_bytes
        if blocks * self.kv.block_bytes > most:
            tokens = most // self.kv.block_bytes * self.cache.layout.block_tokens
            raise RequestError(
                f"{n_tokens} tokens need {blocks * self.kv.block_bytes:,} bytes of KV memory, all "
                f"that can ever be had holds {tokens} tokens: raise budget_bytes or ask for fewer"
            )

    def close(self) -> None:
        """Unbind the model and give the memory back."""
        self.context.step = None
        self.attention.uninstall()
        for layer in self.layers:
            unbind(layer)
        self.residency.close()


def build(
    model: Any,
    policy: str,
    *,
    budget_bytes: int | None = None,
    device_bytes: int | None = None,
    device: str | torch.device = "auto",
    **given: Any,
) -> Parts:
    """Build the parts of an engine; options as :class:`repro.serving.options.Options`.

    Raises:
        UnknownNameError, BudgetError, CheckpointError, MissingDeviceError: see ``Engine``.
    """
    traits = traits_of(policy)
    if traits.chooses_per_step:
        raise BudgetError(
            f"policy {policy!r} chooses inside a step, which this engine does not do: take one "
            f"of {', '.join(sorted(n for n in POLICIES if not traits_of(n).chooses_per_step))}"
        )
    options, wishes = Options.split(given)
    _check_options(policy, wishes)
    if budget_bytes is not None and device_bytes is not None:
        raise BudgetError("give budget_bytes or device_bytes, not both")
    target = resolve_device(device)
    layers = experts_layers(model)
    known: Calibrated = calibrated(options.experts, options.calibration, options.importance)
    recipe = None if known.checkpoint is not None else _recipe(policy, traits, options, layers)
    source = Source(layers, recipe, known.checkpoint, known.importance, target)
    payloads = _payloads(source)
    page_bytes = options.page_bytes or choose_page_bytes(payloads).page_bytes
    _move(model, target)
    layout = probe(model, options.block_tokens or BLOCK_TOKENS)
    if options.block_tokens is None:
        layout = layout.fitted(page_bytes)
    scratch = options.scratch_bytes or _SCRATCH_BYTES[target.type]
    workspace = scratch + layout.scratch_bytes(options.max_running, 512)
    if device_bytes is not None:
        budget_bytes = split_device(device_bytes, measure_fixed(model, layers, workspace))
    capacity, kv_bytes = _split(payloads, page_bytes, layout, options, wishes, budget_bytes)
    plan = plan_memory(  # refuses what cannot fit, before anything is encoded
        payloads,
        capacity_bytes=capacity,
        page_bytes=page_bytes,
        kv_bytes=kv_bytes,
        staging_bytes=options.staging_bytes,
        slack=options.slack,
        n_high=_n_high(wishes, len(layers)),
    )
    Arena.allocated(plan.n_pages, page_bytes, target)  # and what the machine does not have
    clock = options.clock or WallClock()
    if "clock_unit" in policy_options(policy):
        wishes.setdefault("clock_unit", clock.unit)
    if "yield_floors" in policy_options(policy):
        wishes.setdefault("yield_floors", True)  # rather fewer bits than a request sent back
    if "high_watermark" in policy_options(policy):
        _fit_watermarks(wishes, kv_bytes // kv_block_bytes(layout, page_bytes))
    widths, table = payloads[0][0].widths, known.table
    sizes = _sizes(payloads, page_bytes)
    shape = (len(payloads), payloads[0][0].n_experts)

    def made(sensitivity: FloatArray | None) -> ServingPolicy:
        return make_policy(
            policy,
            shape=shape,
            widths=widths,
            block_bytes=sizes,
            sensitivity=sensitivity,
            calibration_mass=None if table is None else table.mass,
            heads=None if known.heads is None else ResidualHeads.of(known.heads),
            **wishes,
        )

    unknown = traits.uses_sensitivity and table is None
    sensitivity = np.zeros((*shape, len(Block), len(widths))) if unknown else None
    if table is not None:
        sensitivity = known.sensitivity(widths)
    # A policy that refuses does so now, while the model is whole.
    made(sensitivity).initial_bits(plan.weight_budget_bytes)
    store = HostStore(
        payloads,
        page_bytes,
        options.host_mode,
        options.pin,
        [layer.layer_index for layer in layers],
    )
    errors = fill(source, store.put, errors=unknown)
    sensitivity = errors if unknown else sensitivity
    decisions = made(sensitivity)
    residency = ExpertResidency(
        store,
        capacity_bytes=capacity,
        initial_bits=decisions.initial_bits(plan.weight_budget_bytes),
        clock=clock,
        device=target,
        worker=options.worker,
        kv_bytes=kv_bytes,
        staging_bytes=options.staging_bytes,
        slack=options.slack,
        n_high=_n_high(wishes, len(layers)),
        limits=options.limits,
        link=options.link,
    )
    context = _bind(layers, residency, scratch)
    read_from_pages(model, layers)
    cache = PagedCache(layout, residency.arena)
    attention = install(model, cache, options.attention)
    kv = PagedKvPool(cache.plan, residency)
    scheduler = Scheduler(
        kv,
        max_running=options.max_running,
        max_step_tokens=options.max_step_tokens,
        can_chunk=layout.can_chunk,
    )
    if traits.uses_features and known.heads is not None:
        shape = (residency.n_layers, residency.n_experts)
        context.signals = PromptSignals(options.max_running, shape, target)

    def kv_held() -> dict[int, float]:
        return {r.number: float(kv.blocks_of(r.table)) for r in scheduler.running if r.table}

    control = Control(
        decisions, residency, context, clock, sensitivity, sizes, kv.block_bytes, kv_held
    )
    config = model.config.get_text_config(decoder=True)
    return Parts(
        model=model.eval(),
        layers=layers,
        device=target,
        policy_name=policy,
        format_name=source.format_name,
        residency=residency,
        context=context,
        cache=cache,
        attention=attention,
        kv=kv,
        scheduler=scheduler,
        control=control,
        clock=clock,
        fixed=measure_fixed(model, layers, workspace),
        manual=options.worker == "manual",
        copies_per_step=options.copies_per_step,
        context_length=int(getattr(config, "max_position_embeddings", 1 << 30)),
        vocab_size=int(config.vocab_size),
        eos_ids=_eos_ids(model),
    )


def _bind(
    layers: tuple[ExpertsLayer, ...], residency: ExpertResidency, scratch: int
) -> StepContext:
    """Let every layer read its weights from the arena."""
    context = StepContext(statistics=DeviceStatistics(layers))
    for row, layer in enumerate(layers):
        readers = tuple(
            PageReader(residency.arena.data, residency.payload(row, block), scratch)
            for block in Block
        )
        bind(layer, row, readers, context)
    return context


def _check_options(policy: str, given: dict[str, Any]) -> None:
    """Refuse a misspelt option before anything is encoded."""
    names = {f.name for f in fields(Options)}
    for name in given:
        if name not in policy_options(policy):
            raise unknown_name("option", name, [*names, *policy_options(policy)])


def _recipe(policy: str, traits: Any, options: Options, layers: tuple[ExpertsLayer, ...]) -> Recipe:
    """How this policy wants experts stored, unless the user says otherwise."""
    if options.format is not None:
        recipe = Recipe.named(options.format)
    elif policy == "dense":
        module: Any = layers[0].module
        recipe = Recipe.lossless(module.down_proj.dtype)
    else:
        recipe = Recipe.named("fp16/int4" if traits.layout == "versions" else "any-precision")
    if traits.layout == "versions" and len(recipe.formats) != 2:
        raise BudgetError(
            f"policy {policy!r} keeps two versions of an expert, format {recipe.name!r} is one: "
            "give a pair such as format='fp16/int4'"
        )
    if traits.layout == "planes" and len(recipe.formats) != 1:
        raise BudgetError(
            f"policy {policy!r} drops planes of one nested code, format {recipe.name!r} is a "
            "pair: give format='any-precision'"
        )
    return recipe


def _payloads(source: Source) -> list[list[BlockPayload]]:
    """Schemes of all blocks, ``[L][B]``."""
    found = []
    for row, layer in enumerate(source.layers):
        blocks = []
        for block in Block:
            schemes = source.schemes(row, block)
            by_width = {w: s for s in schemes for w in s.widths}
            nested = len(schemes) == 1 and bool(schemes[0].nested)
            blocks.append(BlockPayload(dict(sorted(by_width.items())), layer.n_experts, nested))
        found.append(blocks)
    return found


def _sizes(payloads: list[list[BlockPayload]], page_bytes: int) -> Any:
    """``[L, B, W]`` bytes in whole pages."""
    widths = payloads[0][0].widths
    return np.array(
        [
            [[slot_map(b, page_bytes).n_pages(w) * page_bytes for w in widths] for b in row]
            for row in payloads
        ],
        dtype=np.int64,
    )


def _natural_bytes(
    payloads: list[list[BlockPayload]], page_bytes: int, kv_bytes: int, options: dict[str, Any]
) -> int:
    """A budget for what a policy would like to start with, if the user gives none."""
    first = payloads[0][0]
    sizes = _sizes(payloads, page_bytes).sum(axis=1) * first.n_experts  # [L, W]
    widths = first.widths
    n_bits = options.get("n_bits")
    column = widths.index(n_bits) if n_bits in widths else len(widths) - 1
    weights = int(sizes[:, column].sum())
    if len(widths) == 2 and not first.nested and n_bits is None:
        share = _n_high(options, len(payloads))
        n_all = first.n_experts * len(payloads)
        high = (first.n_experts // 3) * len(payloads) if share is None else share
        low, wide = (int(sizes[:, c].sum()) // n_all for c in (0, 1))
        weights = high * wide + (n_all - high) * low + 2 * (wide + low)
    total = weights + kv_bytes
    return -(-(total + total // 16) // page_bytes) * page_bytes


def _split(
    payloads: list[list[BlockPayload]],
    page_bytes: int,
    layout: KVLayout,
    options: Options,
    wishes: dict[str, Any],
    budget_bytes: int | None,
) -> tuple[int, int]:
    """Arena and initial KV partition, in bytes; what the user said goes first."""
    block = kv_block_bytes(layout, page_bytes)
    kv_bytes = options.kv_bytes
    if kv_bytes is None:
        kv_bytes = default_kv_bytes(block, layout.block_tokens, options.max_running)
    if budget_bytes is None:
        budget_bytes = _natural_bytes(payloads, page_bytes, kv_bytes, wishes)
    elif options.kv_bytes is None:
        # At most a quarter; less if experts at their narrowest leave less, but a block.
        sizes = _sizes(payloads, page_bytes)
        floor = int(sizes[..., 0].sum()) * payloads[0][0].n_experts
        left = budget_bytes - budget_bytes // 16 - floor
        kv_bytes = max(block, min(kv_bytes, budget_bytes // 4, left))
    return budget_bytes // page_bytes * page_bytes, kv_bytes


def _fit_watermarks(wishes: dict[str, Any], n_blocks: int) -> None:
    """Watermarks that the KV blocks of the start can reach, or bits would never come back."""
    if "low_watermark" not in wishes and "high_watermark" not in wishes:
        low = min(LOW_WATERMARK, n_blocks // 3)
        wishes["low_watermark"] = low
        wishes["high_watermark"] = min(HIGH_WATERMARK, max(low + 1, n_blocks - 1))


def _n_high(options: dict[str, Any], n_layers: int) -> int | None:
    """High experts of all layers, if the policy was told how many a layer has."""
    per_layer = options.get("n_high")
    return None if per_layer is None else int(per_layer) * n_layers


def _move(model: Any, device: torch.device) -> None:
    """All but what is on the meta device."""
    model._apply(lambda t: t if t.is_meta or t.device == device else t.to(device))


def _eos_ids(model: Any) -> frozenset[int]:
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
