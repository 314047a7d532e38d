"""Muon for stacks of matrices, with AdamW for everything else.

Muon replaces a matrix's momentum by its nearest orthogonal matrix (five Newton-Schulz
steps; Jordan et al. 2024), scaled so that one learning rate and weight decay serve
both optimisers (0.2 * sqrt(larger side); Liu et al., arXiv 2502.16982).  ``torch.optim.Muon``
takes 2-D parameters only; an MoE layer keeps its experts in one 3-D tensor, so this one
works on batches, and the two halves of ``gate_up_proj`` are separate matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest orthogonal matrix of each of ``matrices`` [..., rows, columns], approximately.

    Singular vectors stay; singular values from a hundredth of the norm upwards end between
    0.68 and 1.14 (the coefficients are chosen for speed, not for convergence to 1).
    """
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    wide = x.shape[-1] >= x.shape[-2]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(matrices.dtype)


def split_parameters(model: nn.Module) -> tuple[list[dict[str, Any]], list[nn.Parameter]]:
    """(Muon's parameter groups, AdamW's rest: embeddings, routers, norms, biases, single rows)."""
    single: list[nn.Parameter] = []
    double: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1
        if not is_matrix or "embed" in name or "lm_head" in name or name.endswith("gate.weight"):
            rest.append(parameter)
        else:
            (double if name.endswith("gate_up_proj") else single).append(parameter)
    return [{"params": single, "parts": 1}, {"params": double, "parts": 2}], rest


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for parameters [..., rows, columns].

    A group's ``parts`` says how many matrices lie above each other in one parameter: rows of
    ``gate_up_proj`` [E, 2 * width, hidden] are two matrices, each orthogonalised by itself.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient (no closure is called)."""
        for group in self.param_groups:
            stacks: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum"] for p in params]
            grads = [p.grad for p in params]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov
            for p, update in zip(params, updates, strict=True):
                rows, columns = p.shape[-2] // group["parts"], p.shape[-1]
                stacks[rows, columns].append((p, update.view(-1, rows, columns)))
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            for shape, members in stacks.items():
                scale = 0.2 * max(shape) ** 0.5
                directions = orthogonalise(torch.cat([u for _, u in members]))
                sizes = [u.shape[0] for _, u in members]
                parts = [
                    d.view_as(p) for (p, _), d in zip(members, directions.split(sizes), strict=True)
                ]
                torch._foreach_add_([p for p, _ in members], parts, alpha=-group["lr"] * scale)
