"""The curves of Figure 3 as records keep them, and the authors' own series.

One idea: a pair of tiers on a workload is one record.  Its ``series`` holds a small table for
each order of ``config["orders"]``, row after row: a row for each share of
``config["shares_percent"]``, a column for each name in ``config["columns"][order]``.  Its
value, the cost of demoting everything, is the same for all orders.  Experiment, figure,
tables and checks share the names below.

Columns: ``perplexity`` of all tokens with the ends of its interval; ``increase`` of the loss
over no demotion in nats, paired by window, with the ends of its interval; standard errors of
three more differences: ``step_error`` from the share before, ``line_error`` from the straight
line between none and all demoted, ``coldest_error`` from the coldest-first curve at the same
share; and the same of the last tokens of each window given the rest (``last_...``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro.reporting import paper
from repro.reporting.grouping import DOMAINS, SeriesId, select, series_id
from repro.reporting.records import Record

EXPERIMENT = "demotion"
CLAIM = "DynaExq Figure 3"
METRIC = "demotion_curve"
PAIRS = ("fp16/int4", "fp16/int2", "int4/int2")
COLDEST, HOTTEST, RANDOM = ORDERS = ("coldest", "hottest", "random")
_CONTROL = (
    "perplexity",
    "increase",
    "increase_low",
    "increase_high",
    "coldest_error",
    "last_increase",
)
_COLDEST = (
    "perplexity",
    "perplexity_low",
    "perplexity_high",
    "increase",
    "increase_low",
    "increase_high",
    "step_error",
    "line_error",
    "last_perplexity",
    "last_increase",
    "last_low",
    "last_high",
)
COLUMNS = {COLDEST: _COLDEST, HOTTEST: _CONTROL, RANDOM: _CONTROL}
FIGURE = "Fig 3"  # as data/paper calls it
_AUTHORS = {
    "authors_notebook": "authors' notebook",
    "authors_working_ppl_md": "authors' working table",
}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One order of one pair of tiers on one workload."""

    identity: SeriesId
    pair: str
    order: str
    shares_percent: tuple[int, ...]
    n_experts: int
    n_demoted: tuple[int, ...]
    n_prompts: int
    prompt_tokens: int
    columns: dict[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def at(self, share_percent: int) -> int:
        """Place of a share in every column."""
        return self.shares_percent.index(share_percent)

    @property
    def rises(self) -> bool:
        """Whether demoting all experts costs more than nothing, interval included."""
        return bool(self["increase_low"][-1] > 0)

    @property
    def reached(self) -> Floats:
        """Share of the whole increase that is reached at each share."""
        return np.asarray(self["increase"] / self["increase"][-1])


def curves_of(record: Record) -> list[Curve]:
    """The curves that a record holds, one for each order.

    Raises:
        KeyError: it holds none.
        ValueError: its series does not fit its configuration.
    """
    config = record.config
    shares = tuple(config["shares_percent"])
    numbers = np.asarray(record.series, dtype=np.float64)
    names = [(order, name) for order in config["orders"] for name in config["columns"][order]]
    if len(numbers) != len(shares) * len(names):
        raise ValueError(
            f"{len(numbers)} numbers are no table of {len(shares)} shares and {len(names)} columns"
        )
    found, start = [], 0
    for order in config["orders"]:
        columns = config["columns"][order]
        end = start + len(shares) * len(columns)
        table = numbers[start:end].reshape(len(shares), len(columns))
        found.append(
            Curve(
                series_id(record),
                config["pair"],
                order,
                shares,
                int(config["n_experts"]),
                tuple(config["n_demoted"]),
                int(record.n or 0),
                int(config["context_tokens"] + config["scored_tokens"]),
                dict(zip(columns, table.T, strict=True)),
            )
        )
        start = end
    return found


def curves(
    records: Sequence[Record], *, pair: str | None = None, order: str | None = None
) -> list[Curve]:
    """All curves among the records: text, math, code; then by pair and order."""
    chosen = select(records, claim=CLAIM, metric=METRIC, kind="measured")
    found = [
        curve
        for record in chosen
        for curve in curves_of(record)
        if pair in (None, curve.pair) and order in (None, curve.order)
    ]

    def place(curve: Curve) -> tuple[object, ...]:
        identity = curve.identity
        known = DOMAINS.index(identity.domain) if identity.domain in DOMAINS else len(DOMAINS)
        pair_and_order = PAIRS.index(curve.pair), ORDERS.index(curve.order)
        return (identity.model, known, *identity[1:], *pair_and_order)

    return sorted(found, key=place)


@dataclass(frozen=True)
class Published:
    """One of the authors' series, with how it is called."""

    model: str
    series: str
    origin: str
    estimated: bool
    status: str
    shares_percent: tuple[int, ...]
    perplexity: Floats

    @property
    def reached(self) -> Floats:
        """Share of the whole increase of the log perplexity reached at each share."""
        increase = np.log(self.perplexity / self.perplexity[0])
        return np.asarray(increase / increase[-1])


def published() -> list[Published]:
    """The authors' series of Figure 3: one of the 30B model, two of the 80B model."""
    groups: dict[tuple[str, str, str], list[paper.Row]] = {}
    for row in paper.load_table("figures_stated"):
        if row["figure"] == FIGURE and row["x_name"] == "pct_low_experts":
            groups.setdefault((row["model"], row["series"], row["version"]), []).append(row)
    found = []
    for (model, series, version), rows in groups.items():
        ordered = sorted(rows, key=lambda row: float(row["x"]))
        found.append(
            Published(
                model,
                series,
                _AUTHORS.get(version, version),
                all(row["estimated"] for row in ordered),
                ordered[0]["status"],
                tuple(int(row["x"]) for row in ordered),
                np.array([float(row["value"]) for row in ordered]),
            )
        )
    return found
