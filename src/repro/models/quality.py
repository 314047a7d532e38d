"""How good a trained model is: bits per byte, exact task answers, and how it routes.

The targets of the training recipe are measured here, on the checkpoint as plain
Transformers loads it (bf16 files), never on the trainer's own float32 weights:
``python -m repro.models.quality MODEL --data DIR --out FILE``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from repro.errors import DataUnavailableError, ReproError, UnknownNameError
from repro.files import write_text
from repro.integration.routing import capture_routing
from repro.models.integrity import fingerprint
from repro.models.loading import load_model
from repro.workloads.base import load_workload
from repro.workloads.tasks import TASKS, TaskItem, get_task, is_correct
from repro.workloads.tokens import (
    bits_per_byte,
    encode_stream,
    pad_batch,
    scored_bytes,
    token_byte_lengths,
    windows,
)

WINDOW_TOKENS = 1024
TEST_SETS = ("wikitext2", "gsm8k", "humaneval")


@torch.no_grad()
def window_losses(model: Any, token_windows: np.ndarray, batch_size: int = 16) -> np.ndarray:
    """Summed loss in nats of each window ``[n]``: tokens ``[n, L]``, the first unscored."""
    found = []
    for start in range(0, len(token_windows), batch_size):
        ids = torch.from_numpy(token_windows[start : start + batch_size]).to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        found.append(loss.view(len(ids), -1).double().sum(1).cpu().numpy())
    return np.concatenate(found)


def _test_windows(tokenizer: Any, name: str, data_dir: Path | None) -> np.ndarray:
    workload = load_workload(name, source="folder", data_dir=data_dir)
    cut = windows(encode_stream(tokenizer, workload), WINDOW_TOKENS)
    if not len(cut):
        raise DataUnavailableError(
            f"test set {name!r} fills no window of {WINDOW_TOKENS} tokens: give the whole file"
        )
    return cut


def test_set_quality(
    model: Any, tokenizer: Any, name: str, data_dir: Path | None, max_windows: int | None = None
) -> dict[str, Any]:
    """Bits per byte and perplexity of one test set in disjoint windows of 1,024 tokens.

    Raises:
        DataUnavailableError: the test set is missing, damaged or shorter than a window.
    """
    cut = _test_windows(tokenizer, name, data_dir)[:max_windows]
    loss = window_losses(model, cut)
    n_bytes = int(scored_bytes(cut, token_byte_lengths(tokenizer)).sum())
    n_tokens = len(cut) * (WINDOW_TOKENS - 1)
    total = float(loss.sum())
    return {
        "bits_per_byte": bits_per_byte(total, n_bytes),
        "perplexity": float(np.exp(total / n_tokens)),
        "n_tokens": n_tokens,
        "n_bytes": n_bytes,
        "n_windows": len(cut),
    }


@torch.no_grad()
def generate_texts(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int, batch_size: int
) -> list[str]:
    """Greedy continuations, cut at the end-of-text token."""
    found: list[str] = []
    for start in range(0, len(prompts), batch_size):
        encoded = tokenizer(list(prompts[start : start + batch_size]))["input_ids"]
        ids, mask = pad_batch(encoded, tokenizer.pad_token_id, side="left")
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.long().to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        for row in out[:, ids.shape[1] :].tolist():
            end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
            found.append(tokenizer.decode(row[:end]))
    return found


def task_accuracy(
    model: Any, tokenizer: Any, items: Sequence[TaskItem], batch_size: int = 128
) -> dict[str, Any]:
    """Share of exact answers, with its standard error (greedy, at most 4 tokens too many)."""
    if not items:
        raise UnknownNameError("a task without items cannot be measured: ask for at least 1")
    longest = max(len(ids) for ids in tokenizer([i.completion for i in items])["input_ids"])
    texts = generate_texts(model, tokenizer, [i.prompt for i in items], longest + 4, batch_size)
    right = [is_correct(i, t) for i, t in zip(items, texts, strict=True)]
    share = sum(right) / len(right)
    return {
        "accuracy": share,
        "standard_error": (share * (1 - share) / len(right)) ** 0.5,
        "n": len(right),
    }


def mixed_tokens(tokenizer: Any, data_dir: Path | None, n_tokens: int) -> np.ndarray:
    """At least ``n_tokens`` in windows ``[n, 1024]``: equal parts of the test sets and of tasks.

    Raises:
        DataUnavailableError: a part is shorter than its quarter.
    """
    n = -(-n_tokens // (4 * WINDOW_TOKENS))
    parts = [_test_windows(tokenizer, name, data_dir)[:n] for name in TEST_SETS]
    eos = tokenizer.eos_token_id
    ids: list[int] = []
    items = (i for level in (1, 2) for t in TASKS.values() for i in t.items(400, level=level))
    order = np.random.default_rng(0).permutation(np.array(list(items), dtype=object))
    for item in order:
        ids += [*tokenizer(item.prompt + item.completion)["input_ids"], eos]
        if len(ids) >= n * WINDOW_TOKENS:
            break
    parts.append(windows(np.array(ids), WINDOW_TOKENS)[:n])
    for name, part in zip((*TEST_SETS, "tasks"), parts, strict=True):
        if len(part) < n:
            raise DataUnavailableError(
                f"{name!r} fills {len(part)} windows of {WINDOW_TOKENS} tokens where its quarter "
                f"of the mixture is {n}: ask for fewer tokens"
            )
    return np.concatenate(parts)


@torch.no_grad()
def routing_balance(model: Any, token_windows: np.ndarray, batch_size: int = 16) -> dict[str, Any]:
    """Per layer: effective experts over E, unused experts, smallest and largest share."""
    with capture_routing(model) as recorder:
        for start in range(0, len(token_windows), batch_size):
            ids = torch.from_numpy(token_windows[start : start + batch_size]).to(model.device)
            model(input_ids=ids, use_cache=False)
    counts = recorder.statistics().counts.astype(np.float64)
    share = counts / counts.sum(1, keepdims=True)
    entropy = -(share * np.log(np.maximum(share, 1e-300))).sum(1)
    return {
        "effective_experts_fraction": (np.exp(entropy) / share.shape[1]).tolist(),
        "n_unused": (counts == 0).sum(1).tolist(),
        "smallest_share": share.min(1).tolist(),
        "largest_share": share.max(1).tolist(),
        "n_tokens": int(token_windows.size),
    }


def measure(
    model: Any,
    tokenizer: Any,
    data_dir: Path | None,
    *,
    tasks: Iterable[str] = tuple(TASKS),
    levels: Sequence[int] | None = None,
    n_items: int = 200,
    max_windows: int | None = None,
) -> dict[str, Any]:
    """Everything above in one JSON-able report; prints a line per item.

    Raises:
        UnknownNameError: no such task or level, or nothing to measure.
        DataUnavailableError: a test set is missing, damaged or too short.
    """
    if n_items < 1 or (max_windows is not None and max_windows < 1):
        raise UnknownNameError("nothing to measure: ask for at least 1 item and 1 window")
    # All items first: a wrong name is told before minutes of scoring.
    asked = {
        f"{task.name}/{level}": task.items(n_items, level=level)
        for task in map(get_task, tasks)
        for level in levels or task.levels
    }
    report: dict[str, Any] = {"test_sets": {}, "tasks": {}}
    for name in TEST_SETS:
        report["test_sets"][name] = test_set_quality(model, tokenizer, name, data_dir, max_windows)
        print(name, round(report["test_sets"][name]["bits_per_byte"], 4), "bits/byte", flush=True)
    n_mixed = 100_000 if max_windows is None else 4 * WINDOW_TOKENS
    report["routing"] = routing_balance(model, mixed_tokens(tokenizer, data_dir, n_mixed))
    fractions = report["routing"]["effective_experts_fraction"]
    print("effective experts / E", [round(x, 3) for x in fractions], flush=True)
    print("unused experts", report["routing"]["n_unused"], flush=True)
    for name, items in asked.items():
        start = time.perf_counter()
        result = report["tasks"][name] = task_accuracy(model, tokenizer, items)
        seconds = time.perf_counter() - start
        print(f"{name}: {result['accuracy']:.3f} ({seconds:.1f} s)", flush=True)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m repro.models.quality", description=__doc__)
    parser.add_argument("model", help="bundled name, folder or hub id")
    parser.add_argument("--data", type=Path, help="folder of the test sets (REPRO_DATA_DIR)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--levels", type=int, nargs="*", help="of every task (default: all)")
    parser.add_argument("--items", type=int, default=200, help="per task and level")
    parser.add_argument("--max-windows", type=int, help="per test set, for a quick look")
    args = parser.parse_args(arguments)
    try:
        model, tokenizer = load_model(args.model, device=args.device)
        report = measure(
            model,
            tokenizer,
            args.data,
            levels=args.levels,
            n_items=args.items,
            max_windows=args.max_windows,
        )
        report["provenance"] = _provenance(model, args.items)
        write_text(args.out, json.dumps(report, indent=1, sort_keys=True) + "\n")
    except ReproError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _provenance(model: Any, n_items: int) -> dict[str, Any]:
    folder = Path(model.config._name_or_path)
    on_gpu = model.device.type == "cuda"
    return {
        # Of a model from the hub, its revision says the same.
        "checkpoint_sha256": fingerprint(folder) if folder.is_dir() else None,
        "revision": getattr(model.config, "_commit_hash", None),
        "device": torch.cuda.get_device_name(model.device) if on_gpu else "cpu",
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "n_items_per_task": n_items,
        "protocol": f"disjoint windows of {WINDOW_TOKENS} tokens, first token unscored; "
        "greedy answers, exact match",
    }


if __name__ == "__main__":
    raise SystemExit(main())
