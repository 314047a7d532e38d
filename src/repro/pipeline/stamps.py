"""Whether a step must run: its inputs by content, not by time.

One idea: a clone resets every file time, so a step is skipped only if the content of all
it depends on is what it was when it last succeeded, and all it made is still there.  The
stamp holds one digest per named input, so that a run can say what changed.  Prose cells
and comments are not inputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from repro import paths, profiles
from repro.files import output_error, write_text
from repro.pipeline.environment import has_gpu
from repro.pipeline.notebooks import Chapter
from repro.reporting.hashing import code_digest, digest, file_digest, package_digest
from repro.reporting.jsonable import canonical
from repro.reporting.provenance import versions
from repro.reporting.records import RecordStore, content_digest

FIRST_RUN = "never run here"


@dataclass(frozen=True)
class Stamp:
    """What a successful run of a step depended on and made."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    wall_s: float
    finished: str
    experiments: tuple[str, ...] = ()


def stamp_path(profile: str, step: str) -> Path:
    """File of a step's stamp."""
    return paths.runs_dir(profile) / "stamps" / f"{step}.json"


def read_stamp(profile: str, step: str) -> Stamp | None:
    """The stamp of the last success; an unreadable one counts as absent."""
    try:
        data = json.loads(stamp_path(profile, step).read_text(encoding="utf-8"))
        return Stamp(**{**data, "experiments": tuple(data["experiments"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_stamp(profile: str, step: str, stamp: Stamp) -> None:
    """Write the stamp; called only after the step succeeded."""
    text = json.dumps(asdict(stamp), indent=1, sort_keys=True)
    write_text(stamp_path(profile, step), text + "\n")


def forget(profile: str, step: str) -> None:
    """Remove a stamp before its step runs, so that an interruption leaves none."""
    path = stamp_path(profile, step)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise output_error(path, error) from error


def common_inputs(profile: str, source: str | None) -> dict[str, str]:
    """What every notebook of a profile depends on."""
    entry = asdict(profiles.get(profile))
    found = {
        "profile": digest(canonical(entry)),
        "package code": package_digest(),
        "paper tables": tree_digest(paths.paper_dir(), "*.csv"),
        "versions": digest(canonical(versions())),
        "device": "gpu" if has_gpu() else "cpu",
        "source": source or "the profile's own",
    }
    for folder in sorted(paths.models_dir().glob("*/")):
        found[f"model {folder.name}"] = tree_digest(folder, "*")
    return found


def tree_digest(folder: Path, pattern: str) -> str:
    """Digest of the names and bytes of the files below ``folder``, prose (Markdown) left out."""
    found = (path for path in folder.rglob(pattern) if path.suffix != ".md")
    files = sorted(path for path in found if path.is_file())
    parts = [f"{path.relative_to(folder).as_posix()} {file_digest(path)}" for path in files]
    return digest(*parts)


def notebook_digest(notebook: Chapter) -> str:
    """Digest of the code cells alone."""
    cells = notebook.read().cells
    return digest(*(code_digest(cell.source) for cell in cells if cell.cell_type == "code"))


def notebook_inputs(notebook: Chapter, common: Mapping[str, str]) -> dict[str, str]:
    """Inputs of one notebook."""
    return {"notebook code": notebook_digest(notebook), **common}


def record_outputs(profile: str, experiments: Iterable[str]) -> dict[str, str]:
    """Digest of the records of each experiment, without times and durations."""
    store = RecordStore(profile)
    return {f"records of {name}": content_digest(store.read(name)) for name in sorted(experiments)}


def file_outputs(files: Iterable[Path]) -> dict[str, str]:
    """Digest of each file by its path; an absent file is ``absent``."""
    root = paths.project_root()
    found: dict[str, str] = {}
    for path in files:
        name = path.resolve().relative_to(root).as_posix()
        found[name] = file_digest(path) if path.is_file() else "absent"
    return found


def outputs_now(profile: str, stamp: Stamp) -> dict[str, str]:
    """The outputs a stamp names, as they are now."""
    root = paths.project_root()
    files = [root / name for name in stamp.outputs if not name.startswith("records of ")]
    return {**file_outputs(files), **record_outputs(profile, stamp.experiments)}


def reason_to_run(profile: str, stamp: Stamp | None, inputs: Mapping[str, str]) -> str | None:
    """Why a step must run, or ``None`` when nothing changed."""
    if stamp is None:
        return FIRST_RUN
    changed = sorted(
        name for name in {*inputs, *stamp.inputs} if inputs.get(name) != stamp.inputs.get(name)
    )
    if changed:
        return f"changed: {', '.join(changed)}"
    now = outputs_now(profile, stamp)
    lost = sorted(name for name in stamp.outputs if now.get(name) != stamp.outputs[name])
    if lost:
        return f"missing or changed: {', '.join(lost)}"
    return None
