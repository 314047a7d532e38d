"""Findings on the published results: perplexity, accuracy, latency, throughput, sizes."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from repro.reporting import paper
from repro.reporting.findings import Item, cell, decide

# Sizes of the public test sets; the drafts state their own subsets in a note.
SET_SIZES = {"GPQA": 198, "HumanEval": 164, "GSM8K": 1319, "AIME25": 30, "MMLU-Pro": 12032}
PRINTED_STEP = 0.01  # accuracies are printed with two decimals
FIVE_TASKS = ("MMLU-Pro", "GPQA", "AIME25", "GSM8K", "HumanEval")
_VERSION = {
    "v3_text": "version 3",
    "authors_working_016b10e6": "first working table",
    "authors_working_ae12e283": "second working table",
    "authors_draft_2026": "2026 drafts",
}
# The working table's methods under the names of version 3.
SAME_METHOD = {"FP16": "FP16", "INT4": "W4A16", "INT2": "W2A16", "DynaExq": "DynaExq-A6000"}


def is_ratio(percent: float, n: int) -> bool:
    """Whether ``percent`` with two decimals can be k of ``n``, rounded or cut off."""
    nearest = percent * n / 100
    for k in range(math.floor(nearest) - 1, math.ceil(nearest) + 2):
        exact = 100 * k / n
        is_rounded = abs(exact - percent) <= PRINTED_STEP / 2 + 1e-9
        is_cut_off = -1e-9 <= exact - percent < PRINTED_STEP
        if is_rounded or is_cut_off:
            return True
    return False


def stated_sizes(note: str | None) -> dict[str, int]:
    """Set sizes that a row's own note states, e.g. ``198 GPQA-Diamond``."""
    found = re.findall(r"(\d+) (MMLU-Pro|GPQA|AIME25|GSM8K|HumanEval)", note or "")
    return {name: int(number) for number, name in found}


def impossible_accuracies() -> Item:
    """A8: accuracies that are not k/n for the set they are said to be measured on."""
    checked: Counter[str] = Counter()
    impossible: Counter[str] = Counter()
    in_v3: list[str] = []
    for row in paper.load_table("table4_quality"):
        sizes = {**SET_SIZES, **stated_sizes(row["note"])}
        n = sizes.get(row["benchmark"])
        if n is None:
            continue
        checked[row["version"]] += 1
        if not is_ratio(row["accuracy_pct"], n):
            impossible[row["version"]] += 1
            if row["version"] == "v3_text":
                in_v3.append(f"{row['benchmark']} {row['accuracy_pct']:.2f} (of {n})")
    counts = ", ".join(
        f"{_VERSION.get(version, version)} {impossible[version]} of {checked[version]}"
        for version in checked
    )
    return Item(
        "A8",
        "Accuracies that no whole number of right answers gives",
        f"Neither rounded nor cut off: {', '.join(in_v3) or 'none'} in version 3. Cells by "
        f"version: {counts}.",
        decide(bool(in_v3), "contradiction"),
        "with one greedy answer per question these cells cannot be measurements on the named sets",
        ("table4_quality",),
        {"v3": in_v3, "impossible": dict(impossible), "checked": dict(checked)},
    )


def unsupported_rows() -> Item:
    """A9: rows the authors themselves say no registered result supports."""
    rows = [
        row for row in paper.load_table("table4_quality") if row["version"] == "authors_draft_2026"
    ]
    marked = sum("no registered artefact" in str(row["note"]) for row in rows)
    return Item(
        "A9",
        "Accuracy rows without a registered result",
        f"{marked} of the {len(rows)} accuracy cells of the authors' later draft carry their note "
        "that no registered result supports them.",
        decide(marked > 0, "differs"),
        "accuracies of the paper are shown, never used as a tolerance",
        ("table4_quality",),
        {"n_marked": marked, "n": len(rows)},
    )


def _registered(series: str, metric: str) -> float:
    return float(
        next(
            row["value"]
            for row in paper.load_table("figures_stated")
            if row["figure"] == "registered artefact"
            and str(row["series"]).startswith(series)
            and row["metric"] == metric
        )
    )


def throughput() -> Item:
    """A10: registered runs against the manuscript's ablation table."""
    ablation = {"figure": "ablation (later draft)", "model": "Qwen3-30B", "series": "Full"}
    printed = float(cell("figures_stated", "value", **ablation, metric="throughput"))
    p99_s = float(cell("figures_stated", "value", **ablation, metric="P99_latency"))
    batch = int(cell("figures_stated", "x", **ablation, metric="throughput"))
    dynaexq = _registered("DynaExq", "throughput_mean")
    static = _registered("static", "throughput_mean")
    source = next(
        row["source"]
        for row in paper.load_table("figures_stated")
        if row["figure"] == "registered artefact"
    )
    lengths = re.search(r"(\d+) in / (\d+) out", source)
    n_out = int(lengths.group(2)) if lengths else 0
    duration_s = batch * n_out / printed
    return Item(
        "A10",
        "Throughput of Qwen3-30B at batch 32: manuscript against registered runs",
        f"Printed {printed:.0f} tok/s, registered {dynaexq:.1f} tok/s: {printed / dynaexq:.1f} "
        f"times apart. {batch} x {n_out} = {batch * n_out} tokens at {printed:.0f} tok/s take "
        f"{duration_s:.1f} s, printed is a P99 latency of {p99_s:.0f} s. In the registered runs "
        f"static INT4 ({static:.1f} tok/s) is {dynaexq / static:.1f} times slower than DynaExq.",
        decide(printed / dynaexq > 1.1 or p99_s > 2 * duration_s, "contradiction"),
        "kernels more than the policy seem to decide: compare policies on the same kernels",
        ("figures_stated",),
        {
            "ratio": printed / dynaexq,
            "duration_s": duration_s,
            "p99_s": p99_s,
            "static_tok_per_s": static,
            "dynaexq_tok_per_s": dynaexq,
        },
    )


def _working_latency() -> dict[tuple[str, str], dict[str, float]]:
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in paper.load_table("figures_stated"):
        if row["version"] == "authors_working_016b10e6":
            found.setdefault((row["model"], row["series"]), {})[row["metric"]] = row["value"]
    return found


def tensor_parallel() -> Item:
    """A12: decode throughput of two-GPU rows is half of what their TPOP says."""
    split: list[float] = []
    single: list[float] = []
    for (_, series), row in _working_latency().items():
        product = row["decode_throughput"] * row["TPOP"] / 1000.0
        (split if " TP " in f" {series} " else single).append(product)
    halved = all(abs(product - 0.5) < 0.01 for product in split)
    return Item(
        "A12",
        "Throughput of two-GPU rows is half of 1000 / TPOP",
        f"Decode tok/s times ms per token: {', '.join(f'{p:.3f}' for p in split)} for the "
        f"{len(split)} two-GPU rows, {min(single):.2f} to {max(single):.2f} for the "
        f"{len(single)} one-GPU rows.",
        decide(halved and min(single) > 0.9, "contradiction"),
        "the two-GPU rows look like throughput per GPU, and cannot stand beside the others",
        ("figures_stated",),
        {"split": split, "single": single},
    )


def latency_formula() -> Item:
    """L1: end-to-end latency against TTFT and time per token."""
    fits: list[str] = []
    fails: list[str] = []
    for (model, series), row in _working_latency().items():
        expected = row["TTFT"] + 256 * row["TPOP"] / 1000.0
        name = f"{model} {series}"
        within = abs(expected - row["E2E_at_256_tokens"]) <= 0.005 + 0.005 + 256 * 0.000005
        (fits if within else fails).append(name)
    return Item(
        "L1",
        "End-to-end latency is not always TTFT plus 256 tokens",
        f"{len(fits)} of {len(fits) + len(fails)} rows agree within rounding; not: "
        f"{', '.join(fails) or 'none'}.",
        decide(bool(fails), "contradiction"),
        "the rows were not computed by one formula",
        ("figures_stated",),
        {"n_fit": len(fits), "n": len(fits) + len(fails)},
    )


def five_task_means() -> Item:
    """Q1: averages of version 3 against the cells of the working table."""
    cells: dict[tuple[str, str], dict[str, float]] = {}
    averages: dict[tuple[str, str], float] = {}
    for row in paper.load_table("table4_quality"):
        place = (row["model"], row["method"])
        if row["version"] == "authors_working_016b10e6":
            cells.setdefault(place, {})[row["benchmark"]] = row["accuracy_pct"]
        elif row["version"] == "v3_text" and row["benchmark"] == "Average":
            averages[place] = row["accuracy_pct"]
    same: list[str] = []
    other: list[str] = []
    facts: dict[str, Any] = {}
    for (model, method), printed in averages.items():
        tasks = cells.get((model, SAME_METHOD[method]))
        if tasks is None:
            continue
        mean = sum(tasks[name] for name in FIVE_TASKS) / len(FIVE_TASKS)
        facts[f"{model} {method}"] = (mean, printed)
        close = abs(mean - printed) <= 0.005 + 1e-9
        (same if close else other).append(f"{model} {method} {mean:.2f} / {printed:.2f}")
    n_named = len({"WikiText-2", *FIVE_TASKS})
    return Item(
        "Q1",
        "Averages of version 3 are means of five tasks, and DynaExq's rows have no cells",
        f"Mean of {len(FIVE_TASKS)} tasks of the working table / printed average. Equal: "
        f"{', '.join(same) or 'none'}. Not equal: {', '.join(other) or 'none'}.",
        decide(bool(other), "contradiction"),
        f"{n_named} benchmarks are named, {len(FIVE_TASKS)} are averaged; no stored table holds "
        "the cells of the rows that differ",
        ("table4_quality",),
        {"rows": facts, "n_equal": len(same), "n_other": len(other)},
    )


def figure3() -> Item:
    """A6: the series of Figure 3."""
    rows = [row for row in paper.load_table("figures_stated") if row["figure"] == "Fig 3"]
    first = {
        row["x"]: row["value"]
        for row in rows
        if (row["version"], row["model"]) == ("authors_notebook", "Qwen3-80B")
    }
    second = {row["x"]: row["value"] for row in rows if row["version"] == "authors_working_ppl_md"}
    points = sorted(set(first) & set(second))
    gaps = [first[x] - second[x] for x in points]
    estimated = sum(row["estimated"] for row in rows)
    return Item(
        "A6",
        "Figure 3: two series for the 80B model, and values labelled as estimates",
        f"At the same {len(points)} shares one series runs from {first[points[0]]:.2f} to "
        f"{first[points[-1]]:.2f} perplexity, the other from {second[points[0]]:.2f} to "
        f"{second[points[-1]]:.2f}: {min(gaps):.2f} to {max(gaps):.2f} apart. "
        f"{estimated} stored values are labelled as estimated in the authors' notes.",
        decide(min(abs(gap) for gap in gaps) > 0.005, "contradiction"),
        "no value of Figure 3 is a measured reference",
        ("figures_stated",),
        {"n_points": len(points), "smallest_gap": min(gaps), "n_estimated": estimated},
    )


def replay_tiers() -> Item:
    """A7: the tiers of a replay."""
    replay = {
        row["x"]: row["value"]
        for row in paper.load_table("figures_stated")
        if row["version"] == "authors_measured"
    }
    figure = {
        row["x"]: row["value"]
        for row in paper.load_table("figures_stated")
        if (row["version"], row["model"]) == ("authors_notebook", "Qwen3-30B")
        and row["figure"] == "Fig 3"
    }
    all_high, all_low = replay[100], replay[0]
    fp16, int4 = figure[0], figure[100]
    mislabelled = abs(all_high - int4) < abs(all_high - fp16)
    return Item(
        "A7",
        "A replay curve labelled FP16/INT4 starts where Figure 3 ends",
        f"All experts high gives {all_high:.3f} perplexity in the replay. In Figure 3 all FP16 "
        f"is {fp16:.3f} and all INT4 {int4:.3f}: the replay's high tier is "
        f"{abs(all_high - int4):.3f} from INT4 and {abs(all_high - fp16):.3f} from FP16; its "
        f"low tier gives {all_low:.3f}.",
        decide(mislabelled, "contradiction"),
        "the replay's tiers are INT4 and INT2, as the raw file names them (inferred)",
        ("figures_stated",),
        {"to_int4": abs(all_high - int4), "to_fp16": abs(all_high - fp16)},
    )


def resident_share() -> Item:
    """A11: the share of high-precision experts that was meant and that was run."""
    rows = paper.load_table("figures_stated")
    solved = next(
        match
        for row in rows
        if row["figure"] == "registered artefact"
        and (match := re.search(r"(\d+)/(\d+) FP16 experts", str(row["series"])))
    )
    share = 100.0 * int(solved[1]) / int(solved[2])
    ablation = {"figure": "ablation (later draft)", "model": "Qwen3-30B", "series": "Full"}
    full = cell("figures_stated", "value", **ablation, metric="accuracy")
    default = float(
        cell(
            "figures_stated",
            "x",
            figure="budget sensitivity (later draft)",
            model="Qwen3-30B",
            metric="avg_accuracy",
            value=full,
        )
    )
    return Item(
        "A11",
        "The share of high-precision experts is not the one that was run",
        f"The ablation's full system ({full:.2f} %) is the budget sweep's point at "
        f"{default:.0f} % high experts; the registered run solved its budget to "
        f"{solved[1]}/{solved[2]} = {share:.1f} %.",
        decide(abs(share - default) > 1.0, "contradiction"),
        "always report the share that was resident, not the one that was meant",
        ("figures_stated",),
        {"registered_pct": share, "default_pct": default},
    )


def expert_fraction() -> Item:
    """A13: share of weights in experts."""
    worst: tuple[float, str, float, float] = (0.0, "", 0.0, 0.0)
    lines: list[str] = []
    for row in paper.load_table("table3_models"):
        name = row["model"].removesuffix("-2507").removesuffix("-Instruct")
        computed = next(
            other["routed_share_pct"]
            for other in paper.load_table("model_bytes_computed")
            if str(other["model"]).startswith(name)
        )
        printed = row["expert_weight_fraction_pct"]
        lines.append(f"{name} printed {printed} %, counted {computed:.2f} %")
        if abs(printed - computed) > worst[0]:
            worst = (abs(printed - computed), name, printed, computed)
    return Item(
        "A13",
        "Expert share of the weights",
        "; ".join(lines) + ".",
        decide(worst[0] > 0.5, "contradiction"),
        f"{worst[1]} is {worst[0]:.2f} points off, more than rounding",
        ("table3_models", "model_bytes_computed"),
        {"worst_model": worst[1], "printed_pct": worst[2], "computed_pct": worst[3]},
    )
