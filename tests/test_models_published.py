"""Published configurations: counted parameters, the formula, the tables, tiers and mixtures."""

from __future__ import annotations

import csv
import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.errors import DataUnavailableError, ReproError, UnknownNameError
from repro.models import dimensions
from repro.models.dimensions import load_dimensions, read_paper_table
from repro.models.formula import formula_parts, mtp_layer_params
from repro.models.layout import inspect_config
from repro.models.mixtures import best_uniform_width, bytes_at, n_hi_experts, uniform_bits
from repro.models.parameters import ParameterCount, build_on_meta, count_parameters
from repro.models.published import PUBLISHED, PublishedModel, bytes_row, get_published
from repro.models.tiers import TIERS, Tier, bytes_of, get_tier, matrix_bytes, tier_bytes
from repro.paths import paper_dir

ALL = sorted(PUBLISHED)
GEMMA, NEXT, PHI, QWEN = "Gemma-4-26B-A4B", "Qwen3-Next-80B-A3B", "Phi-3.5-MoE", "Qwen3-30B-A3B"
# Models that DynaExq's Table 3 lists, under its names.
TABLE_3 = {
    "Qwen3-30B-A3B-Instruct-2507": QWEN,
    "Qwen3-Next-80B-A3B-Instruct": NEXT,
    "Phi-3.5-MoE-instruct": PHI,
}
OVERHEAD_NAMES = {
    QWEN: "Qwen3-30B (bs 32)",
    NEXT: "Qwen3-Next-80B (bs 8)",
    PHI: "Phi-3.5-MoE (bs 32)",
}
CSV_TIERS = {
    "bytes_fp16": "fp16",
    "bytes_int4_nominal": "int4",
    "bytes_int4_g128_fp16scale": "int4_g128",
    "bytes_int4_g128_scale_and_zero": "int4_g128_zero",
    "bytes_int2_nominal": "int2",
    "bytes_int2_g64_fp16scale": "int2_g64",
}


def manifest_bytes(model: PublishedModel) -> int:
    """Bytes of the checkpoint as its authors list them, quoted in the table's check column."""
    found = re.search(r"manifest (\d+)", bytes_row(model)["check"])
    assert found, model.name
    return int(found.group(1))


def overhead(metric: str, name: str) -> float:
    """A cell of the overhead table of DynaExq's later draft, in GB."""
    with (paper_dir() / "dynaexq_figures_stated.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["figure"].startswith("overhead")]
    (value,) = (
        float(row["value"])
        for row in rows
        if row["metric"] == metric and row["model"] == OVERHEAD_NAMES[name]
    )
    return value


# --- where the numbers come from


def test_the_eight_models_are_there_and_nothing_is_typed_twice() -> None:
    assert len(PUBLISHED) == 8
    for name, model in PUBLISHED.items():
        assert model.name == name
        assert model.hub_id.count("/") == 1
        assert model.licence
        assert model.dimensions.source
    rows = set(read_paper_table("model_bytes_computed.csv"))
    assert {model.bytes_row for model in PUBLISHED.values()} == rows


@pytest.mark.parametrize("name", [NEXT, "DeepSeek-V2-Lite", QWEN])
def test_extra_fields_that_shape_parameters_are_stated_in_the_table(name: str) -> None:
    model = PUBLISHED[name]
    notes = model.dimensions.notes
    if name == QWEN:  # context and base are those of the checkpoint that DynaExq ran
        notes += load_dimensions("Qwen3-30B-A3B-Thinking-2507 (same shape as Instruct-2507)").notes
        shaping = ("max_position_embeddings", "rope_theta")
    else:
        shaping = tuple(
            key
            for key, value in model.extra.items()
            if isinstance(value, int)
            and not isinstance(value, bool)
            and key not in ("max_position_embeddings", "rope_theta")
        )
    assert shaping
    stated = {int(number) for number in re.findall(r"\d+", notes)}
    assert {model.extra[key] for key in shaping} <= stated


def test_both_rows_of_qwen3_30b_have_one_shape() -> None:
    rows = read_paper_table("model_configs.csv")
    plain, thinking = (row for name, row in rows.items() if name.startswith("Qwen3-30B"))
    ignored = {"model", "other", "source"}
    assert {k: v for k, v in plain.items() if k not in ignored} == {
        k: v for k, v in thinking.items() if k not in ignored
    }


def test_gemma_cells_with_two_numbers_are_taken_apart() -> None:
    d = PUBLISHED[GEMMA].dimensions
    assert (d.kv_heads, d.kv_heads_global, d.head_dim, d.head_dim_global) == (8, 2, 256, 512)
    # ... and PagedWeight's remark on Qwen1.5's shared expert does not become a number.
    assert PUBLISHED["Qwen1.5-MoE-A2.7B"].dimensions.shared_experts == 1


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"'Qwen3-30B'.*did you mean 'Qwen3-30B-A3B'"):
        get_published("Qwen3-30B")


def test_a_missing_or_broken_table_is_one_sentence(tmp_path, monkeypatch) -> None:
    header = (paper_dir() / "model_configs.csv").read_text(encoding="utf-8").splitlines()[0]
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    (tmp_path / "notebooks").mkdir()
    folder = tmp_path / "data" / "paper"
    folder.mkdir(parents=True)
    with pytest.raises(DataUnavailableError, match=r"model_configs\.csv.*restore"):
        load_dimensions("a row that is asked for once only")
    table = folder / "model_configs.csv"
    table.write_text(header + "\nTorn,2048,48\n", encoding="utf-8")
    with pytest.raises(DataUnavailableError, match=r"moe_layers=''.*'Torn'"):
        load_dimensions("Torn")
    with pytest.raises(DataUnavailableError, match="has no row 'Gone'"):
        load_dimensions("Gone")
    table.write_text("name,hidden_size\nx,1\n", encoding="utf-8")
    with pytest.raises(DataUnavailableError, match="column 'model'"):
        dimensions.read_paper_table("model_configs.csv")


# --- counted, calculated, published


@pytest.mark.parametrize("name", ALL)
def test_counted_parameters_equal_the_formula_part_by_part(name: str) -> None:
    model, count = PUBLISHED[name], PUBLISHED[name].count()
    parts = formula_parts(model)
    assert sum(parts.values()) == count.total
    assert parts["routed"] == count.routed
    assert parts["shared"] == count.shared
    assert parts["embedding"] + parts["head"] == count.embedding
    assert count.per_expert == model.params_per_expert
    assert count.n_routed_experts == model.n_moe_layers * model.n_experts


@pytest.mark.parametrize("name", ALL)
def test_the_configuration_says_what_the_table_says(name: str) -> None:
    model = PUBLISHED[name]
    d, layout = model.dimensions, inspect_config(model.to_transformers_config())
    assert layout == model.count().layout
    assert layout.n_layers == d.layers
    assert layout.n_moe_layers == d.moe_layers
    assert (layout.n_experts, layout.top_k) == (d.routed_experts, d.top_k)
    assert (layout.hidden, layout.intermediate) == (d.hidden_size, d.moe_intermediate_size)
    assert layout.shared_intermediate == d.shared_intermediate_total
    assert layout.has_shared == (d.shared_experts > 0)


@pytest.mark.parametrize("name", ALL)
def test_every_number_of_the_published_bytes_table(name: str) -> None:
    model, count, row = PUBLISHED[name], PUBLISHED[name].count(), bytes_row(PUBLISHED[name])
    assert int(row["params_per_routed_expert"]) == count.per_expert
    assert int(row["routed_expert_count"]) == count.n_routed_experts
    assert int(row["routed_expert_params"]) == count.routed
    assert int(row["shared_expert_params"]) == count.shared
    for column, tier in CSV_TIERS.items():
        assert int(row[column]) == bytes_of(count.per_expert, tier), column
    # The one difference: Gemma 4's row says that it leaves norms and scalars out.
    left_out = formula_parts(model)["norms"] if name == GEMMA else 0
    assert int(row["total_params"]) == count.total - left_out
    assert float(row["routed_share_pct"]) == round(100 * count.routed_share, 2)
    assert float(row["routed_plus_shared_share_pct"]) == round(
        100 * count.routed_and_shared_share, 2
    )


def test_what_the_gemma_row_leaves_out_is_700416_parameters() -> None:
    model = build_on_meta(PUBLISHED[GEMMA].to_transformers_config())
    small = {name: p.numel() for name, p in model.named_parameters() if p.ndim == 1}
    assert sum(small.values()) == formula_parts(PUBLISHED[GEMMA])["norms"] == 700_416
    # A scalar of each layer is saved as a buffer and no parameter at all.
    scalars = [b for name, b in model.named_buffers() if name.endswith("layer_scalar")]
    assert [b.numel() for b in scalars] == [1] * 30
    # The two shared matrices of the vocabulary are one: counted once.
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    # In the five full layers values are the keys, so there is nothing to project.
    without_values = [
        layer for layer in range(30) if model.model.layers[layer].self_attn.v_proj is None
    ]
    assert without_values == [5, 11, 17, 23, 29]


def test_gemma_vision_part_is_no_part_of_the_published_count() -> None:
    from transformers import AutoConfig

    text = PUBLISHED[GEMMA].to_transformers_config()
    whole = AutoConfig.for_model("gemma4", text_config=text.to_dict(), vision_config={})
    assert whole.vision_config is not None
    count = count_parameters(whole)  # the default vision part, not the published one
    assert (count.routed, count.shared) == (22_837_985_280, 535_265_280)
    assert count.total > PUBLISHED[GEMMA].count().total


@pytest.mark.parametrize("name", [QWEN, PHI])
def test_checkpoint_manifests_agree_to_the_parameter(name: str) -> None:
    assert 2 * PUBLISHED[name].count().total == manifest_bytes(PUBLISHED[name])


def test_phi_has_biases_that_the_class_does_not_switch_on_by_itself() -> None:
    model = PUBLISHED[PHI]
    config = model.to_transformers_config()
    config.attention_bias = config.lm_head_bias = False
    d = model.dimensions
    queries, keys = d.hidden_size, d.kv_heads * d.hidden_size // d.attention_heads
    biases = d.layers * (2 * queries + 2 * keys) + d.vocab_size
    assert model.count().total - count_parameters(config).total == biases == 359_744


def test_qwen3_next_equals_its_manifest_only_with_the_layer_transformers_does_not_build() -> None:
    model = PUBLISHED[NEXT]
    count = model.count()
    mtp, mtp_routed = mtp_layer_params(model)
    assert 2 * (count.total + mtp) == manifest_bytes(model)
    assert mtp_routed == model.n_experts * count.per_expert
    # The layer inside it is a full-attention layer of the model, which can be counted.
    built = build_on_meta(model.to_transformers_config())
    layer = sum(p.numel() for p in built.model.layers[3].parameters())
    hidden = model.dimensions.hidden_size
    assert mtp == layer + hidden * 2 * hidden + 3 * hidden
    assert not [name for name, _ in built.named_parameters() if "mtp" in name]
    with pytest.raises(ReproError, match="Mixtral-8x7B has no multi-token-prediction"):
        mtp_layer_params(PUBLISHED["Mixtral-8x7B"])


def test_shares_of_qwen3_next_with_and_without_that_layer() -> None:
    """The stated 96 % is none of them: 97.03, 95.06 or 97.04, by what is counted."""
    count = PUBLISHED[NEXT].count()
    mtp, mtp_routed = mtp_layer_params(PUBLISHED[NEXT])
    shares = (
        count.routed_share,
        count.routed / (count.total + mtp),
        (count.routed + mtp_routed) / (count.total + mtp),
    )
    assert [round(100 * share, 2) for share in shares] == [97.03, 95.06, 97.04]


@pytest.mark.parametrize(("stated_name", "name"), TABLE_3.items())
def test_dynaexq_table_3(stated_name: str, name: str) -> None:
    stated = read_paper_table("dynaexq_table3_models.csv")[stated_name]
    count = PUBLISHED[name].count()
    assert int(stated["layers"]) == count.layout.n_layers
    assert int(stated["routed_experts_per_layer"]) == count.layout.n_experts
    assert int(stated["shared_experts"]) == PUBLISHED[name].dimensions.shared_experts
    assert int(stated["top_k"]) == count.layout.top_k
    total = stated["total_params_B"]
    n_decimals = len(total.partition(".")[2])
    assert round(count.total / 1e9, n_decimals) == float(total)
    fraction = float(stated["expert_weight_fraction_pct"])
    # Right for two; 96 for Qwen3-Next is 97 by every count that leaves the experts whole.
    assert round(100 * count.routed_share) - fraction == (1 if name == NEXT else 0)


def test_active_parameters_against_table_3() -> None:
    """3.3 and 3 are cut off, not rounded; 6.6 is right."""
    stated = read_paper_table("dynaexq_table3_models.csv")
    ours = {name: PUBLISHED[name].count().active / 1e9 for name in TABLE_3.values()}
    assert {name: round(value, 2) for name, value in ours.items()} == {
        QWEN: 3.35,
        NEXT: 3.87,
        PHI: 6.64,
    }
    for stated_name, name in TABLE_3.items():
        text = stated[stated_name]["activated_params_B"]
        scale = 10 ** len(text.partition(".")[2])
        assert math.floor(ours[name] * scale) / scale == float(text)


def test_totals_of_pagedweight_table_1() -> None:
    stated = read_paper_table("pagedweight_stated.csv", key="item")
    for stated_name, name in (
        ("Qwen1.5-MoE-A2.7B", "Qwen1.5-MoE-A2.7B"),
        ("Mixtral-8x7B-v0.1", "Mixtral-8x7B"),
        ("Gemma-4-26B-A4B", GEMMA),
    ):
        value = float(stated[f"table1_params {stated_name}"]["value"])
        assert round(PUBLISHED[name].count().total / 1e9, 1) == value


# --- tiers


def test_unknown_tier_is_named() -> None:
    with pytest.raises(UnknownNameError, match=r"precision tier 'int4_g127'.*'int4_g128'"):
        get_tier("int4_g127")
    with pytest.raises(UnknownNameError, match="precision tier 'INT4'"):
        bytes_at(QWEN, 0.5, "fp16", "INT4")


@pytest.mark.parametrize(
    ("params", "n_bits", "group"), [(-1, 4, 128), (128, 0, 128), (128, 33, None), (128, 4, 0)]
)
def test_impossible_tiers_are_refused(params: int, n_bits: int, group: int | None) -> None:
    with pytest.raises(ReproError, match=f"n_bits={n_bits}, group={group}"):
        tier_bytes(params, n_bits, group)


@given(
    params=st.integers(0, 5000),
    n_bits=st.integers(1, 16),
    group=st.one_of(st.none(), st.integers(1, 300)),
    scale_bytes=st.integers(0, 4),
    zero_bytes=st.integers(0, 4),
)
def test_tier_bytes_counts_codes_and_groups_one_by_one(
    params: int, n_bits: int, group: int | None, scale_bytes: int, zero_bytes: int
) -> None:
    n_code_bytes = len(range(0, params * n_bits, 8))
    n_groups = len(range(0, params, group)) if group else 0
    expected = n_code_bytes + sum(scale_bytes + zero_bytes for _ in range(n_groups))
    assert tier_bytes(params, n_bits, group, scale_bytes, zero_bytes) == expected


@given(rows=st.integers(1, 40), columns=st.integers(1, 400), tier=st.sampled_from(sorted(TIERS)))
def test_rows_cost_at_least_the_run_and_equal_it_when_groups_divide_them(
    rows: int, columns: int, tier: str
) -> None:
    by_row, flat = matrix_bytes([(rows, columns)], tier), bytes_of(rows * columns, tier)
    assert by_row >= flat
    whole = columns * (TIERS[tier].group or 8)
    assert matrix_bytes([(rows, whole)], tier) == bytes_of(rows * whole, tier)


@pytest.mark.parametrize("tier", TIERS.values(), ids=lambda tier: tier.name)
def test_bits_per_weight_is_bytes_over_weights(tier: Tier) -> None:
    n_weights = 128 * 64
    assert bytes_of(n_weights, tier.name) * 8 / n_weights == tier.bits_per_weight


def test_groups_cross_rows_only_in_gemma() -> None:
    """Width 704 is 5.5 groups of 128: stored by row, an expert is 2,816 bytes larger."""
    differing = {
        (name, tier): matrix_bytes(count.layout.expert_shapes, tier)
        - bytes_of(count.per_expert, tier)
        for name, count in ((name, PUBLISHED[name].count()) for name in ALL)
        for tier in TIERS
        if matrix_bytes(count.layout.expert_shapes, tier) != bytes_of(count.per_expert, tier)
    }
    assert differing == {(GEMMA, "int4_g128"): 2816, (GEMMA, "int4_g128_zero"): 5632}


# --- mixtures


@pytest.mark.parametrize(("share", "bits"), [(Fraction(1, 3), 8.2), (Fraction(1, 5), 6.6)])
def test_uniform_width_of_the_same_bytes(share: Fraction, bits: float) -> None:
    hi, lo = get_tier("fp16").bits_per_weight, get_tier("int4_g128_zero").bits_per_weight
    assert round(float(share * 16 + (1 - share) * Fraction(lo)), 1) == bits
    assert (hi, lo) == (16.0, 4.25)
    n_bytes = bytes_at(QWEN, float(share), "fp16", "int4_g128_zero")
    assert round(uniform_bits(QWEN, n_bytes), 1) == bits


def test_the_registered_pools_of_qwen3_30b_to_the_byte() -> None:
    """43 + 85 experts of 128: FP16 over the native layout with scale and zero point."""
    n_bytes = bytes_at(QWEN, 43 / 128, "fp16", "int4_g128_zero")
    assert n_bytes == 48 * (43 * 9_437_184 + 85 * 2_506_752) == 29_705_895_936
    assert round(n_bytes / 1e9, 2) == overhead("resident_expert_pools", QWEN)


def test_the_stated_pools_of_phi_leave_no_room_for_an_fp16_expert_in_each_layer() -> None:
    """What is stated equals every expert at native INT4, and not one at FP16."""
    stated = overhead("resident_expert_pools", PHI)
    assert round(bytes_at(PHI, 0, "fp16", "int4_g128_zero") / 1e9, 2) == stated
    # With the smaller INT4 layout a handful fits, of 512: still not one for each layer.
    spare_bytes = (stated + 0.005) * 1e9 - bytes_at(PHI, 0, "fp16", "int4_g128")
    expert = PUBLISHED[PHI].params_per_expert
    upgrade_bytes = bytes_of(expert, "fp16") - bytes_of(expert, "int4_g128")
    assert 0 < spare_bytes // upgrade_bytes < 6 < PUBLISHED[PHI].n_moe_layers


@pytest.mark.parametrize(
    ("name", "hi_tier", "lo_tier"),
    [
        (QWEN, "fp16", "int4_g128"),
        (NEXT, "int4_g128", "int2_g64"),
        (PHI, "fp16", "int4_g128"),
    ],
)
def test_host_caches_hold_both_versions_of_every_expert(
    name: str, hi_tier: str, lo_tier: str
) -> None:
    stated = overhead("pinned_host_expert_cache", name)
    both = bytes_at(name, 1, hi_tier, lo_tier) + bytes_at(name, 0, hi_tier, lo_tier)
    n_decimals = len(str(stated).partition(".")[2])
    assert round(both / 1e9, n_decimals) == stated


@given(
    name=st.sampled_from(ALL),
    share=st.floats(0, 1),
    more=st.floats(0, 1),
    pair=st.sampled_from([("fp16", "int4_g128"), ("int4_g128", "int2_g64"), ("fp16", "int2")]),
)
def test_mixture_bytes_lie_between_the_tiers_and_grow_with_the_share(
    name: str, share: float, more: float, pair: tuple[str, str]
) -> None:
    low, high = bytes_at(name, 0, *pair), bytes_at(name, 1, *pair)
    lower, upper = (bytes_at(name, s, *pair) for s in sorted((share, more)))
    assert low <= lower <= upper <= high
    model = PUBLISHED[name]
    n_hi = n_hi_experts(model.n_experts, share)
    assert abs(n_hi - share * model.n_experts) <= 0.5
    step = (high - low) // model.n_experts
    assert bytes_at(name, share, *pair) == low + n_hi * step


@pytest.mark.parametrize("share", [-0.01, 1.01, math.nan])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ReproError, match="n_hi_share="):
        bytes_at(QWEN, share, "fp16", "int4")


@given(name=st.sampled_from(ALL), bits=st.floats(1.3, 18), tier=st.sampled_from(sorted(TIERS)))
def test_best_uniform_width_fits_and_the_next_does_not(name: str, bits: float, tier: str) -> None:
    model, t = PUBLISHED[name], TIERS[tier]
    n_experts = model.n_moe_layers * model.n_experts
    n_bytes = int(n_experts * model.params_per_expert * bits / 8)
    width = best_uniform_width(model, n_bytes, tier)

    def total(n_bits: int) -> int:
        groups = (t.group, t.scale_bytes, t.zero_bytes)
        return n_experts * tier_bytes(model.params_per_expert, n_bits, *groups)

    assert total(width) <= n_bytes
    assert width == 16 or total(width + 1) > n_bytes


def test_bytes_that_hold_no_bit_are_refused() -> None:
    with pytest.raises(ReproError, match="do not hold one bit"):
        best_uniform_width(QWEN, 1000, "int4_g128")


def test_layouts_and_names_give_the_same_bytes() -> None:
    layout = PUBLISHED[QWEN].count().layout
    for share in (0.0, 0.2, 1.0):
        assert bytes_at(layout, share, "fp16", "int4") == bytes_at(QWEN, share, "fp16", "int4")


def test_a_count_is_kept_for_the_process() -> None:
    first: ParameterCount = PUBLISHED[QWEN].count()
    assert PUBLISHED[QWEN].count() is first
