"""Times of decode attention over pages on a GPU, beside SDPA and the copy bandwidth.

The one idea: a step of several layers is captured and replayed, over more memory than the cache
holds, so that what is timed is what serving pays: launches in a graph, keys and values from
memory.

Bytes are those of the keys and values read (each once); the share is bytes over time, over the
bandwidth of a copy (read and written) measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.kernels.paged_attention import paged_attention
from repro.kernels.paged_attention_reference import KvPlace, paged_attention_reference
from repro.kernels.paged_attention_workspace import Workspace

N_QUERY, N_HEADS, SIZE = 32, 4, 128  # Qwen3-30B-A3B
BLOCK_TOKENS, PAGE_BYTES, N_LAYERS = 16, 65536, 8
BATCHES, CONTEXTS = (1, 8, 32), (512, 2048, 8192)
COLD_BYTES = 400e6  # read between two reads of the same token: several times the cache


def replay_us(launches: list[Callable[[], Any]], repeats: int = 25) -> tuple[float, float]:
    """Median time of one launch in a replayed graph of all, and its spread (IQR over median)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for i in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 5:
            times.append(start.elapsed_time(end) * 1e3 / len(launches))
    low, median, high = statistics.quantiles(times, n=4)
    return median, (high - low) / median


def warm_up(seconds: float = 0.5) -> float:
    """Keep the GPU busy until its clocks have risen; returns the last product's FLOP/s."""
    a = _random(8192, 8192)
    end = time.perf_counter() + seconds
    begin = now = time.perf_counter()
    while now < end:
        begin = now
        for _ in range(4):
            torch.mm(a, a)
        torch.cuda.synchronize()
        now = time.perf_counter()
    return 4 * 2 * len(a) ** 3 / (now - begin)


def copy_bytes_per_s() -> float:
    """Bandwidth of a copy on the device, read plus written; the better of two ways to copy."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    rates = []
    for copy in (lambda: target.copy_(source), lambda: torch.mul(source, 1.0, out=target)):
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            copy()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        rates.append(2 * source.nbytes / statistics.median(times[5:]))
    return max(rates)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def paged_launches(n_rows: int, n_tokens: int) -> tuple[list[Callable[[], Any]], float]:
    """Attention over pages, each launch over other tokens; and its error on the first of them."""
    layer_values = BLOCK_TOKENS * N_HEADS * 2 * SIZE
    page_values = PAGE_BYTES // 2
    block_pages = N_LAYERS * layer_values // page_values
    n_blocks = -(-n_tokens // BLOCK_TOKENS)
    n_sets = max(1, int(-(-COLD_BYTES // (kv_bytes(n_rows, n_tokens) * N_LAYERS))))
    n_pages = n_sets * n_rows * n_blocks * block_pages
    arena = torch.empty(n_pages, page_values, dtype=torch.bfloat16, device="cuda").normal_()
    tables = torch.randperm(n_pages, device="cuda").view(n_sets, n_rows, n_blocks * block_pages)
    lengths = torch.full((n_rows,), n_tokens, dtype=torch.int32, device="cuda")
    query = _random(n_rows, N_QUERY, SIZE)
    keys, values = _random(n_rows, N_HEADS, SIZE), _random(n_rows, N_HEADS, SIZE)
    workspace = Workspace("cuda")

    def launch(table: Tensor, layer: int, function: Any = None, **options: Any) -> Any:
        if function is None:
            function, options = paged_attention, {"workspace": workspace}
        place = KvPlace(
            layer * layer_values, BLOCK_TOKENS, block_pages, page_values, N_HEADS, SIZE, SIZE
        )
        arguments = (query, arena, table, lengths, place, keys, values)
        return function(*arguments, scale=SIZE**-0.5, **options)

    right = launch(tables[0], 0, paged_attention_reference).double()
    error = float((launch(tables[0], 0).double() - right).norm() / right.norm())
    return [partial(launch, t, layer) for t in tables for layer in range(N_LAYERS)], error


def gathered_launches(n_rows: int, n_tokens: int) -> list[Callable[[], Any]]:
    """PyTorch's attention over keys and values that lie together already."""
    n_copies = max(1, int(-(-COLD_BYTES // kv_bytes(n_rows, n_tokens))))
    both = _random(n_copies, 2, n_rows, N_HEADS, n_tokens, SIZE)
    query = _random(n_rows, N_QUERY, 1, SIZE)
    attention = torch.nn.functional.scaled_dot_product_attention
    return [partial(attention, query, k, v, scale=SIZE**-0.5, enable_gqa=True) for k, v in both]


def kv_bytes(n_rows: int, n_tokens: int) -> int:
    """Keys and values of one layer."""
    return n_rows * n_tokens * N_HEADS * 2 * SIZE * 2


def measure(n_rows: int, n_tokens: int, copy_rate: float) -> dict[str, Any]:
    """Paged and gathered attention of one batch and context."""
    launches, error = paged_launches(n_rows, n_tokens)
    warm_up(0.2)
    us, spread = replay_us(launches)
    del launches
    gathered = gathered_launches(n_rows, n_tokens)
    warm_up(0.2)
    sdpa_us, sdpa_spread = replay_us(gathered)
    n_bytes = kv_bytes(n_rows, n_tokens)
    return {
        "batch": n_rows,
        "context": n_tokens,
        "paged_us": us,
        "paged_spread": spread,
        "sdpa_gathered_us": sdpa_us,
        "sdpa_spread": sdpa_spread,
        "bytes_read": n_bytes,
        "copy_share": n_bytes / us * 1e6 / copy_rate,
        "sdpa_copy_share": n_bytes / sdpa_us * 1e6 / copy_rate,
        "relative_error": error,
    }


def main() -> None:
    """Command line: ``python -m repro.kernels.paged_attention --out FILE``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    out: Path = parser.parse_args().out
    if not torch.cuda.is_available():
        parser.exit(2, "there is no CUDA device here: these are times of a GPU\n")
    torch.manual_seed(0)
    matrix_rate = warm_up()
    rate = copy_bytes_per_s()
    rows = [measure(n, tokens, rate) for n in BATCHES for tokens in CONTEXTS]
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": "Qwen3-30B-A3B: 32 query heads, 4 heads of keys and values of 128, bfloat16",
        "copy_bytes_per_s": rate,
        "matrix_flop_per_s": matrix_rate,
        "rows": rows,
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
