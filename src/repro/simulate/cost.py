"""How long a forward pass takes, from what it reads and computes.

The one idea: every kernel of a layer takes the longest (``max``) or the sum of three times:
reading its bytes from memory, its arithmetic, and decoding its weights.  A layer is the sum of
its dense kernels, its attention over the cache and its experts, plus a fixed time; a pass is
the sum of its layers, its output head and a fixed time::

    layer = fixed + (dense bytes | dense flops) + (kv bytes | attention flops)
                  + (expert bytes | expert flops | expert decoding)

where ``|`` is the profile's ``combine``.  An expert's bytes are read once in a pass however many
tokens chose it, and its whole block is.  Left out: activations in memory, imbalance between
experts inside a kernel, and that short kernels reach less bandwidth (all in the fixed times,
as far as a fit puts them there).

Letters: L layers with experts, E experts, B blocks, W widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro.contract import FloatArray, IntArray
from repro.simulate.device import DeviceProfile
from repro.simulate.model import BYTES, SimulatedModel


@dataclass(frozen=True, eq=False)
class PassWork:
    """What one forward pass reads and computes."""

    n_tokens: int
    n_sequences: int  # whose last position goes through the output head
    expert_bytes: FloatArray  # [L]
    expert_decode: FloatArray  # [L] seconds of decoding
    kv_bytes: float  # all layers
    context: float  # positions attended to, summed over tokens (one layer)


class CostModel:
    """Seconds of passes of a model on a device."""

    def __init__(self, device: DeviceProfile, model: SimulatedModel) -> None:
        self.device, self.model = device, model
        n = model.n_layers
        self._dense_bytes = BYTES * model.dense_params / n
        self._dense_flops = 2 * model.dense_params / n
        self._expert_flops = 2 * model.top_k * sum(model.block_params)

    def terms(self, work: PassWork) -> dict[str, tuple[FloatArray, ...]]:
        """The kernels of all layers: byte, arithmetic and decoding time, each ``[L]``."""
        device, n = self.device, self.model.n_layers
        one = np.ones(n)
        zero = np.zeros(n)
        attention = 4 * self.model.query_width * work.context
        return {
            "dense": (
                one * (self._dense_bytes / device.hbm_bytes_per_s),
                one * (self._dense_flops * work.n_tokens / device.flops_per_s),
                zero,
            ),
            "attention": (
                one * (work.kv_bytes / n / device.hbm_bytes_per_s),
                one * (attention / device.flops_per_s),
                zero,
            ),
            "experts": (
                work.expert_bytes / device.hbm_bytes_per_s,
                one * (self._expert_flops * work.n_tokens / device.flops_per_s),
                work.expert_decode,
            ),
        }

    def head_terms(self, work: PassWork) -> tuple[float, float]:
        """Byte and arithmetic time of the output head."""
        params = self.model.head_params
        device = self.device
        return (
            BYTES * params / device.hbm_bytes_per_s,
            2 * params * work.n_sequences / device.flops_per_s,
        )

    def layer_s(self, work: PassWork) -> FloatArray:
        """Seconds of each layer ``[L]``, waits excluded."""
        total = np.full(self.model.n_layers, self.device.layer_fixed_s)
        for kernel in self.terms(work).values():
            total += self._combine(kernel)
        return total

    def rest_s(self, work: PassWork) -> float:
        """Seconds outside the layers: the output head and what is fixed."""
        return self.device.step_fixed_s + float(self._combine(self.head_terms(work)))

    def pass_s(self, work: PassWork) -> float:
        """Seconds of the whole pass, waits excluded."""
        return float(self.layer_s(work).sum()) + self.rest_s(work)

    def _combine(self, terms: Sequence[float | FloatArray]) -> FloatArray:
        if self.device.combine == "max":
            return np.max(np.stack([np.asarray(term) for term in terms]), axis=0)
        return np.sum(np.stack([np.asarray(term) for term in terms]), axis=0)


class ExpertCosts:
    """Bytes read and decoding time of every expert at the widths it has now.

    Args:
        device: kernels.
        model: blocks.
        formats: format name of each width.
        widths: ascending.
        read_bytes: ``[L, B, W]`` what a kernel reads.
    """

    def __init__(
        self,
        device: DeviceProfile,
        model: SimulatedModel,
        formats: Sequence[str],
        widths: Sequence[int],
        read_bytes: IntArray,
    ) -> None:
        self._widths = np.asarray(widths)
        self._read = np.asarray(read_bytes, dtype=np.float64)
        per_weight = [
            device.kernel(name).seconds_per_weight(int(w))
            for name, w in zip(formats, widths, strict=True)
        ]
        self._decode = np.outer(model.block_params, per_weight)  # [B, W]
        self.bytes: FloatArray = np.zeros((model.n_layers, model.n_experts))
        self.decode: FloatArray = np.zeros_like(self.bytes)

    def set_widths(self, n_bits: npt.NDArray[np.integer]) -> None:
        """Published widths ``[L, E, B]``; 0 is not resident and costs nothing."""
        which = np.clip(np.searchsorted(self._widths, n_bits), 0, len(self._widths) - 1)
        there = n_bits > 0
        layers = np.arange(len(n_bits))[:, None, None]
        blocks = np.arange(n_bits.shape[2])
        self.bytes = np.asarray((self._read[layers, blocks, which] * there).sum(axis=2))
        self.decode = np.asarray((self._decode[blocks, which] * there).sum(axis=2))

    def of(self, active: npt.NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
        """Bytes and decoding seconds of the active experts, ``[L]`` each."""
        return (self.bytes * active).sum(axis=1), (self.decode * active).sum(axis=1)


def uniform_work(
    device: DeviceProfile,
    model: SimulatedModel,
    format_name: str,
    n_bits: int,
    *,
    n_sequences: int,
    tokens_each: int = 1,
    cached_each: int = 0,
    active_share: float,
) -> PassWork:
    """A pass with all experts at one width: equal requests, an even share of active experts.

    Args:
        device: kernels.
        model: dimensions.
        format_name: as :meth:`SimulatedModel.schemes`.
        n_bits: one of its widths.
        n_sequences: requests.
        tokens_each: new tokens of each: 1 decodes.
        cached_each: tokens of each that are in the cache already.
        active_share: of a layer's experts, 0 to 1.
    """
    schemes = [next(s for s in row if n_bits in s.widths) for row in model.schemes(format_name)]
    read = sum(spec.n_bytes for s in schemes for spec in s.tensors(n_bits))
    decode = device.kernel(schemes[0].name).seconds_per_weight(n_bits) * sum(model.block_params)
    n_active = active_share * model.n_experts
    one = np.ones(model.n_layers)
    length = cached_each + tokens_each
    context = tokens_each * cached_each + tokens_each * (tokens_each + 1) / 2
    kv = sum(
        x.token_bytes * (length if x.window is None else min(length, x.window + tokens_each))
        for x in model.kv.layers
    )
    return PassWork(
        n_sequences * tokens_each,
        n_sequences,
        one * (n_active * read),
        one * (n_active * decode),
        float(n_sequences * kv),
        float(n_sequences * context),
    )
