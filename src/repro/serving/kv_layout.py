"""What one token, and one request, cost in the KV cache of a model: asked of the model itself.

The one idea: no configuration field says reliably what a layer caches (latents of MLA, keys and
values of different size, shared and skipped layers, recurrent states).  So the model is run
once on two tokens with Transformers' own cache, and what each cache layer received is the
layout.  Experts answer zero meanwhile: they have no part in it, and may be on the meta device.

Left out: caches that keep more than keys and values per token (indexers of sparse attention,
compressed attention) and layers with both attention and a recurrent state; refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from repro.errors import CheckpointError
from repro.integration.experts import use_experts
from repro.integration.steps import CACHE_NAMES
from repro.serving.kv_sizes import BLOCK_TOKENS, KVError, KVLayout, LayerLayout, StateSpec

_PROBE = "repro-kv-probe"
_WHOLE, _FIRST = (5, 6, 7, 8, 9), 3  # a prompt, and its first chunk


def cache_argument(model: nn.Module) -> str:
    """Name of the argument that takes the cache.

    Raises:
        KVError: the model takes none.
    """
    forward: Any = model.forward
    parameters = inspect.signature(forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise KVError(
        f"{type(model).__name__} takes no cache ({' or '.join(CACHE_NAMES)}): "
        "use a causal language model"
    )


def _no_experts(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    return torch.zeros_like(hidden_states)


@contextmanager
def _silent_experts(model: nn.Module) -> Iterator[None]:
    ALL_EXPERTS_FUNCTIONS.register(_PROBE, _no_experts)
    with ExitStack() as stack:
        # a model without experts, or with a layout that only it can run, runs as it is
        with suppress(CheckpointError):
            stack.enter_context(use_experts(model, _PROBE))
        yield


def probe(model: nn.Module, block_tokens: int = BLOCK_TOKENS) -> KVLayout:
    """Ask ``model`` what it caches; runs it on a few tokens, without its experts.

    Args:
        model: a causal language model of Transformers.
        block_tokens: tokens of a block.

    Raises:
        KVError: a cache layer of a kind that is not supported, or no cache at all.
    """
    if block_tokens < 1:
        raise KVError(f"block_tokens={block_tokens}: a block holds at least 1 token")
    with torch.inference_mode(), _silent_experts(model):
        _, cache = _run(model, _WHOLE[:2], None)
        layers = tuple(_layer(i, layer) for i, layer in enumerate(cache.layers))
        if not any(layer.kind != "none" for layer in layers):
            raise KVError(f"{type(model).__name__} put nothing into its cache")
        chunks = not any(layer.states for layer in layers) or _continues(model)
    config: Any = model.config
    n_decoder = config.get_text_config(decoder=True).num_hidden_layers
    skipped = sum(layer.kind == "none" for layer in layers) + n_decoder - len(layers)
    return KVLayout(layers, block_tokens, chunks, shares_kv=skipped > 0)


def _run(model: nn.Module, tokens: tuple[int, ...], cache: Any) -> tuple[Tensor, Any]:
    config: Any = model.config
    if cache is None:
        cache = DynamicCache(config=config)
    some: Any = next(p for p in model.parameters() if not p.is_meta)
    vocab = config.get_text_config(decoder=True).vocab_size
    ids = torch.tensor([tokens], device=some.device) % vocab
    options: dict[str, Any] = {cache_argument(model): cache}
    forward: Any = model.forward
    if "logits_to_keep" in inspect.signature(forward).parameters:
        # named one by one, so that layers that share keys and values see all tokens
        options["logits_to_keep"] = torch.arange(len(tokens), device=some.device)
    return model(input_ids=ids, use_cache=True, **options).logits, cache


def _continues(model: nn.Module) -> bool:
    """Whether a chunk of several tokens goes on from the state of the one before."""
    whole, _ = _run(model, _WHOLE, None)
    _, cache = _run(model, _WHOLE[:_FIRST], None)
    rest, _ = _run(model, _WHOLE[_FIRST:], cache)
    precision: Any = torch.float32 if whole.dtype is torch.float64 else whole.dtype
    tolerance = torch.finfo(precision).eps ** 0.5  # states are float32 at best
    expected, found = whole[:, _FIRST:].double(), rest.double()
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def _layer(index: int, layer: Any) -> LayerLayout:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if isinstance(layer, CacheLayerMixin):
            raise _unsupported(index, layer, "it keeps both attention and a recurrent state")
        if type(layer) is not LinearAttentionLayer:
            raise _unsupported(index, layer, "its state is kept in a way of its own")
        return LayerLayout(
            "recurrent", states=_states(index, layer), n_states=layer.number_of_states
        )
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or keys.numel() == 0:
        return LayerLayout("none")  # it reads another layer's keys and values
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise _unsupported(index, layer, "it keeps more than keys and values")
    if keys.dtype != values.dtype or keys.ndim != 4 or values.ndim != 4:
        raise _unsupported(index, layer, "keys and values differ in more than their size")
    sliding = isinstance(layer, DynamicSlidingWindowLayer)
    return LayerLayout(
        "sliding" if sliding else "full",
        (keys.shape[1], keys.shape[3]),
        (values.shape[1], values.shape[3]),
        keys.dtype,
        int(layer.sliding_window) if sliding else None,
    )


def _states(index: int, layer: Any) -> tuple[StateSpec, ...]:
    found = []
    kinds: tuple[tuple[Literal["conv", "recurrent"], Any], ...] = (
        ("conv", layer.conv_states),
        ("recurrent", layer.recurrent_states),
    )
    for kind, tensors in kinds:
        for number, tensor in tensors.items():
            if tensor is not None:
                shape = tuple(tensor.shape[1:])
                found.append(StateSpec(index, kind, number, shape, tensor.dtype))
    return tuple(found)


def _unsupported(index: int, layer: Any, reason: str) -> KVError:
    return KVError(
        f"cache layer {index} ({type(layer).__name__}) is not supported: {reason}; "
        "serve a model with plain, sliding or linear attention"
    )


__all__ = [
    "BLOCK_TOKENS",
    "KVError",
    "KVLayout",
    "LayerLayout",
    "StateSpec",
    "cache_argument",
    "probe",
]
