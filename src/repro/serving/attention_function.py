"""The attention and mask functions that Transformers calls, and the layer of the cache beside them.

The one idea: what is registered is one function for each function that a model had before, and
knows nothing of any model.  Which pages belong to the module that calls is looked up, so that
several models, and uses of a model outside the engine, go on side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from repro.serving.paged_layers import PagedLayer

if TYPE_CHECKING:
    from repro.serving.paged_cache import PagedCache

NAME = "repro-paged"


class Reader(Protocol):
    """:class:`repro.serving.attention.Installed`, as it is called from here."""

    def hands_through(self, layer: int) -> bool: ...  # noqa: D102

    def returned(self, layer: int, keys: Tensor, values: Tensor) -> None: ...  # noqa: D102

    def needs_mask(self) -> bool: ...  # noqa: D102

    def attend(  # noqa: D102
        self, module: Any, query: Tensor, keys: Tensor, values: Tensor, given: Any
    ) -> Tensor | None: ...

    def observe(  # noqa: D102
        self, module: Any, query: Tensor, keys: Tensor, values: Tensor, given: Any
    ) -> None: ...


# Weak: a model and its cache must go when their owner lets go of them.
_BY_MODULE: WeakKeyDictionary[nn.Module, ReferenceType[Reader]] = WeakKeyDictionary()
_BY_CONFIG: WeakValueDictionary[int, Reader] = WeakValueDictionary()  # configs have no hash


def text_config(model: Any) -> Any:
    """The configuration that a model's decoder layers hold."""
    return model.config.get_text_config(decoder=True)


def register(model: Any, before: str, reader: Reader) -> str:
    """Let ``reader`` be asked first by the model's attention; returns the implementation's name.

    Args:
        model: of Transformers.
        before: the implementation it has, for all that the reader leaves.
        reader: is referred to weakly.
    """
    name = f"{NAME}-over-{before}"
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attention, before))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, partial(_mask, before))
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "config"):
            _BY_MODULE[module] = ref(reader)
    _BY_CONFIG[id(text_config(model))] = reader
    return name


def forget(model: Any) -> None:
    """Undo :func:`register`; the name stays known."""
    for module in model.modules():
        _BY_MODULE.pop(module, None)
    _BY_CONFIG.pop(id(text_config(model)), None)


class ReadingLayer(PagedLayer):
    """A layer of the cache that gathers nothing where attention reads pages."""

    def __init__(
        self, cache: PagedCache, layer: int, group: int, place: int, reader: Reader
    ) -> None:
        super().__init__(cache, cache.layout.layers[layer], group, place)
        self.reader: Reader | None = reader
        self._layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand new keys and values through, or store and gather as the base does."""
        if self.reader is not None and self.reader.hands_through(self._layer):
            return key_states, value_states
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.reader is not None:
            self.reader.returned(self._layer, keys, values)
        return keys, values


def _attention(
    before: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any,
    **given: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """The registered function, over the one the model had before."""
    known = _BY_MODULE.get(module)
    reader = None if known is None else known()
    if reader is not None:
        out = reader.attend(module, query, key, value, given)
        if out is not None:
            return out, None
        seen = {**given, "positional arguments": args or None}
        reader.observe(module, query, key, value, seen)
    return _function(before, module)(module, query, key, value, mask, *args, **given)


def _function(name: str, module: Any) -> Callable[..., tuple[Tensor, Any]]:
    """What the model would have called; each has an eager function of its own."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: Callable[..., tuple[Tensor, Any]] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function


def _mask(before: str, *args: Any, config: Any = None, **given: Any) -> Any:
    """The mask of the function before; none is made for a pass that needs none."""
    reader = _BY_CONFIG.get(id(config))
    if reader is not None and not reader.needs_mask():
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[before](*args, config=config, **given)
