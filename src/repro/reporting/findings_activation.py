"""Findings on the activation tables (Tables 1 and 2)."""

from __future__ import annotations

from repro.reporting import paper
from repro.reporting.findings import Item, decide

ROUNDING_PP = 0.05  # half a unit of the last printed place, one decimal


def activation(stage: str, version: str, model: str) -> dict[int, float]:
    """One published activation row, batch size to percent."""
    for row in paper.activation_rows(stage, end_points_only=True):
        if (row["version"], row["base_model"], row["corrected"]) == (version, model, False):
            return dict(row["values"])
    raise LookupError(f"no {stage} row of {model!r} in version {version!r}")


def phantom_layer() -> Item:
    """A1: a layer without experts in the mean."""
    config = paper.model_config("DeepSeek-V2-Lite")
    factor = paper.phantom_factor()
    first = activation("decode", "authors_draft_8e92d414", "DeepSeek-V2-Lite")[1]
    plateau = max(activation("prefill", "authors_draft_8e92d414", "DeepSeek-V2-Lite").values())
    exact = 100.0 * config["top_k"] / config["routed_experts"]
    explained = (
        abs(first - exact * factor) <= ROUNDING_PP and abs(plateau - 100 * factor) <= ROUNDING_PP
    )
    return Item(
        "A1",
        "DeepSeek-V2-Lite's activation rows average over a layer without experts",
        f"One token activates {config['top_k']} of {config['routed_experts']} experts, "
        f"{exact:.2f} %; printed is {first:.1f} %. Prefill stops at {plateau:.1f} %. Both are "
        f"the true values times {config['moe_layers']}/{config['layers']} "
        f"({exact * factor:.2f} % and {100 * factor:.1f} %).",
        decide(explained and abs(first - exact) > ROUNDING_PP, "contradiction"),
        f"multiply the rows by {config['layers']}/{config['moe_layers']}: "
        f"{plateau:.1f} % is {plateau / factor:.1f} %",
        ("table1_decode_activation", "table2_prefill_activation", "model_configs"),
        {
            "factor": factor,
            "exact_pct": exact,
            "printed_pct": first,
            "plateau_pct": plateau,
            "corrected_plateau_pct": plateau / factor,
        },
    )


def raw_files() -> Item:
    """A2: the text against the raw files."""
    gaps: dict[str, float] = {}
    for stage in ("decode", "prefill"):
        text = activation(stage, "v3_text", "Qwen3-30B-A3B")
        raw = activation(stage, "authors_raw_json", "Qwen3-30B-A3B")
        for batch, value in text.items():
            gaps[f"{stage}, batch {batch}"] = raw[batch] - value
    largest = max(abs(gap) for gap in gaps.values())
    return Item(
        "A2",
        "Version 3's Qwen3-30B-A3B rows are the authors' raw files",
        f"The raw values differ from the {len(gaps)} end points printed in the text by at most "
        f"{largest:.3f} points, which is rounding.",
        decide(largest > ROUNDING_PP + 1e-9, "contradiction"),
        "the unprinted cells of version 3 can be read from the raw files (inferred)",
        ("table1_decode_activation", "table2_prefill_activation"),
        {"largest_gap_pp": largest, "n": len(gaps)},
    )


def replaced_row() -> Item:
    """A3: the row that was withdrawn."""
    old = activation("decode", "v3_text", "Qwen3-30B-A3B")[32]
    new = activation("decode", paper.RECOLLECTED, "Qwen3-30B-A3B")[32]
    old_prefill = activation("prefill", "v3_text", "Qwen3-30B-A3B")[32]
    new_prefill = activation("prefill", paper.RECOLLECTED, "Qwen3-30B-A3B")[32]
    return Item(
        "A3",
        "The decode row of Qwen3-30B-A3B was withdrawn and replaced",
        f"Batch 32: {old:.1f} % became {new:.1f} % ({old / new:.1f} times less); prefill "
        f"{old_prefill:.1f} % became {new_prefill:.1f} %.",
        decide(abs(old - new) > ROUNDING_PP, "differs"),
        "which decode step is sampled changes the answer; both protocols are measured here",
        ("table1_decode_activation", "table2_prefill_activation"),
        {"old_pct": old, "new_pct": new, "ratio": old / new},
    )


def stated_reason() -> Item:
    """A4: the reason given for it."""
    config = paper.model_config("Qwen3-30B-A3B")
    one_token = 100.0 * config["top_k"] / config["routed_experts"]
    raw = activation("decode", "authors_raw_json", "Qwen3-30B-A3B")
    exact = abs(raw[1] - one_token) < 1e-6
    below = raw[2] <= 2 * one_token
    return Item(
        "A4",
        "The reason given for the withdrawal does not fit the withdrawn values",
        f"Activity summed over several steps would exceed {config['top_k']}/"
        f"{config['routed_experts']} = {one_token:.2f} % at batch 1; the raw value is "
        f"{raw[1]:.2f} %. At batch 2 it is {raw[2]:.2f} %, not above twice that.",
        decide(exact and below, "contradiction"),
        "the old row is one step as well, so both rows may be right for different steps",
        ("table1_decode_activation", "model_configs"),
        {"one_token_pct": one_token, "raw_batch1_pct": raw[1], "raw_batch2_pct": raw[2]},
    )


def beyond_uniform() -> Item:
    """A5: values that a batch cannot reach."""
    beyond: list[str] = []
    doubled: list[str] = []
    n_values = 0
    for row in paper.activation_rows("decode"):
        if row["corrected"]:
            continue
        config = paper.model_config(row["base_model"])
        for batch, value in row["values"].items():
            n_values += 1
            bound = paper.uniform_activation(config["routed_experts"], config["top_k"], batch)
            if value - ROUNDING_PP > bound:
                beyond.append(f"{row['base_model']} batch {batch}: {value:.1f} > {bound:.1f} %")
            half = row["values"].get(batch // 2) if batch > 1 else None
            if half is not None and (value - ROUNDING_PP) > 2 * (half + ROUNDING_PP):
                doubled.append(
                    f"{row['base_model']} batch {batch // 2} to {batch}: {half:.1f} to "
                    f"{value:.1f} %, {value / half:.2f} times"
                )
    return Item(
        "A5",
        "A decode value above independent uniform routing, and more than doubled",
        f"Of {n_values} printed decode values, above the uniform bound: "
        f"{'; '.join(beyond) or 'none'}. More than doubled by doubling the batch: "
        f"{'; '.join(doubled) or 'none'}.",
        decide(bool(beyond or doubled), "contradiction"),
        "a batch is two halves, so its experts are at most those of both; the authors mark "
        "this row as unverified",
        ("table1_decode_activation", "model_configs"),
        {"beyond": beyond, "doubled": doubled},
    )
