"""Forward and backward passes over prompts, in micro-batches, without a cache.

The one idea: one place says how a model is called here (padding masked, no cache, parameters
frozen), which tokens are scored, and what the labels are.  Labels "sampled" are drawn from the
model itself: then the mean of squared gradients is the Fisher information, i.e. the curvature
of the divergence from the unchanged model.  They depend on the seed and on the token's place
alone, not on micro-batches.

A token is scored when it and the one before it are real: the first of a prompt never is.

Letters: P prompts, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repro.errors import unknown_name

Labels = Literal["sampled", "data"]


def input_device(model: nn.Module) -> torch.device:
    """Where the model wants its token ids."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    device: torch.device = embedding.weight.device
    return device


def run_prompts(model: nn.Module, ids: Tensor, mask: Tensor, *, logits: bool = False) -> Tensor:
    """One pass over ``[P, T]``; hidden states before the head, or logits."""
    owner: Any = model if logits else getattr(model, "base_model", model)
    device = input_device(model)
    arguments: dict[str, Any] = {"input_ids": ids.to(device), "use_cache": False}
    if not bool(mask.all()):
        arguments["attention_mask"] = mask.to(device, torch.long)
    result: Tensor = owner(**arguments)[0]
    return result


def scored_tokens(mask: Tensor) -> Tensor:
    """``[P, T - 1]``: whether the prediction of the next token counts."""
    return mask[:, 1:] & mask[:, :-1]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient inside; what did before does again after."""
    before = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in before:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in before:
            parameter.requires_grad_(True)


def backward_passes(
    model: nn.Module, ids: Tensor, mask: Tensor, *, labels: Labels, seed: int, micro_batch: int
) -> int:
    """Differentiate the summed negative log-likelihood of the scored tokens.

    Whoever wants gradients has set hooks on tensors inside of the model (see ``probes``).

    Returns:
        how many tokens were scored.
    """
    if labels not in ("sampled", "data"):
        raise unknown_name("labels", str(labels), ("sampled", "data"))
    scored = scored_tokens(mask)
    draws = torch.rand(scored.shape, generator=torch.Generator().manual_seed(seed))
    with frozen(model), torch.inference_mode(False), torch.enable_grad():
        for start in range(0, len(ids), micro_batch):
            at = slice(start, start + micro_batch)
            logits = run_prompts(model, ids[at], mask[at], logits=True)[:, :-1].float()
            chosen = scored[at].to(logits.device)
            if labels == "data":
                target = ids[at, 1:].to(logits.device)
            else:
                target = _sample(logits.detach(), draws[at].to(logits.device))
            losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
            if losses.requires_grad:
                torch.where(chosen, losses, 0).sum().backward()
    return int(scored.sum())


def _sample(logits: Tensor, draws: Tensor) -> Tensor:
    """Tokens drawn from ``softmax(logits[P, T, V])`` with one uniform number each."""
    steps = torch.cumsum(logits.double().softmax(dim=-1), dim=-1)
    target = torch.searchsorted(steps, draws[..., None].double() * steps[..., -1:])
    return target[..., 0].clamp(max=logits.shape[-1] - 1)
