"""What the experts of one layer saw in calibration, and what to make of experts seen too little.

The one idea: means over the tokens an expert really got, with the count beside them.  The
stored means are raw (zero where nothing was seen); whoever uses them asks for the shrunk ones.
An expert with fewer tokens than ``min_tokens`` is marked and pulled towards the mean of its
layer,

    m' = (n m + n0 m_layer) / (n + n0),        n0 = ``prior_tokens``

so an expert that was never routed gets the layer's mean, and a layer in which nothing was
routed gets ones: all channels alike.

``gate_up_rows`` says how much an error of one output of ``gate_up`` matters: the mean of
``(r d y / d pre_n)^2``, y the expert's output, to first order and with channels of ``down``
taken as independent.  A norm after the experts is left out of it.

Letters: E experts, H hidden (K of gate_up), N rows of gate_up, I inputs of down (its K),
r routing weight.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repro.calibration.arrays import load_arrays, save_arrays
from repro.contract import Block

MIN_TOKENS = 64
PRIOR_TOKENS = 32
_KIND, _VERSION = "layer statistics", 1
_SCALARS = ("layer_index", "n_tokens", "min_tokens", "prior_tokens")


@dataclass(frozen=True)
class LayerStatistics:
    """One layer with experts; tensors on the CPU, means in float32."""

    layer_index: int  # of the decoder layer, dense layers counted
    n_tokens: int  # real tokens that passed
    counts: Tensor  # [E] int64, how often chosen
    mass: Tensor  # [E] float64, sum of r
    square_mass: Tensor  # [E] float64, sum of r^2
    gate_up_moment: Tensor  # [E, H] mean of x^2
    gate_up_weighted: Tensor  # [E, H] mean of r^2 x^2
    gate_up_rows: Tensor  # [E, N] mean of r^2 (dy / dpre)^2
    down_moment: Tensor  # [E, I] mean of h^2
    down_weighted: Tensor  # [E, I] mean of r^2 h^2
    gate_up_hessian: Tensor | None = None  # [E, H, H] mean of x x^T
    down_hessian: Tensor | None = None  # [E, I, I] mean of h h^T
    gate_up_fisher: Tensor | None = None  # [E, N, H] per scored token, see fisher.py
    down_fisher: Tensor | None = None  # [E, H, I]
    min_tokens: int = MIN_TOKENS
    prior_tokens: int = PRIOR_TOKENS

    @property
    def few_tokens(self) -> Tensor:
        """``[E]`` bool: experts whose means are pulled towards the layer's."""
        return self.counts < self.min_tokens

    @property
    def hessians(self) -> tuple[Tensor, Tensor] | None:
        """Second-moment matrices of gate_up and down, raw; None if not collected."""
        if self.gate_up_hessian is None or self.down_hessian is None:
            return None
        return self.gate_up_hessian, self.down_hessian

    @property
    def fisher(self) -> tuple[Tensor, Tensor] | None:
        """Diagonal Fisher information of gate_up and down; None if not collected."""
        if self.gate_up_fisher is None or self.down_fisher is None:
            return None
        return self.gate_up_fisher, self.down_fisher

    def usage(self) -> Tensor:
        """How often a real token chose the expert, ``[E]`` float64.

        An expert never routed counts as half a token: its damage is small, not impossible.
        """
        return self.counts.double().clamp(min=0.5) / max(self.n_tokens, 1)

    def shrunk(self, name: str) -> Tensor:
        """The means called ``name`` (e.g. "down_moment"), pulled where tokens were few."""
        means: Tensor = getattr(self, name)
        return shrink(means, self.counts, self.min_tokens, self.prior_tokens)

    def mean_square_weight(self) -> Tensor:
        """Mean of r^2 per expert, shrunk alike, ``[E]`` float32."""
        raw = self.square_mass / self.counts.clamp(min=1)
        return shrink(raw.float(), self.counts, self.min_tokens, self.prior_tokens)

    def save(self, path: Path, meta: Any) -> None:
        """Write ``path`` (.npz) with the description of the run."""
        arrays = {
            f.name: getattr(self, f.name).numpy()
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        scalars = {name: np.array(getattr(self, name), np.int64) for name in _SCALARS}
        save_arrays(path, _KIND, _VERSION, {**arrays, **scalars}, meta)

    @staticmethod
    def read_meta(path: Path) -> Any:
        """The description in ``path`` alone.

        Raises:
            CheckpointError: truncated, or another kind of file.
        """
        return load_arrays(path, _KIND, _VERSION, only_meta=True)[1]

    @classmethod
    def load(cls, path: Path) -> tuple[LayerStatistics, Any]:
        """The statistics in ``path`` and the description they were saved with.

        Raises:
            CheckpointError: truncated, or another kind of file.
        """
        arrays, meta = load_arrays(path, _KIND, _VERSION)
        values: dict[str, Any] = {
            name: int(array) if name in _SCALARS else torch.from_numpy(array)
            for name, array in arrays.items()
        }
        return cls(**values), meta


def shrink(means: Tensor, counts: Tensor, min_tokens: int, prior_tokens: int) -> Tensor:
    """Pull the means ``[E, ...]`` of experts with few tokens towards those of the layer."""
    n = counts.to(device=means.device, dtype=torch.float64)
    if not bool((n > 0).any()):
        return torch.ones_like(means)
    n = n.reshape(-1, *(1,) * (means.dim() - 1))
    layer = ((n / n.sum()) * means).sum(dim=0, keepdim=True)
    pulled = (n * means + max(prior_tokens, 1) * layer) / (n + max(prior_tokens, 1))
    return torch.where(n < min_tokens, pulled.to(means.dtype), means)


def importance(stats: LayerStatistics, block: Block, *, weighted: bool = True) -> Tensor:
    """How much errors of each input channel matter, ``[E, 1, K]`` for ``encode_stack``.

    Args:
        stats: of the layer.
        block: which of the two matrices.
        weighted: by the squared routing weight, i.e. errors at the layer's output; else
            every token of the expert counts alike.
    """
    name = "gate_up" if block is Block.GATE_UP else "down"
    return stats.shrunk(f"{name}_{'weighted' if weighted else 'moment'}")[:, None, :]
