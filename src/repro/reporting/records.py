"""Results as records: one JSON object per line, kept whole, deterministic, resumable.

One idea: measuring and drawing are joined by files only.  A point is one call of a
measuring function under one configuration; it may yield several records.  The key of a
point is a hash of experiment, configuration and the code of the named modules: a point
whose key is on file is loaded, not measured, and a point measured by older code is
replaced.  Each point is written as it ends (the file is replaced in one step), so a
killed run loses one point.  Records are kept in a fixed order, so two runs with one seed
give the same bytes apart from ``provenance.time``, whatever order they ran in.

Left out: locking.  Two processes that write the same experiment at once may lose a
point, never corrupt the file.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from repro import paths
from repro.errors import ReproError
from repro.files import output_error
from repro.reporting import provenance
from repro.reporting.jsonable import canonical, order_key, plain
from repro.reporting.record_files import PACKED, read_lines, record_files, write_lines

SCHEMA = 1
Kind = Literal["measured", "simulated", "derived", "paper", "choice"]
KINDS = get_args(Kind)
Value = float | int | str | bool | None
RECORD_LOG = "REPRO_RECORD_LOG"
_OPTIONAL = ("n", "p10", "p50", "p90", "ci_low", "ci_high", "series")
_REQUIRED = (
    "experiment",
    "claim",
    "kind",
    "metric",
    "value",
    "unit",
    "config",
    "provenance",
    "key",
    "point",
)


class RecordFileError(ReproError):
    """A records file that cannot be read as records."""


@dataclass(frozen=True)
class Measurement:
    """What a measuring function returns: one number, or one series, with its spread.

    ``labels`` (batch size, layer, ...) are joined to the configuration of the point.
    """

    claim: str
    kind: Kind
    metric: str
    value: Value
    unit: str
    n: int | None = None
    p10: float | None = None
    p50: float | None = None
    p90: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    series: Sequence[float | int] | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """One measurement with its configuration and where it came from."""

    experiment: str
    claim: str
    kind: str
    metric: str
    value: Value
    unit: str
    config: dict[str, Any]
    provenance: dict[str, Any]
    key: str
    point: str
    n: int | None = None
    p10: float | None = None
    p50: float | None = None
    p90: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    series: tuple[float | int, ...] | None = None
    schema: int = SCHEMA

    @property
    def device(self) -> str:
        """Name of the device the number was measured on."""
        return str(self.provenance.get("device", {}).get("name", "no device"))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; optional fields that are unset are absent."""
        data: dict[str, Any] = {name: getattr(self, name) for name in (*_REQUIRED, "schema")}
        for name in _OPTIONAL:
            value = getattr(self, name)
            if value is not None:
                data[name] = list(value) if name == "series" else value
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Inverse of :meth:`to_dict`; raises ``ValueError`` for anything else."""
        if not isinstance(data, Mapping):
            raise ValueError("it is no JSON object")
        missing = [name for name in _REQUIRED if name not in data]
        if missing:
            raise ValueError(f"field {missing[0]!r} is missing")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r} is not {SCHEMA}")
        if data["kind"] not in KINDS:
            raise ValueError(f"kind {data['kind']!r} is not one of {', '.join(KINDS)}")
        known = {name: data[name] for name in _REQUIRED}
        for name in _OPTIONAL:
            if data.get(name) is not None:
                known[name] = tuple(data[name]) if name == "series" else data[name]
        return cls(**known)

    def line(self) -> str:
        """The one line of the file."""
        return json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=False, allow_nan=False)

    def timeless(self) -> str:
        """The line without what varies between equal runs (``provenance.time``)."""
        data = self.to_dict()
        data["provenance"] = {k: v for k, v in self.provenance.items() if k != "time"}
        return json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _record_order(record: Record) -> tuple[Any, ...]:
    return (record.claim, record.metric, order_key(record.config), record.point)


class RecordStore:
    """The records of one profile: a folder with one file per experiment.

    ``root`` replaces the folder ``data/records/<profile>``.
    """

    def __init__(self, profile: str, root: Path | str | None = None) -> None:
        self.profile = profile
        self.root = Path(root) if root is not None else paths.records_dir(profile)
        self.n_measured = 0
        self.n_loaded = 0
        self._visited: dict[str, set[str]] = {}
        self._writable = False

    def path(self, experiment: str) -> Path:
        """File of one experiment; the packed one if that is what there is."""
        plain_file = self.root / f"{experiment}.jsonl"
        packed = self.root / f"{experiment}{PACKED}"
        return packed if packed.is_file() and not plain_file.is_file() else plain_file

    def experiments(self) -> list[str]:
        """Names of the experiments that have a file."""
        return sorted({file.name.split(".jsonl")[0] for file in record_files(self.root)})

    def read(self, experiment: str | None = None) -> list[Record]:
        """All records of one experiment, or of every one; an absent file holds none.

        Raises:
            RecordFileError: a line is no whole record.  The file is left as it is.
        """
        names = self.experiments() if experiment is None else [experiment]
        records: list[Record] = []
        for name in names:
            _note("read", name)
            records.extend(self._read(name))
        return records

    def measure_or_load(
        self,
        experiment: str,
        config: Mapping[str, Any],
        fn: Callable[[], Sequence[Measurement]],
        *,
        sources: Iterable[ModuleType | str] = (),
        force: bool = False,
        device: str | None = None,
    ) -> list[Record]:
        """Records of the point ``config``, measured by ``fn`` unless they are on file.

        ``sources`` are the modules (or their names) whose code decides the numbers.
        ``device`` names the device for the provenance; by default it is ``cuda`` when the
        process has used CUDA by the end of ``fn``, else the CPU.
        """
        full = plain({"profile": self.profile, **config}, f"{experiment}: config")
        named = list(sources)
        point = provenance.digest(experiment, canonical(full))
        key = provenance.digest(experiment, canonical(full), provenance.source_digest(named))
        self._visited.setdefault(experiment, set()).add(point)
        _note("write", experiment)
        if not force:
            found = [record for record in self._read(experiment) if record.key == key]
            if found:
                self.n_loaded += 1
                return found
        self._require_writable()
        utc_start = provenance.utc_now()
        started = time.perf_counter()
        measurements = list(fn())
        wall_s = round(time.perf_counter() - started, 3)
        if not measurements:
            raise ValueError(f"{experiment}: the point {canonical(full)} yielded no measurement")
        origin = provenance.capture(
            sources=named,
            seed=full.get("seed"),
            device=device,
            command=command(experiment, self.profile, full.get("source")),
            utc_start=utc_start,
            wall_s=wall_s,
        )
        fresh = [_record(experiment, full, origin, key, point, item) for item in measurements]
        _refuse_duplicates(experiment, fresh)
        # Read again: another process may have added a point while this one was measured.
        kept = [record for record in self._read(experiment) if record.point != point]
        self._write(experiment, [*kept, *fresh])
        self.n_measured += 1
        return sorted(fresh, key=_record_order)

    def prune(self, experiment: str, **where: Any) -> int:
        """Drop the points that this store has not visited; returns how many records went.

        To be called at the end of a complete sweep, so that points of an older
        configuration do not linger beside the new ones.  ``where`` restricts it to records
        whose configuration has these values (for example ``source="embedded"``).
        """
        visited = self._visited.get(experiment, set())
        records = self._read(experiment)
        kept = [
            record
            for record in records
            if record.point in visited
            or any(record.config.get(name) != value for name, value in where.items())
        ]
        if len(kept) != len(records):
            self._write(experiment, kept)
        return len(records) - len(kept)

    def _read(self, experiment: str) -> list[Record]:
        path = self.path(experiment)
        try:
            text = read_lines(path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise RecordFileError(
                f"cannot read {paths.relative(path)!r} ({reason}): repair it, restore it from "
                "git, or move it away to measure again"
            ) from error
        return [
            _parse(path, number, line)
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        ]

    def _require_writable(self) -> None:
        """Fail before the measurement, not after it."""
        if self._writable:
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                self._writable = True
        except OSError as error:
            raise output_error(self.root, error) from error

    def _write(self, experiment: str, records: Iterable[Record]) -> None:
        ordered = sorted(records, key=_record_order)
        text, path = "".join(f"{record.line()}\n" for record in ordered), self.path(experiment)
        write_lines(path, text)


def _parse(path: Path, number: int, line: str) -> Record:
    try:
        return Record.from_dict(json.loads(line))
    except ValueError as error:
        raise RecordFileError(
            f"{paths.relative(path)!r} line {number} is no whole record ({error}): delete that "
            "line to measure its point again, or restore the file from git"
        ) from error


def _record(
    experiment: str,
    config: dict[str, Any],
    origin: dict[str, Any],
    key: str,
    point: str,
    item: Measurement,
) -> Record:
    where = f"{experiment}: {item.metric}"
    labels = plain(dict(item.labels), f"{where}: labels")
    for name, value in labels.items():
        if name in config and config[name] != value:
            raise ValueError(f"{where}: label {name}={value!r} contradicts the configuration")
    if item.kind not in KINDS:
        raise ValueError(f"{where}: kind {item.kind!r} is not one of {', '.join(KINDS)}")
    series = None if item.series is None else tuple(plain(item.series, f"{where}: series"))
    spread = {
        name: plain(getattr(item, name), f"{where}: {name}")
        for name in ("value", "n", "p10", "p50", "p90", "ci_low", "ci_high")
    }
    return Record(
        experiment=experiment,
        claim=item.claim,
        kind=item.kind,
        metric=item.metric,
        unit=item.unit,
        config={**config, **labels},
        provenance=origin,
        key=key,
        point=point,
        series=series,
        **spread,
    )


def _refuse_duplicates(experiment: str, records: Sequence[Record]) -> None:
    seen: set[tuple[str, str, str]] = set()
    for record in records:
        name = (record.claim, record.metric, canonical(record.config))
        if name in seen:
            raise ValueError(
                f"{experiment}: two measurements of {record.metric!r} have the same "
                "configuration: tell them apart by a label"
            )
        seen.add(name)


def command(experiment: str, profile: str, source: str | None = None) -> str:
    """The command that measures an experiment again."""
    text = f"python -m repro measure {experiment} --profile {profile}"
    return text if source in (None, "embedded") else f"{text} --source {source}"


def content_digest(records: Iterable[Record]) -> str:
    """Digest of records without what varies between equal runs."""
    return provenance.digest(*(record.timeless() for record in records))


def is_current(record: Record) -> bool | None:
    """Whether the code that measured ``record`` is the code of today (``None``: unknown)."""
    stated = record.provenance.get("sources")
    if not stated or not stated.get("modules"):
        return None
    today = _digest_today(tuple(stated["modules"]))
    return None if today is None else today == stated["digest"]


@lru_cache(maxsize=64)
def _digest_today(modules: tuple[str, ...]) -> str | None:
    try:
        return provenance.source_digest(modules)
    except ValueError:
        return None


def _note(mode: str, experiment: str) -> None:
    """Tell the pipeline which experiments a notebook reads and writes."""
    target = os.environ.get(RECORD_LOG)
    if target:
        with open(target, "a", encoding="utf-8") as handle:
            handle.write(f"{mode} {experiment}\n")
