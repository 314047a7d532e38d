"""What goes into an engine and what comes out, in the forms that users write.

The one idea: one prompt or many, text or token ids, sampling as an object or as options: all
become the same before the engine sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from repro.errors import unknown_name
from repro.serving.request import Completion, Request, RequestError, SamplingParams

Prompt = str | Sequence[int]
OnToken = Callable[[str, int], Any]


def several_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list.

    Raises:
        RequestError: an empty list.
    """
    if isinstance(prompts, str):
        return [prompts]
    several = _lists(prompts)
    if not isinstance(several, list):
        raise RequestError(f"{prompts!r} is no prompt: give a text or token ids, or a list of them")
    if not several:
        raise RequestError("no prompt was given: a batch needs at least one")
    if all(isinstance(p, int) for p in several):
        return [several]  # type: ignore[list-item]
    return several


def _lists(value: Any) -> Any:
    """Arrays and tensors, nested or not, as lists of plain numbers."""
    if isinstance(value, str):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_lists(v) for v in value] if isinstance(value, Iterable) else value


def sampling_of(given: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """Sampling given as a whole or by its options.

    Raises:
        UnknownNameError: an option that does not exist.
        RequestError: both were given, or a value out of range.
    """
    known = {"temperature", "top_k", "top_p", "seed"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise unknown_name("option", unknown[0], known)
    if given is not None:
        raise RequestError("give sampling=... or its options, not both")
    return SamplingParams(**options)


def with_index(on_token: Callable[[int, str, int], Any], index: int) -> OnToken:
    """The callback of one prompt among several."""
    return lambda text, token_id: on_token(index, text, token_id)


def completion_of(request: Request) -> Completion:
    """What became of a request that has ended."""
    timing, nan = request.timing, float("nan")
    ids = request.new_ids()
    first, last = timing.first_token, timing.last_token
    tpot = nan
    if first is not None and last is not None and len(ids) > 1:
        tpot = (last - first) / (len(ids) - 1)
    return Completion(
        text="" if request.stopper is None else request.stopper.text,
        token_ids=ids,
        finish_reason=request.finish_reason or "error",
        n_prompt_tokens=request.n_prompt,
        ttft_s=nan if first is None else first - timing.arrived,
        tpot_s=tpot,
        e2e_s=(timing.ended or timing.arrived) - timing.arrived,
        n_preemptions=request.n_preemptions,
        kv_stall_s=timing.kv_stall_s,
        error=request.error,
    )
