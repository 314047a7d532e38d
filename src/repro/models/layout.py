"""What kind of Mixture-of-Experts model a configuration describes.

The nine architectures name the same things differently (``num_experts``,
``num_local_experts``, ``n_routed_experts``; the expert width is ``intermediate_size``
in four of them).  :func:`inspect_config` reads any of them into one ``MoeLayout`` and
refuses by name what it does not know, so that nothing later has to guess.
:func:`check_model` holds the layout against the tensors of an instantiated model: a
layout is a claim, the tensors are the fact.

Left out: weights (the loader checks those) and every field that shapes no expert.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.errors import CheckpointError
from repro.paths import relative

# Fields that give a configuration away as Mixture-of-Experts, whatever its architecture.
_EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LAYER_IN_NAME = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class MoeLayout:
    """Experts of a model, as its configuration states them.

    ``intermediate`` is the width of one routed expert; ``shared_intermediate`` the total
    width of what every token passes beside them (0 without), with ``shared_gate`` telling
    whether a learned gate scales it.  The last three say how the fused expert tensors are
    stored: ``[E, out, in]`` or transposed, gate and up as halves or interleaved, with bias.
    """

    architecture: str
    n_layers: int
    moe_layer_ids: tuple[int, ...]
    n_experts: int
    top_k: int
    hidden: int
    intermediate: int
    shared_intermediate: int
    shared_gate: bool
    activation: str
    is_transposed: bool = False
    is_concatenated: bool = True
    has_bias: bool = False

    @property
    def has_shared(self) -> bool:
        """Whether every token passes something beside its routed experts."""
        return self.shared_intermediate > 0

    @property
    def n_moe_layers(self) -> int:
        """Layers that have routed experts."""
        return len(self.moe_layer_ids)

    @property
    def expert_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """``[N, K]`` (outputs, inputs) of one expert's gate_up and down matrices."""
        return (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)

    @property
    def params_per_expert(self) -> int:
        """Weights of one routed expert, biases included where the architecture has them."""
        weights = sum(rows * columns for rows, columns in self.expert_shapes)
        return weights + (sum(rows for rows, _ in self.expert_shapes) if self.has_bias else 0)


@dataclass(frozen=True)
class _Fields:
    """Where one architecture keeps what ``MoeLayout`` asks for."""

    n_experts: str
    intermediate: str
    top_k: str = "num_experts_per_tok"
    activation: str = "hidden_act"
    shared: Callable[[Any], int] = lambda config: 0
    shared_gate: bool = False
    is_moe_layer: Callable[[Any, int], bool] = lambda config, layer: True
    fixed_activation: str | None = None
    is_transposed: bool = False
    is_concatenated: bool = True
    has_bias: bool = False


def _every_nth_layer(config: Any, layer: int) -> bool:
    """Qwen: not in ``mlp_only_layers``, and every ``decoder_sparse_step``-th one."""
    return (
        layer not in (config.mlp_only_layers or ())
        and (layer + 1) % config.decoder_sparse_step == 0
    )


_ARCHITECTURES: dict[str, _Fields] = {
    "qwen3_moe": _Fields("num_experts", "moe_intermediate_size", is_moe_layer=_every_nth_layer),
    "qwen3_next": _Fields(
        "num_experts",
        "moe_intermediate_size",
        shared=lambda config: config.shared_expert_intermediate_size,
        shared_gate=True,
        is_moe_layer=_every_nth_layer,
    ),
    "qwen2_moe": _Fields(
        "num_experts",
        "moe_intermediate_size",
        shared=lambda config: config.shared_expert_intermediate_size,
        shared_gate=True,
        is_moe_layer=_every_nth_layer,
    ),
    "mixtral": _Fields("num_local_experts", "intermediate_size"),
    "phimoe": _Fields("num_local_experts", "intermediate_size"),
    "deepseek_v2": _Fields(
        "n_routed_experts",
        "moe_intermediate_size",
        shared=lambda config: (config.n_shared_experts or 0) * config.moe_intermediate_size,
        is_moe_layer=lambda config, layer: layer >= config.first_k_dense_replace,
    ),
    "olmoe": _Fields("num_experts", "intermediate_size"),
    "gpt_oss": _Fields(
        "num_local_experts",
        "intermediate_size",
        # The experts apply a clamped SwiGLU of their own; config.hidden_act is not read.
        fixed_activation="clamped_swiglu",
        is_transposed=True,
        is_concatenated=False,
        has_bias=True,
    ),
    "gemma4_text": _Fields(
        "num_experts",
        "moe_intermediate_size",
        top_k="top_k_experts",
        activation="hidden_activation",
        # A dense MLP runs beside the experts in every layer: DynaExq's "shared expert".
        shared=lambda config: config.intermediate_size,
        is_moe_layer=lambda config, layer: bool(config.enable_moe_block),
    ),
}
SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(sorted(_ARCHITECTURES))


def _text_config(config: Any) -> Any:
    """The language part of a multimodal configuration, or the configuration itself."""
    get = getattr(config, "get_text_config", None)
    return get(decoder=True) if callable(get) else config


def _supported() -> str:
    return "use one of " + ", ".join(SUPPORTED_ARCHITECTURES)


def _positive(config: Any, field: str, architecture: str) -> int:
    value = getattr(config, field, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{architecture} configuration has {field}={value!r}: "
            "give a whole number of at least 1 in its config.json"
        )
    return value


def inspect_config(config: Any) -> MoeLayout:
    """Read the expert layout of a Transformers configuration.

    Raises:
        CheckpointError: a dense model, an architecture that is not supported, a
            checkpoint that is already quantised, or values that contradict each other.
    """
    quantization = getattr(config, "quantization_config", None)
    config = _text_config(config)
    quantization = quantization or getattr(config, "quantization_config", None)
    architecture = getattr(config, "model_type", None) or type(config).__name__
    fields = _ARCHITECTURES.get(architecture)
    if fields is None:
        if any(getattr(config, field, None) for field in _EXPERT_COUNT_FIELDS):
            raise CheckpointError(
                f"{architecture!r} is a Mixture-of-Experts architecture that is not supported: "
                + _supported()
            )
        raise CheckpointError(
            f"{architecture!r} is a dense model without routed experts: " + _supported()
        )
    if quantization:
        get = getattr(quantization, "get", lambda key: getattr(quantization, key, None))
        raise CheckpointError(
            f"{architecture} checkpoint is already quantised ({get('quant_method') or 'unnamed'}): "
            "use the bf16 or FP16 checkpoint, precision is changed here"
        )
    n_layers = _positive(config, "num_hidden_layers", architecture)
    moe_layer_ids = tuple(i for i in range(n_layers) if fields.is_moe_layer(config, i))
    if not moe_layer_ids or getattr(config, fields.n_experts, None) in (0, None):
        raise CheckpointError(
            f"{architecture} configuration has no Mixture-of-Experts layer "
            f"({fields.n_experts}={getattr(config, fields.n_experts, None)!r}, "
            f"{len(moe_layer_ids)} of {n_layers} layers sparse): use a configuration with experts"
        )
    n_experts = _positive(config, fields.n_experts, architecture)
    top_k = _positive(config, fields.top_k, architecture)
    if top_k > n_experts:
        raise CheckpointError(
            f"{architecture} configuration routes to {fields.top_k}={top_k} of only "
            f"{n_experts} experts: correct its config.json"
        )
    return MoeLayout(
        architecture=architecture,
        n_layers=n_layers,
        moe_layer_ids=moe_layer_ids,
        n_experts=n_experts,
        top_k=top_k,
        hidden=_positive(config, "hidden_size", architecture),
        intermediate=_positive(config, fields.intermediate, architecture),
        shared_intermediate=fields.shared(config) or 0,
        shared_gate=fields.shared_gate,
        activation=fields.fixed_activation or getattr(config, fields.activation),
        is_transposed=fields.is_transposed,
        is_concatenated=fields.is_concatenated,
        has_bias=fields.has_bias,
    )


def read_config(folder: Path | str) -> Any:
    """The Transformers configuration in ``folder/config.json``, read without network.

    Raises:
        CheckpointError: no such file, not JSON, or nothing Transformers can read.
    """
    path = Path(folder) / "config.json"
    shown = relative(path.parent)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"cannot read config.json in {shown!r} ({error.strerror or error}): "
            "name a folder that holds a model"
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"config.json in {shown!r} is not text: copy it again") from error
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"config.json in {shown!r} is truncated or not JSON "
            f"(line {error.lineno}): copy it again"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise CheckpointError(
            f"config.json in {shown!r} names no model_type, so it describes no model: copy it again"
        )
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            path.parent, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # Transformers raises many kinds, some from its validators
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"config.json in {shown!r} (model_type {content['model_type']!r}) cannot be read "
            f"by the installed Transformers ({first_line}): {_supported()} and check its values"
        ) from error


def find_experts(model: Any) -> dict[int, tuple[str, Any]]:
    """Fused expert modules of a model: layer index -> (name, module)."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        tensors = (own.get("gate_up_proj"), own.get("down_proj"))
        if any(tensor is None or tensor.ndim != 3 for tensor in tensors):
            continue
        layer = _LAYER_IN_NAME.search(name)
        if layer is not None:
            found[int(layer.group(1))] = (name, module)
    return found


def check_model(model: Any) -> MoeLayout:
    """The layout of ``model``'s configuration, after comparing it with its tensors.

    Raises:
        CheckpointError: also where a layer's experts are missing or of another shape,
            or the storage flags of the module differ from what the layout expects.
    """
    layout = inspect_config(model.config)
    experts = find_experts(model)
    if tuple(sorted(experts)) != layout.moe_layer_ids:
        raise CheckpointError(
            f"{layout.architecture} model holds fused experts in layers {sorted(experts)}, its "
            f"configuration says {list(layout.moe_layer_ids)}: load it with a matching config.json"
        )
    flags = ("is_transposed", "is_concatenated", "has_bias")
    for name, module in experts.values():
        for tensor_name, (rows, columns) in zip(
            ("gate_up_proj", "down_proj"), layout.expert_shapes, strict=True
        ):
            tail = (columns, rows) if layout.is_transposed else (rows, columns)
            held = tuple(getattr(module, tensor_name).shape)
            if held != (layout.n_experts, *tail):
                raise CheckpointError(
                    f"{name}.{tensor_name} has shape {list(held)}, the configuration asks for "
                    f"{[layout.n_experts, *tail]}: load it with a matching config.json"
                )
        for flag in flags:
            if getattr(module, flag, getattr(layout, flag)) != getattr(layout, flag):
                raise CheckpointError(
                    f"{name} stores its experts with {flag}={getattr(module, flag)}, "
                    f"{layout.architecture} is read with {getattr(layout, flag)}: "
                    "use the version of Transformers that is pinned"
                )
    return layout
