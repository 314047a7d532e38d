"""Running a model again from the layer where something changed.

The one idea: one forward pass keeps what every decoder layer was called with; a pass that
differs only in the experts of layer l and after then calls layers l, l + 1, ... with the same
arguments and the new hidden states, and norm and head at the scored tokens alone.  Attention of
layer l comes before its experts, so its output is kept, too.  That all this is the model's own
arithmetic is not taken on trust: it is compared with the model's logits first, and a model put
together otherwise is run in full.

Letters: P prompts, T tokens, H hidden, V vocabulary, n scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repro.calibration.passes import run_prompts, scored_tokens

_ATTENTION = ("self_attn", "linear_attn")


@dataclass
class _LayerCall:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool
    attention: tuple[nn.Module, Any] | None = None  # the module and what it gave

    @property
    def hidden(self) -> Tensor:
        return self.kwargs["hidden_states"] if self.by_name else self.args[0]  # type: ignore[no-any-return]

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        if self.by_name:
            result = layer(*self.args, **{**self.kwargs, "hidden_states": hidden})
        else:
            result = layer(hidden, *self.args[1:], **self.kwargs)
        return result[0] if isinstance(result, tuple) else result

    @contextmanager
    def attention_kept(self) -> Iterator[None]:
        """Attention of this layer gives what it gave, without computing."""
        if self.attention is None:
            yield
            return
        module, output = self.attention
        module.forward = lambda *args, **kwargs: output
        try:
            yield
        finally:
            del module.forward


class Replay:
    """One batch of prompts, ready to be run from any decoder layer on."""

    def __init__(self, model: nn.Module, ids: Tensor, mask: Tensor) -> None:
        self._model, self._ids, self._mask = model, ids, mask
        chosen = scored_tokens(mask)
        padded = torch.cat([chosen, torch.zeros_like(chosen[:, :1])], dim=1)
        self.places = padded.reshape(-1).nonzero()[:, 0]  # scored tokens among all P * T
        self._calls: list[_LayerCall] = []
        base: Any = getattr(model, "base_model", model)
        self._layers = list(getattr(base, "layers", ()))
        self._norm: Any = getattr(base, "norm", None)
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self.whole_model = not self._capture()

    @property
    def n_scored(self) -> int:
        """n."""
        return int(self.places.numel())

    @property
    def shape(self) -> tuple[int, int]:
        """P and T."""
        return int(self._ids.shape[0]), int(self._ids.shape[1])

    @property
    def labels(self) -> Tensor:
        """The token that follows each scored token, ``[n]``."""
        return self._ids.reshape(-1)[self.places + 1]

    def logits(self, layer_index: int, chunk: int) -> Iterator[Tensor]:
        """Float32 logits of the scored tokens, ``chunk`` tokens at a time.

        Args:
            layer_index: first decoder layer that may have changed.
            chunk: tokens per piece.
        """
        if self.whole_model:
            logits = run_prompts(self._model, self._ids, self._mask, logits=True)
            for places in self.places.split(chunk):
                yield logits.reshape(-1, logits.shape[-1])[places.to(logits.device)].float()
            return
        hidden = self._hidden(layer_index)
        flat = hidden.reshape(-1, hidden.shape[-1])[self.places.to(hidden.device)]
        for piece in self._norm(flat[None])[0].split(chunk):
            yield self._head(piece).float()

    def _hidden(self, layer_index: int) -> Tensor:
        first = self._calls[layer_index]
        with first.attention_kept():
            hidden = first.run(self._layers[layer_index], first.hidden)
        after = slice(layer_index + 1, None)
        for call, layer in zip(self._calls[after], self._layers[after], strict=True):
            hidden = call.run(layer, hidden)
        return hidden

    def _capture(self) -> bool:
        """Record one pass; whether replaying it gives the model's own logits."""
        handles = []

        def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._calls.append(_LayerCall(args, kwargs, "hidden_states" in kwargs))

        def attended(module: nn.Module, args: Any, output: Any) -> None:
            self._calls[-1].attention = (module, output)

        for layer in self._layers:
            handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            for name, part in layer.named_children():
                if name in _ATTENTION:
                    handles.append(part.register_forward_hook(attended))
        try:
            logits = run_prompts(self._model, self._ids, self._mask, logits=True)
        finally:
            for handle in handles:
                handle.remove()
        if not self._layers or self._norm is None or self._head is None:
            return False
        if len(self._calls) != len(self._layers) or not self.n_scored:
            return False
        try:
            return all(self._agrees(logits, at) for at in {0, len(self._layers) - 1})
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False  # not built of layers, norm and head: the full pass is always right

    def _agrees(self, logits: Tensor, layer_index: int) -> bool:
        self.whole_model = False
        flat = logits.reshape(-1, logits.shape[-1])
        chunk = chunk_tokens(logits.shape[-1], logits.device)
        pieces = self.logits(layer_index, chunk)
        # Sums of another order, as on a GPU, may differ in the last bits.
        tolerance = 1e-3 if logits.dtype == torch.float32 else 5e-2
        for places, ours in zip(self.places.split(chunk), pieces, strict=True):
            theirs = flat[places.to(flat.device)].float()
            scale = float(theirs.abs().max()) + 1e-6
            if float((ours - theirs).abs().max()) > tolerance * scale:
                return False
        return True


def chunk_tokens(n_vocabulary: int, device: torch.device) -> int:
    """How many tokens' logits to treat at once: what fits a CPU's cache, or fills a GPU."""
    n_values = 1 << 27 if device.type == "cuda" else 1 << 19
    return max(1, n_values // n_vocabulary)
