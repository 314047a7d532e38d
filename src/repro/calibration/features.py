"""Three norms that say how hard a prompt drives an expert's block.

The one idea (PagedWeight's prompt signal): per prompt and block, the routing-weighted mean, the
routing-weighted root mean square and the maximum of the norms of the inputs the expert got,

    mean = sum r |x| / sum r,    rms = sqrt(sum r |x|^2 / sum r),    max = max |x|,

with the routing mass ``sum r`` beside them.  A prompt that never chose the expert has zeros
everywhere.  Gathered by the probing experts function, in one forward pass.

Letters: P prompts, L layers with experts, E experts, B blocks, r routing weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from repro.calibration.cursor import TokenCursor, check_prompts
from repro.calibration.passes import run_prompts
from repro.calibration.probes import ExpertCall, probing
from repro.contract import Block
from repro.integration.experts import ExpertsLayer, experts_layers


@dataclass(frozen=True)
class PromptFeatures:
    """What every prompt did to every block."""

    values: npt.NDArray[np.float64]  # [P, L, E, B, 3] in the order of heads.FEATURE_NAMES
    mass: npt.NDArray[np.float64]  # [P, L, E] sum of r
    n_tokens: npt.NDArray[np.int64]  # [P] real tokens
    layer_ids: tuple[int, ...]


class _Norms:
    gradients = False

    def __init__(self, layers: tuple[ExpertsLayer, ...], mask: Tensor) -> None:
        self.cursor = TokenCursor(mask)
        self._mask = mask
        self._rows = {layer.layer_index: row for row, layer in enumerate(layers)}
        n_experts = max(layer.n_experts for layer in layers)
        self._shape = (len(layers), n_experts, len(Block), mask.shape[0])
        self.sums: Tensor | None = None  # [2, L, E, B, P]: r |x| and r |x|^2
        self.largest: Tensor | None = None  # [L, E, B, P]
        self.mass: Tensor | None = None  # [L, E, P]

    def wants(self, layer_index: int) -> bool:
        return layer_index in self._rows

    def begin(self, layer_index: int, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        self.cursor.advance(layer_index, top_k_index.shape[0])
        self._mask = self.cursor.mask(layer_index, top_k_index.device)

    def expert(self, call: ExpertCall) -> None:
        device = call.inputs.device
        if self.sums is None or self.largest is None or self.mass is None:
            n_layers, n_experts, _, n_prompts = self._shape
            self.sums = torch.zeros(2, *self._shape, dtype=torch.float64, device=device)
            self.largest = torch.zeros(self._shape, device=device)
            self.mass = torch.zeros(
                n_layers, n_experts, n_prompts, dtype=torch.float64, device=device
            )
        row = self._rows[call.layer_index]
        prompt = self.cursor.prompt(call.layer_index, call.token)
        real = self._mask[call.token]
        r = torch.where(real, call.weight.float(), 0).double()
        self.mass[row, call.expert].index_add_(0, prompt, r)
        for block, x in ((Block.GATE_UP, call.inputs), (Block.DOWN, call.inner)):
            norm = torch.where(real, x.float().norm(dim=1), 0)
            at = (row, call.expert, block)
            self.sums[0][at].index_add_(0, prompt, r * norm)
            self.sums[1][at].index_add_(0, prompt, r * norm.double().square())
            self.largest[at].scatter_reduce_(0, prompt, norm, "amax")

    def end(self, layer_index: int) -> None:
        """Nothing to do: sums go on over micro-batches."""


@torch.no_grad()
def prompt_features(
    model: nn.Module, input_ids: Tensor, mask: Tensor | None = None, *, micro_batch: int = 4
) -> PromptFeatures:
    """Features of the prompts ``[P, T]``; padding is left out by ``mask``.

    Raises:
        CaptureError: a layer did not see every token exactly once.
    """
    ids, real = check_prompts(input_ids, mask)
    layers = experts_layers(model)
    probe = _Norms(layers, real)
    with probing(model, probe):
        for start in range(0, len(ids), micro_batch):
            at = slice(start, start + micro_batch)
            run_prompts(model, ids[at], real[at])
    probe.cursor.check([layer.layer_index for layer in layers])
    if probe.sums is None or probe.largest is None or probe.mass is None:
        raise AssertionError("no expert was hit although every layer saw every token")
    mass = probe.mass.cpu().numpy()  # [L, E, P]
    floor = np.where(mass > 0, mass, 1.0)[:, :, None]
    first, second = probe.sums.cpu().numpy()
    values = np.stack(
        [first / floor, np.sqrt(second / floor), probe.largest.double().cpu().numpy()], axis=-1
    )  # [L, E, B, P, 3]
    return PromptFeatures(
        np.ascontiguousarray(values.transpose(3, 0, 1, 2, 4)),
        np.ascontiguousarray(mass.transpose(2, 0, 1)),
        real.sum(dim=1).cpu().numpy().astype(np.int64),
        tuple(layer.layer_index for layer in layers),
    )
