"""``Engine``: a Mixture-of-Experts model served under a memory budget it cannot exceed.

The one idea: the model stays a Transformers model.  Its experts live on the pages of an arena,
its KV cache on the same pages; at every step boundary finished changes are published, the
policy may ask for new ones, and requests that have room take part in the step.  The forward
pass never waits for a copy.

An engine belongs to one thread; only its worker runs beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from repro.errors import ReproError
from repro.serving.answers import (
    OnToken,
    Prompt,
    completion_of,
    sampling_of,
    several_prompts,
    with_index,
)
from repro.serving.build import Parts, build
from repro.serving.control import Pressure
from repro.serving.conversation import Conversation
from repro.serving.metrics import Metrics
from repro.serving.pressure import RoomMaker
from repro.serving.request import (
    Completion,
    Phase,
    Request,
    RequestError,
    SamplingParams,
    Score,
    Timing,
    check_prompt,
)
from repro.serving.runner import Runner
from repro.serving.snapshot import snapshot
from repro.serving.stopping import Stopper

_LOG = logging.getLogger("repro.serving")
_KEPT_RESULTS = 10_000


class EngineError(ReproError):
    """An engine that cannot do what was asked of it now."""


class Engine:
    """Serves ``model`` under ``budget_bytes``.

    The engine takes the model's experts over: they are encoded, moved to its host store and
    arena, and their parameters go to the meta device.  Load the model again for another
    engine.

    Args:
        model: a Transformers model with experts, see :func:`repro.load_model`.
        tokenizer: of the model; None serves token ids only.
        policy: ``dense``, ``static``, ``dynaexq``, ``pagedweight``, ...; see ``repro.policies``.
        budget_bytes: size of the arena: expert weights with their tables, KV cache, staging
            and slack.  By default what the policy's starting widths and a KV cache for
            ``max_running`` requests of 512 tokens need.
        device_bytes: instead, a cap on the whole device, dense weights and workspace included.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; the model is moved there.
        seed: of sampling.
        options: of the policy and of memory, see :func:`repro.serving.build.build`.

    Raises:
        UnknownNameError: no such policy, format or option.
        BudgetError: the budget is smaller than the floor; says by how many bytes.
        CheckpointError: a model without experts, or whose experts another engine took.
        MissingDeviceError: a device that is not there.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        policy: str = "pagedweight",
        *,
        budget_bytes: int | None = None,
        device_bytes: int | None = None,
        device: str | torch.device = "auto",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._closed = True  # until it is open
        self._parts: Parts = build(
            model,
            policy,
            budget_bytes=budget_bytes,
            device_bytes=device_bytes,
            device=device,
            **options,
        )
        self.tokenizer = tokenizer
        self.metrics = Metrics()
        self.seed = seed
        self._n_requests = 0
        self._in_step = False
        self._runner = Runner(self._parts, self.metrics, seed)
        self._room = RoomMaker(self)
        self._conversations: list[Conversation] = []
        self._events: list[str] = []
        self._ended: dict[int, tuple[Request, Completion]] = {}
        self._closed = False

    # what a user asks for -----------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 64,
        *,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        on_token: Callable[[int, str, int], Any] | None = None,
        **sampling_options: Any,
    ) -> list[Completion]:
        """Answer all prompts, batched continuously; in the order they were given.

        Args:
            prompts: texts, or lists of token ids.
            max_new_tokens: of each answer at most.
            sampling: how tokens are chosen; or give ``temperature=``, ``top_k=``, ``top_p=``,
                ``seed=`` directly.
            stop: strings that end an answer; they are cut off.
            ignore_eos: go on after the end-of-text token.
            on_token: called as ``on_token(index of the prompt, piece of text, token id)``.

        Raises:
            RequestError: an empty list or prompt, one that never fits; nothing was started.
        """
        self._check_open()
        several = several_prompts(prompts)
        if sampling_options:
            sampling = sampling_of(sampling, sampling_options)
        requests = [
            self._request(
                self._encode(prompt),
                max_new_tokens,
                sampling or SamplingParams(),
                stop=stop,
                ignore_eos=ignore_eos,
                on_token=None if on_token is None else with_index(on_token, index),
            )
            for index, prompt in enumerate(several)
        ]
        return self._complete(requests)

    def submit(self, prompt: Prompt, max_new_tokens: int = 64, **options: Any) -> Request:
        """Queue one prompt without waiting; :meth:`step` serves it.  Options as ``generate``.

        Raises:
            RequestError: it can never be served.
        """
        self._check_open()
        known = ("stop", "ignore_eos", "on_token")
        given = {name: options.pop(name) for name in known if name in options}
        sampling = options.pop("sampling", None)
        sampling = sampling_of(sampling, options) if options else sampling or SamplingParams()
        request = self._request(self._encode(prompt), max_new_tokens, sampling, **given)
        self._parts.scheduler.add(request)
        return request

    def result(self, request: Request) -> Completion:
        """Serve until ``request`` has ended, and return what became of it, once.

        Raises:
            RequestError: it is not one of this engine's, or its result was taken already.
        """
        self._check_open()
        scheduler = self._parts.scheduler
        while request.phase is not Phase.FINISHED:
            if request not in scheduler.running and request not in scheduler.waiting:
                raise RequestError(f"request {request.number} is not one of this engine's")
            self.step()
        if self._ended.get(request.number, (None,))[0] is not request:
            raise RequestError(
                f"the result of request {request.number} was taken already, or is another "
                "engine's: keep what result() returns"
            )
        return self._ended.pop(request.number)[1]

    def cancel(self, request: Request) -> None:
        """End a request at the next step boundary; its memory is free then."""
        request.cancel_asked = True

    def score(self, texts: Prompt | Sequence[Prompt]) -> list[Score]:
        """How likely each text is: every token but the first, given those before it.

        Raises:
            RequestError: a text of fewer than two tokens, or one that never fits.
        """
        self._check_open()
        requests = []
        for text in several_prompts(texts):
            ids = self._encode(text)
            if len(ids) < 2:
                raise RequestError(f"a text of {len(ids)} token(s) has nothing to score")
            requests.append(self._request(ids, 0, SamplingParams(), score=True))
        self._complete(requests)
        failed = next((r for r in requests if r.finish_reason == "error"), None)
        if failed is not None:
            raise EngineError(f"a text could not be scored: {failed.error}")
        return [
            Score(len(r.log_likelihoods), sum(r.log_likelihoods), tuple(r.log_likelihoods))
            for r in requests
        ]

    def conversation(self) -> Conversation:
        """A conversation that keeps its KV memory between turns."""
        self._check_open()
        conversation = Conversation(self)
        self._conversations.append(conversation)
        return conversation

    # one step -----------------------------------------------------------------------------

    def step(self) -> bool:
        """One step boundary and the step after it; False if no request was there."""
        self._check_open()
        if self._in_step:
            raise EngineError("step() was called from inside a step: return from on_token first")
        self._in_step = True
        try:
            return self._step()
        finally:
            self._in_step = False

    def _step(self) -> bool:
        parts = self._parts
        now = self._timer()
        self._drop_cancelled(now)
        parts.boundary()
        scheduler = parts.scheduler
        if scheduler.n_unfinished == 0:
            parts.control.tick(Pressure(scheduler.kv.free_blocks(), 0))
            return False
        plan = scheduler.plan(now)
        parts.control.tick(Pressure(scheduler.kv.free_blocks(), plan.needed_blocks))
        if plan.empty:
            self._room.make(plan.needed_blocks, now, self._timer)
            return True
        self._room.progress()
        for request in self._runner.run(plan, self._timer):
            self._end(request)
        return True

    # requests -----------------------------------------------------------------------------

    def _request(
        self,
        ids: list[int],
        max_new_tokens: int,
        sampling: SamplingParams,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        on_token: OnToken | None = None,
        score: bool = False,
        conversation: Conversation | None = None,
    ) -> Request:
        parts = self._parts
        check_prompt(ids, 1 if score else max_new_tokens, parts.context_length, parts.vocab_size)
        parts.check_fits(len(ids) + (0 if score else max_new_tokens))
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer: this engine has none")
        if any(not s for s in stop):
            raise RequestError("an empty stop string would end every answer: leave it out")
        number, self._n_requests = self._n_requests, self._n_requests + 1
        request = Request(
            tokens=list(ids),
            n_prompt=len(ids),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            timing=Timing(self._timer()),
            stop=stop,
            eos_ids=frozenset() if ignore_eos else parts.eos_ids,
            on_token=on_token,
            score=score,
            conversation=conversation,
            number=number,
        )
        if not score:
            request.stopper = Stopper(self.tokenizer, stop)
        return request

    def _complete(self, requests: list[Request]) -> list[Completion]:
        for request in requests:
            self._parts.scheduler.add(request)
        try:
            return [self.result(request) for request in requests]
        except BaseException:  # an interrupt too: nothing of this call may stay behind
            for request in requests:
                if request.phase is not Phase.FINISHED:
                    self._end(request, "cancelled")
                self._ended.pop(request.number, None)
            raise

    def _drop_cancelled(self, now: float) -> None:
        scheduler = self._parts.scheduler
        for request in [*scheduler.running, *scheduler.waiting]:
            if request.finish_reason is not None:  # an interrupt came between its end and this
                self._end(request)
            elif request.cancel_asked:
                self._end(request, "cancelled")

    def _end(self, request: Request, reason: Any = None) -> None:
        """Take a request out and keep what became of it."""
        if reason is not None:
            request.finish_reason = reason
        now = self._timer()
        keep = None if request.conversation is None else request.conversation.keep
        self._parts.scheduler.finish(request, now, keep)
        self._parts.forget_signals(request)
        request.timing.ended = now
        completion = completion_of(request)
        self.metrics.add_completion(completion)
        self._ended[request.number] = (request, completion)
        if len(self._ended) > _KEPT_RESULTS:  # of submitted requests that nobody asks for
            del self._ended[next(iter(self._ended))]

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(i) for i in prompt]
        if self.tokenizer is None:
            raise RequestError("a text needs a tokenizer: give token ids, this engine has none")
        return [int(i) for i in self.tokenizer(prompt)["input_ids"]]

    def _announce(self, message: str) -> None:
        self._events.append(message)
        del self._events[:-100]
        _LOG.warning(message)

    # state --------------------------------------------------------------------------------

    @staticmethod
    def _timer() -> float:
        return time.perf_counter()

    @property
    def residency(self) -> Any:
        """The mechanism below: handles, pages, transitions."""
        self._check_open()
        return self._parts.residency

    def snapshot(self) -> dict[str, Any]:
        """JSON-able: bytes by pool, widths, states, transitions, waits, refusals, policy."""
        self._check_open()
        return snapshot(self._parts, self.metrics, self._events)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No new decisions inside: the map of widths stays as it is."""
        self._check_open()
        control = self._parts.control
        before, control.frozen = control.frozen, True
        try:
            yield
        finally:
            control.frozen = before

    def close(self) -> None:
        """Stop the worker and give all memory back; a second call does nothing."""
        if self._closed:
            return
        if self._in_step:
            raise EngineError("close() was called from inside a step: return from on_token first")
        self._closed = True
        self._conversations.clear()
        parts, self._parts = self._parts, None  # type: ignore[assignment]
        # These know each other: without the cut, memory would wait for the garbage collector.
        self._runner = self._room = None  # type: ignore[assignment]
        parts.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this engine is closed: make a new one with a freshly loaded model")

    def __enter__(self) -> Engine:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()
