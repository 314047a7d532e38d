"""Codes that make up for each other's errors: the GPTQ way of rounding.

The one idea: what counts is the error of the output, ``(W - Q) x``, over the inputs that an
expert really sees, not the error of single weights.  Columns are rounded one after the other,
and what a column lost is taken out of the columns still to come as well as their correlation
allows: with ``H = mean(x x^T)`` and ``H^-1 = U^T U`` (U upper triangular), rounding column j
with error e moves column k > j by ``-e * U[j, k] / U[j, j]``.  Frantar et al., "GPTQ", 2022;
the papers reproduced here use it (or AutoRound) for their static baselines.

Scales and zeros of a group are fitted to the weights as they are when the group is reached,
by the same search as for rounding to nearest; without an importance of their own, errors are
weighed by the diagonal of H.  With ``H`` a multiple of the identity nothing moves and the
codes are those of rounding to nearest.

H is damped by a share of its mean diagonal; more if it is still not positive definite.  Then,
or if H is zero (an expert never routed), the expert is rounded to nearest and counted.  An
input that was always zero (a dead column) has nothing but the damping, is correlated with
nothing and rounded as it is.
Left out: reordering columns by activation, which would need a permutation at run time.

Letters: E experts, N rows, K columns, C groups of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from repro.errors import CheckpointError
from repro.formats.clipping import Clip, fit_rows, power_of_two, quantise, within_float32

DAMPING = (0.01, 0.1, 1.0)  # shares of the mean diagonal, tried in turn
_SMALLEST_SCALE = 2.0**-126
_BLOCK_COLUMNS = 128  # columns updated at once before the rest of the row is
# Of a factor in float64 and its working copies, so that the experts of a layer fit.
_CHUNK_BYTES = (1 << 28, 1 << 32)  # on a CPU and on a GPU


def check_hessian(hessian: Tensor, weight: Tensor) -> Tensor:
    """The Hessian as ``[E, K, K]``; one ``[K, K]`` stands for all experts.

    Raises:
        CheckpointError: a Hessian that does not fit or holds NaN or infinity.
    """
    n_experts, _, n_columns = weight.shape
    if hessian.dim() == 2:
        hessian = hessian[None]
    fits = hessian.shape[1:] == (n_columns, n_columns) and hessian.shape[0] in (1, n_experts)
    if hessian.dim() != 3 or not fits:
        raise CheckpointError(
            f"hessian of shape {tuple(hessian.shape)} does not fit weights of shape "
            f"{tuple(weight.shape)}: give one [{n_columns}, {n_columns}] per expert"
        )
    if not bool(torch.isfinite(hessian).all()):
        raise CheckpointError(
            "hessian has NaN or infinite values: calibrate again with finite inputs"
        )
    return hessian.to(weight.device).expand(n_experts, -1, -1)


class Compensated(NamedTuple):
    """Codes ``uint8 [E, N, K]``; scale and zero ``[E, N, C]``; experts rounded to nearest."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    n_fallbacks: int


def encode_columns(
    weight: Tensor,
    hessian: Tensor,
    importance: Tensor | None,
    n_bits: int,
    group_size: int,
    symmetric: bool,
    clip: Clip,
) -> Compensated:
    """Encode float32 ``[E, N, K]`` under second moments ``[E, K, K]``."""
    n_experts, _, n_columns = weight.shape
    per_expert = 4 * 8 * n_columns**2 + 3 * 4 * weight[0].numel()
    size = max(1, _CHUNK_BYTES[weight.device.type != "cpu"] // per_expert)
    done = []
    for start in range(0, n_experts, size):
        chunk = slice(start, start + size)
        weights = importance[chunk] if importance is not None else None
        factor, failed = inverse_factor(hessian[chunk])
        if weights is None:
            diagonal = hessian[chunk].diagonal(dim1=1, dim2=2).to(torch.float32)
            weights = torch.where(failed[:, None], 1.0, diagonal.clamp(min=0))
            weights = weights[:, None, :].expand(weight[chunk].shape)
        codes, scale, zero = _compensate(
            weight[chunk], factor, weights, n_bits, group_size, symmetric, clip
        )
        done.append((codes, scale, zero, failed))
    codes, scale, zero, failed = (torch.cat(tensors) for tensors in zip(*done, strict=True))
    return Compensated(codes, scale, zero, int(failed.sum()))


def inverse_factor(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Upper triangular U ``[E, K, K]`` (float32) with ``U^T U`` the inverse of the damped H.

    Also which experts have no such factor (bool ``[E]``); their U is the identity.
    """
    n_columns = hessian.shape[-1]
    h = hessian.to(torch.float64)
    h = (h + h.mT) / 2
    diagonal = h.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(dim=1)
    failed = ~(mean > 0)
    eye = torch.eye(n_columns, dtype=h.dtype, device=h.device)
    h = torch.where(failed[:, None, None], eye, h / torch.where(failed, 1.0, mean)[:, None, None])
    # H reversed is L L^T, so H is R R^T with R = L reversed, upper triangular, and U = R^-1.
    factor, info = torch.linalg.cholesky_ex((h + DAMPING[0] * eye).flip(1, 2))
    for damping in DAMPING[1:]:
        if bool((info == 0).all()):
            break
        again, info_again = torch.linalg.cholesky_ex((h + damping * eye).flip(1, 2))
        repaired = (info != 0) & (info_again == 0)
        factor = torch.where(repaired[:, None, None], again, factor)
        info = torch.where(repaired, 0, info)
    failed = failed | (info != 0)
    upper = torch.where(failed[:, None, None], eye, factor.flip(1, 2))
    inverse = torch.linalg.solve_triangular(upper, eye.expand_as(upper), upper=True)
    return inverse.to(torch.float32), failed


def _compensate(
    weight: Tensor,
    factor: Tensor,
    importance: Tensor,
    n_bits: int,
    group_size: int,
    symmetric: bool,
    clip: Clip,
) -> tuple[Tensor, Tensor, Tensor]:
    """Round column after column; the columns still to come are corrected block by block."""
    n_experts, n_rows, n_columns = weight.shape
    # A power of two is exact, so large weights can be corrected without overflow.
    largest = weight.abs().amax(dim=(1, 2), keepdim=True)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 1, 0).clamp(-126, 126)
    unit = power_of_two(exponent)
    rest = weight / unit
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    n_groups = -(-n_columns // group_size)
    scale = rest.new_zeros(n_experts, n_rows, n_groups)
    zero = torch.zeros_like(scale)
    for first, last in _blocks(n_columns, group_size):
        errors = torch.empty_like(rest[:, :, first:last])
        for column in range(first, last):
            group = column // group_size
            if column % group_size == 0:
                columns = slice(column, column + group_size)
                fitted = fit_rows(
                    rest[:, :, columns].flatten(0, 1),
                    importance[:, :, columns].flatten(0, 1),
                    group_size,
                    n_bits,
                    symmetric,
                    clip,
                )
                scale[:, :, group], zero[:, :, group] = (v.view(n_experts, n_rows) for v in fitted)
            now, s, z = rest[:, :, column], scale[:, :, group], zero[:, :, group]
            code = quantise(now, s, z, n_bits)
            codes[:, :, column] = code.to(torch.uint8)
            pivot = factor[:, column, column, None]
            errors[:, :, column - first] = (now - s * (code - z)) / pivot
            if column + 1 < last:
                rest[:, :, column + 1 : last] -= (
                    errors[:, :, column - first, None] * factor[:, column, None, column + 1 : last]
                )
        if last < n_columns:
            rest[:, :, last:] -= errors @ factor[:, first:last, last:]
    reach = torch.maximum(zero.abs(), ((1 << n_bits) - 1 - zero).abs())
    scale = within_float32(scale * unit, reach)
    # What bfloat16 holds with few bits left stands for zero, as in fit_groups.
    return codes, torch.where(scale.abs() < _SMALLEST_SCALE, 0.0, scale), zero


def _blocks(n_columns: int, group_size: int) -> list[tuple[int, int]]:
    """Runs of about 128 columns; every group begins in a run that has all before it applied.

    Small groups share a run, inside which corrections are applied at once; a large group is
    cut so that it begins with a run.
    """
    if group_size <= _BLOCK_COLUMNS:
        size = _BLOCK_COLUMNS // group_size * group_size
        starts = list(range(0, n_columns, size))
    else:
        starts = [
            start
            for group in range(0, n_columns, group_size)
            for start in range(group, min(group + group_size, n_columns), _BLOCK_COLUMNS)
        ]
    return list(zip(starts, [*starts[1:], n_columns], strict=True))
