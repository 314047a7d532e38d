"""What the process occupies is what the ledger says: at the start, while serving, after close.

How it is measured: in a process of its own, on a model whose experts are some 200 MB, after a
tiny engine has served there, so that libraries, thread pools and code are paid for.  The C
library is told to map every block of 128 KiB and more (left alone, it raises that threshold and
keeps freed memory), and to trim before RSS is read; peaks are the
kernel's high-water mark, set back before each phase through ``/proc/self/clear_refs``.  The
arena is written to when it is made, so none of its pages is missing from RSS, and neither is
any of the host store.  The ledger: budget_bytes, bytes of the host store, and nothing else.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import repro
from repro.integration.experts import experts_layers
from repro.models.tiny import ARCHITECTURES, tiny_model
from repro.residency.errors import ClosedError
from repro.serving import EngineError
from repro.serving.clocks import StepClock

POLICIES = ("dense", "dynaexq", "pagedweight")
PROMPTS = [list(range(2, 14)), [5, 9, 3], list(range(20, 50))]

MEASURE = r"""
import ctypes, gc, json, sys
from pathlib import Path
import torch
import repro
from repro.formats import AnyPrecision, EncodedStack, GroupAffine
from repro.integration.experts import experts_layers
from repro.models.tiny import tiny_config, tiny_model
from repro.serving.payloads import _scheme
from transformers import AutoModelForCausalLM

policy, host_mode = sys.argv[1:]
libc = ctypes.CDLL("libc.so.6")

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def rss():
    gc.collect()
    libc.malloc_trim(0)
    return status("VmRSS")

def from_here():
    "The peak counts from now on."
    now = rss()
    Path("/proc/self/clear_refs").write_text("5")
    return now

def random_stack(self, weight, importance=None, **options):
    "Clustering 75 million weights takes minutes; random codes occupy as much."
    scheme = _scheme(self, tuple(weight.shape[1:]))
    tensors = {}
    for n_bits in scheme.widths:
        for spec in scheme.tensors(n_bits):
            shape = (len(weight), *spec.shape)
            if spec.name not in tensors and spec.dtype.is_floating_point:
                tensors[spec.name] = torch.rand(shape).to(spec.dtype) / 100
            elif spec.name not in tensors:
                n_bytes = spec.dtype.itemsize
                raw = torch.randint(0, 255, (*shape[:-1], shape[-1] * n_bytes), dtype=torch.uint8)
                tensors[spec.name] = raw.view(spec.dtype)
    return EncodedStack(scheme, tensors)

def engine(model, **options):
    return repro.Engine(model, None, policy, device="cpu", host_mode=host_mode, **options)

def prompts(n, length):
    return [[(7 * i + j) % 60 + 2 for j in range(length)] for i in range(n)]

with engine(tiny_model("qwen3_moe")) as small:
    small.generate(prompts(8, 40), 10, ignore_eos=True)
del small

config = tiny_config(
    "qwen3_moe", num_hidden_layers=2, hidden_size=512, moe_intermediate_size=512, num_experts=32,
    num_attention_heads=8, num_key_value_heads=2, head_dim=32,
)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
model.to_empty(device="cpu")
for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
    with torch.no_grad():
        tensor.uniform_(-0.03, 0.03) if "inv_freq" not in name else tensor.fill_(0.1)
AnyPrecision.encode_stack = GroupAffine.encode_stack = random_stack
originals = sum(
    p.nbytes for layer in experts_layers(model) for p in layer.module.parameters()
)
layer_bytes = originals // 2

found = {"originals": originals, "layer_bytes": layer_bytes}
base = from_here() - originals  # the process and the dense part of the model
e = engine(model, kv_bytes=40 << 20)
found["build_peak"] = status("VmHWM") - base
found["open"] = rss() - base
facts = e.snapshot()
found["arena"] = facts["budget_bytes"]
found["used"] = facts["residency"]["used_bytes"]
found["host"] = facts["residency"]["host"]["bytes"]
found["scratch"] = facts["fixed_bytes"]["workspace"]
found["on_meta"] = all(
    p.is_meta for layer in experts_layers(model) for p in layer.module.parameters()
)
before = from_here()
e.generate(prompts(6, 40), 3, ignore_eos=True)
found["serving_peak"] = status("VmHWM") - before
found["served"] = rss() - base

# As in IPython: a cell was interrupted inside a layer, sys.last_traceback holds its frames, and
# the name of the engine is still bound.
class Stop:
    def __call__(self, *_):
        raise KeyboardInterrupt
stop = model.model.layers[-1].mlp.experts.register_forward_pre_hook(Stop())
try:
    e.generate(prompts(4, 30), 2)
except KeyboardInterrupt as error:
    sys.last_value, sys.last_traceback = error, error.__traceback__
e.close()
e.close()
found["closed_traceback"] = rss() - base
del sys.last_value, sys.last_traceback
found["closed_name"] = rss() - base
del e
found["closed"] = rss() - base
print(json.dumps(found))
"""


@functools.cache
def measured(policy: str) -> dict[str, Any]:
    """Bytes, beyond the process with the dense part of its model."""
    host_mode = "single" if policy == "dynaexq" else "mirrored"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, policy, host_mode],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


LINUX = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")


@LINUX
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_what_the_ledger_says(policy):
    found = measured(policy)
    arena = found["arena"]
    assert 200e6 < found["originals"] < 400e6 and found["on_meta"]
    assert abs(found["open"] - (arena + found["host"])) <= 0.05 * arena, found
    assert abs(found["served"] - (arena + found["host"])) <= 0.05 * arena, found


@LINUX
@pytest.mark.parametrize("policy", POLICIES)
def test_no_layer_sized_copy_while_serving(policy):
    found = measured(policy)
    assert found["scratch"] < found["layer_bytes"] / 3, "or the test says nothing"
    assert found["serving_peak"] <= 0.5 * found["layer_bytes"], found


@LINUX
def test_the_named_scratch_bounds_what_a_step_takes():
    """Scratch, and 4 MB for activations and logits of 6 x 40 tokens; measured far more."""
    found = measured("pagedweight")
    assert found["serving_peak"] <= found["scratch"] + (4 << 20), found


@LINUX
@pytest.mark.parametrize(
    "policy",
    [
        "dense",
        "pagedweight",
    ],
)
def test_while_encoding_at_most_one_layer_exists_twice(policy):
    """The model, the whole host store, and a layer in one more form."""
    found = measured(policy)
    most = found["originals"] + found["host"] + 2.1 * found["layer_bytes"]
    assert found["build_peak"] <= most, found


@LINUX
@pytest.mark.parametrize("policy", POLICIES)
def test_all_memory_comes_back(policy):
    found = measured(policy)
    assert abs(found["closed"]) <= 0.05 * found["arena"], found


@LINUX
@pytest.mark.parametrize("held", ["closed_name", "closed_traceback"])
def test_memory_comes_back_though_somebody_holds_on(held):
    """The engine's name is still bound, or an interrupted cell's traceback holds its frames."""
    found = measured("pagedweight")
    assert abs(found[held]) <= 0.05 * found["arena"], found


# In this process -------------------------------------------------------------------------------


def engine(policy: str = "dense", model: Any = None, **options: Any) -> repro.Engine:
    options = {"device": "cpu", "worker": "manual", "clock": StepClock(), **options}
    return repro.Engine(model or tiny_model("qwen3_moe"), None, policy, **options)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_originals_are_on_the_meta_device(arch):
    model = tiny_model(arch)
    stacked = [
        getattr(layer.module, name)
        for layer in experts_layers(model)
        for name in ("gate_up_proj", "down_proj")
    ]
    storages = [weakref.ref(p.untyped_storage()) for p in stacked]
    before = sum(p.nbytes for p in model.parameters())
    taken = sum(p.nbytes for p in stacked)
    del stacked
    with engine(model=model) as e:
        gc.collect()
        assert all(ref() is None for ref in storages), "somebody keeps the originals"
        real = sum(p.nbytes for p in model.parameters() if not p.is_meta)
        assert real == before - taken
        assert len(e.generate(PROMPTS, 3, ignore_eos=True)) == 3
        assert sum(p.nbytes for p in model.parameters() if not p.is_meta) == real


@pytest.mark.parametrize("policy", POLICIES)
def test_two_hundred_calls_leak_nothing(policy):
    with engine(policy) as e:

        def calls(n: int) -> tuple[int, int]:
            for i in range(n):
                e.generate([PROMPTS[i % 3]], 3, ignore_eos=True)
                e.score([PROMPTS[0]])
            e.metrics.reset()
            gc.collect()
            tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
            return len(tensors), len(e._ended)

        used, first = e.residency.used_bytes(), calls(20)
        assert calls(200) == first, "tensors, or results that nobody asked for"
        assert e.residency.used_bytes() == used
        e.residency.check()


@pytest.mark.parametrize("worker", ["manual", "thread"])
def test_closing_twice_and_using_it_afterwards(worker):
    import threading

    before = threading.active_count()
    e = engine("pagedweight", worker=worker)
    conversation, residency = e.conversation(), e.residency
    conversation.say(PROMPTS[0], 3, ignore_eos=True)
    running = e.submit(PROMPTS[1], 20, ignore_eos=True)
    e.step()
    e.close()
    e.close()
    assert threading.active_count() == before
    for call in (
        lambda: e.generate(PROMPTS),
        lambda: e.submit(PROMPTS[0]),
        lambda: e.result(running),
        lambda: e.score(PROMPTS),
        lambda: e.conversation(),
        lambda: conversation.say(PROMPTS[0]),
        lambda: e.snapshot(),
        lambda: e.step(),
        lambda: e.residency,
        lambda: e.frozen().__enter__(),
        lambda: e.__enter__(),
    ):
        with pytest.raises(EngineError, match="closed"):
            call()
    for closed in (
        lambda: residency.reserve(1, "kv"),
        lambda: residency.publish(),
        lambda: residency.snapshot(),
        lambda: residency.arena.data,
        lambda: residency.restart_worker(),
    ):
        with pytest.raises(ClosedError):
            closed()
    e.cancel(running)  # says nothing, does nothing


# On a GPU --------------------------------------------------------------------------------------

GPU_CONFIG = {
    "num_hidden_layers": 3,
    "hidden_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


MIB = 1 << 20
SCRATCH = 16 * MIB


def on_the_gpu(policy: str, times: int) -> None:
    """Serve under a cap on the process of ledger, ``times`` the named workspace, and 5 %."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    engine(policy, device=device).close()  # contexts and workspaces of libraries
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    model = tiny_model("qwen3_moe", **GPU_CONFIG).to(torch.bfloat16)
    base = torch.cuda.memory_allocated(device)
    e = engine(policy, model, device=device, kv_bytes=24 * MIB, scratch_bytes=SCRATCH)
    facts = e.snapshot()
    arena, fixed = facts["budget_bytes"], facts["fixed_bytes"]
    ledger = arena + fixed["dense_weights"] + fixed["expert_biases"]
    slip = 0.05 * arena
    try:
        assert abs(torch.cuda.memory_allocated(device) - base - ledger) <= slip
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        cap = torch.cuda.memory_reserved(device) + times * fixed["workspace"] + slip + 20 * MIB
        torch.cuda.set_per_process_memory_fraction(cap / total, device)
        first = e.generate(PROMPTS, 8, ignore_eos=True)
        peak = torch.cuda.max_memory_allocated(device) - base - ledger
        print(policy, "beside the ledger", peak / MIB, "workspace", fixed["workspace"] / MIB)
        assert all(c.error is None for c in first), first
        assert peak <= times * fixed["workspace"] + slip
        # "Replace a tensor and check again": all dense tensors anew, the experts stay away.
        model._apply(lambda t: t if t.is_meta else t.clone())
        again = e.generate(PROMPTS, 8, ignore_eos=True)
        assert [c.token_ids for c in again] == [c.token_ids for c in first]
        assert all(p.is_meta for p in model.model.layers[0].mlp.experts.parameters())
        assert abs(torch.cuda.memory_allocated(device) - base - ledger) <= slip
        e.residency.check()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        e.close()
    gc.collect()
    left = torch.cuda.memory_allocated(device) - base - fixed["dense_weights"]
    assert left <= slip, "memory stays after close(), though the name is still bound"


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_device_memory_is_what_the_ledger_says(policy):
    on_the_gpu(policy, times=8)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "policy",
    [
        "dense",
        "dynaexq",
        "pagedweight",
    ],
)
def test_the_named_workspace_bounds_what_a_step_takes_on_the_device(policy):
    on_the_gpu(policy, times=1)
