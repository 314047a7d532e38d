"""``repro reproduce`` and ``repro status``: every step, run or skipped, with its reason.

One idea: the state of the work is on disk, never in a process.  Steps run in order, each
leaves a stamp only when it succeeded, and a second call goes on where the first stopped.
The steps are the notebooks, then the figures, the report and the verdicts.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from repro import paths, profiles
from repro.errors import DataUnavailableError, OutputError, ReproError, unknown_name
from repro.files import write_text
from repro.pipeline import stamps
from repro.pipeline.environment import kernel_env
from repro.pipeline.notebooks import Chapter, chapters, execute, text_of
from repro.pipeline.stamps import Stamp
from repro.reporting.hashing import file_digest, package_digest
from repro.reporting.provenance import utc_now
from repro.reporting.record_sets import input_files
from repro.reporting.records import RECORD_LOG, RecordStore

PROGRESS_EVERY_S = 15.0
DRAWN_WITH = ("numpy", "matplotlib", "pillow", "jinja2")
FREE_BYTES_NEEDED = 200 * 1024**2


@dataclass
class StepResult:
    """One line of the final table."""

    step: str
    state: str  # done, unchanged, failed, not reached, would run
    reason: str
    wall_s: float | None = None
    n_records: int | None = None
    n_files: int | None = None


def reproduce(profile: str, *, force: bool = False, source: str | None = None) -> int:
    """Run what is not up to date; returns 0 when all steps and required claims hold.

    Raises:
        UnknownNameError: no such profile, or no notebook takes ``source``.
        OutputError: a result cannot be written.
    """
    profiles.get(profile)
    found = _chapters(source)
    _require_space()
    _say(f"reproduce: profile {profile}, {len(found)} notebooks")
    results: list[StepResult] = []
    common = stamps.common_inputs(profile, source)
    status = 0
    for number, notebook in enumerate(found, start=1):
        head = f"[{number}/{len(found)}] {notebook.name}"
        if status:
            results.append(StepResult(notebook.name, "not reached", "an earlier step failed"))
            continue
        result = _notebook_step(profile, notebook, common, head, force=force, source=source)
        results.append(result)
        status = 2 if result.state == "failed" else 0
    if not status:
        _settle(profile, [result.step for result in results if result.state == "done"])
        status = _closing_steps(profile, results)
    _say("")
    _say(render(results))
    return status


def status(profile: str) -> int:
    """Print what is up to date and what would run, without running anything."""
    profiles.get(profile)
    common = stamps.common_inputs(profile, None)
    results: list[StepResult] = []
    for notebook in chapters():
        stamp = stamps.read_stamp(profile, notebook.name)
        # A run with another source is a run of its own; compare with what was asked then.
        asked = {**common, "source": stamp.inputs.get("source", "")} if stamp else common
        inputs = stamps.notebook_inputs(notebook, asked)
        reason = stamps.reason_to_run(profile, stamp, inputs)
        results.append(_line(notebook.name, profile, stamp, reason, "would run"))
    for step, inputs in (
        ("figures", _figure_inputs(profile)),
        ("report", _report_inputs(profile)),
    ):
        stamp = stamps.read_stamp(profile, step)
        reason = stamps.reason_to_run(profile, stamp, inputs)
        results.append(_line(step, profile, stamp, reason, "would run"))
    _say(f"status: profile {profile}")
    _say(render(results))
    return 0


def _chapters(source: str | None) -> list[Chapter]:
    found = chapters()
    if not found:
        raise DataUnavailableError(
            f"no notebook in {paths.relative(paths.notebooks_dir())!r}: restore it from git"
        )
    taken = {name for notebook in found for name in notebook.parameters()}
    if source is not None and "source" not in taken:
        raise unknown_name("parameter of the notebooks", "source", taken)
    return found


def _require_space() -> None:
    free_bytes = shutil.disk_usage(paths.project_root()).free
    if free_bytes < FREE_BYTES_NEEDED:
        raise OutputError(
            f"only {free_bytes / 1e6:.0f} MB are free in the project folder: make room for "
            f"{FREE_BYTES_NEEDED / 1e6:.0f} MB"
        )


def _notebook_step(
    profile: str,
    notebook: Chapter,
    common: Mapping[str, str],
    head: str,
    *,
    force: bool,
    source: str | None,
) -> StepResult:
    stamp = stamps.read_stamp(profile, notebook.name)
    inputs = stamps.notebook_inputs(notebook, common)
    reason = "forced" if force else stamps.reason_to_run(profile, stamp, inputs)
    if reason is None:
        _say(f"{head}: unchanged")
        return _line(notebook.name, profile, stamp, None, "unchanged")
    last = f", took {stamp.wall_s:.0f} s last time" if stamp else ""
    _say(f"{head}: running ({reason}{last})")
    started = time.perf_counter()
    try:
        stamp = run_notebook(profile, notebook, inputs, force=force, source=source)
    except OutputError:
        raise
    except ReproError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return StepResult(notebook.name, "failed", str(error), time.perf_counter() - started)
    _say(f"{head}: done in {stamp.wall_s:.0f} s")
    return _line(notebook.name, profile, stamp, reason, "done")


def run_notebook(
    profile: str,
    notebook: Chapter,
    inputs: Mapping[str, str],
    *,
    force: bool = False,
    source: str | None = None,
) -> Stamp:
    """Execute one notebook for ``profile``, keep the executed copy, leave its stamp."""
    taken = notebook.parameters()
    parameters: dict[str, Any] = {"profile": profile}
    if force and "force" in taken:
        parameters["force"] = True
    if source is not None and "source" in taken:
        parameters["source"] = source
    stamps.forget(profile, notebook.name)
    target = paths.runs_dir(profile) / f"{notebook.name}.ipynb"
    log = target.with_suffix(".log")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        touched = Path(folder) / "touched"
        env = {**kernel_env(source), RECORD_LOG: str(touched)}
        executed = execute(notebook, parameters, env=env, log=log, progress=_progress())
        experiments = _experiments(touched)
    write_text(target, text_of(executed))
    log.unlink(missing_ok=True)
    stamp = Stamp(
        inputs=dict(inputs),
        outputs={
            **stamps.file_outputs([target]),
            **stamps.record_outputs(profile, experiments),
        },
        wall_s=round(time.perf_counter() - started, 1),
        finished=utc_now(),
        experiments=tuple(experiments),
    )
    stamps.write_stamp(profile, notebook.name, stamp)
    return stamp


def _settle(profile: str, ran: list[str]) -> None:
    """Note the records as all notebooks left them: two may add points to one experiment."""
    for name in ran:
        stamp = stamps.read_stamp(profile, name)
        if stamp is not None:
            outputs = stamps.outputs_now(profile, stamp)
            stamps.write_stamp(profile, name, replace(stamp, outputs=outputs))


def _experiments(touched: Path) -> list[str]:
    if not touched.is_file():
        return []
    lines = touched.read_text(encoding="utf-8").splitlines()
    return sorted({line.split(" ", 1)[1] for line in lines})


def _progress() -> Callable[[int, int, float], None]:
    last = [0.0]

    def report(cell: int, n_cells: int, elapsed_s: float) -> None:
        if elapsed_s - last[0] >= PROGRESS_EVERY_S:
            last[0] = elapsed_s
            _say(f"      cell {cell} of {n_cells}, {elapsed_s:.0f} s")

    return report


def _input_bytes(profile: str) -> dict[str, str]:
    return {paths.relative(path): file_digest(path) for path in input_files(profile)}


def _figure_inputs(profile: str) -> dict[str, str]:
    return {
        **_input_bytes(profile),
        "package code": package_digest(),
        "paper tables": stamps.tree_digest(paths.paper_dir(), "*.csv"),
        "versions": ", ".join(f"{name} {metadata.version(name)}" for name in DRAWN_WITH),
    }


def _report_inputs(profile: str) -> dict[str, str]:
    drawn = stamps.read_stamp(profile, "figures")
    return {**_figure_inputs(profile), **(drawn.outputs if drawn else {})}


def _closing_steps(profile: str, results: list[StepResult]) -> int:
    """Figures, report, verdicts; returns the exit status of the verdicts."""

    def draw() -> list[Path]:
        from repro.reporting.figures import draw_all

        pictures = draw_all(profile)
        return [*pictures, *(path.with_suffix(".json") for path in pictures)]

    def write() -> list[Path]:
        from repro.reporting.report import write_report

        return [write_report(profile)]

    results.append(_file_step(profile, "figures", _figure_inputs(profile), draw))
    results.append(_file_step(profile, "report", _report_inputs(profile), write))

    from repro.reporting.verify import verify

    _say("")
    started = time.perf_counter()
    failed = verify(profile, brief=True)
    results.append(
        StepResult(
            "verify",
            "failed" if failed else "done",
            "a required claim fails or nothing is measured" if failed else "claims hold",
            time.perf_counter() - started,
        )
    )
    return failed


def _file_step(
    profile: str, step: str, inputs: Mapping[str, str], make: Callable[[], list[Path]]
) -> StepResult:
    stamp = stamps.read_stamp(profile, step)
    reason = stamps.reason_to_run(profile, stamp, inputs)
    if reason is None:
        _say(f"{step}: unchanged")
        return _line(step, profile, stamp, None, "unchanged")
    _say(f"{step}: making ({reason})")
    stamps.forget(profile, step)
    started = time.perf_counter()
    files = make()
    stamp = Stamp(
        inputs=dict(inputs),
        outputs=stamps.file_outputs(files),
        wall_s=round(time.perf_counter() - started, 1),
        finished=utc_now(),
    )
    stamps.write_stamp(profile, step, stamp)
    return _line(step, profile, stamp, reason, "done")


def _line(
    step: str, profile: str, stamp: Stamp | None, reason: str | None, state: str
) -> StepResult:
    if reason is None:
        state = "unchanged"
    n_records = None
    n_files = None
    if stamp is not None:
        store = RecordStore(profile)
        if stamp.experiments:
            n_records = sum(len(store.read(name)) for name in stamp.experiments)
        n_files = sum(not name.startswith("records of ") for name in stamp.outputs)
    return StepResult(
        step,
        state,
        reason or f"nothing changed since {stamp.finished if stamp else '?'}",
        stamp.wall_s if stamp else None,
        n_records,
        n_files,
    )


def render(results: list[StepResult]) -> str:
    """The final table."""
    heads = ("step", "state", "wall s", "records", "files", "reason")
    rows = [
        (
            result.step,
            result.state,
            "-" if result.wall_s is None else f"{result.wall_s:.1f}",
            "-" if result.n_records is None else str(result.n_records),
            "-" if result.n_files is None else str(result.n_files),
            result.reason,
        )
        for result in results
    ]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [
            cell.rjust(width) if 2 <= i <= 4 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths[:5]) + "  ------")
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, flush=True)


__all__ = ["StepResult", "render", "reproduce", "run_notebook", "status"]
