"""Attention that reads pages itself, as a registered attention function of Transformers.

The one idea: a decode pass gives each row one token.  In such a pass the cache gathers nothing
and hands the new keys and values through; the attention function finds the pages, and one
kernel stores the token and attends (:mod:`repro.kernels.paged_attention`).  Every other pass,
and every layer the kernel does not serve, goes the way the model went before.

Which layers qualify is not read off a configuration.  In a gathered pass, a prompt usually, the
attention function sees what reaches it: a layer qualifies if it gets exactly the tensors that
the cache returned (in MLA it gets others, expanded from them) and no argument that the kernel
does not know.  Until a layer was seen, it is gathered.

A paged layer whose attention is then not called would lose its token; that ends the pass.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from repro.errors import unknown_name
from repro.kernels.paged_attention_reference import KvPlace
from repro.serving.attention_function import NAME, ReadingLayer, forget, register, text_config
from repro.serving.kv_blocks import BlockPlan
from repro.serving.kv_sizes import KVError

if TYPE_CHECKING:
    from repro.serving.paged_cache import PagedCache

Mode = Literal["auto", "gathered", "paged"]
MODES = ("auto", "gathered", "paged")

_LOG = logging.getLogger("repro.serving")
_NOT_SEEN = "not seen in a gathered pass yet"
#: Arguments of an attention function that do not change what it computes for one new token.
_HARMLESS = frozenset(
    "dropout scaling sliding_window s_aux softcap position_ids cache_position use_cache cache "
    "past_key_values logits_to_keep output_attentions output_hidden_states output_router_logits "
    "return_dict num_items_in_batch is_causal kwargs".split()
)
_KINDS = ("full_attention", "sliding_attention", None)


class Installed:
    """Paged attention of one model and its cache; ``reason`` says why there is none."""

    def __init__(self, model: Any, cache: PagedCache, reason: str | None) -> None:
        self.reason = reason
        self.passes: Counter[str] = Counter()  # "paged", or why a pass was gathered
        self.why_gathered: dict[int, str | None] = {}  # by layer; None: it is paged
        self._model, self._cache = model, cache
        self._before: str | None = None
        self._lengths: Tensor | None = None
        self._pages: Tensor | None = None
        self._paged: frozenset[int] = frozenset()
        self._pending: set[int] = set()
        self._returned: dict[int, tuple[Tensor, Tensor]] = {}
        self._places = {i: kv_place(cache.plan, i) for g in cache.plan.groups for i in g.layers}
        self._workspace: Any = None

    @property
    def active(self) -> bool:
        """Whether decode passes may be paged."""
        return self.reason is None

    def report(self) -> dict[str, Any]:
        """JSON-able: what is paged, and why the rest is not."""
        return {
            "reason": self.reason,
            "passes": dict(self.passes),
            "layers": {str(i): why or "paged" for i, why in sorted(self.why_gathered.items())},
        }

    def uninstall(self) -> None:
        """Give the model its own attention function back; a second call does nothing."""
        if self._before is None:
            return
        self._model.set_attn_implementation(self._before)
        forget(self._model)
        for layer in self._cache.layers:
            if isinstance(layer, ReadingLayer):
                layer.reader = None
        self._cache.reader = self._before = None
        self.reason = "uninstalled"

    # what the cache calls --------------------------------------------------------------------

    def begin(self, n_past: Any, n_new: Any, pages: Tensor) -> frozenset[int]:
        """Which layers of the pass are paged.

        Args:
            n_past: ``int64[R]`` cached tokens of each row.
            n_new: ``int64[R]`` new ones.
            pages: ``[R, B, P]`` page numbers on the device.
        """
        self.end()
        paged = frozenset(i for i, why in self.why_gathered.items() if why is None)
        if int(n_new.max()) > 1:
            self.passes["more than one new token in a row"] += 1
        elif not paged:
            reasons = Counter(why for why in self.why_gathered.values() if why)
            self.passes[reasons.most_common(1)[0][0]] += 1
        else:
            self.passes["paged"] += 1
            lengths = torch.from_numpy((n_past + n_new).astype("int32"))
            self.use(pages.flatten(1), lengths.to(pages.device), paged)
        return self._paged

    def use(self, pages: Tensor, lengths: Tensor, paged: frozenset[int] | None = None) -> None:
        """Read these until :meth:`end`: ``pages [R, B * P]``, ``lengths [R]`` with the new token.

        A captured graph gives buffers of its own, whose contents change between replays.
        """
        if paged is None:
            paged = frozenset(i for i, why in self.why_gathered.items() if why is None)
        self._pages, self._lengths, self._paged = pages, lengths, paged

    def check(self) -> None:
        """Before a pass is committed.

        Raises:
            KVError: a paged layer's attention did not come here, so its token is not stored.
        """
        if self._pending:
            raise KVError(
                f"layers {sorted(self._pending)} did not call the attention function {NAME!r} in "
                "a paged pass: use attention='gathered' with this model"
            )

    def end(self) -> None:
        """The pass is over; let go of its tensors."""
        self._pages = self._lengths = None
        self._paged = frozenset()
        self._pending.clear()
        self._returned.clear()

    # what the cache's layers call ------------------------------------------------------------

    def hands_through(self, layer: int) -> bool:
        """Whether a layer is paged in this pass; its attention must follow."""
        if layer not in self._paged:
            return False
        self._pending.add(layer)
        return True

    def returned(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Note what a gathered layer got, if it is not known yet."""
        if self.why_gathered.get(layer) == _NOT_SEEN:
            self._returned[layer] = keys, values

    # what the model calls --------------------------------------------------------------------

    def needs_mask(self) -> bool:
        """Not where all layers with keys and values are paged."""
        return len(self._paged) < len(self.why_gathered)

    def observe(self, module: Any, query: Tensor, keys: Tensor, values: Tensor, given: Any) -> None:
        """Learn from a gathered pass whether a layer qualifies."""
        layer = module.layer_idx
        returned = self._returned.pop(layer, None)
        if returned is None:
            return
        why = self._objection(layer, module, query, given)
        if keys is not returned[0] or values is not returned[1]:
            why = "its keys and values are computed from what is cached (latent attention)"
        self.why_gathered[layer] = why

    def _objection(self, layer: int, module: Any, query: Tensor, given: Any) -> str | None:
        from repro.kernels.paged_attention import unsupported

        layout, kinds = (
            self._cache.layout.layers[layer],
            getattr(module.config, "layer_types", None),
        )
        for name, value in given.items():
            if name not in _HARMLESS and value is not None:
                return f"its attention gets {name}, which the kernel does not know"
        if given.get("output_attentions") or given.get("dropout"):
            return "attention weights are wanted"
        kind = kinds[layer] if kinds else None
        if kind not in _KINDS:
            return f"{kind} is neither full nor sliding"
        if given.get("sliding_window") not in (None, layout.window):
            return f"window {given['sliding_window']} in attention, {layout.window} in the cache"
        if isinstance(given.get("scaling"), Tensor):
            return "its scale is a tensor"
        place = self._places[layer]
        if place is None:
            return "it has other heads of values than of keys"
        return unsupported(place, query.shape[1], query.dtype)

    def attend(
        self, module: Any, query: Tensor, keys: Tensor, values: Tensor, given: Any
    ) -> Tensor | None:
        """``[R, 1, Hq, D]`` if the layer is paged in this pass; its token is stored then."""
        layer = module.layer_idx
        if layer not in self._pending or self._pages is None or self._lengths is None:
            return None
        from repro.kernels.paged_attention import paged_attention

        self._pending.discard(layer)
        place, layout = self._places[layer], self._cache.layout.layers[layer]
        assert place is not None  # such a layer does not qualify
        scale = given.get("scaling")
        out = paged_attention(
            query[:, :, 0],
            self._cache.memory(layout.dtype),
            self._pages,
            self._lengths,
            place,
            keys[:, :, 0],
            values[:, :, 0],
            scale=place.key_size**-0.5 if scale is None else float(scale),
            workspace=self._workspace,
            window=layout.window,
            sinks=given.get("s_aux"),
            softcap=given.get("softcap"),
        )
        return out[:, None]


def install(model: Any, cache: PagedCache, mode: Mode = "auto") -> Installed:
    """Let decode passes of ``model`` read ``cache`` from its pages.

    Args:
        model: of Transformers; its attention function is replaced by one that falls back to it.
        cache: of this model.
        mode: ``auto`` (on CUDA), ``gathered`` (never) or ``paged`` (also in Triton's
            interpreter, for tests).  Where it is not possible, nothing is changed, and the
            reason is in the result; ``paged`` warns.

    Raises:
        UnknownNameError: another mode.
    """
    if mode not in MODES:
        raise unknown_name("attention", mode, MODES)
    reason = "attention='gathered'" if mode == "gathered" else _refusal(model, cache, mode)
    installed = Installed(model, cache, reason)
    if reason is not None:
        if mode == "paged":
            _LOG.warning("decode attention gathers keys and values: %s", reason)
        return installed
    from repro.kernels.paged_attention_workspace import Workspace

    before = text_config(model)._attn_implementation or "eager"
    installed._before = before
    installed._workspace = Workspace(cache.memory(torch.uint8).device)
    for number, group in enumerate(cache.plan.groups):
        for place, layer in enumerate(group.layers):
            cache.layers[layer] = ReadingLayer(cache, layer, number, place, installed)
            installed.why_gathered[layer] = _NOT_SEEN
    cache.reader = installed
    model.set_attn_implementation(register(model, before, installed))
    return installed


def _refusal(model: Any, cache: PagedCache, mode: str) -> str | None:
    """Why no pass of this model can be paged; None if some may."""
    try:
        from repro.kernels.paged_attention import DTYPES, interpreted
    except ImportError as error:
        return f"Triton is missing ({error})"
    device = cache.memory(torch.uint8).device
    if device.type != "cuda" and not (mode == "paged" and interpreted()):
        return f"the arena is on {device.type}, kernels run on cuda"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if cache.layout.shares_kv:
        return "layers share keys and values within a pass"
    dtypes = {group.dtype for group in cache.plan.groups}
    if not dtypes:
        return "no layer keeps keys and values"
    if not dtypes & set(DTYPES):
        return f"{dtypes.pop()} is not bfloat16, float16 or float32"
    if not model._can_set_attn_implementation():
        return f"{type(model).__name__} does not take registered attention functions"
    return None


def kv_place(plan: BlockPlan, layer: int) -> KvPlace | None:
    """Where the tokens of one layer lie, in values; None if their heads are not in pairs."""
    layout = plan.layout.layers[layer]
    n_bytes = layout.dtype.itemsize
    if layout.key_shape[0] != layout.value_shape[0]:
        return None
    return KvPlace(
        start=plan.layout.places(plan.page_bytes)[layer][0] // n_bytes,
        block_tokens=plan.layout.block_tokens,
        block_pages=plan.block_pages,
        page_values=plan.page_bytes // n_bytes,
        n_heads=layout.key_shape[0],
        key_size=layout.key_shape[1],
        value_size=layout.value_shape[1],
    )
