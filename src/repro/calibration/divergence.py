"""How far changed predictions lie from the reference, token by token.

The one idea: with p the reference's probabilities and d the difference of logits,

    KL(reference || changed) = log sum p e^d - sum p d
    increase of the loss     = log sum p e^d - d[label]

so both follow from two sums, and no pair of large numbers is subtracted: damages of 1e-9 nats
come out with all their digits.  d is taken in float32 (as the logits are), the sums in float64.

Letters: n scored tokens, V vocabulary, P prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from repro.calibration.replay import Replay, chunk_tokens


@dataclass(frozen=True)
class Reference:
    """Predictions of the unchanged model at the scored tokens of some prompts."""

    logits: tuple[Tensor, ...]  # chunks [c, V] float32
    probabilities: tuple[Tensor, ...]  # chunks [c, V] float64
    labels: tuple[Tensor, ...]  # chunks [c]
    places: Tensor  # [n] among the P * T tokens
    shape: tuple[int, int]  # P, T
    losses: Tensor  # [n] float64
    chunk: int

    @classmethod
    def of(cls, replay: Replay, n_vocabulary: int) -> Reference:
        """Run the unchanged model once."""
        device = replay.places.device
        chunk = chunk_tokens(n_vocabulary, device)
        logits = tuple(replay.logits(0, chunk)) if replay.n_scored else ()
        labels = tuple(replay.labels.split(chunk))
        labels = tuple(y.to(z.device) for y, z in zip(labels, logits, strict=False))
        probabilities, losses = [], []
        for z, y in zip(logits, labels, strict=True):
            log_p = z.double().log_softmax(dim=-1)
            probabilities.append(log_p.exp())
            losses.append(-log_p.gather(1, y[:, None])[:, 0])
        empty = torch.zeros(0, dtype=torch.float64, device=device)
        return cls(
            logits,
            tuple(probabilities),
            labels,
            replay.places,
            replay.shape,
            torch.cat(losses) if losses else empty,
            chunk,
        )

    def compare(self, replay: Replay, layer_index: int) -> tuple[Tensor, Tensor]:
        """Mean divergence and mean increase of the loss per prompt, ``[P]`` float64 each."""
        kl, loss = [], []
        pieces = replay.logits(layer_index, self.chunk) if self.logits else iter(())
        for changed, z, p, y in zip(
            pieces, self.logits, self.probabilities, self.labels, strict=True
        ):
            d = changed.sub_(z)
            moved = d.double()
            first = (moved * p).sum(dim=1)
            at_label = moved.gather(1, y[:, None])[:, 0]
            normaliser = moved.exp_().mul_(p).sum(dim=1).log()
            kl.append((normaliser - first).clamp(min=0))
            loss.append(normaliser - at_label)
        return self.per_prompt(kl), self.per_prompt(loss)

    def per_prompt(self, values: list[Tensor]) -> Tensor:
        """Means over the scored tokens of each prompt; zero where there are none."""
        device = self.losses.device
        grid = torch.zeros(self.shape, dtype=torch.float64, device=device)
        if not values:
            return grid[:, 0]
        # Laid out and summed by rows, which is the same every time; adding by index is not.
        places, counted = self.places.to(device), torch.zeros_like(grid)
        grid.view(-1)[places] = torch.cat(values)
        counted.view(-1)[places] = 1.0
        return grid.sum(dim=1) / counted.sum(dim=1).clamp(min=1)
