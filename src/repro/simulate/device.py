"""Devices as numbers: what a simulated GPU can do, and where every number comes from.

The one idea: a profile is a handful of rates and fixed times, each with its source beside it;
a number without a source cannot be put in.  A source that begins with "our choice" is neither
published nor measured, and reports repeat it.

Seconds, bytes, bytes per second and floating-point operations per second throughout; a byte
rate of memory is what a reading kernel reaches, not the one printed on the box.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from repro.errors import unknown_name
from repro.simulate.errors import SimulationError

Combine = Literal["max", "sum"]
OURS = "our choice"


@dataclass(frozen=True)
class KernelCost:
    """Work of a kernel beyond reading bytes: seconds per weight ``base_s + per_bit_s * bits``.

    Spread over the whole device (a weight costs so much of the device's time), and once per
    pass however many tokens there are: a kernel that holds weights as the register operand
    decodes each of them once for up to 16 tokens.
    """

    base_s: float = 0.0
    per_bit_s: float = 0.0

    def seconds_per_weight(self, n_bits: int) -> float:
        """Of decoding one weight at this width."""
        return self.base_s + self.per_bit_s * n_bits


@dataclass(frozen=True)
class DeviceProfile:
    """A GPU, its link to the host and the host's own share of a step.

    Args:
        name: of the profile.
        memory_bytes: of the device.
        hbm_bytes_per_s: a reading kernel's rate.
        h2d_bytes_per_s: host to device, pinned.
        d2h_bytes_per_s: device to host, pinned.
        flops_per_s: of 16-bit matrix products as kernels reach them.
        step_fixed_s: host and launch time of a forward pass, whatever it computes.
        layer_fixed_s: the same of one decoder layer.
        copy_fixed_s: of one copy over the link.
        kernels: decoding cost by format name (``dense``, ``group-affine``, ``any-precision``).
        combine: how bytes, arithmetic and decoding of one kernel add up: ``max`` (they overlap
            perfectly) or ``sum`` (not at all).
        sources: of every number above, by field name, and ``kernels.NAME``.

    Raises:
        SimulationError: a number that is not positive, or has no source.
    """

    name: str
    memory_bytes: int
    hbm_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    flops_per_s: float
    step_fixed_s: float
    layer_fixed_s: float
    copy_fixed_s: float
    kernels: Mapping[str, KernelCost]
    sources: Mapping[str, str] = field(repr=False)
    combine: Combine = "max"

    def __post_init__(self) -> None:
        if self.combine not in ("max", "sum"):
            raise unknown_name("way to combine", self.combine, ("max", "sum"))
        rates = ("memory_bytes", "hbm_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s")
        for name in self.numbers():
            value = getattr(self, name)
            if value < 0 or (value == 0 and name in (*rates, "flops_per_s")):
                raise SimulationError(f"{name}={value} of device {self.name!r}: give more than 0")
        wanted = [*self.numbers(), *(f"kernels.{name}" for name in self.kernels)]
        for name in wanted:
            if not self.sources.get(name):
                raise SimulationError(f"{name} of device {self.name!r} has no source: state one")

    @staticmethod
    def numbers() -> tuple[str, ...]:
        """Names of the fields that are one number."""
        others = ("name", "kernels", "sources", "combine")
        return tuple(f.name for f in fields(DeviceProfile) if f.name not in others)

    def kernel(self, format_name: str) -> KernelCost:
        """Decoding cost of a format.

        Raises:
            UnknownNameError: no kernel for it.
        """
        if format_name not in self.kernels:
            raise unknown_name("format with a kernel cost", format_name, self.kernels)
        return self.kernels[format_name]

    def changed(self, source: str, **numbers: Any) -> DeviceProfile:
        """The same device with other numbers, all from one ``source`` (a fit, an experiment)."""
        named = [f"kernels.{n}" for n in numbers.get("kernels", ())]
        names = [name for name in numbers if name in self.numbers()] + named
        sources = {**self.sources, **dict.fromkeys(names, source)}
        return replace(self, sources=sources, **numbers)

    def to_json(self) -> dict[str, Any]:
        """Numbers and sources."""
        numbers = {name: getattr(self, name) for name in self.numbers()}
        kernels = {n: [k.base_s, k.per_bit_s] for n, k in sorted(self.kernels.items())}
        return {
            "name": self.name,
            "combine": self.combine,
            **numbers,
            "kernels": kernels,
            "sources": dict(sorted(self.sources.items())),
        }


_WEIGHTS = 64 * 1536 * 2048  # of the kernels that were timed: 64 experts of 1536 x 2048
_H200_MEASURED = "measured once on an H200"
_TIMED = f"{_H200_MEASURED}, 64 experts of 1536 x 2048"
# Seconds for them at 3 and 8 bits, one token: the public Any-Precision kernel, x1.87 and x1.04
# of fp16's 109 us; the line through both is within 11 % of what 4, 5 and 6 bits took.
_AT_3, _AT_8 = 109e-6 / 1.87, 109e-6 / 1.04
_PER_BIT = (_AT_8 - _AT_3) / 5 / _WEIGHTS
_NESTED = KernelCost(_AT_3 / _WEIGHTS - 3 * _PER_BIT, _PER_BIT)
# 91 us at 4 bits: nibbles looked up from registers.
_AFFINE = KernelCost(0.0, 91e-6 / _WEIGHTS / 4)
_A6000_SLOWER = 1.5  # 1.5e13 integer operations a second against 1e13


def _scaled(cost: KernelCost, factor: float) -> KernelCost:
    return KernelCost(cost.base_s * factor, cost.per_bit_s * factor)


H200 = DeviceProfile(
    name="h200",
    memory_bytes=141_000_000_000,
    hbm_bytes_per_s=3.9e12,
    h2d_bytes_per_s=55.3e9,
    d2h_bytes_per_s=55.3e9,
    flops_per_s=0.6 * 989.5e12,
    step_fixed_s=0.5e-3,
    layer_fixed_s=183e-6,
    copy_fixed_s=10e-6,
    kernels={"dense": KernelCost(), "group-affine": _AFFINE, "any-precision": _NESTED},
    sources={
        "memory_bytes": "NVIDIA, H200 product page: 141 GB HBM3e",
        "hbm_bytes_per_s": f"{_TIMED} in bf16: 3.9 TB/s of a nominal 4.8 (NVIDIA, H200 product "
        "page)",
        "h2d_bytes_per_s": f"{_H200_MEASURED}: 55.3 GB/s pinned",
        "d2h_bytes_per_s": f"{_H200_MEASURED}: 55.3 GB/s pinned",
        "flops_per_s": f"{OURS}: 60 % of 989.5 TFLOPS dense bf16 (NVIDIA, H200 product page: 1979 "
        "with sparsity), what grouped products of middling size reach",
        "step_fixed_s": f"{OURS}: sampling and one graph launch",
        "layer_fixed_s": f"{_H200_MEASURED}: 10.8 ms a captured step of Qwen3-30B-A3B at batch 1, "
        "less 1.5 ms of reading and step_fixed_s, over 48 layers",
        "copy_fixed_s": f"{OURS}: a copy call and its event",
        "kernels.dense": "nothing to decode",
        "kernels.group-affine": f"{_TIMED}, 4 bits in 91 us; {OURS} that other widths cost as "
        "their bits",
        "kernels.any-precision": f"{_H200_MEASURED}: the public Any-Precision kernel, one token, 3 "
        "and 8 bits",
    },
)

RTX_A6000 = DeviceProfile(
    name="rtx-a6000",
    memory_bytes=48 * 2**30,
    hbm_bytes_per_s=768e9 * 3.9 / 4.8,
    h2d_bytes_per_s=31.5e9 * 55.3 / 63.0,
    d2h_bytes_per_s=31.5e9 * 55.3 / 63.0,
    flops_per_s=0.6 * 154.8e12,
    step_fixed_s=H200.step_fixed_s,
    layer_fixed_s=H200.layer_fixed_s,
    copy_fixed_s=H200.copy_fixed_s,
    kernels={name: _scaled(cost, _A6000_SLOWER) for name, cost in H200.kernels.items()},
    sources={
        "memory_bytes": "NVIDIA, RTX A6000 datasheet: 48 GB GDDR6",
        "hbm_bytes_per_s": "768 GB/s (NVIDIA, RTX A6000 datasheet); "
        f"{OURS}: the share of it that the H200's kernel reaches of its own",
        "h2d_bytes_per_s": "PCIe 4.0 x16 (NVIDIA, RTX A6000 datasheet), 31.5 GB/s by the PCIe "
        f"standard; {OURS}: the share that the H200 reaches of PCIe 5.0's 63 GB/s",
        "d2h_bytes_per_s": f"{OURS}: as host to device",
        "flops_per_s": f"{OURS}: 60 % of 154.8 TFLOPS dense (NVIDIA, RTX A6000 datasheet: 309.7 "
        "with sparsity), as for the H200",
        "step_fixed_s": f"{OURS}: as measured for the H200, for the host decides",
        "layer_fixed_s": f"{OURS}: as measured for the H200, for small kernels wait for launches",
        "copy_fixed_s": f"{OURS}: as for the H200",
        "kernels.dense": "nothing to decode",
        "kernels.group-affine": f"{OURS}: the H200's, by integer operations per second",
        "kernels.any-precision": f"{OURS}: the H200's, by integer operations per second",
    },
)

DEVICES: dict[str, DeviceProfile] = {d.name: d for d in (RTX_A6000, H200)}


def get_device(name: str) -> DeviceProfile:
    """The profile of that name.

    Raises:
        UnknownNameError: no such profile.
    """
    if name not in DEVICES:
        raise unknown_name("device profile", name, DEVICES)
    return DEVICES[name]
