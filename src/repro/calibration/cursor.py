"""Which of the prompts' tokens a call of a layer is about.

The one idea: experts see tokens without their place.  Layers see the prompts in order,
whether a micro-batch goes through the whole model or the whole batch through one layer at a
time, so a place per layer that moves on by as many tokens as a call has says which tokens
these are, which of them are real, and when a layer has seen all of them.

Letters: P prompts, T tokens of a prompt (padding included).
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from repro.integration.steps import CaptureError


class TokenCursor:
    """Walks through ``mask[P, T]`` in every layer on its own."""

    def __init__(self, mask: Tensor) -> None:
        self.shape = (int(mask.shape[0]), int(mask.shape[1]))
        self.n_tokens = self.shape[0] * self.shape[1]
        self.n_real = int(mask.sum())
        self._flat = mask.reshape(-1).to(torch.bool)
        self._next: dict[int, int] = defaultdict(int)
        self._range: dict[int, tuple[int, int]] = {}

    def advance(self, layer_index: int, n_tokens: int) -> None:
        """The layer was called with so many more tokens.

        Raises:
            CaptureError: these are more than the prompts have.
        """
        start = self._next[layer_index]
        if start + n_tokens > self.n_tokens:
            raise CaptureError(
                f"layer {layer_index} saw more than the {self.n_tokens} tokens of the prompts: "
                "this model repeats or repacks tokens and cannot be calibrated"
            )
        self._next[layer_index] = start + n_tokens
        self._range[layer_index] = (start, start + n_tokens)

    def mask(self, layer_index: int, device: torch.device) -> Tensor:
        """Which tokens of the layer's current call are real, ``[n]``."""
        start, end = self._range[layer_index]
        if self._flat.device != device:
            self._flat = self._flat.to(device)
        return self._flat[start:end]

    def prompt(self, layer_index: int, token: Tensor) -> Tensor:
        """The prompts that tokens of the current call belong to."""
        return (token + self._range[layer_index][0]) // self.shape[1]

    def finished(self, layer_index: int) -> bool:
        """Whether the layer has seen every token."""
        return self._next[layer_index] == self.n_tokens

    def check(self, layer_indices: list[int]) -> None:
        """Raise unless all these layers have seen every token."""
        missing = [i for i in layer_indices if not self.finished(i)]
        if missing:
            raise CaptureError(
                f"layers {missing} have experts but did not see all {self.n_tokens} tokens: "
                "something runs them without the experts implementation that was set"
            )


def check_prompts(input_ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(ids, mask)``, both ``[P, T]`` on one device; without a mask every token is real.

    Raises:
        CaptureError: no prompts, no real token, or a mask of another shape.
    """
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise CaptureError(
            f"prompts of shape {tuple(input_ids.shape)} cannot be calibrated on: "
            "give token ids [prompts, tokens] with at least one token"
        )
    if mask is None:
        return input_ids, torch.ones_like(input_ids, dtype=torch.bool)
    if mask.shape != input_ids.shape:
        raise CaptureError(
            f"token mask of shape {tuple(mask.shape)} for prompts of shape "
            f"{tuple(input_ids.shape)}: give one value per token"
        )
    real = mask.to(input_ids.device, torch.bool)
    if not bool(real.any()):
        raise CaptureError("the token mask marks no token as real: mark at least one")
    return input_ids, real
