"""One forward pass as a step, and the sequences that steps belong to.

The one idea: what a forward pass was called with says everything about its place in a
trace.  Its ids say how many sequences and tokens there are, its attention mask which of
them are real, its cache whether it goes on with earlier sequences.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from repro.errors import ReproError
from repro.integration.experts import ExpertsLayer
from repro.integration.traces import RoutingTrace, index_dtype

CACHE_NAMES = ("cache", "past_key_values")
"""What Transformers calls the key-value cache: 5.24 and later, and before."""


class CaptureError(ReproError):
    """Routing that cannot be recorded completely."""


@dataclass(frozen=True)
class StepRecord:
    """One forward pass as the recorder saw it."""

    n_sequences: int
    n_tokens: int  # of each sequence, padding included
    continues: bool  # goes on with sequences of an earlier step
    workload: str


@dataclass
class Step:
    """A forward pass with the routing of its layers."""

    record: StepRecord
    mask: Tensor  # [S, t] bool
    owner: nn.Module  # whose forward pass this is
    index: dict[int, Tensor] = field(default_factory=dict)  # layer -> [S * t, k]
    weights: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """The arguments of a forward pass that matter here."""

    n_sequences: int
    n_tokens: int
    continues: bool
    attention_mask: Any
    device: torch.device

    @classmethod
    def of(cls, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Read them off, by position or by name.

        Raises:
            CaptureError: there is nothing to count the tokens of.
        """
        names = list(inspect.signature(owner.forward).parameters)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        ids = _first(arguments, "input_ids", "inputs_embeds")
        if ids is None:
            raise CaptureError(
                f"{type(owner).__name__} was called without input_ids or inputs_embeds: "
                "pass one of them, the recorder takes the number of tokens from it"
            )
        cache = _first(arguments, *CACHE_NAMES)
        continues = cache is not None and int(cache.get_seq_length()) > 0
        mask = arguments.get("attention_mask")
        return cls(int(ids.shape[0]), int(ids.shape[1]), continues, mask, ids.device)

    def real_tokens(self, given: Tensor | None, for_this_step: Tensor | None) -> Tensor:
        """Which tokens of the step are real, ``[S, t]``.

        Args:
            given: a mask for the steps of its shape.
            for_this_step: a mask that must fit.

        Raises:
            CaptureError: nothing says it, or what says it does not fit.
        """
        shape = (self.n_sequences, self.n_tokens)
        size = f"{self.n_sequences} sequences x {self.n_tokens} tokens"
        if for_this_step is not None:
            if tuple(for_this_step.shape) != shape:
                raise CaptureError(
                    f"token mask of shape {tuple(for_this_step.shape)} for a step of {size}: "
                    "give one value per token"
                )
            return for_this_step.to(self.device, torch.bool)
        if given is not None and tuple(given.shape) == shape:
            return given.to(self.device, torch.bool)
        if self.attention_mask is None:
            if given is not None:
                raise CaptureError(
                    f"the mask of shape {tuple(given.shape)} does not fit a step of {size}: pass "
                    "the model an attention_mask, or wrap the step in recorder.token_mask(...)"
                )
            return torch.ones(shape, dtype=torch.bool, device=self.device)
        found: tuple[int, ...] = tuple(getattr(self.attention_mask, "shape", ()))
        if len(found) != 2 or found[0] != self.n_sequences or found[1] < self.n_tokens:
            raise CaptureError(
                f"an attention_mask of shape {found} does not say which of {size} are real: "
                "wrap the step in recorder.token_mask(...)"
            )
        mask = torch.as_tensor(self.attention_mask)[:, -self.n_tokens :]
        return mask.to(self.device, torch.bool)


def output_cache(output: Any) -> Any:
    """The key-value cache in a model's output, None without one."""
    if not isinstance(output, dict):
        return None
    keys = set(output)  # asking the output itself for the other version's name warns
    return next((output[name] for name in CACHE_NAMES if name in keys), None)


def _first(arguments: dict[str, Any], *names: str) -> Any:
    return next((arguments[n] for n in names if arguments.get(n) is not None), None)


@dataclass
class _Group:
    """Sequences that were started together, with all their steps."""

    workload: str
    steps: list[Step] = field(default_factory=list)


class StepLog:
    """Finished steps, sorted by the sequences they belong to."""

    def __init__(self, layers: tuple[ExpertsLayer, ...], *, keep_weights: bool) -> None:
        self._layers = layers
        self._keep_weights = keep_weights
        self._n_experts = max(layer.n_experts for layer in layers)
        self._groups: list[_Group] = []
        self._by_cache: WeakKeyDictionary[Any, _Group] = WeakKeyDictionary()

    def append(self, step: Step, output: Any) -> None:
        """Add a finished step; the cache in ``output`` tells which sequences it continues."""
        # Packed at once: a step's 64-bit indices would outweigh the trace of a whole run.
        small = torch.uint8 if self._n_experts <= 256 else torch.int32
        step.index = {layer: index.to(small) for layer, index in step.index.items()}
        kept = step.weights if self._keep_weights else {}
        step.weights = {layer: weights.to(torch.float16) for layer, weights in kept.items()}
        cache = output_cache(output)
        group = self._by_cache.get(cache) if step.record.continues and cache is not None else None
        if group is None:
            group = _Group(step.record.workload)
            self._groups.append(group)
        group.steps.append(step)
        if cache is not None:
            self._by_cache[cache] = group

    def trace(self, workload: str | None, implementation: str) -> RoutingTrace:
        """All sequences, padded at the left of each step to equal length."""
        groups = [g for g in self._groups if workload is None or g.workload == workload]
        if not groups:
            raise CaptureError(
                "no routing was recorded: call the model inside of capture_routing "
                "(with keep='trace')"
            )
        n_steps = max(len(g.steps) for g in groups)
        widths = [
            max(g.steps[i].record.n_tokens for g in groups if i < len(g.steps))
            for i in range(n_steps)
        ]
        n_sequences = sum(g.steps[0].record.n_sequences for g in groups)
        first = next(iter(groups[0].steps[0].index.values()))
        shape = (n_sequences, sum(widths), len(self._layers), int(first.shape[1]))
        index = np.zeros(shape, dtype=index_dtype(self._n_experts))
        weights = np.zeros(shape, dtype=np.float16) if self._keep_weights else None
        mask = np.zeros(shape[:2], dtype=bool)
        row = 0
        for group in groups:
            height, end = group.steps[0].record.n_sequences, 0
            for width, step in zip(widths, group.steps, strict=False):
                end += width
                at = (slice(row, row + height), slice(end - step.record.n_tokens, end))
                mask[at] = step.mask.cpu().numpy()
                index[at] = self._stacked(step, step.index)
                if weights is not None:
                    weights[at] = self._stacked(step, step.weights)
            row += height
        return RoutingTrace(
            top_k_index=index,
            mask=mask,
            weights=weights,
            n_experts=self._n_experts,
            layer_ids=[layer.layer_index for layer in self._layers],
            meta={"implementation": implementation},
            step_tokens=widths,
        )

    def _stacked(self, step: Step, parts: dict[int, Tensor]) -> npt.NDArray[Any]:
        """Layers of one step as ``[S, t, L, k]``."""
        stacked = torch.stack([parts[x.layer_index].cpu() for x in self._layers], dim=1)
        shape = (step.record.n_sequences, step.record.n_tokens, len(self._layers), -1)
        return stacked.reshape(shape).numpy()
