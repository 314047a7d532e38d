"""Where a number came from: code, versions, machine, seed and time.

One idea: a number is worth something only with the state that made it.  Whatever
differs between two runs of the same state (start time, duration) is kept apart under
``time``, so that two runs with one seed give the same bytes once ``time`` is removed.

Left out: clocks and temperatures, which vary within a run.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import repro
from repro import paths
from repro.errors import DataUnavailableError
from repro.reporting.hashing import (
    digest,
    file_digest,
    package_digest,
    source_digest,
    source_names,
)

__all__ = [
    "capture",
    "device_facts",
    "digest",
    "file_digest",
    "git_state",
    "package_digest",
    "source_digest",
    "source_names",
    "utc_now",
    "versions",
]

VERSIONED = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
SOURCE_PATHS = ("src", "kernels", "pyproject.toml")


def _git(*arguments: str, root: Path) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@lru_cache(maxsize=1)
def git_state() -> dict[str, Any]:
    """Commit, and whether the code differs from it; both ``None`` outside a git clone.

    ``dirty`` looks at the code only: records and figures change while they are made.
    """
    unknown: dict[str, Any] = {"commit": None, "dirty": None}
    try:
        root = paths.project_root()
    except DataUnavailableError:
        return unknown
    top = _git("rev-parse", "--show-toplevel", root=root)
    if top is None or Path(top).resolve() != root.resolve():
        return unknown
    commit = _git("rev-parse", "HEAD", root=root)
    if commit is None:
        return unknown
    present = [name for name in SOURCE_PATHS if (root / name).exists()]
    changes = _git("status", "--porcelain", "--", *present, root=root)
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


@lru_cache(maxsize=1)
def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that make the numbers (nothing is imported)."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


@lru_cache(maxsize=1)
def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _threads() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads())
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() else (os.cpu_count() or 1)


def _used_device() -> str:
    """``cuda`` when this process has started CUDA, else ``cpu``; imports nothing."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return "cuda" if cuda is not None and cuda.is_initialized() else "cpu"


def device_facts(device: str | None = None) -> dict[str, Any]:
    """Name and memory of the device; for a GPU also driver, CUDA and power limit."""
    chosen = device or _used_device()
    if not chosen.startswith("cuda"):
        return {"type": "cpu", "name": _cpu_model(), "memory_bytes": _memory_bytes()}
    import torch

    properties = torch.cuda.get_device_properties(torch.device(chosen))
    driver, power = _nvidia_smi()
    return {
        "type": "cuda",
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": driver,
        "power_limit": power,
    }


@lru_cache(maxsize=1)
def _nvidia_smi() -> tuple[str | None, str | None]:
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    first = done.stdout.strip().splitlines()[:1]
    if done.returncode != 0 or not first:
        return None, None
    driver, _, power = first[0].partition(",")
    return driver.strip(), power.strip()


def utc_now() -> str:
    """The time now in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def capture(
    *,
    sources: Iterable[ModuleType | str] = (),
    seed: int | None = None,
    device: str | None = None,
    command: str | None = None,
    utc_start: str | None = None,
    wall_s: float | None = None,
) -> dict[str, Any]:
    """The provenance of one measured point, ready for JSON."""
    named = list(sources)
    return {
        "git": dict(git_state()),
        "package": {"version": repro.__version__, "digest": package_digest()},
        "sources": {"modules": source_names(named), "digest": source_digest(named)},
        "versions": dict(versions()),
        "device": device_facts(device),
        "cpu": {"model": _cpu_model(), "threads": _threads()},
        "platform": f"{platform.system()} {platform.machine()}",
        "seed": seed,
        "command": command,
        "time": {"utc_start": utc_start or utc_now(), "wall_s": wall_s},
    }
