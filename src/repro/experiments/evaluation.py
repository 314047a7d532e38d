"""What a change of expert weights does to the loss: one model, its texts, its formats.

The one idea: all precision experiments ask the same question - encode some experts, put the
decoded weights in place, measure the loss of fixed windows - so model, windows, calibration
and encoded stacks are made once here and every experiment only says which weights to put
where.  Arithmetic is float32 on every device; losses are summed in float64.

Calibration windows are never the ones that losses are measured on: of embedded workloads the
first quarter is kept for calibration, with the public sets it has sets of its own.

Letters: P windows, T tokens of one, E experts, N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from repro.calibration.blocks import block_weights
from repro.calibration.collect import Calibration, collect
from repro.calibration.statistics import importance
from repro.contract import Block
from repro.errors import DataUnavailableError
from repro.experiments.traffic import keep_freed_memory, model_digest
from repro.formats.encoded import EncodedStack
from repro.formats.registry import make_format
from repro.integration import grouped
from repro.integration.experts import EXPERTS_NAME, ExpertsLayer, experts_layers, use_experts
from repro.models import load_model
from repro.profiles import Profile
from repro.workloads.base import domain_workloads, load_workload
from repro.workloads.tokens import encode_stream, windows

DTYPE = "float32"
IMPLEMENTATIONS = {"cpu": grouped.GROUPED_NAME, "cuda": EXPERTS_NAME}
BATCH_TOKENS = {"cpu": 4096, "cuda": 131_072}  # of one forward pass; bounds memory only
CALIBRATION_SETS = {"text": "wikitext2-valid", "math": "math500", "code": "mbpp"}
"""Public sets to calibrate on, so that test sets are only ever tested on."""
CALIBRATION_SHARE = 4  # the first quarter of an embedded workload is calibrated on
SOURCES = (
    "repro.experiments.evaluation",
    "repro.calibration.accumulate",
    "repro.calibration.collect",
    "repro.calibration.probes",
    "repro.calibration.statistics",
    "repro.formats.any_precision",
    "repro.formats.clipping",
    "repro.formats.gptq",
    "repro.formats.group_affine",
    "repro.formats.kmeans",
    "repro.formats.row_scales",
    "repro.integration.grouped",
)
"""Modules whose code decides what is measured."""

Stacks = dict[int, dict[Block, EncodedStack]]  # by decoder layer


class Evaluation:
    """One model with the windows of every domain."""

    def __init__(self, profile: Profile, model: str, *, device: str, source: str) -> None:
        self.profile, self.name, self.device, self.source = profile, model, device, source
        if device == "cpu":
            keep_freed_memory()
        self.model, self.tokenizer = load_model(model, device=device, dtype=DTYPE)
        grouped.register()
        self.layers: tuple[ExpertsLayer, ...] = experts_layers(self.model)
        self._altered = False
        self._streams: dict[str, npt.NDArray[np.int64]] = {}
        self._hashes: dict[str, str] = {}

    # Texts -----------------------------------------------------------------------------

    @cached_property
    def workloads(self) -> dict[str, str]:
        """The workload of each domain that losses are measured on."""
        return {str(domain): name for domain, name in domain_workloads(self.source).items()}

    def identity(self) -> dict[str, Any]:
        """Part of every record's configuration: model, device, arithmetic."""
        return {
            "model": self.name,
            "model_digest": model_digest(self.name),
            "source": self.source,
            "seed": self.profile.seed,
            "device": self.device,
            "dtype": DTYPE,
            "experts_implementation": IMPLEMENTATIONS[self.device],
            "calibration_prompts": self.profile.calibration_prompts,
            "calibration_tokens": self.profile.calibration_tokens,
            "calibration_sets": self._calibration_sets(),
        }

    def workload_identity(self, workload: str) -> dict[str, Any]:
        """The same of one workload."""
        self._stream(workload)
        domain = load_workload(workload, source=self.source, max_documents=1).domain
        return {
            "workload": workload,
            "domain": domain,
            "workload_sha256": self._hashes[workload],
        }

    def windows(self, workload: str, n: int, length: int) -> Tensor:
        """Up to ``n`` windows ``[P, T]`` spread over the workload, never a calibration window.

        A set that holds fewer gives all it has; P says how many.

        Raises:
            DataUnavailableError: the workload holds not even one.
        """
        stream = self._stream(workload)
        if self.source == "embedded":
            stream = stream[len(stream) // CALIBRATION_SHARE :]
        return self._spread(windows(stream, length), workload, n, length)

    def calibration_windows(self, domain: str) -> Tensor:
        """Windows ``[P, T]`` to calibrate on."""
        n, length = self.profile.calibration_prompts, self.profile.calibration_tokens
        workload = self._calibration_sets()[domain]
        stream = self._stream(workload)
        if self.source == "embedded":
            stream = stream[: len(stream) // CALIBRATION_SHARE]
        return self._spread(windows(stream, length), workload, n, length)

    def _spread(
        self, available: npt.NDArray[np.int64], workload: str, n: int, length: int
    ) -> Tensor:
        if not len(available):
            raise DataUnavailableError(
                f"workload {workload!r} ({self.source}) holds no window of {length} tokens: "
                "use shorter ones"
            )
        chosen = np.linspace(0, len(available) - 1, min(n, len(available))).round().astype(int)
        return torch.from_numpy(available[chosen]).to(self.device)

    def _calibration_sets(self) -> dict[str, str]:
        return self.workloads if self.source == "embedded" else CALIBRATION_SETS

    def _stream(self, workload: str) -> npt.NDArray[np.int64]:
        if workload not in self._streams:
            read = load_workload(workload, source=self.source, seed=self.profile.seed)
            self._hashes[workload] = read.provenance["sha256"]
            self._streams[workload] = encode_stream(self.tokenizer, read)
        return self._streams[workload]

    # Losses ----------------------------------------------------------------------------

    def token_losses(self, ids: Tensor) -> npt.NDArray[np.float64]:
        """Negative log likelihood in nats of tokens 1 to T - 1: ``[P, T - 1]``."""
        step = max(1, BATCH_TOKENS[self.device] // ids.shape[1])
        found = []
        with torch.no_grad(), use_experts(self.model, IMPLEMENTATIONS[self.device]):
            for start in range(0, len(ids), step):
                batch = ids[start : start + step]
                logits = self.model(batch, use_cache=False).logits[:, :-1].float()
                losses = F.cross_entropy(
                    logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none"
                )
                found.append(losses.view(len(batch), -1).double().cpu())
        return torch.cat(found).numpy()

    # Formats ---------------------------------------------------------------------------

    @cached_property
    def calibration(self) -> Calibration:
        """Statistics of the calibration windows of all domains, Hessians included."""
        self._require_original()
        ids = torch.cat([self.calibration_windows(domain) for domain in self.workloads])
        micro_batch = max(1, BATCH_TOKENS[self.device] // ids.shape[1])
        return collect(
            self.model, ids, hessians=True, micro_batch=micro_batch,
            fingerprint=model_digest(self.name),
        )  # fmt: skip

    def encode(self, format_name: str) -> Stacks:
        """All experts in the format of that name, calibrated.

        Raises:
            RuntimeError: other weights are in place; encode before :meth:`put`.
        """
        self._require_original()
        made = make_format(format_name)
        stacks: Stacks = {}
        for layer in self.layers:
            statistics = self.calibration.layer(layer.layer_index)
            hessians = statistics.hessians or (None, None)
            weights = block_weights(layer.module)
            stacks[layer.layer_index] = {}
            for block in Block:
                options: dict[str, Any] = {}
                if format_name.endswith("-gptq"):
                    options["hessian"] = hessians[block].to(self.device)  # type: ignore[union-attr]
                matters = importance(statistics, block).to(self.device)
                stacks[layer.layer_index][block] = made.encode_stack(
                    weights[block].detach(), matters, **options
                )
        return stacks

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Whatever is put in place inside is undone after, also when something fails."""
        kept = [
            (weight, weight.detach().clone())
            for layer in self.layers
            for weight in block_weights(layer.module)
        ]
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, original in kept:
                    weight.copy_(original)
            self._altered = False

    def _require_original(self) -> None:
        if self._altered:
            raise RuntimeError("the model holds decoded weights: encode and calibrate before put")

    def put(self, stacks: Stacks, n_bits: int) -> None:
        """Put the decoded weights of all experts in place (inside :meth:`restored`)."""
        self._altered = True
        with torch.no_grad():
            for layer in self.layers:
                for block, weight in zip(Block, block_weights(layer.module), strict=True):
                    weight.copy_(stacks[layer.layer_index][block].decode(n_bits))


def expert_bytes(stacks: Stacks, n_bits: int) -> int:
    """Bytes of all experts at a width, tables and scales included."""
    return sum(
        stack.nbytes(n_bits) * len(stack) for blocks in stacks.values() for stack in blocks.values()
    )


def n_weights(stacks: Stacks) -> int:
    """Weights of all experts."""
    return sum(
        len(stack) * stack.scheme.shape[0] * stack.scheme.shape[1]
        for blocks in stacks.values()
        for stack in blocks.values()
    )
