"""Running a planned step: forward passes, next tokens, and whose failure a failure is.

The one idea: a batch is one computation of many owners.  If it raises, its KV is rolled back
and every request is run again alone, so that only the one that cannot be computed fails.

A step is up to three forward passes: decoding rows together, prompt chunks of similar length
together, texts to be scored together.  Each is a step to residency, which begins before it and
ends after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from repro.serving import forward
from repro.serving.metrics import Metrics, StepRecord
from repro.serving.request import Request
from repro.serving.sampling import greedy, request_seed, sample
from repro.serving.scheduler import Plan

if TYPE_CHECKING:
    from repro.serving.build import Parts

Chunk = tuple[Request, int]
Timer = Callable[[], float]
_PADDING = 2  # a chunk may be padded to so many times its length


class Runner:
    """Runs plans on one model."""

    def __init__(self, parts: Parts, metrics: Metrics, seed: int) -> None:
        self._parts = parts
        self._metrics = metrics
        self._seed = seed
        self._n_steps = 0

    def run(self, plan: Plan, timer: Timer) -> list[Request]:
        """All of the plan; returns the requests that have ended."""
        ended = []
        stalled = len(plan.stalled)
        if plan.decode:
            chunks = [(request, 1) for request in plan.decode]
            ended += self._pass("decode", chunks, stalled, timer)
            stalled = 0
        for chunks in _groups(plan.prefill, exact=self._parts.cache.layout.recurrent):
            ended += self._pass("prefill", chunks, stalled, timer)
            stalled = 0
        return ended

    def _pass(self, kind: str, chunks: list[Chunk], n_stalled: int, timer: Timer) -> list[Request]:
        start = timer()
        cached = [request.n_cached for request, _ in chunks]
        reason: str | None = None
        try:
            logits = self._forward(chunks)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:  # outside: the traceback held what the pass had allocated
            return self._isolate(kind, chunks, cached, reason, timer)
        ended = self._advance(chunks, cached, logits, timer)
        self._n_steps += 1
        self._metrics.add_step(
            StepRecord(
                number=self._n_steps,
                kind=kind,
                n_requests=len(chunks),
                n_tokens=sum(n for _, n in chunks),
                wall_s=timer() - start,
                weight_wait_s=self._parts.context.take_wait(),
                n_stalled=n_stalled,
            )
        )
        return ended

    def _forward(self, chunks: list[Chunk]) -> Any:
        parts = self._parts
        rows = [forward.Row(r.table, r.tokens[r.n_cached : r.n_cached + n]) for r, n in chunks]
        step = parts.residency.begin_step()
        parts.context.step = step
        signals = parts.context.signals
        if signals is not None and not chunks[0][0].decoding:
            signals.begin([(request.number, n) for request, n in chunks])
        try:
            logits = forward.run(
                parts.model, parts.cache, rows, parts.context, all_logits=chunks[0][0].score
            )
            parts.context.commit()
            return logits
        finally:
            parts.context.rollback()  # what a pass that raised had counted
            parts.context.step = None
            if signals is not None:
                signals.end()
            parts.residency.end_step(step)

    def _isolate(
        self,
        kind: str,
        chunks: list[Chunk],
        cached: list[int],
        reason: str,
        timer: Timer,
    ) -> list[Request]:
        """Undo a pass that raised, and run its requests one by one."""
        again = []
        for (request, n), before in zip(chunks, cached, strict=True):
            self._parts.forget_signals(request)  # half a pass was counted
            if request.n_cached == before:
                again.append((request, n))
                continue
            # Part of the pass had been completed. A recurrent state cannot go back.
            request.table.crop(0 if self._parts.cache.layout.recurrent else before)
            again.append((request, before + n - request.n_cached))
        if len(chunks) == 1:
            request = chunks[0][0]
            request.error, request.finish_reason = reason, "error"
            return [request]
        ended = []
        for chunk in again:
            ended += self._pass(kind, [chunk], 0, timer)
        return ended

    def _advance(
        self, chunks: list[Chunk], cached: list[int], logits: Any, timer: Timer
    ) -> list[Request]:
        """Score, or choose the next token of those whose prompt is complete."""
        if chunks[0][0].score:
            for (request, n), before, rows in zip(chunks, cached, logits, strict=True):
                _add_scores(request, n, before, rows)
            return [r for r, _ in chunks if r.finish_reason or (not r.n_pending and _done(r))]
        ready = [i for i, (request, _) in enumerate(chunks) if request.n_pending == 0]
        if not ready:
            return []
        last = logits[torch.tensor(ready, device=logits.device)]
        finite = torch.isfinite(last).all(dim=-1).tolist()
        likeliest = greedy(last)
        now = timer()
        requests = [chunks[index][0] for index in ready]
        for place, request in enumerate(requests):
            try:
                if not finite[place]:
                    raise ValueError("the model's logits are not finite: check its weights")
                token = likeliest[place]
                if request.sampling.temperature > 0:
                    token = sample(last[place], request.sampling, self._generator(request))
                self._append(request, token, now)
            except Exception as error:
                request.error = f"{type(error).__name__}: {error}"
                request.finish_reason = "error"
        # Only now, when every request has its token: an interrupt in a callback costs nobody one.
        for request in requests:
            _deliver(request)
        return [request for request in requests if request.finish_reason]

    def _generator(self, request: Request) -> torch.Generator:
        if request.generator is None:
            seed = request.sampling.seed
            seed = request_seed(self._seed, request.number) if seed is None else seed
            request.generator = torch.Generator().manual_seed(seed)
        return request.generator

    def _append(self, request: Request, token: int, now: float) -> None:
        request.tokens.append(token)
        timing = request.timing
        timing.first_token = now if timing.first_token is None else timing.first_token
        timing.last_token = now
        piece = request.stopper.push(token)
        if request.stopper.stopped:
            request.finish_reason = "stop"
        elif token in request.eos_ids:
            request.finish_reason = "eos"
        elif request.n_new >= request.max_new_tokens:
            request.finish_reason = "length"
        if request.finish_reason:
            piece += request.stopper.finish()
        if request.on_token is not None:
            request.undelivered.append((piece, token))


def _deliver(request: Request) -> None:
    """Call back with what has not been shown yet."""
    while request.on_token is not None and request.undelivered:
        piece, token = request.undelivered.pop(0)
        try:
            request.on_token(piece, token)
        except Exception as error:
            request.error = f"its callback raised {type(error).__name__}: {error}"
            request.finish_reason = "error"
            request.undelivered.clear()


def _done(request: Request) -> bool:
    request.finish_reason = "length"
    return True


def _add_scores(request: Request, n: int, before: int, logits: Tensor) -> None:
    """Likelihoods of the tokens that follow positions ``before`` to ``before + n``."""
    targets = request.tokens[before + 1 : before + n + 1]
    if not targets:
        return
    scores = torch.log_softmax(logits[: len(targets)].to(torch.float32), dim=-1)
    index = torch.tensor(targets, device=scores.device)[:, None]
    chosen = scores.gather(1, index).squeeze(1)
    if not bool(torch.isfinite(chosen).all()):
        request.error = "the model's logits are not finite: check its weights"
        request.finish_reason = "error"
        return
    request.log_likelihoods += chosen.double().tolist()


def _groups(chunks: list[Chunk], *, exact: bool) -> list[list[Chunk]]:
    """Chunks of similar length together; scored texts apart, for all their logits are wanted.

    Recurrent states bear no padding: then only chunks of ``exact`` length, all of them started
    or none, go together.
    """
    alike: dict[tuple[Any, ...], list[Chunk]] = {}
    for chunk in sorted(chunks, key=lambda c: c[1]):
        request, n = chunk
        key: tuple[Any, ...] = (request.score,)
        if exact:
            key = (request.score, n, request.n_cached > 0)
        alike.setdefault(key, []).append(chunk)
    groups = []
    for kind in alike.values():
        start = 0
        for end in range(1, len(kind) + 1):
            if end == len(kind) or kind[end][1] > _PADDING * kind[start][1]:
                groups.append(kind[start:end])
                start = end
    return groups
