"""Running a model over prompts to record its routing: prefill, and free-running decode.

The one idea: prompts and seeds determine the trace.  Sampling draws one number per
(sequence, step) beforehand and looks the token up in the cumulative distribution, so how
prompts are cut into batches does not change what is generated.

Decode runs free for a fixed number of steps and does not stop at an end-of-text token: the
models were trained on documents joined by it, and every sequence stays in the batch.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.integration.routing import capture_routing
from repro.integration.steps import CACHE_NAMES, CaptureError, output_cache
from repro.integration.traces import RoutingTrace

Tokens = Tensor | npt.NDArray[Any]


def _tensor(values: Tokens, dtype: torch.dtype, name: str, model: Any) -> Tensor:
    tensor = torch.as_tensor(np.asarray(values) if not isinstance(values, Tensor) else values)
    if tensor.ndim != 2 or tensor.shape[0] == 0 or tensor.shape[1] == 0:
        raise ValueError(f"{name} of shape {tuple(tensor.shape)}: give [sequences, tokens]")
    return tensor.to(model.device, dtype)


def tokens_sha256(tokens: Tensor) -> str:
    """Identity of token ids: hash of shape and int64 values."""
    array = np.ascontiguousarray(tokens.detach().cpu().numpy().astype("<i8"))
    digest = hashlib.sha256(str(array.shape).encode())
    digest.update(array.tobytes())
    return digest.hexdigest()


def _batches(n: int, batch_size: int) -> Iterator[slice]:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: give at least 1")
    for start in range(0, n, batch_size):
        yield slice(start, min(start + batch_size, n))


def _positions(mask: Tensor) -> Tensor:
    """Position of each real token among the real ones; padding gets 0."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def _prompt_arguments(model: Any, ids: Tensor, mask: Tensor | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {"input_ids": ids}
    if mask is not None:
        arguments["attention_mask"] = mask.long()
        arguments["position_ids"] = _positions(mask)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1  # the logits of a whole prompt cost more than its experts
    return arguments


def _meta(stage: str, ids: Tensor, batch_size: int, **more: Any) -> dict[str, Any]:
    return {
        "stage": stage,
        "prompt_tokens": int(ids.shape[1]),
        "input_sha256": tokens_sha256(ids),
        "batch_size": batch_size,
        **more,
    }


@torch.inference_mode()
def record_prefill(
    model: Any,
    input_ids: Tokens,
    batch_size: int = 8,
    mask: Tokens | None = None,
    *,
    keep_weights: bool = False,
    implementation: str | None = None,
) -> RoutingTrace:
    """Routing of whole prompts: trace axes ``[prompts, prompt tokens]``, one step.

    Args:
        model: a causal language model of Transformers with experts.
        input_ids: ``[n, length]``.
        batch_size: prompts per forward pass; it bounds memory and does not change routing.
        mask: real tokens ``[n, length]``; padding is at the left.
        keep_weights: keep routing weights as well.
        implementation: experts implementation; by default the model's.
    """
    ids = _tensor(input_ids, torch.long, "input_ids", model)
    real = None if mask is None else _tensor(mask, torch.bool, "mask", model)
    with capture_routing(
        model, implementation=implementation, keep_weights=keep_weights
    ) as recorder:
        for part in _batches(len(ids), batch_size):
            arguments = _prompt_arguments(model, ids[part], None if real is None else real[part])
            model(**arguments, use_cache=False)
    trace = recorder.trace()
    return replace(trace, meta=trace.meta | _meta("prefill", ids, batch_size))


@torch.inference_mode()
def record_decode(
    model: Any,
    input_ids: Tokens,
    steps: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 32,
    mask: Tokens | None = None,
    include_prompt: bool = False,
    keep_weights: bool = False,
    implementation: str | None = None,
) -> RoutingTrace:
    """Routing of ``steps`` generated tokens per prompt: trace axes ``[prompts, steps]``.

    The token axis begins with the first generated token (step 0 is the single next token
    after prefill).  With ``include_prompt`` the prompts come before it, as one step.

    Args:
        model: a causal language model of Transformers with experts.
        input_ids: prompts ``[n, length]``.
        steps: decode steps, each one forward pass with the cache.
        temperature: of sampling; 0 takes the most likely token.
        seed: of sampling.
        batch_size: prompts that decode together.
        mask: real tokens of the prompts ``[n, length]``; padding is at the left.
        include_prompt: record the prefill too.
        keep_weights: keep routing weights as well.
        implementation: experts implementation; by default the model's.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: give at least 1")
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: give 0 (greedy) or more")
    ids = _tensor(input_ids, torch.long, "input_ids", model)
    real = None if mask is None else _tensor(mask, torch.bool, "mask", model)
    draws = np.random.default_rng(seed).random((len(ids), steps))
    uniform = torch.from_numpy(draws).to(model.device)
    cache_name = cache_argument(model)
    generated = []
    with capture_routing(
        model, implementation=implementation, keep_weights=keep_weights
    ) as recorder:
        for part in _batches(len(ids), batch_size):
            prompt_mask = None if real is None else real[part]
            arguments = _prompt_arguments(model, ids[part], prompt_mask)
            with nullcontext() if include_prompt else recorder.paused():
                output = model(**arguments, use_cache=True)
            tokens = []
            for step in range(steps):
                token = _sample(output.logits[:, -1], temperature, uniform[part, step])
                tokens.append(token)
                arguments = {"input_ids": token[:, None], cache_name: output_cache(output)}
                if prompt_mask is not None:
                    ones = prompt_mask.new_ones(len(prompt_mask), 1)
                    prompt_mask = torch.cat([prompt_mask, ones], dim=1)
                    arguments["attention_mask"] = prompt_mask.long()
                    arguments["position_ids"] = _positions(prompt_mask)[:, -1:]
                output = model(**arguments, use_cache=True)
            generated.append(torch.stack(tokens, dim=1))
    trace = recorder.trace()
    meta = _meta(
        "prefill+decode" if include_prompt else "decode",
        ids,
        batch_size,
        temperature=temperature,
        seed=seed,
        generated_sha256=tokens_sha256(torch.cat(generated)),
    )
    return replace(trace, meta=trace.meta | meta)


def cache_argument(model: Any) -> str:
    """The name under which ``model.forward`` takes the key-value cache."""
    parameters = inspect.signature(model.forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise CaptureError(
        f"{type(model).__name__}.forward takes none of {', '.join(CACHE_NAMES)}: "
        "choose a model that can decode with a cache"
    )


def _sample(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Token ids ``[n]`` from logits ``[n, V]`` and numbers in [0, 1) ``[n]``."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    cumulative = torch.softmax(logits.double() / temperature, dim=-1).cumsum(dim=-1)
    # Scaled by the last value: the sum may end a rounding error below 1.
    target = (uniform * cumulative[:, -1])[:, None]
    token = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return token.clamp(max=logits.shape[-1] - 1)
