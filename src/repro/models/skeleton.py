"""A Transformers model without weights, to be filled one tensor at a time.

The one idea: everything that ``from_pretrained`` derives from the configuration - types of
parameters, rotary tables, tied weights - is built here on the meta device, where it takes no
memory; weights come in later, from a checkpoint layer by layer or from encoded experts, and
a parameter that nothing has filled is an error, never a random value.

Left out: renamings beyond those of the nine supported architectures; a tensor that belongs
to no parameter is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from repro.errors import CheckpointError
from repro.models.layout import check_model, find_experts

# Older spellings of what is no expert, for the architectures whose modules were renamed.
_RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "mixtral": ((".block_sparse_moe.", ".mlp."),),
    "phimoe": ((".block_sparse_moe.", ".mlp."), (".mlp.gate.", ".mlp.router.")),
}
# Tables that old checkpoints carry and models compute themselves.
_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$")


def build_skeleton(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of ``config`` in evaluation mode: parameters on meta, tables on ``device``.

    Raises:
        CheckpointError: Transformers cannot build the model, or its tensors are not what
            the layout expects.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except Exception as error:  # the library raises many kinds
            raise CheckpointError(
                f"{config.model_type} configuration builds no model "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__}): "
                "use the checkpoint's own config.json"
            ) from error
        check_model(model)
        _apply_types(model, dtype)
    _fill_tables(model, device)
    return model.eval().requires_grad_(False)


def target_name(architecture: str, name: str, known: Iterable[str]) -> str | None:
    """The parameter or buffer that a checkpoint's tensor fills; None for what none needs.

    Raises:
        CheckpointError: it belongs to no parameter of the architecture.
    """
    known = known if isinstance(known, (set, frozenset, dict)) else set(known)
    renamed = name
    for old, new in _RENAMED.get(architecture, ()):
        renamed = renamed.replace(old, new)
    for candidate in (renamed, f"model.{renamed}"):
        if candidate in known:
            return candidate
    if name.startswith("mtp.") or _COMPUTED.search(name):
        return None  # Transformers builds no multi-token-prediction layer
    raise CheckpointError(
        f"tensor {name!r} belongs to no parameter of {architecture}: "
        "use the checkpoint's own config.json, or copy the checkpoint again"
    )


def place(model: nn.Module, name: str, tensor: Tensor, device: torch.device) -> None:
    """Put ``tensor`` where the parameter or buffer ``name`` was, in that one's type.

    Raises:
        CheckpointError: another shape than the model has there.
    """
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    held = getattr(owner, leaf)
    if tuple(held.shape) != tuple(tensor.shape):
        raise _other_shape(name, tuple(tensor.shape), tuple(held.shape))
    tensor = tensor.to(device=device, dtype=held.dtype)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def tie_missing(model: Any, names: Iterable[str]) -> None:
    """Tie what the checkpoint stores once (embeddings and head), as its configuration says."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if any(name in parameters and parameters[name].is_meta for name in names):
        model.tie_weights()


def check_filled(label: str, model: nn.Module, expected: Iterable[str]) -> None:
    """Refuse a model of which one of the ``expected`` tensors has not been filled.

    Raises:
        CheckpointError: names the first.
    """
    empty = [name for name in expected if _get(model, name).is_meta]
    if empty:
        raise CheckpointError(
            f"checkpoint {label!r} lacks {len(empty)} tensors that would be random "
            f"({', '.join(empty[:3])}): copy the checkpoint again"
        )


def check_stored(
    label: str, architecture: str, model: nn.Module, stored: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse what is not the non-expert part of ``model``, from names and shapes alone.

    Raises:
        CheckpointError: a tensor that has no place, another shape, or one that is missing.
    """
    held = model.state_dict(keep_vars=True)
    routed = tuple(f"{name}." for name, _ in find_experts(model).values())
    filled = set()
    for name, shape in stored.items():
        goal = target_name(architecture, name, held)
        if goal is None:
            continue
        if tuple(held[goal].shape) != shape:
            raise _other_shape(goal, shape, tuple(held[goal].shape))
        filled.add(id(held[goal]))  # tied tensors are one
    lacking = sorted(
        name
        for name, tensor in held.items()
        if id(tensor) not in filled and not name.startswith(routed)
    )
    if lacking:
        raise CheckpointError(
            f"checkpoint {label!r} lacks {len(lacking)} tensors that would be random "
            f"({', '.join(lacking[:3])}): copy the checkpoint again"
        )


def fused_name(experts: str, block: str, *, bias: bool = False) -> str:
    """The parameter of a fused experts module that holds a block, or its biases."""
    return f"{experts}.{block}_proj{'_bias' if bias else ''}"


def _other_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"{name!r} has shape {list(found)}, the configuration asks for {list(expected)}: "
        "use the checkpoint's own config.json"
    )


def _get(model: nn.Module, name: str) -> Tensor:
    owner_name, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner_name), leaf)  # type: ignore[no-any-return]


def _apply_types(model: Any, dtype: torch.dtype) -> None:
    """Parameters that Transformers keeps in float32 in a model of half precision."""
    patterns = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        patterns += list(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype not in (torch.float16, torch.bfloat16) or not patterns:
        return
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns))
    for name, parameter in model.named_parameters():
        if kept.search(name):
            parameter.data = parameter.data.to(torch.float32)


def _fill_tables(model: Any, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary tables, embedding scales).

    Raises:
        CheckpointError: one of them is not computed by the model's own initialisation.
    """
    from transformers import PreTrainedModel

    saved = set(model.state_dict())
    holder: dict[str, Any] = {"": model}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            holder[name] = module
        computed = [
            leaf
            for leaf, buffer in module._buffers.items()
            if buffer is not None and f"{name}.{leaf}".removeprefix(".") not in saved
        ]
        if not computed:
            continue
        for leaf in computed:
            buffer = module._buffers[leaf]
            filling = float("nan") if buffer.is_floating_point() else 0
            module._buffers[leaf] = torch.full_like(buffer, filling, device=device)
        inner = max((n for n in holder if f"{name}.".startswith(f"{n}.") or not n), key=len)
        module._is_hf_initialized = False
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            holder[inner]._init_weights(module)
        for leaf in computed:
            buffer = module._buffers[leaf]
            if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
                raise CheckpointError(
                    f"buffer '{name}.{leaf}' is not computed by this version of Transformers: "
                    "use the version that is pinned"
                )
