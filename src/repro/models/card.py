"""Model cards of the bundled models, written from what is recorded beside the weights.

``python -m repro.models.card`` rewrites ``README.md`` of each bundled model from its recipe,
training log and measured quality, so that no number in a card is typed by hand (a test
compares).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repro.files import write_text
from repro.models.corpus import SOURCES
from repro.models.layout import inspect_config, read_config
from repro.models.specs import CONTEXT_TOKENS, VOCAB_SIZE, get_spec
from repro.paths import models_dir
from repro.workloads.tasks import TASKS

_TEST_SETS = {"wikitext2": "WikiText-2 test", "gsm8k": "GSM8K test", "humaneval": "HumanEval"}


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _last_log_row(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8").splitlines()[-1]))


def _data_table(rows_in_second: dict[str, float]) -> list[str]:
    lines = ["| source | share of tokens | licence | rows seen in stage 2 |", "|---|---|---|---|"]
    for source in SOURCES:
        part = rows_in_second.get(source.name)
        seen = "newly generated" if part is None else f"{part:.0%}"
        lines.append(f"| {source.name} | {source.weight:.1%} | {source.licence} | {seen} |")
    return lines


def _quality_table(qualities: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| | " + " | ".join(qualities) + " |", "|---" * (1 + len(qualities)) + "|"]
    for key, title in _TEST_SETS.items():
        values = [q["test_sets"][key]["bits_per_byte"] for q in qualities.values()]
        lines.append(f"| {title}, bits per byte | " + " | ".join(f"{v:.4f}" for v in values) + " |")
    balance = [q["routing"] for q in qualities.values()]
    spans = [
        f"{min(b['effective_experts_fraction']):.2f} to {max(b['effective_experts_fraction']):.2f}"
        for b in balance
    ]
    lines.append("| effective experts / E, by layer | " + " | ".join(spans) + " |")
    unused = [str(sum(b["n_unused"])) for b in balance]
    lines.append(
        f"| unused experts in {balance[0]['n_tokens']:,} mixed tokens | "
        + " | ".join(unused)
        + " |"
    )
    return lines


def _task_table(quality: dict[str, Any]) -> list[str]:
    levels = sorted({level for task in TASKS.values() for level in task.levels})
    lines = [
        "| task | " + " | ".join(f"level {level}" for level in levels) + " |",
        "|---" * (1 + len(levels)) + "|",
    ]
    for name in TASKS:
        cells = [quality["tasks"].get(f"{name}/{level}") for level in levels]
        shown = [f"{100 * c['accuracy']:.1f}" if c else "" for c in cells]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


def model_card(folder: Path) -> str:
    """The card of one bundled model as Markdown."""
    recipe, layout = _read(folder / "recipe.json"), inspect_config(read_config(folder))
    first, second = recipe["stages"]
    logs = [_last_log_row(folder / f"training-stage{i}.jsonl") for i in (1, 2)]
    qualities = {
        "final": _read(folder / "quality.json"),
        "stage 1": _read(folder / "quality-stage1.json"),
        "stage 2": _read(folder / "quality-stage2.json"),
    }
    made = recipe["trained_on"]
    shared = (
        f", beside a gated shared expert of width {layout.shared_intermediate}"
        if layout.has_shared
        else ""
    )
    lines = [
        f"# {folder.name}",
        "",
        f"{get_spec(folder.name).summary}. A small Mixture-of-Experts language model made for "
        "measuring routing, quantisation and serving; it is not meant to be useful to talk to.",
        "",
        f"- {layout.n_layers} layers, hidden size {layout.hidden}, {layout.n_experts} routed "
        f"experts of width {layout.intermediate}, top-{layout.top_k}{shared}",
        f"- byte-level BPE of {VOCAB_SIZE:,} tokens with single digits; trained context "
        f"{CONTEXT_TOKENS:,} tokens; bf16 safetensors",
        "- loads with plain `AutoModelForCausalLM.from_pretrained`, or checked with "
        f'`repro.load_model("{folder.name}")`',
        "",
        "## Data",
        "",
        "Public corpora and generated text. Nothing of the corpora is in this repository. Lines of "
        "WikiText-2 that share text with a test set were left out, as were documents under the "
        "GFDL. The MATH problems are test problems of that set outside MATH-500: do not report "
        "MATH-test scores of this model.",
        "",
        *_data_table(recipe["second_stage_share_of_rows"]),
        "",
        "## Recipe",
        "",
        f"Trained on one {made['device']} (torch {made['torch']}, transformers "
        f"{made['transformers']}, {made['date']}) by `python -m repro.models.train`, constants in "
        "`recipe.json`, logs in `training-stage1.jsonl` and `training-stage2.jsonl`.",
        "",
        f"1. Stage 1: {logs[0]['tokens'] / 1e6:,.0f} M tokens in {logs[0]['trained_s'] / 60:.1f} "
        f"minutes, {first['short_steps']:,} steps at {first['short_tokens']:,} tokens per sequence "
        f"and {first['long_steps']:,} at {first['long_tokens']:,}; Muon for matrices, AdamW for "
        f"the rest, peak rate {first['learning_rate']}. The balance coefficient of each layer was "
        "allowed to fall to nothing, and some experts were left without traffic.",
        f"2. Stage 2: those experts were replaced by copies of busy ones, and training went on for "
        f"{logs[1]['tokens'] / 1e6:,.0f} M tokens at peak rate {second['learning_rate']} with a "
        "floor under the coefficient, on part of the corpora (table above).",
        f"3. The committed weights are {1 - recipe['share_of_second_stage']:.0%} stage 1 and "
        f"{recipe['share_of_second_stage']:.0%} stage 2, revived experts whole from stage 2 "
        "(`python -m repro.models.average`). The share was chosen on WikiText-2 validation and "
        "MATH-500. One tensor departs from it: the program of that day visited the embedding, "
        "which is tied to the head, twice, so it stands at "
        f"{1 - (1 - recipe['share_of_second_stage']) ** 2:.2%} stage 2. The program is mended and "
        "would give that tensor another value; all that is measured here is of these weights.",
        "",
        "## Quality",
        "",
        "Disjoint windows of 1,024 tokens, first token unscored, bytes of the scored tokens; whole "
        f"test sets. Stages: {made['device']}, bf16; final: "
        f"{qualities['final']['provenance']['device']}, "
        f"{qualities['final']['provenance']['dtype']}.",
        "",
        *_quality_table(qualities),
        "",
        f"Exact answers of the final model on generated tasks, percent of "
        f"{qualities['final']['provenance']['n_items_per_task']} items, greedy:",
        "",
        *_task_table(qualities["final"]),
        "",
        "Evaluation prompts and training texts come from different seeds, but small levels meet "
        "all the same: how many do is counted in `repro.workloads.tasks.base`. In the training "
        "logs the validation loss of `tasks` jumps where the long phase begins, because its "
        "windows then began inside documents; that is the measurement, not the model.",
        "",
        "## Limits",
        "",
        "English prose, school mathematics and Python only. It knows few facts and makes up the "
        "rest; it was never tuned to follow instructions or to be safe. Its exact answers hold for "
        "the generated tasks' own wording. Corpora were seen many times over, so text close to "
        "them may be repeated word for word.",
        "",
        "## Licence",
        "",
        "Weights: Apache-2.0 like the code, as far as the licences of the data above allow; the "
        "share-alike sources (WikiText-2, some textbooks) are named there.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the cards of all bundled models."""
    for folder in sorted(models_dir().iterdir()):
        if (folder / "recipe.json").is_file():
            write_text(folder / "README.md", model_card(folder))
            print(folder.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
