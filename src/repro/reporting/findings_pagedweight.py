"""Findings on PagedWeight's stated numbers."""

from __future__ import annotations

from repro.reporting.findings import Item, cell, decide


def _paged(item: str) -> float:
    return float(cell("pagedweight_stated", "value", item=item))


def memory_saved() -> Item:
    """P1: the memory and the saving of PagedWeight's headline."""
    full = _paged("table2_longbench_memory FP16")
    small = _paged("table2_longbench_memory PagedWeight 10GB")
    near = _paged("qwen1.5_moe_near_fp16_quality_memory")
    saving = _paged("gpu_memory_saving_max")
    saved = 100 * (1 - near / full)
    return Item(
        "P1",
        "PagedWeight: 16 GB and 72 % saved do not belong together",
        f"{near:.0f} of {full:.2f} GB saves {saved:.0f} %; {saving:.1f} % saved leaves "
        f"{full * (1 - saving / 100):.2f} GB, which is the {small:.2f} GB row "
        f"({100 * (1 - small / full):.1f} %).",
        decide(abs(saved - saving) > 1.0, "contradiction"),
        "the saving belongs to the smallest setting, the 16 GB to another one",
        ("pagedweight_stated",),
        {"saved_pct": saved, "left_gb": full * (1 - saving / 100), "row_gb": small},
    )


def half_the_score() -> Item:
    """P2: how far uniform quantisation falls behind on long contexts."""
    full = _paged("table2_longbench_average FP16")
    uniform = _paged("table2_longbench_average APL 3-bit")
    return Item(
        "P2",
        "PagedWeight: uniform quantisation reaches more than half of the score",
        f"{uniform:.1f} of {full:.1f} is {100 * uniform / full:.0f} %; the summary says half.",
        decide(abs(uniform / full - 0.5) > 0.05, "contradiction"),
        "quote the two scores, not the fraction",
        ("pagedweight_stated",),
        {"share": uniform / full},
    )


def score_against_memory() -> Item:
    """P3: the long-context score against memory."""
    sizes = ("10GB", "13GB", "15GB")
    memory = [_paged(f"table2_longbench_memory PagedWeight {size}") for size in sizes]
    score = [_paged(f"table2_longbench_average PagedWeight {size}") for size in sizes]
    falls = any(later < earlier for earlier, later in zip(score, score[1:], strict=False))
    pairs = ", ".join(f"{s:.1f} at {m:.2f} GB" for s, m in zip(score, memory, strict=True))
    return Item(
        "P3",
        "PagedWeight: the long-context score falls with more memory",
        f"{pairs}.",
        decide(falls and memory == sorted(memory), "contradiction"),
        "either the scores scatter by that much or the rows differ in more than memory",
        ("pagedweight_stated",),
        {"memory_gb": memory, "score": score},
    )


def throughput_loss() -> Item:
    """P4: the largest loss against uniform quantisation."""
    losses: dict[int, float] = {}
    for batch in (1, 4):
        where = {"condition": f"batch {batch} (model and GPU not stated in the stub)"}
        uniform = cell("pagedweight_stated", "value", item="table3_throughput Uniform-low", **where)
        paged = cell(
            "pagedweight_stated", "value", item="table3_throughput PagedWeight-low", **where
        )
        losses[batch] = 100 * (1 - paged / uniform)
    stated = _paged("throughput_loss_max")
    text = ", ".join(f"{loss:.1f} % at batch {batch}" for batch, loss in losses.items())
    return Item(
        "P4",
        "PagedWeight: the stated largest throughput loss is in no row that is known",
        f"The rows give {text}; stated is at most {stated:.1f} %.",
        decide(all(abs(loss - stated) > 0.05 for loss in losses.values()), "differs"),
        "another row must exist",
        ("pagedweight_stated",),
        {"losses_pct": losses, "stated_pct": stated},
    )
