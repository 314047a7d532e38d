"""What was measured on the bundled models, read from the files beside their weights.

One idea: quality and training logs are committed with the weights, because measuring them
again needs the training corpora, the public test sets, and a GPU for some of it.  Here they
become records like any other, with the device, versions and date that the files state, so
that tables, figures and claims need not know files.

``quality.json`` speaks of the committed weights and says so by their checksum;
``quality-stage*.json`` and ``training-stage*.jsonl`` speak of the stages they came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from repro import paths
from repro.reporting.hashing import digest, file_digest
from repro.reporting.records import Record, RecordFileError

EXPERIMENT = "models"
QUALITY, TRAINING = "Bundled models: quality", "Bundled models: training"
FINAL = "final"
STAGES = {FINAL: "quality.json", "stage 1": "quality-stage1.json", "stage 2": "quality-stage2.json"}
LOGS = {"stage 1": "training-stage1.jsonl", "stage 2": "training-stage2.jsonl"}
CONFIG, RECIPE, INDEX = "config.json", "recipe.json", "model.safetensors.index.json"
DOMAINS = {"wikitext2": "text", "gsm8k": "math", "humaneval": "code"}
_COMMAND = "python -m repro.models.quality {model} --data FOLDER --out data/models/{model}/{file}"


def read() -> list[Record]:
    """Records of every bundled model that has a recipe beside its weights.

    Raises:
        RecordFileError: one of the files is damaged.
    """
    found: list[Record] = []
    for folder in _folders():
        try:
            found += _Folder(folder).records()
        except (KeyError, TypeError, AttributeError, OSError) as error:
            raise RecordFileError(
                f"the files on quality and training in {paths.relative(folder)!r} are not as this "
                f"version writes them ({type(error).__name__}: {error}): restore them from git"
            ) from error
    return found


def files() -> list[Path]:
    """The files that :func:`read` reads."""
    names = (CONFIG, RECIPE, INDEX, *STAGES.values(), *LOGS.values())
    weights = [path for folder in _folders() for path in folder.glob("*.safetensors")]
    found = [folder / name for folder in _folders() for name in names]
    return [path for path in found if path.is_file()] + sorted(weights)


def checkpoint_sha256(folder: Path) -> str:
    """Checksum of configuration and weights, as ``quality.json`` states it."""
    shards = sorted(folder.glob("*.safetensors"))
    sha = hashlib.sha256()
    for path in [folder / CONFIG, *shards]:
        sha.update(path.name.encode())
        sha.update(path.read_bytes())
    return sha.hexdigest()


def _folders() -> list[Path]:
    folder = paths.models_dir()
    return sorted(path.parent for path in folder.glob(f"*/{RECIPE}")) if folder.is_dir() else []


class _Folder:
    """One model's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder.name
        self.trained = self._json(RECIPE).get("trained_on", {})

    def records(self) -> Iterator[Record]:
        """All records of the model."""
        yield from self._shape()
        for stage, file in STAGES.items():
            if (self.folder / file).is_file():
                yield from self._quality(stage, file)
        yield from self._curves()

    def _path(self, file: str) -> Path:
        return self.folder / file

    def _json(self, file: str) -> dict[str, Any]:
        return dict(self._parsed(file, self._path(file).read_text(encoding="utf-8")))

    def _parsed(self, file: str, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise RecordFileError(
                f"{paths.relative(self._path(file))!r} is damaged ({error}): restore it from git"
            ) from error

    def _record(
        self, file: str, claim: str, metric: str, value: Any, unit: str, **more: Any
    ) -> Record:
        """One record; ``n`` apart, whatever else is given becomes its configuration."""
        n = more.pop("n", None)
        origin = more.pop("provenance", None) or self._made()
        config = {"model": self.model, **more}
        key = digest(EXPERIMENT, file_digest(self._path(file)))
        kind = "derived" if file == CONFIG else "measured"
        return Record(EXPERIMENT, claim, kind, metric, value, unit, config, origin, key, key, n=n)

    def _made(self) -> dict[str, Any]:
        return _provenance(self.trained, f"python -m repro.models.train {self.model}")

    def _shape(self) -> Iterator[Record]:
        config = self._json(CONFIG)
        experts = config.get("num_experts") or config.get("num_local_experts")
        for metric, value, unit in (
            ("layers", config.get("num_hidden_layers"), "layers"),
            ("experts", experts, "experts"),
            ("top_k", config.get("num_experts_per_tok"), "experts"),
            ("hidden", config.get("hidden_size"), "1"),
            ("expert_width", config.get("moe_intermediate_size"), "1"),
            ("shared_expert_width", config.get("shared_expert_intermediate_size") or 0, "1"),
        ):
            yield self._record(CONFIG, QUALITY, metric, value, unit)
        if self._path(INDEX).is_file():
            total = self._json(INDEX).get("metadata", {}).get("total_parameters")
            yield self._record(INDEX, QUALITY, "total_params", total, "parameters")

    def _quality(self, stage: str, file: str) -> Iterator[Record]:
        found = self._json(file)
        stated = found.get("provenance", {})
        origin = None
        if stated:
            origin = _provenance(stated, _COMMAND.format(model=self.model, file=file))

        def record(metric: str, value: Any, unit: str, **more: Any) -> Record:
            more = {"stage": stage, **more, "provenance": origin}
            return self._record(file, QUALITY, metric, value, unit, **more)

        for name, of_set in found.get("test_sets", {}).items():
            where = {"workload": name, "domain": DOMAINS.get(name, ""), "n": of_set["n_tokens"]}
            bits = of_set["bits_per_byte"]
            yield record("bits_per_byte", bits, "bits per byte", source="folder", **where)
        for name, of_task in found.get("tasks", {}).items():
            task, _, level = name.partition("/")
            where = {"task": task, "level": int(level), "n": of_task["n"]}
            yield record("task_accuracy", of_task["accuracy"], "share", **where)
        routing = found.get("routing", {})
        for layer, fraction in enumerate(routing.get("effective_experts_fraction", ())):
            where = {"layer": layer, "n": routing["n_tokens"]}
            yield record("effective_experts_fraction", fraction, "share", **where)
            yield record("unused_experts", routing["n_unused"][layer], "experts", **where)
        if "checkpoint_sha256" in stated:
            same = stated["checkpoint_sha256"] == checkpoint_sha256(self.folder)
            yield record("speaks_of_these_weights", same, "yes or no")

    def _curves(self) -> Iterator[Record]:
        """Validation loss by corpus; tokens and seconds count on through the stages."""
        tokens_before, seconds_before = 0, 0.0
        recipe = self._json(RECIPE)
        recipes = recipe.get("stages", [])
        if "share_of_second_stage" in recipe:
            share = recipe["share_of_second_stage"]
            yield self._record(RECIPE, TRAINING, "share_of_second_stage", share, "share")
        for (stage, file), of_stage in zip(LOGS.items(), recipes, strict=False):
            if not self._path(file).is_file():
                continue
            long_from = tokens_before + of_stage["short_steps"] * of_stage["batch_tokens"]
            where = {"stage": stage, "sequence_tokens": of_stage["long_tokens"]}
            yield self._record(RECIPE, TRAINING, "long_phase_from", long_from, "tokens", **where)
            lines = self._path(file).read_text(encoding="utf-8").splitlines()
            parsed = [self._parsed(file, line) for line in lines if line.strip()]
            rows = [row for row in parsed if "tokens" in row]  # others tell of single events
            for row in rows:
                where = {"stage": stage, "step": row["step"], "tokens": tokens_before}
                where["tokens"] += row["tokens"]
                for corpus, nats in row.get("validation_nats", {}).items():
                    yield self._record(
                        file, TRAINING, "validation_loss", nats, "nats", corpus=corpus, **where
                    )
            tokens_before += rows[-1]["tokens"] if rows else 0
            seconds_before += rows[-1]["trained_s"] if rows else 0.0
        yield self._record(RECIPE, TRAINING, "trained_tokens", tokens_before, "tokens")
        yield self._record(RECIPE, TRAINING, "trained_time", round(seconds_before, 1), "s")


def _provenance(stated: dict[str, Any], command: str) -> dict[str, Any]:
    """What the file states about its making, in the form of a measured record."""
    name = str(stated.get("device", "unknown device"))
    versions = {key: stated[key] for key in ("torch", "transformers") if key in stated}
    return {
        "device": {"name": "a CPU" if name == "cpu" else name},
        "versions": versions,
        "command": command,
        "time": {"utc_start": stated.get("date")},
    }
