"""Routing traces of the measured models on the measured workloads, each recorded once.

The one idea: all measurements of routing read the same few traces.  A trace is kept in the
cache under a key made of everything that decides it (weights, text, seed, sizes, code and
library versions), so the second experiment does not run the model again, and it can be
written to ``data/traces`` (``save_all``) for others to replay; traces hold no text.

Stages: ``prefill`` (whole prompts) and ``decode`` (free-running, sampled, after those
prompts) are two parts of one recording; ``long-prefill`` has fewer, longer prompts, for the
sweep over prompt length.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from repro import paths
from repro.errors import CheckpointError, DataUnavailableError, unknown_name
from repro.integration import grouped
from repro.integration.recording import record_decode, record_prefill
from repro.integration.traces import RoutingTrace
from repro.models import load_model
from repro.profiles import Profile
from repro.reporting.provenance import digest, file_digest, source_digest, versions
from repro.reporting.records import canonical
from repro.workloads.base import domain_workloads, list_workloads, load_workload
from repro.workloads.declarations import Domain, Workload
from repro.workloads.tokens import encode_stream, prompts

STAGES = ("prefill", "decode", "long-prefill")
SOURCES = (
    "repro.experiments.traffic",
    "repro.integration.experts",
    "repro.integration.grouped",
    "repro.integration.recording",
    "repro.integration.routing",
    "repro.integration.statistics",
    "repro.integration.steps",
    "repro.integration.traces",
)
"""Modules whose code decides what is in a trace."""

# Sampled as the models were trained, not the most likely token: greedy text of a small
# model repeats itself, and repeated tokens repeat their experts.
TEMPERATURE = 1.0
# Named, so that a record says what ran; the default differs between devices and stages.
IMPLEMENTATIONS = {"cpu": grouped.GROUPED_NAME, "cuda": "grouped_mm"}
TOKENIZER_FILES = ("tokenizer*",)
MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors*", *TOKENIZER_FILES)
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # bf16 decode is slower than float32 on a CPU
# Of one forward pass; they bound memory and do not change what is measured.
PREFILL_BATCH_TOKENS = 4096
DECODE_BATCH = 32

logger = logging.getLogger(__name__)


class Traffic:
    """The traces of one profile on one device, from one source of workloads."""

    def __init__(self, profile: Profile, *, device: str, source: str) -> None:
        self.profile = profile
        self.device = device
        self.source = source
        self._workloads: dict[str, Workload] = {}
        self._loaded: tuple[str, Any, Any] | None = None
        self._streams: dict[tuple[str, str], Any] = {}
        self._traces: dict[tuple[str, str, str], RoutingTrace] = {}

    @cached_property
    def workloads(self) -> dict[Domain, str]:
        """The workload of each domain."""
        return domain_workloads(self.source)

    def workload(self, name: str) -> Workload:
        """One workload, read once."""
        if name not in self._workloads:
            self._workloads[name] = load_workload(name, source=self.source, seed=self.profile.seed)
        return self._workloads[name]

    def identity(self, model: str) -> dict[str, Any]:
        """What is measured, as far as the model decides it: part of every point's key."""
        return {
            "model": model,
            "model_digest": model_digest(model),
            "source": self.source,
            "seed": self.profile.seed,
            "device": self.device,
            "dtype": DTYPES[self.device],
            "experts_implementation": IMPLEMENTATIONS[self.device],
        }

    def workload_identity(self, name: str) -> dict[str, Any]:
        """The same for the workload."""
        workload = self.workload(name)
        return {
            "workload": name,
            "domain": workload.domain,
            "workload_sha256": workload.provenance["sha256"],
        }

    def shape(self, stage: str) -> dict[str, int]:
        """Number of prompts and their tokens at a stage."""
        p = self.profile
        if stage == "long-prefill":
            # Half as many: four times as long, they are most of the work all the same.
            return {"n_prompts": max(1, p.n_prompts // 2), "prompt_tokens": max(p.prefill_lengths)}
        return {"n_prompts": p.n_prompts, "prompt_tokens": p.prompt_tokens}

    def decoding(self) -> dict[str, Any]:
        """What decides the generated tokens besides seed and prompts."""
        return {"decode_steps": self.profile.decode_steps, "temperature": TEMPERATURE}

    def trace(self, model: str, workload: str, stage: str) -> RoutingTrace:
        """One trace: kept from before if everything that decides it is the same, else recorded."""
        if stage not in STAGES:
            raise unknown_name("stage", stage, STAGES)
        if stage == "long-prefill":
            return self._recording(model, workload, stage)
        whole = self._recording(model, workload, "prefill+decode")
        border = self.profile.prompt_tokens
        part = slice(0, border) if stage == "prefill" else slice(border, None)
        trace = whole.select(tokens=part)
        return replace(trace, meta=trace.meta | {"stage": stage})

    def _recording(self, model: str, workload: str, stage: str) -> RoutingTrace:
        place = (model, workload, stage)
        if place not in self._traces:
            config = {
                "stage": stage,
                **self.identity(model),
                **self.workload_identity(workload),
                **self.shape(stage),
            }
            if stage == "prefill+decode":
                config |= self.decoding()
            self._traces[place] = self._cached(config)
        return self._traces[place]

    def save_all(self) -> list[Path]:
        """Write the trace of every model and workload, recorded if need be; the files."""
        files: list[Path] = []
        for model in self.profile.models:
            for workload in self.workloads.values():
                path = trace_path(model, workload, self.source)
                self._recording(model, workload, "prefill+decode").save(path)
                files.append(path)
        return files

    def _cached(self, config: dict[str, Any]) -> RoutingTrace:
        installed = versions()
        key = digest(
            canonical(config),
            source_digest(SOURCES),
            *(str(installed.get(name)) for name in ("torch", "transformers")),
        )
        folder = paths.cache_dir() / "traces" / config["model"]
        path = folder / f"{config['workload']}-{config['stage']}-{key}.npz"
        if path.is_file():
            try:
                return RoutingTrace.load(path)
            except CheckpointError as error:
                logger.warning("%s", error)
        trace = self._record(config)
        trace = replace(trace, meta=trace.meta | config)
        trace.save(path)
        return trace

    def _record(self, config: dict[str, Any]) -> RoutingTrace:
        model, tokenizer = self._model(config["model"])
        n_prompts, length = config["n_prompts"], config["prompt_tokens"]
        ids = prompts(
            tokenizer,
            self.workload(config["workload"]),
            n=n_prompts,
            length=length,
            seed=self.profile.seed,
            stream=self._stream(config["model"], config["workload"], tokenizer),
        )
        grouped.register()
        implementation = config["experts_implementation"]
        logger.info("recording %(model)s on %(workload)s: %(stage)s", config)
        if config["stage"] == "long-prefill":
            batch = max(1, PREFILL_BATCH_TOKENS // length)
            return record_prefill(model, ids, batch, implementation=implementation)
        return record_decode(
            model,
            ids,
            config["decode_steps"],
            temperature=config["temperature"],
            seed=self.profile.seed,
            batch_size=DECODE_BATCH,
            include_prompt=True,
            implementation=implementation,
        )

    def _stream(self, model: str, workload: str, tokenizer: Any) -> Any:
        """The workload's tokens, encoded once for all stages and models of one tokenizer."""
        place = (model_digest(model, TOKENIZER_FILES), workload)
        if place not in self._streams:
            self._streams[place] = encode_stream(tokenizer, self.workload(workload))
        return self._streams[place]

    def _model(self, name: str) -> tuple[Any, Any]:
        """One model at a time: a second one would double the memory for nothing."""
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None
            if self.device == "cpu":
                import torch

                torch.set_num_threads(self.profile.n_threads)
                keep_freed_memory()
            model, tokenizer = load_model(name, device=self.device, dtype=DTYPES[self.device])
            self._loaded = (name, model, tokenizer)
        return self._loaded[1], self._loaded[2]


def model_folder(name: str) -> Path:
    """Folder of a bundled model, or ``name`` itself when it is a folder.

    Raises:
        DataUnavailableError: neither is there.
    """
    for folder in (paths.models_dir() / name, Path(name)):
        if (folder / "config.json").is_file():
            return folder
    raise DataUnavailableError(
        f"model {name!r} has no folder with a config.json here: restore data/models from git, "
        "or give the path of a model folder"
    )


def keep_freed_memory() -> None:
    """Let the C library keep what is freed instead of giving it back to the system at once.

    Every layer frees and asks again for the same tens of megabytes; getting them as fresh
    pages each time was a tenth of the work.  Nothing happens where there is no glibc.
    """
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)


def model_digest(name: str, patterns: tuple[str, ...] = MODEL_FILES) -> str:
    """Digest of the configuration, weights and tokenizer files of a model.

    What else lies beside them (card, recipe, training log, measured quality) decides nothing.
    """
    folder = model_folder(name)
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    return digest(*(part for file in files for part in (file.name, file_digest(file))))


def trace_path(model: str, workload: str, source: str) -> Path:
    """File of a saved trace; several sources that offer one name each have a file."""
    sources = next((i.sources for i in list_workloads() if i.name == workload), ())
    name = workload if len(sources) < 2 else f"{workload}-{source}"
    return paths.traces_dir() / Path(model).name / f"{name}.npz"
