"""Plain PyTorch beside each kernel: the same numbers, slowly, on any device.

The one idea: a reference computes in float64 from the bytes on the pages, shares no code with
the kernels, and rounds nothing on the way; what a kernel returns is compared with it.

Letters: T tokens, H hidden, I intermediate, E experts, k experts per token, N rows, K columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from repro.contract import HEADER_WORDS
from repro.kernels.geometry import PlaneGeometry

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


def read_block(arena: Tensor, row: Tensor, geometry: PlaneGeometry) -> Tensor:
    """One block from its pages: float64 ``[N, K]``.

    Args:
        arena: ``uint8 [pages, page_bytes]``.
        row: ``int32 [words]``, a row of the table.
        geometry: of the block.
    """
    n_bits = int(row[1])
    pages = row[HEADER_WORDS : HEADER_WORDS + geometry.n_pages(n_bits)].long()
    n_rows, n_columns = geometry.n_rows, geometry.n_columns

    def part(first: int, n_pages: int, n_bytes: int) -> Tensor:
        return arena[pages[first : first + n_pages]].reshape(-1)[:n_bytes]

    codes = torch.zeros(n_rows, n_columns, dtype=torch.int64, device=arena.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=arena.device)
    for plane in range(n_bits):
        first = plane * geometry.plane_pages
        raw = part(first, geometry.plane_pages, 4 * n_rows * geometry.row_words)
        bits = (raw.view(n_rows, -1, 1) >> shifts) & 1
        codes = 2 * codes + bits.reshape(n_rows, -1)[:, :n_columns].long()
    first = n_bits * geometry.plane_pages
    scales = torch.ones(n_rows, dtype=torch.float64, device=arena.device)
    if geometry.has_scales:
        scales = part(first, geometry.scale_pages, 2 * n_rows).view(torch.bfloat16).double()
    first += geometry.scale_pages
    raw = part(first, geometry.lut_pages(n_bits), 2 * geometry.n_groups << n_bits)
    lut = raw.view(torch.float16).view(geometry.n_groups, -1).double()
    groups = torch.arange(n_rows, device=arena.device) // geometry.rows_per_lut
    return lut[groups].gather(1, codes) * scales[:, None]


def moe_reference(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    arena: Tensor,
    table: Tensor,
    gate_up: PlaneGeometry,
    down: PlaneGeometry,
    activation: str = "silu",
) -> Tensor:
    """A whole layer of experts in float64; arguments as ``repro.kernels.moe.fused_moe``."""
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    act = ACTIVATIONS[activation]
    for expert in range(table.shape[0]):
        token, slot = (top_k_index == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        both = hidden[token].double() @ read_block(arena, table[expert, 0], gate_up).T
        gate, up = both.chunk(2, dim=-1)
        result = (act(gate) * up) @ read_block(arena, table[expert, 1], down).T
        out.index_add_(0, token, result * top_k_weights[token, slot].double()[:, None])
    return out
