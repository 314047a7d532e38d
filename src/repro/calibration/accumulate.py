"""Sums over the real tokens of one layer, kept where the model runs.

The one idea: an expert's tokens are reduced at once to sums over tokens, in one product
``[2, n] x [n, K]`` with the rows 1 and r^2, so that memory does not grow with the prompts.
Squares are taken in float32 and added up in float64.  Padding is set to zero before it is
added, never multiplied by zero: what a model leaves in padding may be NaN.

Letters: n tokens of one expert, E experts, K inputs of a block, N rows of gate_up, r routing
weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from repro.calibration.probes import ExpertCall, activate
from repro.calibration.statistics import LayerStatistics
from repro.contract import Block
from repro.integration.experts import ExpertsLayer
from repro.integration.statistics import DeviceStatistics

_HESSIANS = {Block.GATE_UP: "gate_up_hessian", Block.DOWN: "down_hessian"}


class LayerSums:
    """Accumulates one layer; memory is taken at its first call, on that call's device."""

    def __init__(self, layer: ExpertsLayer, *, hessians: bool) -> None:
        self.layer = layer
        self._routing = DeviceStatistics((layer,))
        self._with_hessians = hessians
        self._sums: dict[str, Tensor] = {}

    def _sum(self, name: str, like: Tensor, *shape: int) -> Tensor:
        if name not in self._sums:
            with torch.inference_mode(False):
                self._sums[name] = torch.zeros(
                    (self.layer.n_experts, *shape), dtype=torch.float64, device=like.device
                )
        return self._sums[name]

    def add_routing(self, top_k_index: Tensor, top_k_weights: Tensor, mask: Tensor) -> None:
        """Count the choices of one call, ``[T, k]`` twice and a mask of T values."""
        self._routing.add(self.layer.layer_index, top_k_index, top_k_weights, mask)

    def add_expert(self, call: ExpertCall, mask: Tensor) -> None:
        """Add the tokens of one expert; ``mask[n]`` says which of them are real."""
        real = mask[:, None]
        r2 = call.weight.detach().float().square()
        weights = torch.where(mask, torch.stack([torch.ones_like(r2), r2]), 0).double()
        for name, values in (("gate_up", call.inputs), ("down", call.inner)):
            squares = torch.where(real, values.detach().float().square(), 0).double()
            total = self._sum(name, squares, 2, squares.shape[1])
            total[call.expert] += weights @ squares
        gains = torch.where(real, _row_gains(call).square(), 0).double()
        rows = self._sum("rows", gains, gains.shape[1])
        rows[call.expert] += weights[1] @ gains
        self._sum("square_mass", r2)[call.expert] += weights[1].sum()
        if self._with_hessians:
            for block, values in ((Block.GATE_UP, call.inputs), (Block.DOWN, call.inner)):
                x = torch.where(real, values.detach().float(), 0)
                total = self._sum(_HESSIANS[block], x, x.shape[1], x.shape[1])
                total[call.expert] += x.T @ x

    def finish(
        self, widths: tuple[int, int, int], min_tokens: int, prior_tokens: int
    ) -> LayerStatistics:
        """The means; ``widths`` are H, N and I, for a layer in which no expert was hit."""
        routing = self._routing.read()
        hidden, n_rows, n_inner = widths
        counts = torch.from_numpy(routing.counts[0].copy())
        like = torch.zeros(())
        gate_up = self._sum("gate_up", like, 2, hidden)
        down = self._sum("down", like, 2, n_inner)
        rows = self._sum("rows", like, n_rows)
        found = {
            "gate_up_moment": gate_up[:, 0],
            "gate_up_weighted": gate_up[:, 1],
            "gate_up_rows": rows,
            "down_moment": down[:, 0],
            "down_weighted": down[:, 1],
        }
        if self._with_hessians:
            found["gate_up_hessian"] = self._sum("gate_up_hessian", like, hidden, hidden)
            found["down_hessian"] = self._sum("down_hessian", like, n_inner, n_inner)
        means: dict[str, Any] = {name: _mean(total, counts) for name, total in found.items()}
        return LayerStatistics(
            layer_index=self.layer.layer_index,
            n_tokens=int(routing.n_tokens[0]),
            counts=counts,
            mass=torch.from_numpy(routing.mass[0].copy()),
            square_mass=self._sum("square_mass", like).cpu(),
            min_tokens=min_tokens,
            prior_tokens=prior_tokens,
            **means,
        )


def _mean(total: Tensor, counts: Tensor) -> Tensor:
    n = counts.to(total.device).clamp(min=1).reshape(-1, *(1,) * (total.dim() - 1))
    return (total / n).float().cpu()


def _row_gains(call: ExpertCall) -> Tensor:
    """``|dy / dpre|`` per token and row of gate_up, ``[n, N]``, columns of down independent.

    The activation works element by element, so one backward pass through it with the norms
    of down's columns gives all of them.
    """
    with torch.inference_mode(False), torch.enable_grad():
        norms = call.matrices.down.detach().float().norm(dim=0)  # [I]
        leaf = call.pre.detach().float().clone().requires_grad_()
        inner = activate(call.module, leaf)
        (gains,) = torch.autograd.grad((inner * norms).sum(), leaf)
    return gains.detach()
