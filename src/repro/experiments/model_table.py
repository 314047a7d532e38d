"""The model table: how large the experts of each model are, at each precision tier.

DynaExq's Table 3 with what it leaves out: bytes per expert at FP16, INT4 and INT2, scales
counted; the exact total, counted on the real architecture; how much of it are experts; and
the uniform width that costs the same bytes as DynaExq's mixture.  All eight published
configurations and the bundled small models are treated alike.  Nothing is measured on a
device: every number is derived from a configuration.

Two byte counts stand side by side.  ``expert_bytes_int4_g128`` cuts an expert's weights
into groups as one run, as the published tables do; ``expert_bytes_int4_g128_by_row`` lets
no group cross a row, as a format must.  They differ where the group does not divide a row
(Gemma 4's width 704, the fine small model's width 64).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

from repro.errors import DataUnavailableError, unknown_name
from repro.models import dimensions, formula, layout, mixtures, parameters, published, tiers
from repro.models.parameters import ParameterCount
from repro.models.published import PUBLISHED
from repro.models.tiers import TIERS
from repro.paths import models_dir
from repro.reporting.provenance import digest, file_digest
from repro.reporting.records import Measurement, Record, RecordStore, canonical

if TYPE_CHECKING:
    from repro.profiles import Profile

EXPERIMENT = "model-table"
CLAIM = "DynaExq Table 3"
SOURCES = (
    "repro.experiments.model_table",
    dimensions,
    formula,
    layout,
    mixtures,
    parameters,
    published,
    tiers,
)
# DynaExq's text keeps a fifth of the experts high; its registered run solved to a third.
SHARES = (Fraction(1, 3), Fraction(1, 5))
# High and low tier of the mixtures: FP16 over the authors' native INT4, and, for models
# that do not fit so, INT4 over INT2.
TIER_PAIRS = (("fp16", "int4_g128_zero"), ("int4_g128", "int2_g64"))

logger = logging.getLogger(__name__)


def run(
    profile: Profile,
    store: RecordStore,
    *,
    device: str = "cpu",
    force: bool = False,
    source: str = "embedded",
    models: Sequence[str] | None = None,
) -> list[Record]:
    """Records of the model table, one point for each model.

    ``device`` and ``source`` are accepted for uniformity: no device computes here and no
    workload is read.  Without ``models``, a bundled model whose folder is absent is left
    out with a warning; one that is asked for by name must be there.

    Raises:
        UnknownNameError: a model that is neither published nor bundled.
        DataUnavailableError: a bundled model was asked for that is not there.
        CheckpointError: the configuration of a bundled model cannot be read.
    """
    known = (*PUBLISHED, *profile.models)
    records: list[Record] = []
    skipped = False
    for name in known if models is None else models:
        if name not in known:
            raise unknown_name("model", name, known)
        if name not in PUBLISHED and not (models_dir() / name / "config.json").is_file():
            message = f"bundled model {name!r} has no data/models/{name}/config.json"
            if models is not None:
                raise DataUnavailableError(f"{message}: restore the folder from git, or train it")
            logger.warning("%s: its row is left out of the model table", message)
            skipped = True
            continue
        records.extend(
            store.measure_or_load(
                EXPERIMENT,
                {"model": name, "model_config_digest": _config_digest(name)},
                partial(measure, name),
                sources=SOURCES,
                force=force,
                device="cpu",
            )
        )
    if models is None and not skipped:
        store.prune(EXPERIMENT)
    return records


def measure(name: str) -> list[Measurement]:
    """All rows of one model, published or bundled."""
    if name in PUBLISHED:
        count = PUBLISHED[name].count()
    else:
        count = parameters.count_parameters(layout.read_config(models_dir() / name))
    rows = [*_sizes(count), *_tiers(count), *_mixtures(count)]
    return rows + (_checks(name, count) if name in PUBLISHED else [])


def _row(metric: str, value: float | int, unit: str, **labels: Any) -> Measurement:
    return Measurement(CLAIM, "derived", metric, value, unit, labels=labels)


def _sizes(count: ParameterCount) -> list[Measurement]:
    shape = count.layout
    return [
        _row("layers", shape.n_layers, "layers"),
        _row("moe_layers", shape.n_moe_layers, "layers"),
        _row("routed_experts_per_layer", shape.n_experts, "experts"),
        _row("routed_experts", count.n_routed_experts, "experts"),
        _row("top_k", shape.top_k, "experts"),
        _row("hidden_size", shape.hidden, "values"),
        _row("expert_width", shape.intermediate, "values"),
        _row("shared_width", shape.shared_intermediate, "values"),
        _row("params_per_expert", count.per_expert, "parameters"),
        _row("routed_params", count.routed, "parameters"),
        _row("shared_params", count.shared, "parameters"),
        _row("embedding_params", count.embedding, "parameters"),
        _row("total_params", count.total, "parameters"),
        _row("active_params_per_token", count.active, "parameters"),
        _row("routed_share_percent", 100 * count.routed_share, "%"),
        _row("routed_and_shared_share_percent", 100 * count.routed_and_shared_share, "%"),
        _row("model_bytes_fp16", 2 * count.total, "bytes"),
    ]


def _tiers(count: ParameterCount) -> list[Measurement]:
    rows = []
    for tier in TIERS.values():
        expert_bytes = tiers.bytes_of(count.per_expert, tier.name)
        rows += [
            _row(f"expert_bytes_{tier.name}", expert_bytes, "bytes"),
            _row(f"all_expert_bytes_{tier.name}", count.n_routed_experts * expert_bytes, "bytes"),
        ]
        if tier.group is not None:
            by_row = tiers.matrix_bytes(count.layout.expert_shapes, tier.name)
            rows.append(_row(f"expert_bytes_{tier.name}_by_row", by_row, "bytes"))
    for hi_tier, lo_tier in (("fp16", "int4_g128"), ("int4_g128", "int2_g64")):
        hi_bytes, lo_bytes = (tiers.bytes_of(count.per_expert, t) for t in (hi_tier, lo_tier))
        pair = {"hi_tier": hi_tier, "lo_tier": lo_tier}
        both_bytes = count.n_routed_experts * (hi_bytes + lo_bytes)
        rows += [
            _row("upgrade_bytes_per_expert", hi_bytes - lo_bytes, "bytes", **pair),
            # The host keeps both complete versions of every expert.
            _row("host_bytes_both_versions", both_bytes, "bytes", **pair),
        ]
    return rows


def _mixtures(count: ParameterCount) -> list[Measurement]:
    rows = []
    for hi_tier, lo_tier in TIER_PAIRS:
        for share in SHARES:
            n_bytes = mixtures.bytes_at(count.layout, float(share), hi_tier, lo_tier)
            labels = {
                "hi_tier": hi_tier,
                "lo_tier": lo_tier,
                "hi_share": str(share),
                "n_hi_per_layer": mixtures.n_hi_experts(count.layout.n_experts, float(share)),
            }
            bits = mixtures.uniform_bits(count.layout, n_bytes)
            width = mixtures.best_uniform_width(count.layout, n_bytes, lo_tier)
            rows += [
                _row("mixture_bytes", n_bytes, "bytes", **labels),
                _row("uniform_bits_of_same_bytes", bits, "bits per weight", **labels),
                _row("best_uniform_width_of_same_bytes", width, "bits", **labels),
            ]
    return rows


def _checks(name: str, count: ParameterCount) -> list[Measurement]:
    """Where the count stands against arithmetic and against the table of the papers."""
    model = PUBLISHED[name]
    table_total = int(published.bytes_row(model)["total_params"])
    parts = formula.formula_parts(model)
    rows = [
        _row("count_minus_formula", count.total - sum(parts.values()), "parameters"),
        _row("count_minus_table", count.total - table_total, "parameters"),
    ]
    if model.model_type == "qwen3_next":
        mtp, mtp_routed = formula.mtp_layer_params(model)
        with_mtp = count.total + mtp
        main_only = 100 * count.routed / with_mtp
        everywhere = 100 * (count.routed + mtp_routed) / with_mtp
        rows += [
            _row("total_params_with_mtp", with_mtp, "parameters"),
            _row("routed_share_percent_with_mtp", main_only, "%", mtp_experts_counted=False),
            _row("routed_share_percent_with_mtp", everywhere, "%", mtp_experts_counted=True),
        ]
    return rows


def _config_digest(name: str) -> str:
    """What decides the numbers besides the code: a change of it is another point."""
    if name not in PUBLISHED:
        return file_digest(models_dir() / name / "config.json")
    model = PUBLISHED[name]
    return digest(
        repr(model.dimensions), canonical(dict(model.extra)), canonical(published.bytes_row(model))
    )
