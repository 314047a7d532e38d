"""``list_models``: what can be loaded by name, how large it is and where it comes from.

Sizes come from file headers (bundled models) and from arithmetic on the table of
dimensions (published ones, equal to the count of the instantiated model by test), so
listing needs neither torch nor Transformers nor a network and answers at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from repro.errors import CheckpointError
from repro.models.formula import formula_parts
from repro.models.integrity import count_parameters, weight_files
from repro.models.published import PUBLISHED, PublishedModel
from repro.models.specs import SPECS, ModelSpec
from repro.paths import models_dir, relative

_BYTES_PER_PARAM = 2  # bf16, as both papers' checkpoints are stored


@dataclass(frozen=True)
class ModelInfo:
    """One line of ``list_models``.

    Attributes:
        name: what ``load_model`` takes.
        kind: ``bundled`` (trained here, in the repository) or ``published`` (of the papers).
        summary: layers, experts, top-k in one line.
        n_params: parameters; None when a bundled model's files are missing or damaged.
        n_bytes: size of the weight files; for published models at bf16.
        where: folder below the project, or id on the Hugging Face hub.
        available: whether the weights lie in the repository; published ones are fetched.
    """

    name: str
    kind: Literal["bundled", "published"]
    summary: str
    n_params: int | None
    n_bytes: int | None
    where: str
    available: bool


def _bundled(spec: ModelSpec) -> ModelInfo:
    folder = models_dir() / spec.name
    n_params = n_bytes = None
    if (folder / "config.json").is_file():
        try:
            n_params = count_parameters(folder)
            n_bytes = sum(path.stat().st_size for path in weight_files(folder))
        except CheckpointError:
            n_params = None  # one damaged file must not hide the other models; loading names it
    available = n_params is not None
    where = relative(folder)
    return ModelInfo(spec.name, "bundled", spec.summary, n_params, n_bytes, where, available)


def _published(model: PublishedModel) -> ModelInfo:
    dims = model.dimensions
    summary = (
        f"{model.n_moe_layers} MoE layers of {dims.routed_experts} experts of width "
        f"{dims.moe_intermediate_size}, top-{dims.top_k}"
    )
    if dims.shared_experts:
        summary += f", shared width {dims.shared_intermediate_total}"
    n_params = sum(formula_parts(model).values())
    n_bytes = _BYTES_PER_PARAM * n_params
    return ModelInfo(model.name, "published", summary, n_params, n_bytes, model.hub_id, False)


def list_models() -> list[ModelInfo]:
    """Bundled small models first, then the published configurations of both papers."""
    return [*map(_bundled, SPECS.values()), *map(_published, PUBLISHED.values())]


def format_models(models: Iterable[ModelInfo]) -> str:
    """``models`` as the table that ``repro models`` prints."""
    lines: list[str] = []
    titles = {
        "bundled": "Bundled: trained here, ready to use",
        "published": "Published: fetched from the Hugging Face hub on demand; bytes at bf16",
    }
    rows = list(models)
    for kind, title in titles.items():
        lines += ["", title] if lines else [title]
        for info in rows:
            if info.kind != kind:
                continue
            size = "missing or damaged"
            if info.n_params is not None and info.n_bytes is not None:
                size = f"{_params(info.n_params)} {_bytes(info.n_bytes)}"
            lines += [f"  {info.name:<20}{size:<20}  {info.where}", f"    {info.summary}"]
    return "\n".join(lines)


def _params(n_params: int) -> str:
    scale, unit = (1e9, "B") if n_params >= 1e9 else (1e6, "M")
    return f"{n_params / scale:6.1f} {unit}"


def _bytes(n_bytes: int) -> str:
    scale, unit = (2**30, "GiB") if n_bytes >= 2**30 else (2**20, "MiB")
    return f"{n_bytes / scale:6.1f} {unit}"
