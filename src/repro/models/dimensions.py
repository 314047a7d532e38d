"""Dimensions of the published models, read from the table that holds them.

One idea: a published number is typed once, in ``data/paper/model_configs.csv``, with its
source beside it; code reads it from there.  Two cells hold two numbers (Gemma 4 has
"8 sliding / 2 global" key-value heads) and one a number with a remark; those are taken
apart here, and anything else that is no number is an error.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import lru_cache

from repro.errors import DataUnavailableError
from repro.paths import paper_dir, relative

_CONFIG_TABLE = "model_configs.csv"


@dataclass(frozen=True)
class Dimensions:
    """One row of ``model_configs.csv``, as numbers.

    ``kv_heads_global`` and ``head_dim_global`` differ from the plain ones only in
    Gemma 4, whose full-attention layers have heads of their own; ``head_dim`` is None
    where attention is not described by one (multi-head latent attention).
    """

    hidden_size: int
    layers: int
    moe_layers: int
    routed_experts: int
    top_k: int
    moe_intermediate_size: int
    shared_experts: int
    shared_intermediate_total: int
    dense_intermediate_size: int | None
    vocab_size: int
    attention_heads: int
    kv_heads: int
    kv_heads_global: int
    head_dim: int | None
    head_dim_global: int | None
    tied_embeddings: bool
    notes: str
    source: str


def read_paper_table(file_name: str, key: str = "model") -> dict[str, dict[str, str]]:
    """Rows of a CSV under ``data/paper`` by their ``key`` column.

    Raises:
        DataUnavailableError: the table is missing or has no such column.
    """
    path = paper_dir() / file_name
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return {row[key]: row for row in csv.DictReader(stream)}
    except (OSError, KeyError, UnicodeDecodeError) as error:
        raise DataUnavailableError(
            f"cannot read column {key!r} of {relative(path)!r} ({error}): "
            "restore the file from the repository"
        ) from error


def missing_row(table: str, row_name: str) -> DataUnavailableError:
    """The error for a table under ``data/paper`` without a row it should have."""
    return DataUnavailableError(
        f"data/paper/{table} has no row {row_name!r}: restore the file from the repository"
    )


@lru_cache(maxsize=32)
def load_dimensions(row_name: str) -> Dimensions:
    """The row called ``row_name`` of ``model_configs.csv``.

    Raises:
        DataUnavailableError: the table or the row is missing, or a cell is no number.
    """
    row = read_paper_table(_CONFIG_TABLE).get(row_name)
    if row is None:
        raise missing_row(_CONFIG_TABLE, row_name)

    def cell(column: str) -> str:
        # A column that is missing, or a row cut short, reads as an empty cell.
        return (row.get(column) or "").strip()

    def number(column: str) -> int | None:
        # A leading whole number; what follows explains it ("1 block (counted as ...)").
        found = re.match(r"\d+", cell(column))
        return int(found.group()) if found else None

    def after_slash(column: str) -> int | None:
        # "8 sliding / 2 global" in Gemma 4; one number elsewhere.
        found = re.search(r"/\s*(\d+)\s+global", cell(column))
        return int(found.group(1)) if found else number(column)

    def required(column: str) -> int:
        value = number(column)
        if value is None:
            raise DataUnavailableError(
                f"{_CONFIG_TABLE} has {column}={cell(column)!r} for {row_name!r}, not a number: "
                "restore the file from the repository"
            )
        return value

    return Dimensions(
        hidden_size=required("hidden_size"),
        layers=required("layers"),
        moe_layers=required("moe_layers"),
        routed_experts=required("routed_experts"),
        top_k=required("top_k"),
        moe_intermediate_size=required("moe_intermediate_size"),
        shared_experts=required("shared_experts"),
        shared_intermediate_total=required("shared_intermediate_total"),
        dense_intermediate_size=number("dense_intermediate_size"),
        vocab_size=required("vocab_size"),
        attention_heads=required("attention_heads"),
        kv_heads=required("kv_heads"),
        kv_heads_global=after_slash("kv_heads") or 0,
        head_dim=number("head_dim"),
        head_dim_global=after_slash("head_dim"),
        tied_embeddings=cell("tied_embeddings").lower() == "true",
        notes=cell("other"),
        source=cell("source"),
    )
