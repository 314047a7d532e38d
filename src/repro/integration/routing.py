"""Recording the routing of a model while it runs, whatever kernel applies its experts.

    with capture_routing(model) as recorder:
        model(input_ids, attention_mask=mask)
    trace = recorder.trace()

The one idea: a forward pass of the model is one step, and a step is accepted only when
every layer with experts was seen exactly once with all its tokens.  A kernel or a layer
that goes round the recorder is therefore an error and never a statistic that is too small
(hooks on linear layers are bypassed by grouped kernels without a word).

Which tokens are real is taken from the attention mask of the step or given by the caller.
A step that continues a cache is appended to the sequences it continues; one that does not
starts new sequences, which are stacked below the earlier ones.

Left out: beam search (it reorders sequences inside the cache) and expert parallelism (one
device sees only its own experts).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from repro.contract import RoutingStatistics
from repro.integration.experts import ExpertsLayer, base_implementation, observe
from repro.integration.statistics import DeviceStatistics
from repro.integration.steps import Call, CaptureError, Step, StepLog, StepRecord
from repro.integration.traces import RoutingTrace


class RoutingRecorder:
    """Collects steps; made by :func:`capture_routing`."""

    def __init__(
        self, layers: tuple[ExpertsLayer, ...], *, mask: Tensor | None, keep: str, weights: bool
    ) -> None:
        self.layers = layers
        self.implementation = ""
        self.steps: list[StepRecord] = []
        self._log = StepLog(layers, keep_weights=weights) if keep == "trace" else None
        self._mask = mask
        self._step_mask: Tensor | None = None
        self._workload = ""
        self._open: Step | None = None
        self._statistics: dict[str, DeviceStatistics] = {}
        self._choices = 0  # per token, as the router gives them
        self._real_tokens: Tensor | int = 0  # stays on the device until check()
        self._paused = False

    # what the caller says about the coming steps

    @contextmanager
    def token_mask(self, mask: Tensor) -> Iterator[None]:
        """Count only these tokens ``[S, t]`` of the steps inside."""
        before, self._step_mask = self._step_mask, mask
        try:
            yield
        finally:
            self._step_mask = before

    @contextmanager
    def workload(self, name: str) -> Iterator[None]:
        """Account the steps inside to the workload ``name``."""
        before, self._workload = self._workload, name
        try:
            yield
        finally:
            self._workload = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model inside without recording it (a prefill, when only decode counts)."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # what the model does

    def begin(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model's forward pass: shape, mask and sequences of the step."""
        if self._paused or self._open is not None:
            return  # open already: the decoder inside of the model that opened the step
        call = Call.of(owner, args, kwargs)
        mask = call.real_tokens(self._mask, self._step_mask)
        record = StepRecord(call.n_sequences, call.n_tokens, call.continues, self._workload)
        self._open = Step(record, mask, owner)

    def observe(
        self, module: nn.Module, layer_index: int, top_k_index: Tensor, top_k_weights: Tensor
    ) -> None:
        """Before the experts of one layer."""
        step = self._open
        if self._paused:
            return
        if step is None:
            raise CaptureError(
                f"the experts of layer {layer_index} ran outside of the model's forward pass: "
                "call the model that was given to capture_routing"
            )
        expected = step.record.n_sequences * step.record.n_tokens
        if top_k_index.shape[0] != expected:
            raise CaptureError(
                f"layer {layer_index} routed {top_k_index.shape[0]} tokens in a step of "
                f"{expected}: this model drops or repacks tokens and cannot be recorded"
            )
        if layer_index in step.index:
            raise CaptureError(
                f"layer {layer_index} ran twice in one step: switch off what recomputes "
                "layers (gradient checkpointing) while recording"
            )
        self._choices = int(top_k_index.shape[1])
        # Both are copied: a kernel may sort or clamp its arguments in place afterwards.
        step.index[layer_index] = top_k_index.detach().clone()
        step.weights[layer_index] = top_k_weights.detach().clone()

    def end(self, owner: nn.Module, output: Any) -> None:
        """After the model's forward pass; ``output`` None when it failed."""
        step = self._open
        if step is None or step.owner is not owner:
            return
        self._open = None
        if output is None:
            return  # the forward pass raised: what it left behind is no step
        missing = [x.layer_index for x in self.layers if x.layer_index not in step.index]
        if missing:
            raise CaptureError(
                f"layers {missing} have experts but were not seen in a step: something runs "
                "them without the experts implementation the recorder set"
            )
        record = step.record
        statistics = self._statistics.setdefault(record.workload, DeviceStatistics(self.layers))
        for layer_index, index in step.index.items():
            statistics.add(layer_index, index, step.weights[layer_index], step.mask)
        self._real_tokens = self._real_tokens + step.mask.sum()
        self.steps.append(record)
        if self._log is not None:
            self._log.append(step, output)

    # what was collected

    def statistics(self, workload: str | None = None) -> RoutingStatistics:
        """Counts and mass of one workload, or of all steps together."""
        if workload is not None:
            if workload not in self._statistics:
                raise CaptureError(
                    f"no step was accounted to workload {workload!r}: "
                    f"there are {sorted(self._statistics)}"
                )
            return self._statistics[workload].read()
        parts = [s.read() for s in self._statistics.values()]
        if not parts:
            return DeviceStatistics(self.layers).read()
        return RoutingStatistics(
            layer_ids=parts[0].layer_ids,
            counts=np.sum([p.counts for p in parts], axis=0),
            mass=np.sum([p.mass for p in parts], axis=0),
            n_tokens=np.sum([p.n_tokens for p in parts], axis=0),
            absent=np.sum([p.absent for p in parts], axis=0),
        )

    def check(self) -> None:
        """Raise unless in every layer counts = real tokens x choices per token."""
        total = self.statistics()
        n_tokens = int(self._real_tokens)
        for row, layer_index in enumerate(total.layer_ids):
            if total.absent[row]:
                raise CaptureError(
                    f"{total.absent[row]} choices of layer {layer_index} name experts on "
                    "another device: record without expert parallelism"
                )
            counted = int(total.counts[row].sum())
            if counted != n_tokens * self._choices:
                raise CaptureError(
                    f"layer {layer_index} counted {counted} choices for {n_tokens} tokens x "
                    f"{self._choices}: the statistics are incomplete, record again"
                )

    def trace(self, workload: str | None = None) -> RoutingTrace:
        """All sequences recorded so far, padded at the left of each step to equal length.

        Raises:
            CaptureError: nothing was recorded, or only statistics were kept.
        """
        if self._log is None:
            raise CaptureError("only statistics were kept: record with keep='trace'")
        return self._log.trace(workload, self.implementation)


@contextmanager
def capture_routing(
    model: nn.Module,
    mask: Tensor | npt.NDArray[Any] | None = None,
    *,
    implementation: str | None = None,
    keep: str = "trace",
    keep_weights: bool = False,
) -> Iterator[RoutingRecorder]:
    """Record the routing of every forward pass of ``model`` inside the ``with`` block.

    Args:
        model: a Transformers model with experts.
        mask: real tokens ``[sequences, tokens]`` of the steps of that shape; other steps,
            and all of them without it, go by the attention mask they are given (none:
            every token is real).
        implementation: what applies the experts; by default what the model uses now.
            Note that on a GPU ``generate`` changes "grouped_mm" to "batched_mm" while
            decoding, but leaves an observed implementation alone.
        keep: "trace" keeps every choice, "statistics" only counts and mass.
        keep_weights: also keep the routing weights of every choice (float16).

    Raises:
        CaptureError: at the step that cannot be recorded completely, or at the end when
            counts are not tokens x k.
        CheckpointError: ``model`` has no experts, or of an unsupported layout.
    """
    if keep not in ("trace", "statistics"):
        raise ValueError(f"keep={keep!r}: choose 'trace' or 'statistics'")
    given = None if mask is None else torch.as_tensor(mask)

    def observer(module: nn.Module, layer: int, index: Tensor, weights: Tensor) -> None:
        recorder.observe(module, layer, index, weights)

    def before(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.begin(owner, args, kwargs)

    def after(owner: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        recorder.end(owner, output)

    with observe(model, observer, implementation) as layers:
        recorder = RoutingRecorder(layers, mask=given, keep=keep, weights=keep_weights)
        config: Any = layers[0].module.config
        recorder.implementation = base_implementation(config._experts_implementation)
        owners = {id(m): m for m in (model, getattr(model, "base_model", model))}
        handles: list[Any] = []
        try:
            for owner in owners.values():
                handles.append(owner.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(
                    owner.register_forward_hook(after, with_kwargs=True, always_call=True)
                )
            yield recorder
        finally:
            for handle in handles:
                handle.remove()
    recorder.check()
