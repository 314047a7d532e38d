"""The environment in which notebooks run: the same for reproducing, refreshing and checking.

One idea: an output is comparable only if it was made in the same surroundings.  Threads
are fixed (sums depend on how they are split), nothing draws progress bars into outputs,
nothing reaches for a network unasked.
"""

from __future__ import annotations

from pathlib import Path

KERNEL_ENV: dict[str, str] = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    # Waiting threads sleep instead of spinning: with anything else running on two cores,
    # spinning made a forward pass five times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONHASHSEED": "0",
    "PYTHONSAFEPATH": "1",
    # tqdm asks for a widget package as soon as it is imported in a kernel; bars are off anyway.
    "PYTHONWARNINGS": "ignore:IProgress not found",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
#: Where workloads may be fetched from a network: asking for it is what allows it.
NETWORK_SOURCES = ("hub",)


def has_gpu() -> bool:
    """Whether an NVIDIA driver is present; asked without importing torch."""
    return Path("/dev/nvidiactl").exists()


def kernel_env(source: str | None = None) -> dict[str, str]:
    """Variables of a notebook's kernel; ``source`` decides whether the hub may be asked."""
    env = dict(KERNEL_ENV)
    if source in NETWORK_SOURCES:
        env["HF_HUB_OFFLINE"] = "0"
    if not has_gpu():
        # Triton kernels run in its interpreter, which must be on before one is imported.
        env["TRITON_INTERPRET"] = "1"
    # A user's own backend would drop the stored pictures.
    env["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    return env
