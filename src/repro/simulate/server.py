"""A server in virtual time: requests arrive, a scheduler plans, passes take their time.

The one idea: the loop is serving's.  :class:`repro.serving.scheduler.Scheduler` plans each step
on KV pages of the same arena, the policy is asked at every step boundary, and finished requests
are counted by :class:`repro.serving.metrics.Metrics`; only the forward pass is replaced by its
cost.  A step is one pass of decoding rows and one of prompt chunks.

Nothing here reads a wall clock or a random number that is not seeded, so the same setup gives
the same bytes.

Letters: L layers, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from repro.contract import FloatArray, IntArray
from repro.serving.answers import completion_of
from repro.serving.control import Pressure
from repro.serving.kv_blocks import BlockPlan
from repro.serving.kv_pool import PagedKvPool
from repro.serving.metrics import Metrics, StepRecord
from repro.serving.request import Request, SamplingParams, Timing
from repro.serving.scheduler import Plan, Scheduler
from repro.simulate.arrivals import SimulatedRequest
from repro.simulate.cost import CostModel, PassWork
from repro.simulate.device import DeviceProfile
from repro.simulate.errors import SimulationError
from repro.simulate.model import SimulatedModel
from repro.simulate.result import PassTrail, Result
from repro.simulate.routing import Place, Routing, counts_of
from repro.simulate.setup import Setup, build
from repro.simulate.virtual_time import VirtualClock


class Server:
    """One run.

    Args:
        setup: policy, memory, batch.
        model: dimensions.
        device: rates.
        routing: what routers choose.
        check_every: steps between full checks of the books (owners of all pages; slow where
            pages are many); 0: none.  The cap is checked at every step in any case.
        keep_trail: whether counts of every pass are kept, for bounds and adaptation time.
        statistics: ``sensitivity``, ``calibration_mass``, ``damage_per_use`` of
            :func:`repro.simulate.setup.build`.

    Raises:
        SimulationError: routing of other dimensions, or what does not fit.
    """

    def __init__(
        self,
        setup: Setup,
        model: SimulatedModel,
        device: DeviceProfile,
        routing: Routing,
        *,
        check_every: int = 0,
        keep_trail: bool = True,
        **statistics: FloatArray | None,
    ) -> None:
        wanted = (model.n_layers, model.n_experts, model.top_k)
        if routing.shape != wanted:
            raise SimulationError(
                f"routing of {routing.shape} (layers, experts, choices) for a model of {wanted}: "
                "map the trace to the model"
            )
        self.setup, self.model, self.device = setup, model, device
        self._routing = routing
        self._check_every, self._keep_trail = check_every, keep_trail
        self.clock = VirtualClock()
        self.built = build(setup, model, device, self.clock, **statistics)
        self.mechanism = self.built.mechanism
        self._cost = CostModel(device, model)
        plan = BlockPlan.of(model.kv.fitted(self.mechanism.page_bytes), self.mechanism.page_bytes)
        self._pool = PagedKvPool(plan, self.mechanism.kv_lender)
        self.scheduler = Scheduler(
            self._pool,
            max_running=setup.max_running,
            max_step_tokens=setup.max_step_tokens,
            can_chunk=model.kv.can_chunk,
        )
        self.metrics = Metrics()
        self._workloads: dict[int, str] = {}
        self._trail: list[PassTrail] = []
        self._n_passes = 0
        self._charged_bytes = 0
        self._peak_bytes = 0
        self._high_uses = self._uses = 0
        self._damage = 0.0
        self._active: dict[str, list[float]] = {"prefill": [], "decode": []}
        self._full_bytes = sum(x.token_bytes for x in model.kv.layers if x.window is None)
        self._windows = [(x.token_bytes, x.window) for x in model.kv.layers if x.window]

    # the loop ------------------------------------------------------------------------------------

    def run(self, requests: Iterable[SimulatedRequest]) -> Result:
        """Serve all of them; the server is then used up.

        Raises:
            SimulationError: a request that no step could ever serve.
        """
        coming = deque(sorted(requests, key=lambda r: r.arrival_s))
        number = n_steps = 0
        try:
            while coming or self.scheduler.n_unfinished:
                while coming and coming[0].arrival_s <= self.clock.now():
                    self._admit(number, coming.popleft())
                    number += 1
                self.mechanism.boundary()
                if not self.scheduler.n_unfinished:
                    self.clock.advance_to(coming[0].arrival_s)
                    continue
                self._step()
                n_steps += 1
                used, lender = self.mechanism.kv_lender.used_bytes(), self.mechanism.kv_lender
                assert used <= lender.capacity_bytes, "more bytes in use than the cap"
                self._peak_bytes = max(self._peak_bytes, used)
                if self._check_every and n_steps % self._check_every == 0:
                    self.mechanism.check()
            return self._result()
        finally:
            self.mechanism.close()

    def _admit(self, number: int, asked: SimulatedRequest) -> None:
        if asked.n_prompt < 1 or asked.n_new < 1:
            raise SimulationError(
                f"request {number} has {asked.n_prompt} prompt tokens and wants {asked.n_new}: "
                "give at least one of both"
            )
        self._workloads[number] = asked.workload
        self.scheduler.add(
            Request(
                tokens=[0] * asked.n_prompt,
                n_prompt=asked.n_prompt,
                max_new_tokens=asked.n_new,
                sampling=SamplingParams(),
                timing=Timing(asked.arrival_s),
                number=number,
            )
        )

    def _step(self) -> None:
        plan = self.scheduler.plan(self.clock.now())
        pressure = Pressure(self._pool.free_blocks(), plan.needed_blocks)
        self.mechanism.tick(pressure)
        if plan.empty:
            self._make_room(plan)
            return
        stalled = len(plan.stalled)
        for kind, chunks in (
            ("decode", [(request, 1) for request in plan.decode]),
            ("prefill", plan.prefill),
        ):
            if chunks:
                self._pass(kind, chunks, stalled)
                stalled = 0

    def _make_room(self, plan: Plan) -> None:
        """Nobody can run: serving's remedies in serving's order (``serving.pressure``)."""
        now = self.clock.now()
        if self.mechanism.wait():
            self.metrics.idle_wait_s += self.clock.now() - now
            return
        needed = plan.needed_blocks
        if needed * self._pool.block_bytes <= self.mechanism.lendable_bytes():
            pressure = Pressure(self._pool.free_blocks(), needed)
            if self.mechanism.tick(pressure, force=True):
                return
        if self.scheduler.preempt() is not None:
            self.metrics.n_preemptions += 1
            return
        raise SimulationError(
            f"{needed} KV blocks are missing and nothing can make room: give more bytes, or "
            "shorter requests"
        )

    def _pass(self, kind: str, chunks: list[tuple[Request, int]], n_stalled: int) -> None:
        start = self.clock.now()
        places = [
            Place(r.number, r.n_prompt, r.n_cached, n, self._workloads[r.number]) for r, n in chunks
        ]
        choices = self._routing.choices(places, self._n_passes)
        counts = counts_of(choices, self.model.n_experts)
        active = counts > 0
        work = self._work(chunks, active)
        layer_s, rest_s = self._cost.layer_s(work), self._cost.rest_s(work)
        rest_s += self._copies_s()
        waited = self.mechanism.run(active, counts, layer_s, rest_s)
        self._note(start, kind, counts, active, places)
        self._n_passes += 1
        for request, n in chunks:
            request.table.n_tokens += n
            if request.n_pending == 0:
                self._append(request)
        self.metrics.add_step(
            StepRecord(
                number=self._n_passes,
                kind=kind,
                n_requests=len(chunks),
                n_tokens=work.n_tokens,
                wall_s=self.clock.now() - start,
                weight_wait_s=waited,
                n_stalled=n_stalled,
            )
        )
        for request, _ in chunks:
            if request.finish_reason:
                self.scheduler.finish(request, self.clock.now())
                request.timing.ended = self.clock.now()
                self.metrics.add_completion(completion_of(request))

    def _append(self, request: Request) -> None:
        request.tokens.append(0)
        now = self.clock.now()
        timing = request.timing
        timing.first_token = now if timing.first_token is None else timing.first_token
        timing.last_token = now
        if request.n_new >= request.max_new_tokens:
            request.finish_reason = "length"

    def _work(self, chunks: list[tuple[Request, int]], active: Any) -> PassWork:
        expert_bytes, decode = self.mechanism.costs.of(active)
        kv_bytes = context = 0.0
        for request, n in chunks:
            before = request.n_cached
            kv_bytes += self._full_bytes * (before + n)
            kv_bytes += sum(size * min(before + n, window + n) for size, window in self._windows)
            context += n * before + n * (n + 1) / 2
        n_last = sum(request.n_pending == n for request, n in chunks)
        n_tokens = sum(n for _, n in chunks)
        return PassWork(n_tokens, n_last, expert_bytes, decode, kv_bytes, context)

    def _copies_s(self) -> float:
        """Memory time of what the link moved since the last pass: it passes through memory too."""
        moved = sum(self.mechanism.link.n_bytes.values())
        new, self._charged_bytes = moved - self._charged_bytes, moved
        return new / self.device.hbm_bytes_per_s

    # results -------------------------------------------------------------------------------------

    def _note(
        self, start: float, kind: str, counts: IntArray, active: Any, places: list[Place]
    ) -> None:
        uses = int(counts.sum())
        high = int((counts * self.mechanism.is_high).sum())
        damage = float((counts * self.mechanism.damage).sum())
        self._uses += uses
        self._high_uses += high
        self._damage += damage
        self._active[kind].append(float(active.mean()))
        if self._keep_trail:
            longest: dict[str, int] = {}
            for place in places:
                longest[place.workload] = longest.get(place.workload, 0) + place.n_tokens
            workload = max(sorted(longest), key=lambda w: longest[w])
            small = counts.astype(np.uint16)
            self._trail.append(
                PassTrail(
                    start, kind, workload, small, high, uses, damage, self.mechanism.n_fetched
                )
            )

    def _result(self) -> Result:
        mean = {k: float(np.mean(v)) if v else None for k, v in self._active.items()}
        uses = max(1, self._uses)
        report = {
            "setup": self.setup.to_json(),
            "model": self.model.name,
            "device": self.device.name,
            "status": "simulated",
            "end_s": self.clock.now(),
            "active_share": mean,
            "high_share": self._high_uses / uses,
            "damage_per_use": self._damage / uses,
            "peak_used_bytes": self._peak_bytes,
            "kv_peak_blocks": self._pool.peak_blocks,
            "link_busy_s": self.mechanism.link.busy_s,
            "mechanism": self.mechanism.report(),
            "metrics": self.metrics.report(),
        }
        return Result(report, tuple(self.metrics.completions), tuple(self._trail), self.built)


def simulate(
    setup: Setup,
    model: SimulatedModel,
    device: DeviceProfile,
    routing: Routing,
    requests: Iterable[SimulatedRequest],
    **options: Any,
) -> Result:
    """One run of a :class:`Server` with these requests."""
    return Server(setup, model, device, routing, **options).run(requests)
