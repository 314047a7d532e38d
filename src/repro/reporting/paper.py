"""The papers' numbers: CSV tables in ``data/paper`` as rows and as records.

One idea: nobody types a published number into code or a notebook.  Every row carries its
source and a status code; what the authors withdrew, did not verify or labelled as an
estimate is marked in fields of its own and never deleted.

Status codes: R read in the named place, R2 second-hand, C computed from R values,
I inferred, U unknown.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

from repro import paths
from repro.errors import DataUnavailableError, unknown_name
from repro.reporting import provenance
from repro.reporting.records import Record, canonical

STATUS = {
    "R": "read in the named place",
    "R2": "read second-hand, in somebody else's transcription",
    "C": "computed from values that were read",
    "I": "inferred; the reason is given",
    "U": "unknown, not found",
}
PREFIX = "dynaexq_"
ACTIVATION_TABLES = {"decode": "table1_decode_activation", "prefill": "table2_prefill_activation"}
RECOLLECTED = "authors_draft_8e92d414"
MODEL_NAMES = {
    "Qwen3-30B-A3B-Instruct-2507 (INT4 mixed AutoRound)": "Qwen3-30B-A3B",
    "DeepSeek-V2-Lite (mixed AutoRound)": "DeepSeek-V2-Lite",
}
CONFIG_NAMES = {"Qwen3-Next-80B-A3B": "Qwen3-Next-80B-A3B-Instruct"}
Row = dict[str, Any]


def list_tables() -> list[str]:
    """Names that :func:`load_table` knows."""
    return sorted(path.stem.removeprefix(PREFIX) for path in paths.paper_dir().glob("*.csv"))


def table_path(name: str) -> Path:
    """CSV file of a table; the prefix ``dynaexq_`` may be left out.

    Raises:
        UnknownNameError: no such table.
    """
    for stem in (PREFIX + name, name):
        path = paths.paper_dir() / f"{stem}.csv"
        if path.is_file():
            return path
    raise unknown_name("paper table", name, list_tables())


def load_table(name: str) -> list[Row]:
    """Rows of one table, numbers as numbers, empty cells as ``None``.

    Every row has ``status`` (a code of :data:`STATUS`), ``source`` and ``row`` (its line in
    the file).  Activation rows have also ``withdrawn``, ``unverified``, ``base_model`` and
    ``corrected_pct`` (the value without the phantom layer, or ``None``); figure rows have
    ``estimated``.
    """
    return [dict(row) for row in _load(table_path(name))]


@cache
def _load(path: Path) -> tuple[Row, ...]:
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            reader = csv.DictReader(handle, strict=True)
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise DataUnavailableError(
            f"cannot read {paths.relative(path)!r} ({error}): restore it from git"
        ) from error
    name = path.stem.removeprefix(PREFIX)
    loaded: list[Row] = []
    for line, raw in rows:
        if None in raw or None in raw.values():
            raise DataUnavailableError(
                f"{paths.relative(path)!r} line {line} has not as many cells as the header: "
                "restore it from git"
            )
        row: Row = {column: _number(text) for column, text in raw.items()}
        row["row"] = line
        row["status"] = _status(name, row)
        if name in ACTIVATION_TABLES.values():
            _mark_activation(row)
        elif name == "figures_stated":
            # The 30B series of the notebook is the one whose label elsewhere says "estimated".
            row["estimated"] = "estimated" in f"{row['metric']} {row['note'] or ''}"
        loaded.append(row)
    return tuple(loaded)


def _number(text: str) -> Any:
    if text == "":
        return None
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _status(table: str, row: Row) -> str:
    if table == "model_bytes_computed":
        return "C"
    if table == "pagedweight_stated":
        return "R" if str(row["confidence"]).split(",")[0] == "seed" else "R2"
    if table == "model_configs" and "found by string search" in str(row["source"]):
        return "R2"
    return "R"


def _mark_activation(row: Row) -> None:
    note = str(row["note"] or "")
    row["base_model"] = MODEL_NAMES.get(row["model"], row["model"])
    # The authors replaced their first Qwen3-30B rows by re-collected ones (A3).
    row["withdrawn"] = row["base_model"] == "Qwen3-30B-A3B" and row["version"] != RECOLLECTED
    row["unverified"] = "unverified" in note
    row["corrected_pct"] = None
    if row["base_model"] == "DeepSeek-V2-Lite":
        row["corrected_pct"] = row["activation_pct"] / phantom_factor()


def phantom_factor() -> float:
    """Share of DeepSeek-V2-Lite's layers that have experts: 26 of 27.

    The published activation rows average over all layers, one of which is always zero.
    """
    config = model_config("DeepSeek-V2-Lite")
    return float(config["moe_layers"] / config["layers"])


def model_config(model: str) -> Row:
    """Architecture row of a published model, by its name or the start of its name."""
    rows = load_table("model_configs")
    wanted = CONFIG_NAMES.get(model, model)
    for row in rows:
        if row["model"] == wanted:
            return row
    for row in rows:
        if str(row["model"]).startswith(wanted):
            return row
    raise unknown_name("published model", model, [str(row["model"]) for row in rows])


def uniform_activation(n_experts: int, top_k: int, n_tokens: float) -> float:
    """Expected activated share in percent if every token chose its experts evenly.

    Tokens choose independently: 1 - (1 - k/E)^tokens.
    """
    return 100.0 * (1.0 - (1.0 - top_k / n_experts) ** n_tokens)


def activation_rows(stage: str, *, end_points_only: bool = False) -> list[Row]:
    """Published activation rows of ``stage``, one per (version, model), batch to percent.

    Rows are ``{version, base_model, values: {batch: pct}, withdrawn, unverified, status,
    source, note, corrected}``; ``corrected`` is true for the row this package computes
    without the phantom layer (status C).  Rows with only one value are the raw file's
    spot checks; they are left out unless ``end_points_only`` asks for them too.
    """
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in load_table(ACTIVATION_TABLES[stage]):
        grouped.setdefault((row["version"], row["base_model"]), []).append(row)
    result: list[Row] = []
    for (version, model), rows in grouped.items():
        if len(rows) < 3 and not end_points_only:
            continue
        base = {
            "version": version,
            "base_model": model,
            "withdrawn": rows[0]["withdrawn"],
            "unverified": rows[0]["unverified"],
            "status": rows[0]["status"],
            "source": rows[0]["source"],
            "note": rows[0]["note"],
        }
        values = {row["batch_size"]: row["activation_pct"] for row in rows}
        result.append({**base, "values": values, "corrected": False})
        if rows[0]["corrected_pct"] is not None:
            values = {row["batch_size"]: row["corrected_pct"] for row in rows}
            result.append({**base, "values": values, "corrected": True, "status": "C"})
    return result


_METRICS = {
    "table1_decode_activation": ("DynaExq Table 1", "activation_ratio", "activation_pct"),
    "table2_prefill_activation": ("DynaExq Table 2", "activation_ratio", "activation_pct"),
    "table3_models": ("DynaExq Table 3", "expert_weight_fraction", "expert_weight_fraction_pct"),
    "table4_quality": ("DynaExq Table 4", "accuracy", "accuracy_pct"),
}


def paper_records() -> list[Record]:
    """Every stated number as a record of kind ``paper``; corrected ones as ``derived``."""
    records: list[Record] = []
    for name in list_tables():
        for row in load_table(name):
            records.extend(_records_of(name, row))
    return records


def _records_of(name: str, row: Row) -> list[Record]:
    if name in _METRICS:
        claim, metric, column = _METRICS[name]
        records = [_record(name, row, claim, metric, row[column], "percent", skip={column})]
        if row.get("corrected_pct") is not None:
            records.append(
                _record(
                    name,
                    row,
                    claim,
                    f"{metric}_without_phantom_layer",
                    row["corrected_pct"],
                    "percent",
                    skip={column},
                    kind="derived",
                )
            )
        return records
    if name == "figures_stated":
        claim = f"DynaExq {row['figure']}"
        return [_record(name, row, claim, row["metric"], row["value"], row["unit"])]
    if name == "pagedweight_stated":
        return [_record(name, row, "PagedWeight", row["item"], row["value"], row["unit"])]
    if name == "model_bytes_computed":
        skip = {"model", "check", "source", "row", "status"}
        return [
            _record(name, row, "DynaExq Table 3", column, value, _unit(column), kind="derived")
            for column, value in row.items()
            if column not in skip
        ]
    return []  # model_configs describes models; it states no result


def _unit(column: str) -> str:
    if column.startswith("bytes"):
        return "bytes"
    return "percent" if column.endswith("_pct") else "count"


def _record(
    table: str,
    row: Row,
    claim: str,
    metric: str,
    value: Any,
    unit: str,
    *,
    kind: str = "paper",
    skip: set[str] | None = None,
) -> Record:
    left_out = {"source", "note", "metric", "value", "unit", "item", "corrected_pct", "row"}
    left_out |= skip or set()
    if table == "model_bytes_computed":
        config: Row = {"model": row["model"], "status": row["status"]}
    else:
        config = {name: item for name, item in row.items() if name not in left_out}
    config["table"] = table
    point = provenance.digest(table, str(row["row"]), metric)
    return Record(
        experiment="paper",
        claim=claim,
        kind=kind,
        metric=metric,
        value=value,
        unit=unit,
        config=config,
        provenance={
            "source": row["source"],
            "status": row["status"],
            "note": row.get("note") or row.get("check"),
            "table": table_path(table).name,
            "row": row["row"],
        },
        key=provenance.digest(point, canonical(config), canonical(value)),
        point=point,
    )
