"""What the prompts being served do to each block: three input norms, gathered in prefill.

The one idea (PagedWeight's prompt signal): while a prompt is computed, the norms of the inputs
that each expert gets from it are summed with the routing weights, on the device and per
request; decoding adds nothing.  A planner sees them merged over the running requests, each
weighted by the KV memory it holds, for that is what its presence costs.

    mean = sum r |x| / sum r,    rms = sqrt(sum r |x|^2 / sum r),    max = max |x|

An expert that no running request chose has zeros: nothing is known.

Letters: R slots (requests), L layers, E experts, B blocks, r routing weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from repro.contract import Block, FloatArray

N_NORMS = 3


class PromptSignals:
    """Norms of up to ``n_slots`` requests at a time.

    Args:
        n_slots: R.
        shape: ``(L, E)``.
        device: where the model runs.
    """

    def __init__(self, n_slots: int, shape: tuple[int, int], device: torch.device) -> None:
        with torch.inference_mode(False):
            blocks = (n_slots, *shape, len(Block))
            self._first = torch.zeros(blocks, device=device)  # sum r |x|
            self._second = torch.zeros(blocks, device=device)  # sum r |x|^2
            self._largest = torch.zeros(blocks, device=device)
            self._mass = torch.zeros((n_slots, *shape), device=device)
        self._free = list(range(n_slots))[::-1]
        self._slots: dict[int, int] = {}  # request number -> slot
        self._of_token: Tensor | None = None  # slot of each real token of the pass

    def begin(self, requests: list[tuple[int, int]]) -> None:
        """A prefill pass: (request number, new tokens) of its rows, in order."""
        slots = [self._slot(number) for number, _ in requests]
        each = np.repeat(np.asarray(slots), [n for _, n in requests])
        self._of_token = torch.from_numpy(each).to(self._mass.device)

    def end(self) -> None:
        """The pass is over: what follows is not gathered."""
        self._of_token = None

    @property
    def active(self) -> bool:
        """Whether a prefill pass is under way."""
        return self._of_token is not None

    def _slot(self, number: int) -> int:
        if number not in self._slots:
            slot = self._slots[number] = self._free.pop()
            for table in (self._first, self._second, self._largest, self._mass):
                table[slot] = 0
        return self._slots[number]

    def forget(self, number: int) -> None:
        """A request has ended, or its prompt will be computed again."""
        slot = self._slots.pop(number, None)
        if slot is not None:
            self._free.append(slot)

    def add(
        self, row: int, expert: int, token: Tensor, weight: Tensor, x: Tensor, inner: Tensor
    ) -> None:
        """One expert of one layer on its tokens.

        Args:
            row: of the layer.
            expert: its number.
            token: ``int64 [n]`` which real tokens of the pass.
            weight: ``[n]`` routing weights.
            x: ``[n, H]`` input of gate_up.
            inner: ``[n, I]`` input of down.
        """
        assert self._of_token is not None
        slot = self._of_token[token]
        r = weight.to(torch.float32)
        self._mass[:, row, expert].index_put_((slot,), r, accumulate=True)
        for block, values in ((Block.GATE_UP, x), (Block.DOWN, inner)):
            norm = values.to(torch.float32).norm(dim=1)
            at = (slice(None), row, expert, int(block))
            self._first[at].index_put_((slot,), r * norm, accumulate=True)
            self._second[at].index_put_((slot,), r * norm.square(), accumulate=True)
            self._largest[at].scatter_reduce_(0, slot, norm, "amax")

    def merged(self, weights: Mapping[int, float]) -> FloatArray | None:
        """``[L, E, B, 3]`` over the requests in ``weights`` (by number); None if none is known."""
        known = [(self._slots[n], w) for n, w in weights.items() if n in self._slots and w > 0]
        if not known:
            return None
        slots = torch.tensor([slot for slot, _ in known], device=self._mass.device)
        tables = (self._first, self._second, self._largest, self._mass)
        first, second, largest, mass = (t[slots].cpu().double().numpy() for t in tables)
        share = np.array([w for _, w in known])[:, None, None] * (mass > 0)  # [R, L, E]
        total = share.sum(axis=0)
        share = share / np.where(total > 0, total, 1.0)
        floor = np.where(mass > 0, mass, 1.0)[..., None]
        norms = np.stack([first / floor, np.sqrt(second / floor), largest], axis=-1)
        merged: FloatArray = np.einsum("rle,rlebf->lebf", share, norms)
        return merged
