"""Settings of all tests: no network, fixed threads and seeds, no device unless asked for.

Environment variables are set before any test imports a library that reads them.
"""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

# pytest-xdist's workers share the cores.
N_THREADS = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
os.environ.update(
    {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": N_THREADS,
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
)
if not os.path.exists("/dev/nvidiactl"):
    # Triton kernels run in its interpreter; it must be on before a kernel is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run started in the background inherits an ignored Ctrl-C; tests of interruptions send one.
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import settings  # noqa: E402  (after the environment is set)

# Same examples in every run and no example database: a red test stays red.
settings.register_profile("repro", deadline=None, derandomize=True, database=None)
settings.load_profile("repro")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The project folder."""
    return ROOT


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for another machine fails at once, wherever it runs."""
    if request.node.get_closest_marker("download"):
        return
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test reached for the network: {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the plain run must not contain; ``-m`` asks for it by name."""
    asked = config.getoption("markexpr") or ""
    reasons = {
        "gpu": "" if _has_gpu(items) else "no CUDA device",
        "slow": "" if "slow" in asked else "slow: run with -m slow",
        "download": "" if "download" in asked else "needs a network: run with -m download",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu(items: list[pytest.Item]) -> bool:
    if not any(item.get_closest_marker("gpu") for item in items):
        return False  # spares a run without such tests the import
    import torch

    return torch.cuda.is_available()


def pytest_report_header() -> str:
    """What a failure report needs to be read elsewhere."""
    return f"threads: {N_THREADS}, hub offline"
