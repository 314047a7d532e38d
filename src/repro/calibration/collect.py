"""``collect``: run the calibration prompts and keep what every layer's experts saw.

    calibration = collect(model, ids, mask, folder="...")
    importance(calibration.layers[0], Block.DOWN)

The one idea: a layer is finished when it has seen the last token, and is then written and
forgotten.  A model that runs micro-batches through all layers finishes them together at the
end; one that runs the whole batch through a layer at a time (a streamed model) finishes them
one after the other, and only one layer's sums are ever in memory.

With a folder the work is resumable by layer: files ``layer-XXX.npz`` of the same model,
prompts and options are taken as they are; of any other they are refused by name.

Letters: P prompts, T tokens of a prompt (padding included).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repro.calibration.accumulate import LayerSums
from repro.calibration.arrays import check_fingerprint, label_of
from repro.calibration.blocks import block_weights
from repro.calibration.cursor import TokenCursor, check_prompts
from repro.calibration.fingerprints import model_fingerprint, prompts_fingerprint
from repro.calibration.fisher import collect_fisher
from repro.calibration.passes import Labels, run_prompts
from repro.calibration.probes import ExpertCall, probing
from repro.calibration.statistics import MIN_TOKENS, PRIOR_TOKENS, LayerStatistics
from repro.errors import CheckpointError
from repro.integration.experts import ExpertsLayer, experts_layers
from repro.integration.steps import CaptureError
from repro.paths import relative

Progress = Callable[[int, int], None]
"""Called as ``progress(done, total)``."""


@dataclass(frozen=True)
class Calibration:
    """Statistics of all layers with experts, in order."""

    layers: tuple[LayerStatistics, ...]
    meta: dict[str, Any]  # model and prompts fingerprints, number of tokens, options

    def layer(self, layer_index: int) -> LayerStatistics:
        """The layer of that decoder index.

        Raises:
            KeyError: it has no experts.
        """
        return next(s for s in self.layers if s.layer_index == layer_index)

    def save(self, folder: Path | str) -> None:
        """Write ``layer-XXX.npz`` for every layer."""
        for stats in self.layers:
            stats.save(layer_file(Path(folder), stats.layer_index), self.meta)

    @classmethod
    def load(cls, folder: Path | str, *, model: str | None = None) -> Calibration:
        """All layers in ``folder``; ``model`` is the fingerprint they must carry.

        Raises:
            CheckpointError: none there, damaged, of another model, or not of one run.
        """
        first = check_statistics(Path(folder), model=model)
        read = [LayerStatistics.load(file)[0] for file in sorted(Path(folder).glob("layer-*.npz"))]
        return cls(tuple(sorted(read, key=lambda stats: stats.layer_index)), first)


def check_statistics(
    folder: Path, *, model: str | None = None, hessians: bool = False
) -> dict[str, Any]:
    """The description of the run that made the statistics in ``folder``; reads no other array.

    Raises:
        CheckpointError: none there, damaged, of another model, not of one run, or without
            second moments where ``hessians`` are asked for.
    """
    files = sorted(folder.glob("layer-*.npz"))
    if not files:
        raise CheckpointError(f"{relative(folder)!r} holds no layer-*.npz: calibrate into it first")
    first: dict[str, Any] = LayerStatistics.read_meta(files[0])
    for file in files:
        meta = LayerStatistics.read_meta(file)
        check_fingerprint(label_of(file), str(meta["model"]), model)
        if meta != first:
            raise CheckpointError(
                f"{label_of(file)!r} and {label_of(files[0])!r} are of different runs: "
                "delete the older one and calibrate again"
            )
    if hessians and not first["hessians"]:
        raise CheckpointError(
            f"{label_of(folder)!r} holds no second moments of the inputs, which this format needs: "
            "calibrate with --hessians, or quantise to a format without -gptq"
        )
    return first


def layer_file(folder: Path, layer_index: int) -> Path:
    """Where the statistics of a layer lie."""
    return folder / f"layer-{layer_index:03d}.npz"


class _Moments:
    """The probe that fills :class:`LayerSums` and hands over finished layers."""

    gradients = False

    def __init__(
        self,
        layers: tuple[ExpertsLayer, ...],
        mask: Tensor,
        done: Callable[[int, LayerStatistics], None],
        *,
        hessians: bool,
        limits: tuple[int, int],
    ) -> None:
        self.cursor = TokenCursor(mask)
        self._layers = {layer.layer_index: layer for layer in layers}
        self._sums: dict[int, LayerSums] = {}
        self._done, self._hessians, self._limits = done, hessians, limits
        self._top_k = 0
        self._mask = mask

    def wants(self, layer_index: int) -> bool:
        return layer_index in self._layers

    def begin(self, layer_index: int, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        self.cursor.advance(layer_index, top_k_index.shape[0])
        self._mask = self.cursor.mask(layer_index, top_k_index.device)
        self._top_k = int(top_k_index.shape[1])
        if layer_index not in self._sums:
            layer = self._layers[layer_index]
            self._sums[layer_index] = LayerSums(layer, hessians=self._hessians)
        self._sums[layer_index].add_routing(top_k_index, top_k_weights, self._mask)

    def expert(self, call: ExpertCall) -> None:
        self._sums[call.layer_index].add_expert(call, self._mask[call.token])

    def end(self, layer_index: int) -> None:
        if not self.cursor.finished(layer_index):
            return
        gate_up, down = block_weights(self._layers[layer_index].module)
        widths = (gate_up.shape[2], gate_up.shape[1], down.shape[2])
        stats = self._sums.pop(layer_index).finish(widths, *self._limits)
        _check(stats, self.cursor.n_real, self._top_k)
        self._done(layer_index, stats)


def _check(stats: LayerStatistics, n_real: int, top_k: int) -> None:
    counted = int(stats.counts.sum())
    if counted != n_real * top_k or stats.n_tokens != n_real:
        raise CaptureError(
            f"layer {stats.layer_index} counted {counted} choices for {n_real} tokens x "
            f"{top_k}: the statistics are incomplete, switch off expert parallelism"
        )
    for name in ("gate_up_moment", "down_moment", "gate_up_rows", "square_mass"):
        bad = ~torch.isfinite(getattr(stats, name)).reshape(stats.counts.shape[0], -1).all(dim=1)
        if bool(bad.any()):
            raise CheckpointError(
                f"layer {stats.layer_index}, expert {int(bad.nonzero()[0])}: activations are NaN "
                "or overflow in calibration; run the model in bfloat16 or float32"
            )


def collect(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor | None = None,
    *,
    hessians: bool = False,
    fisher: bool = False,
    labels: Labels = "sampled",
    seed: int = 0,
    micro_batch: int | None = None,
    min_tokens: int = MIN_TOKENS,
    prior_tokens: int = PRIOR_TOKENS,
    folder: Path | str | None = None,
    fingerprint: str | None = None,
    keep: bool = True,
    progress: Progress | None = None,
) -> Calibration:
    """Statistics of every layer with experts over the prompts ``[P, T]``.

    Args:
        model: a Transformers model with experts, in memory or streamed layer by layer.
        input_ids: the prompts, padded to one length.
        mask: True on real tokens; padding is not counted.  None: all are real.
        hessians: also the full second-moment matrices (for GPTQ).
        fisher: also the diagonal Fisher information; needs the weights in memory.
        labels: of the Fisher information, "sampled" from the model or "data".
        seed: of the sampled labels.
        micro_batch: prompts per forward pass; by default 4, and all of them for a streamed
            model, which cuts the batch itself.
        min_tokens: experts with fewer tokens are marked and pulled to the layer's mean.
        prior_tokens: how many tokens the layer's mean counts for.
        folder: where layers are written as soon as they are finished, and found again.
        fingerprint: of the model; by default that of its weights in memory.
        keep: False with a folder: statistics are not kept in memory (``layers`` is empty).
        progress: called with (finished prompts or layers, total).

    Raises:
        CaptureError: a layer did not see every token exactly once.
        CheckpointError: unsupported experts; a folder of another model, prompts or options.
    """
    ids, real = check_prompts(input_ids, mask)
    layers = experts_layers(model)
    streamed = any(p.is_meta for p in layers[0].module.parameters())
    if fisher and streamed:
        raise CheckpointError(
            "a streamed model has no weights to differentiate: load it into memory for Fisher"
        )
    meta = {
        "model": fingerprint or model_fingerprint(model),
        "prompts": prompts_fingerprint(ids, real),
        "n_prompts": int(ids.shape[0]),
        "n_tokens": int(real.sum()),
        "hessians": hessians,
        "fisher": f"{labels}-{seed}" if fisher else "",
        "min_tokens": min_tokens,
        "prior_tokens": prior_tokens,
    }
    home = None if folder is None else Path(folder)
    keep = keep or home is None
    found: dict[int, LayerStatistics] = {}
    open_layers = layers if home is None else _open_layers(home, layers, meta, found, keep=keep)

    def done(layer_index: int, stats: LayerStatistics) -> None:
        if home is not None and not fisher:
            stats.save(layer_file(home, layer_index), meta)
        if keep or fisher:
            found[layer_index] = stats
        if progress is not None and streamed:
            n_open = sum(not probe.cursor.finished(x.layer_index) for x in open_layers)
            progress(len(layers) - n_open, len(layers))

    if open_layers:
        probe = _Moments(
            open_layers, real, done, hessians=hessians, limits=(min_tokens, prior_tokens)
        )
        size = micro_batch or (len(ids) if streamed else 4)
        with probing(model, probe), torch.no_grad():
            for start in range(0, len(ids), size):
                run_prompts(model, ids[start : start + size], real[start : start + size])
                if progress is not None and not streamed:
                    progress(min(start + size, len(ids)), len(ids))
        probe.cursor.check([x.layer_index for x in open_layers])
    if fisher and open_layers:
        information = collect_fisher(
            model, ids, real, labels=labels, seed=seed, micro_batch=micro_batch or 1
        )
        for layer in open_layers:
            gate_up, down = information[layer.layer_index]
            found[layer.layer_index] = replace(
                found[layer.layer_index], gate_up_fisher=gate_up, down_fisher=down
            )
            if home is not None:
                found[layer.layer_index].save(layer_file(home, layer.layer_index), meta)
    ordered = [found[x.layer_index] for x in layers if x.layer_index in found] if keep else []
    return Calibration(tuple(ordered), meta)


def _open_layers(
    folder: Path,
    layers: tuple[ExpertsLayer, ...],
    meta: dict[str, Any],
    found: dict[int, LayerStatistics],
    *,
    keep: bool,
) -> tuple[ExpertsLayer, ...]:
    """Layers that no earlier run of the same model, prompts and options has finished.

    The others are put into ``found`` if they are to be kept.
    """
    left = []
    for layer in layers:
        path = layer_file(folder, layer.layer_index)
        if not path.exists():
            left.append(layer)
            continue
        stats, earlier = LayerStatistics.load(path)
        for key in ("model", "prompts"):
            check_fingerprint(label_of(path), str(earlier.get(key)), meta[key], key)
        if earlier != meta:
            changed = sorted(k for k in meta if earlier.get(k) != meta[k])
            raise CheckpointError(
                f"{label_of(path)!r} was collected with another {', '.join(changed)}: "
                "use the same options, or another folder"
            )
        if keep:
            found[layer.layer_index] = stats
    return tuple(left)
