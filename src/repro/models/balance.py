"""How hard training pushes each layer towards even use of its experts.

A fixed coefficient of the balance loss either leaves experts unused or forbids them to
specialise, and which of both differs from layer to layer.  Here a slow controller moves the
coefficient of each layer so that the effective number of experts over mixed batches stays
near a target share of E.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repro.models.recipe import Recipe


class BalanceController:
    """Moves each layer's balance coefficient so that effective experts stay near the target."""

    def __init__(self, recipe: Recipe, n_layers: int, n_experts: int, device: torch.device) -> None:
        self.recipe = recipe
        self.coefficient = torch.full((n_layers,), recipe.balance_start, device=device)
        self.traffic = torch.full((n_layers, n_experts), 1.0 / n_experts, device=device)

    def effective_share(self) -> Tensor:
        """exp(entropy) of the traffic over E, per layer."""
        entropy = -(self.traffic * self.traffic.clamp_min(1e-12).log()).sum(-1)
        return entropy.exp() / self.traffic.shape[1]

    def update(self, counts: Tensor) -> None:
        """One step with the routed counts [layers, E] of the batch."""
        self.traffic.lerp_(counts / counts.sum(-1, keepdim=True), 0.05)
        gap = self.recipe.balance_target - self.effective_share()
        self.coefficient.mul_((self.recipe.balance_rate * gap * 10).clamp(-0.05, 0.05).exp())
        self.coefficient.clamp_(self.recipe.balance_floor, 0.1)

    def state(self) -> dict[str, Tensor]:
        """For the checkpoint."""
        return {"coefficient": self.coefficient, "traffic": self.traffic}

    def load(self, state: dict[str, Tensor]) -> None:
        """From the checkpoint."""
        self.coefficient.copy_(state["coefficient"])
        self.traffic.copy_(state["traffic"])
