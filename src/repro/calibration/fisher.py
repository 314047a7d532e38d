"""Diagonal Fisher information of every weight of every expert.

The one idea: in a linear layer the gradient of one token is an outer product, ``delta x^T``,
so the sum of its squares over tokens needs no gradient per token:

    F[n, k] = 1 / n_scored * sum_t delta[t, n]^2 x[t, k]^2 = (delta^2)^T (x^2) / n_scored

delta is the gradient of the summed negative log-likelihood of the prompts with respect to the
block's output.  For gate_up that is its pre-activation; for down its output *before* the
routing weight, so r is inside of delta in both, and so is all that follows, later layers and
their routers included.  With labels sampled from the model, ``1/2 sum F dW^2`` estimates the
divergence in nats per scored token when the errors of single weights are independent.

Left out: products of different tokens (one label moves delta of all earlier tokens).

Letters: E experts, N outputs, K inputs of a block, n tokens of one expert, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from repro.calibration.cursor import TokenCursor, check_prompts
from repro.calibration.passes import Labels, backward_passes
from repro.calibration.probes import ExpertCall, probing
from repro.contract import Block


class GradientProbe:
    """Calls :meth:`seen` with inputs and output gradients of every block; padding is zero."""

    gradients = True

    def __init__(self, mask: Tensor) -> None:
        self.cursor = TokenCursor(mask)
        self._mask = mask

    def wants(self, layer_index: int) -> bool:
        """All layers."""
        return True

    def begin(self, layer_index: int, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        """Move on to the call's tokens."""
        self.cursor.advance(layer_index, top_k_index.shape[0])
        self._mask = self.cursor.mask(layer_index, top_k_index.device)

    def expert(self, call: ExpertCall) -> None:
        """Set hooks on the outputs of both blocks."""
        real = self._mask[call.token][:, None]
        for block, x, out in (
            (Block.GATE_UP, call.inputs, call.pre),
            (Block.DOWN, call.inner, call.out),
        ):
            inputs = torch.where(real, x.detach().float(), 0)
            out.register_hook(self._hook(call, block, inputs, real))

    def _hook(self, call: ExpertCall, block: Block, inputs: Tensor, real: Tensor):  # type: ignore[no-untyped-def]
        at = (call.layer_index, call.expert)  # not the call: it would keep the graph alive

        def hook(gradient: Tensor) -> None:
            with torch.no_grad():
                self.seen(*at, block, inputs, torch.where(real, gradient.float(), 0))

        return hook

    def end(self, layer_index: int) -> None:
        """Nothing to do."""

    def seen(
        self, layer_index: int, expert: int, block: Block, inputs: Tensor, delta: Tensor
    ) -> None:
        """Inputs ``[n, K]`` and gradients of the outputs ``[n, N]`` of one block."""
        raise NotImplementedError


class _Fisher(GradientProbe):
    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask)
        self.sums: dict[tuple[int, Block], Tensor] = {}

    def expert(self, call: ExpertCall) -> None:
        for block, weight in (
            (Block.GATE_UP, call.matrices.gate_up),
            (Block.DOWN, call.matrices.down),
        ):
            if (call.layer_index, block) not in self.sums:
                shape = (int(call.module.num_experts), *weight.shape)  # type: ignore[arg-type]
                self.sums[call.layer_index, block] = torch.zeros(shape, device=weight.device)
        super().expert(call)

    def seen(
        self, layer_index: int, expert: int, block: Block, inputs: Tensor, delta: Tensor
    ) -> None:
        self.sums[layer_index, block][expert].addmm_(delta.square().T, inputs.square())


def collect_fisher(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor | None = None,
    *,
    labels: Labels = "sampled",
    seed: int = 0,
    micro_batch: int = 1,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Fisher information of gate_up ``[E, N, K]`` and down per layer index, float32 on the CPU.

    Terms are not negative and are added in float32.  An expert that was never routed has
    zeros; a single prompt of one token scores nothing and gives zeros.
    """
    ids, real = check_prompts(input_ids, mask)
    probe = _Fisher(real)
    with probing(model, probe) as layers:
        n_scored = backward_passes(
            model, ids, real, labels=labels, seed=seed, micro_batch=micro_batch
        )
    probe.cursor.check([layer.layer_index for layer in layers])
    scale = 1.0 / max(n_scored, 1)
    return {
        layer.layer_index: (
            (probe.sums[layer.layer_index, Block.GATE_UP] * scale).cpu(),
            (probe.sums[layer.layer_index, Block.DOWN] * scale).cpu(),
        )
        for layer in layers
    }
