"""The damage ``s_i^b`` of reading a block at a width, predicted from statistics alone.

The one idea: an error dW of a weight costs its square times what its input, its row and its
expert's usage make of it.  The kinds differ in what they know:

"output"      expected squared error of the layer's output per real token: the second moments
              of the inputs weighted by r^2, the gain from each row to the output (gate_up; the
              rows of down are the output), and how often the expert is used;
"covariance"  the same with the full second-moment matrix, ``dw C dw^T`` for every row;
"fisher"      half the diagonal Fisher information times the squared error: an estimate of the
              divergence in nats per scored token, with all that comes after the layer;
"weight"      the plain squared error, a control that knows neither inputs nor usage.

Experts with few tokens use means pulled to their layer's (see ``statistics``).  ``gain`` is
the increase from one width to another, never negative (PagedWeight's g).

Letters: E experts, N rows, K columns, W widths, r routing weight.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.calibration.statistics import LayerStatistics, shrink
from repro.calibration.table import gain
from repro.contract import Block
from repro.errors import CheckpointError, unknown_name

Kind = Literal["output", "covariance", "fisher", "weight"]
KINDS: tuple[Kind, ...] = ("output", "covariance", "fisher", "weight")
_VALUES_AT_ONCE = 1 << 26


class Stack(Protocol):
    """What is needed of :class:`repro.formats.encoded.EncodedStack`."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits per weight it can be read at, ascending."""
        ...

    def decode(self, n_bits: int, expert: int | None = None) -> Tensor:
        """Float32 ``[E, N, K]``, or ``[N, K]`` of one expert."""
        ...


def sensitivity(
    weight: Tensor,
    stack: Stack,
    stats: LayerStatistics,
    block: Block,
    kind: Kind = "output",
) -> npt.NDArray[np.float64]:
    """Damage of every expert at every width of ``stack``, ``[E, W]``.

    Args:
        weight: the original matrices ``[E, N, K]``.
        stack: the same matrices encoded.
        stats: of the layer.
        block: which of the two matrices.
        kind: see the module.

    Raises:
        UnknownNameError: no such kind.
        CheckpointError: statistics without what the kind needs; a weight that is not finite.
    """
    if kind not in KINDS:
        raise unknown_name("kind of sensitivity", str(kind), KINDS)
    measure = _measure(stats, block, kind, weight)
    n_experts = weight.shape[0]
    step = max(1, _VALUES_AT_ONCE // max(1, weight[0].numel()))
    found = torch.zeros(n_experts, len(stack.widths), dtype=torch.float64, device=weight.device)
    for column, n_bits in enumerate(stack.widths):
        whole = stack.decode(n_bits) if step >= n_experts else None
        for start in range(0, n_experts, step):
            experts = slice(start, min(start + step, n_experts))
            decoded = whole if whole is not None else _decode(stack, n_bits, experts)
            error = decoded.to(weight.device) - weight[experts].float()
            found[experts, column] = measure(error, experts)
    if not bool(torch.isfinite(found).all()):
        expert = int((~torch.isfinite(found)).any(dim=1).nonzero()[0])
        raise CheckpointError(
            f"layer {stats.layer_index}, expert {expert}: the damage of {block.name.lower()} is "
            "not finite; check its weights and calibrate again"
        )
    return found.cpu().numpy()


class _Measure(Protocol):
    def __call__(self, error: Tensor, experts: slice) -> Tensor:
        """Damage ``[e]`` of errors ``[e, N, K]``."""
        ...


def _decode(stack: Stack, n_bits: int, experts: slice) -> Tensor:
    return torch.stack([stack.decode(n_bits, e) for e in range(experts.start, experts.stop)])


def _measure(stats: LayerStatistics, block: Block, kind: Kind, weight: Tensor) -> _Measure:
    device = weight.device
    usage = stats.usage().to(device)
    gate_up = block is Block.GATE_UP

    if kind == "weight":

        def plain(error: Tensor, experts: slice) -> Tensor:
            return error.square().sum(dim=2).double().sum(dim=1)

        return plain

    if kind == "fisher":
        if stats.fisher is None:
            raise _lacking(stats, kind, "fisher=True")
        per_token = stats.fisher[block].to(device) / usage[:, None, None]
        information = shrink(per_token, stats.counts, stats.min_tokens, stats.prior_tokens)

        def fisher(error: Tensor, experts: slice) -> Tensor:
            total = (error.square() * information[experts]).sum(dim=2).double().sum(dim=1)
            return 0.5 * total * usage[experts]

        return fisher

    mean_r2 = stats.mean_square_weight().to(device)
    if gate_up:
        rows = stats.shrunk("gate_up_rows").to(device).double()
    else:
        rows = mean_r2[:, None].double()  # the output's own rows
    rows = rows * usage[:, None]
    if kind == "output":
        name = "gate_up_weighted" if gate_up else "down_weighted"
        floor = torch.finfo(torch.float32).tiny
        columns = stats.shrunk(name).to(device) / mean_r2.clamp(min=floor)[:, None]

        def output(error: Tensor, experts: slice) -> Tensor:
            per_row = torch.einsum("enk,ek->en", error.square(), columns[experts])
            return (per_row.double() * rows[experts]).sum(dim=1)

        return output

    if stats.hessians is None:
        raise _lacking(stats, kind, "hessians=True")
    matrices = stats.shrunk("gate_up_hessian" if gate_up else "down_hessian").to(device)

    def covariance(error: Tensor, experts: slice) -> Tensor:
        per_row = ((error @ matrices[experts]) * error).sum(dim=2)
        return (per_row.double() * rows[experts]).sum(dim=1).clamp(min=0)

    return covariance


def _lacking(stats: LayerStatistics, kind: str, option: str) -> CheckpointError:
    return CheckpointError(
        f"the statistics of layer {stats.layer_index} lack what sensitivity {kind!r} needs: "
        f"collect them with {option}"
    )


__all__ = ["KINDS", "Kind", "Stack", "gain", "sensitivity"]
