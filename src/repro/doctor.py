"""What this machine can do, and what is missing for ``make reproduce``.

The one idea: every line is a check with a verdict and, where something is missing, what to
do about it.  The checks must work on the broken machine they are for, so nothing heavy is
imported before it is looked up, and an import that fails is a finding, not a crash.

Nothing is downloaded and nothing is written.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from repro import paths
from repro.errors import ReproError
from repro.profiles import PROFILES

NEEDED_MEMORY_BYTES = 6 * 2**30
NEEDED_DISK_BYTES = 2**30
NEEDED_PYTHON = ((3, 11), (3, 13))

INSTALL = "run `make test`, which sets up .venv, or `pip install -r requirements.lock -e .`"


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    state: Literal["ok", "missing", "note"]
    detail: str
    remedy: str = ""
    #: Without it ``make reproduce`` cannot run.
    needed: bool = False


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"


def _python() -> Iterator[Check]:
    lowest, highest = NEEDED_PYTHON
    fits = lowest <= sys.version_info[:2] <= highest
    wanted = f"{lowest[0]}.{lowest[1]} to {highest[0]}.{highest[1]}"
    remedy = "" if fits else f"use Python {wanted}"
    version = f"{platform.python_version()} ({platform.system()}, {platform.machine()})"
    yield Check("Python", "ok" if fits else "missing", version, remedy, needed=True)


def _package(name: str, *, needed: bool = True, remedy: str = INSTALL) -> Check:
    """A package that is really imported: a version alone does not say that it works."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken binary raises nearly anything
        why = " ".join(str(error).split()) or type(error).__name__
        return Check(name, "missing", f"cannot be imported ({why})", remedy, needed)
    version = str(getattr(module, "__version__", None) or metadata.version(name))
    return Check(name, "ok", version, needed=needed)


def _packages() -> Iterator[Check]:
    torch_check = _package("torch")
    yield _with_build(torch_check)
    if platform.system() == "Linux":
        yield _package("triton")
    for name in ("transformers", "datasets", "papermill", "matplotlib"):
        yield _package(name)
    if util.find_spec("lm_eval"):
        yield Check("lm-eval", "ok", metadata.version("lm_eval"))
    else:
        yield Check(
            "lm-eval",
            "note",
            "not installed (optional: task scores on real checkpoints)",
            "pip install -e '.[lm-eval]'",
        )


def _with_build(check: Check) -> Check:
    """Say which build of torch it is: the usual reason why a GPU is not seen."""
    if check.state != "ok":
        return check
    cuda = sys.modules["torch"].version.cuda
    build = f"CUDA {cuda} build" if cuda else "CPU build"
    return Check(check.name, "ok", f"{check.detail} ({build})", needed=check.needed)


def _device() -> Iterator[Check]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        yield Check(
            "GPU", "note", "none: GPU figures are drawn from committed records", needed=False
        )
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        capability = f"compute capability {found.major}.{found.minor}"
        yield Check("GPU", "ok", f"{found.name}, {_gib(found.total_memory)}, {capability}")


def _machine() -> Iterator[Check]:
    threads = os.environ.get("OMP_NUM_THREADS")
    limit = f", OMP_NUM_THREADS={threads}" if threads else ""
    yield Check("CPU", "ok", f"{os.cpu_count()} cores{limit}")
    yield _memory()
    try:
        root = paths.project_root()
    except ReproError as error:
        yield Check("project", "missing", str(error), "run inside a clone", needed=True)
        return
    free = shutil.disk_usage(root).free
    state: Literal["ok", "missing"] = "ok" if free >= NEEDED_DISK_BYTES else "missing"
    remedy = "" if state == "ok" else f"free {_gib(NEEDED_DISK_BYTES)} where the project lies"
    yield Check("disk", state, f"{_gib(free)} free", remedy, needed=True)
    for folder in (paths.data_dir(), paths.figures_dir()):
        nearest = folder if folder.exists() else root
        if not os.access(nearest, os.W_OK):
            name = paths.relative(folder)
            yield Check(name, "missing", "read-only", f"make {name}/ writable", needed=True)


def _memory() -> Check:
    try:
        import psutil
    except ImportError:
        return Check("memory", "note", "unknown (psutil is not installed)", INSTALL)
    found = psutil.virtual_memory()
    detail = f"{_gib(found.total)}, {_gib(found.available)} free"
    if found.available >= NEEDED_MEMORY_BYTES:
        return Check("memory", "ok", detail)
    # A warning only: the system may give back caches, or swap.
    return Check(
        "memory", "note", detail, f"close programs: {_gib(NEEDED_MEMORY_BYTES)} may be used"
    )


def _models() -> Iterator[Check]:
    try:
        folder = paths.models_dir()
    except ReproError:
        return
    for name in PROFILES["tiny"].models:
        where = paths.relative(folder / name)
        remedy = f"restore it from the repository: git checkout -- {where}"
        lacking, damaged, n_bytes = _weights(folder / name)
        if lacking:
            detail = f"{where} has no {' and no '.join(lacking)}"
            yield Check(f"model {name}", "missing", detail, remedy, needed=True)
        elif damaged:
            detail = f"truncated: {where}/{damaged[0]}"
            yield Check(f"model {name}", "missing", detail, remedy, needed=True)
        else:
            yield Check(f"model {name}", "ok", f"{n_bytes / 2**20:.0f} MiB", needed=True)


def _weights(folder: Path) -> tuple[list[str], list[str], int]:
    """Files that a saved model lacks, files that are cut short, and bytes of the weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        parts = ["model.safetensors"]
    lacking = [name for name in ("config.json", *parts) if not (folder / name).is_file()]
    there = [folder / name for name in parts if (folder / name).is_file()]
    damaged = [path.name for path in there if not _is_whole(path)]
    return lacking, damaged, sum(path.stat().st_size for path in there)


def _is_whole(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says (8 bytes of length, then JSON)."""
    n_bytes = path.stat().st_size
    with path.open("rb") as file:
        n_header = int.from_bytes(file.read(8), "little")
        if n_header > n_bytes:
            return False
        try:
            header = json.loads(file.read(n_header))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    return n_bytes == 8 + n_header + max(ends, default=0)


def _records() -> Iterator[Check]:
    for profile in PROFILES:
        try:
            files = sorted(paths.records_dir(profile).glob("*.jsonl*"))
        except ReproError:
            return
        n_records = sum(_n_lines(path) for path in files)
        if n_records:
            yield Check(f"records {profile}", "ok", f"{n_records} in {len(files)} files")
        else:
            yield Check(
                f"records {profile}", "note", "none yet", f"make reproduce PROFILE={profile}"
            )


def _n_lines(path: Path) -> int:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).count(b"\n")


def _hub() -> Iterator[Check]:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    if offline:
        yield Check("hub", "note", "offline (HF_HUB_OFFLINE): bundled models and text only")
    else:
        yield Check("hub", "note", "allowed, but used only where a hub name is given")
    data = os.environ.get("REPRO_DATA_DIR")
    if data and not Path(data).expanduser().is_dir():
        yield Check(
            "REPRO_DATA_DIR", "missing", f"{data!r} is no folder", "correct or unset it", True
        )
    elif data:
        yield Check("REPRO_DATA_DIR", "ok", "folder of local data sets found")


SECTIONS: dict[str, Callable[[], Iterator[Check]]] = {
    "software": lambda: (check for part in (_python, _packages) for check in part()),
    "machine": lambda: (check for part in (_machine, _device) for check in part()),
    "project": lambda: (check for part in (_models, _records, _hub) for check in part()),
}


def examine() -> dict[str, list[Check]]:
    """All checks, by section."""
    return {section: list(checks()) for section, checks in SECTIONS.items()}


def render(report: dict[str, list[Check]]) -> str:
    """The report as text, one line per check and one per remedy."""
    lines = []
    for section, checks in report.items():
        lines.append(section)
        for check in checks:
            mark = {"ok": "OK", "missing": "MISSING", "note": "-"}[check.state]
            lines.append(f"  {mark:<8} {check.name:<18} {check.detail}")
            if check.remedy:
                lines.append(f"  {'':<8} {'':<18} -> {check.remedy}")
    return "\n".join(lines)


def blockers(report: dict[str, list[Check]]) -> list[Check]:
    """What stands in the way of ``make reproduce``."""
    found = (check for checks in report.values() for check in checks)
    return [check for check in found if check.needed and check.state == "missing"]


def main(*, as_json: bool = False) -> int:
    """Print the report; 0 when ``make reproduce`` can run here, 1 otherwise."""
    report = examine()
    missing = blockers(report)
    if as_json:
        sections = {name: [asdict(check) for check in checks] for name, checks in report.items()}
        print(json.dumps({"ready": not missing, "checks": sections}, indent=2))
        return 1 if missing else 0
    print(render(report))
    names = ", ".join(check.name for check in missing)
    print(f"\nnot ready: {names}" if missing else "\nready: `make reproduce` can run here")
    return 1 if missing else 0
