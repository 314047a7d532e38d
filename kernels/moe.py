"""A layer of experts over pages in four launches: checks, workspaces, grids.

The one idea: the host looks at shapes only.  Which experts are used, how many tokens each has
and how wide each block is stays on the device, so that one captured graph serves every step.

Letters: T tokens, H hidden, I intermediate, E experts, k experts per token.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from repro.errors import MissingDeviceError
from repro.kernels.geometry import KernelInputError, PlaneGeometry
from repro.kernels.reference import ACTIVATIONS

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MIN_CAPABILITY = (8, 0)  # bfloat16 in the matrix units
_BLOCK_M = 16
_BLOCK_N = 32
_BLOCK_W = 4
_BLOCK_PAIRS = 256
_BLOCK_COLUMNS = 512


def fused_moe(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    arena: Tensor,
    table: Tensor,
    gate_up: PlaneGeometry,
    down: PlaneGeometry,
    activation: str = "silu",
) -> Tensor:
    """Gated experts of one layer, each block at the width its table row says.

    Args:
        hidden: ``[T, H]``, float16, bfloat16 or float32.
        top_k_index: integers ``[T, k]``; experts outside 0 to E - 1 are absent and add nothing.
        top_k_weights: ``[T, k]``.
        arena: ``uint8 [pages, page_bytes]``.
        table: ``int32 [E, 2, words]``, rows of gate_up and down of this layer
            (:mod:`repro.contract`).
        gate_up: of ``[2 I, H]``, gate rows first.
        down: of ``[H, I]``.
        activation: ``"silu"`` or ``"gelu_tanh"``.

    Returns:
        ``[T, H]`` in the type of ``hidden``, summed in float32.

    Raises:
        KernelInputError: shapes, types, devices or an activation that do not fit.
        MissingDeviceError: Triton is missing, or the GPU is older than compute capability 8.0.
    """
    check_arguments(hidden, top_k_index, top_k_weights, arena, table, gate_up, down, activation)
    planes = _kernels(hidden.device)
    n_tokens, top_k = top_k_index.shape
    n_experts, n_pairs = table.shape[0], n_tokens * top_k
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if not n_pairs:
        return out.zero_()
    hidden = hidden.contiguous()
    index = top_k_index.contiguous()  # of any integer type: a cast would be one more launch
    weights = top_k_weights.contiguous()
    device = hidden.device
    offsets = torch.empty(n_experts + 1, dtype=torch.int32, device=device)
    order = torch.empty(n_pairs, dtype=torch.int32, device=device)
    middle = torch.empty(n_pairs, down.n_columns, dtype=hidden.dtype, device=device)
    pairs = torch.empty(n_pairs, down.n_rows, dtype=torch.float32, device=device)
    views = (arena.view(torch.int32), arena.view(torch.float16), arena.view(torch.int16))
    precision = "ieee" if hidden.dtype == torch.float32 else "tf32"
    blocks = {"block_m": _BLOCK_M, "block_n": _BLOCK_N, "block_w": _BLOCK_W}

    planes.group_pairs[(n_experts,)](
        index, offsets, order, n_pairs, n_experts, block=_BLOCK_PAIRS
    )  # fmt: skip
    planes.gate_up_activation[(-(-down.n_columns // _BLOCK_N), n_experts)](
        hidden, *views, table, offsets, order, middle, top_k, down.n_columns, gate_up.n_columns,
        gate_up.row_words, gate_up.page_bytes // 4, gate_up.rows_per_lut, table.stride(0),
        has_scales=gate_up.has_scales, kind=activation, precision=precision, **blocks,
    )  # fmt: skip
    planes.down_projection[(-(-down.n_rows // _BLOCK_N), n_experts)](
        middle, *views, table[:, 1], offsets, order, weights, pairs, down.n_rows, down.n_columns,
        down.row_words, down.page_bytes // 4, down.rows_per_lut, table.stride(0),
        has_scales=down.has_scales, precision=precision, **blocks,
    )  # fmt: skip
    planes.combine[(n_tokens, -(-down.n_rows // _BLOCK_COLUMNS))](
        pairs, index, out, down.n_rows, n_experts, top_k=top_k, block=_BLOCK_COLUMNS
    )  # fmt: skip
    return out


def _kernels(device: torch.device) -> Any:
    """The module of kernels, if this device can run them."""
    if importlib.util.find_spec("triton") is None:
        raise MissingDeviceError(
            "the kernels need the package triton: install it, or use repro.kernels.reference"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        raise MissingDeviceError(
            f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0: "
            "use repro.kernels.reference there"
        )
    from repro.kernels import planes

    return planes


def check_arguments(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    arena: Tensor,
    table: Tensor,
    gate_up: PlaneGeometry,
    down: PlaneGeometry,
    activation: str,
) -> None:
    """Of a layer, for this path and the fast one.

    Raises:
        KernelInputError: shapes, types, devices or an activation that do not fit.
    """
    if activation not in ACTIVATIONS:
        raise KernelInputError(
            f"no kernel has the activation {activation!r}: use one of {', '.join(ACTIVATIONS)}"
        )
    if hidden.dtype not in _DTYPES:
        raise KernelInputError(
            f"activations of type {hidden.dtype}: use float16, bfloat16 or float32"
        )
    shapes = (gate_up.n_rows, gate_up.n_columns), (down.n_rows, down.n_columns)
    if shapes[0] != (2 * down.n_columns, down.n_rows) or hidden.shape[1:] != (down.n_rows,):
        raise KernelInputError(
            f"gate_up {list(shapes[0])}, down {list(shapes[1])} and tokens {list(hidden.shape)} "
            "do not fit: use [2 I, H], [H, I] and [T, H]"
        )
    if top_k_index.shape != top_k_weights.shape or len(top_k_index) != len(hidden):
        raise KernelInputError(
            f"routing of shapes {list(top_k_index.shape)} and {list(top_k_weights.shape)} for "
            f"{len(hidden)} tokens: use [T, k] twice"
        )
    page_bytes = arena.shape[1] if arena.dim() == 2 else 0
    if arena.dtype != torch.uint8 or {gate_up.page_bytes, down.page_bytes} != {page_bytes}:
        raise KernelInputError(
            f"an arena of {list(arena.shape)} {arena.dtype} for pages of {gate_up.page_bytes} "
            f"and {down.page_bytes} bytes: use uint8 [pages, page_bytes]"
        )
    if not arena.is_contiguous():
        raise KernelInputError("the pages of the arena do not follow each other: do not slice it")
    if table.dtype != torch.int32 or table.dim() != 3 or table.shape[1] != 2:
        raise KernelInputError(
            f"a table of {list(table.shape)} {table.dtype}: use int32 [E, 2, words] of one layer"
        )
    if table.stride(2) != 1:
        raise KernelInputError("the words of a table row do not follow each other: do not slice it")
    devices = {t.device for t in (hidden, top_k_index, top_k_weights, arena, table)}
    if len(devices) > 1:
        raise KernelInputError(
            f"tensors on {', '.join(sorted(map(str, devices)))}: move all of them to one device"
        )
