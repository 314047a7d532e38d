"""Engines for experiments: models, their codes and prompts, each made once.

The one idea: experiments on serving differ in what they do to an engine, not in how one is
made.  A model's codes are encoded once per process and shared by all engines; prompts are
windows of the profile's text.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

import repro
from repro.experiments.traffic import model_digest
from repro.integration.experts import experts_layers
from repro.models import load_model
from repro.profiles import Profile
from repro.serving import EncodedExperts, Engine, encode_experts
from repro.workloads.base import domain_workloads, load_workload
from repro.workloads.tokens import encode_stream, token_byte_lengths, windows

DTYPE = "float32"
PLANES, VERSIONS = "any-precision", "fp16/int4"
LAYOUTS = {"planes": ("pagedweight", PLANES), "versions": ("dynaexq", VERSIONS)}
"""Policy and format that each layout of payloads is served with."""
SOURCES = (
    "repro.experiments.serving_setup",
    "repro.integration.page_reader",
    "repro.integration.paged_experts",
    "repro.policies.dynaexq",
    "repro.policies.pagedweight",
    "repro.policies.planner",
    "repro.residency.memory",
    "repro.residency.residency",
    "repro.residency.transitions",
    "repro.residency.worker",
    "repro.serving.build",
    "repro.serving.control",
    "repro.serving.engine",
    "repro.serving.forward",
    "repro.serving.kv_blocks",
    "repro.serving.kv_pool",
    "repro.serving.paged_cache",
    "repro.serving.pressure",
    "repro.serving.runner",
    "repro.serving.scheduler",
)
"""Modules whose code decides what is measured."""


@lru_cache(maxsize=2)
def codes(model: str, device: str) -> EncodedExperts:
    """All experts of a model as nested codes."""
    loaded, _ = load_model(model, device=device, dtype=DTYPE)
    return encode_experts(experts_layers(loaded), PLANES)


def engine(model: str, layout: str, device: str, **options: Any) -> Engine:
    """A fresh engine in one of the layouts; ``policy`` may be given instead of its own."""
    policy, name = LAYOUTS[layout]
    policy = options.pop("policy", policy)
    loaded, tokenizer = load_model(model, device=device, dtype=DTYPE)
    if layout == "planes":
        options["experts"] = codes(model, device)
    else:
        options["format"] = name
    return repro.Engine(loaded, tokenizer, policy, device=device, **options)


@lru_cache(maxsize=4)
def _text(model: str, source: str, seed: int) -> tuple[Any, str]:
    _, tokenizer = load_model(model, device="cpu", dtype=DTYPE)
    name = domain_workloads(source)["text"]
    read = load_workload(name, source=source, seed=seed)
    return encode_stream(tokenizer, read), str(read.provenance["sha256"])


def prompts(profile: Profile, model: str, source: str, n: int, length: int) -> list[list[int]]:
    """``n`` prompts of ``length`` tokens, spread over the text."""
    stream, _ = _text(model, source, profile.seed)
    found = windows(stream, length)
    chosen = np.linspace(0, len(found) - 1, n).round().astype(int)
    return [[int(i) for i in row] for row in found[chosen]]


def scored_bytes(model: str, texts: list[list[int]]) -> int:
    """UTF-8 bytes of the tokens that a score counts: all but the first of each text."""
    _, tokenizer = load_model(model, device="cpu", dtype=DTYPE)
    lengths = token_byte_lengths(tokenizer)
    return int(sum(lengths[text[1:]].sum() for text in texts))


def identity(profile: Profile, model: str, source: str, device: str) -> dict[str, Any]:
    """Part of every record's configuration."""
    return {
        "model": model,
        "model_digest": model_digest(model),
        "source": source,
        "seed": profile.seed,
        "device": device,
        "dtype": DTYPE,
        "workload": str(domain_workloads(source)["text"]),
        "workload_sha256": _text(model, source, profile.seed)[1],
    }
