"""What changed weights do to the loss, to second order, without the diagonal.

The one idea: with delta the gradient at a block's output, one token's share of the first-order
change of the loss is ``delta^T dW x``.  Its sum is the slope; the sum of its squares, with
labels sampled from the model, is the curvature along dW (Fisher information of this one
direction), so

    divergence  ~  1/2 sum_t (delta_t^T dW x_t)^2 / n_scored

and nothing is assumed about single weights being independent, only tokens.  One backward pass
serves all widths of all blocks.  A study tool: it costs as much as a forward pass per width.

Letters: L layers, E experts, B blocks, W widths, N rows, K columns, n tokens of one expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from repro.calibration.cursor import check_prompts
from repro.calibration.fisher import GradientProbe
from repro.calibration.passes import Labels, backward_passes
from repro.calibration.probes import probing
from repro.contract import Block

Errors = Mapping[tuple[int, Block], Tensor]
"""dW ``[W, E, N, K]`` by (layer index, block)."""


@dataclass(frozen=True)
class SecondOrder:
    """Per scored token; layers in the order of ``layer_ids``."""

    quadratic: npt.NDArray[np.float64]  # [L, E, B, W] half the mean square: nats
    linear: npt.NDArray[np.float64]  # [L, E, B, W] the slope: with labels "data", of the loss
    layer_ids: tuple[int, ...]


class _Directions(GradientProbe):
    def __init__(self, mask: Tensor, errors: Errors) -> None:
        super().__init__(mask)
        self._errors = errors
        self.sums = {
            key: torch.zeros(2, *e.shape[:2], dtype=torch.float64, device=e.device)
            for key, e in errors.items()
        }

    def wants(self, layer_index: int) -> bool:
        """Earlier layers too: the graph begins at the first."""
        return True

    def seen(
        self, layer_index: int, expert: int, block: Block, inputs: Tensor, delta: Tensor
    ) -> None:
        errors = self._errors.get((layer_index, block))
        if errors is None:
            return
        n_widths, n_rows = errors.shape[0], errors.shape[2]
        flat = errors[:, expert].to(inputs.device).reshape(n_widths * n_rows, -1)
        moved = (inputs @ flat.T).reshape(-1, n_widths, n_rows)  # dW x
        share = (moved * delta[:, None, :]).sum(dim=2).double()  # [n, W]
        total = self.sums[layer_index, block]
        total[0, :, expert] += share.square().sum(dim=0).to(total.device)
        total[1, :, expert] += share.sum(dim=0).to(total.device)


def second_order(
    model: nn.Module,
    input_ids: Tensor,
    errors: Errors,
    mask: Tensor | None = None,
    *,
    labels: Labels = "sampled",
    seed: int = 0,
    micro_batch: int = 1,
) -> SecondOrder:
    """Slope and curvature along every dW of ``errors``; blocks not named there read zero."""
    ids, real = check_prompts(input_ids, mask)
    probe = _Directions(real, errors)
    with probing(model, probe) as layers:
        n_scored = backward_passes(
            model, ids, real, labels=labels, seed=seed, micro_batch=micro_batch
        )
    probe.cursor.check([layer.layer_index for layer in layers])
    layer_ids = tuple(layer.layer_index for layer in layers)
    n_experts = max(layer.n_experts for layer in layers)
    n_widths = next(iter(errors.values())).shape[0]
    found = np.zeros((2, len(layer_ids), n_experts, len(Block), n_widths))
    for (layer_index, block), total in probe.sums.items():
        sums = total.cpu().numpy() / max(n_scored, 1)
        found[:, layer_ids.index(layer_index), : sums.shape[2], block] = sums.transpose(0, 2, 1)
    return SecondOrder(0.5 * found[0], found[1], layer_ids)
