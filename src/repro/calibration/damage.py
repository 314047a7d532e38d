"""The measured damage of lowering single blocks, prompt by prompt.

The one idea: change one matrix and nothing else, and compare all predictions with those of the
unchanged model.  Only layers from the changed one on are run again (see ``replay``), and all
prompts of a batch at once.  The model gets its own bits back whatever happens.

Letters: n blocks, W widths, P prompts, T tokens of a prompt, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from repro.calibration.arrays import check_fingerprint, load_arrays, save_arrays
from repro.calibration.blocks import BlockRef, block_weights
from repro.calibration.cursor import check_prompts
from repro.calibration.divergence import Reference
from repro.calibration.passes import input_device, scored_tokens
from repro.calibration.replay import Replay
from repro.calibration.sensitivity import Stack
from repro.contract import Block
from repro.errors import UnknownNameError
from repro.integration.experts import experts_layers, use_experts
from repro.paths import relative

_KIND, _VERSION = "measured damage", 1

Stacks = Mapping[int, Sequence[Stack]]
"""Encoded gate_up and down by layer index."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Damage:
    """Means over the scored tokens of each prompt, in nats."""

    blocks: tuple[BlockRef, ...]
    widths: tuple[int, ...]
    kl: npt.NDArray[np.float64]  # [n, W, P] divergence from the unchanged model
    loss: npt.NDArray[np.float64]  # [n, W, P] increase of the loss
    n_scored: npt.NDArray[np.int64]  # [P] scored tokens
    reference_loss: npt.NDArray[np.float64]  # [P] of the unchanged model
    meta: dict[str, Any] = field(default_factory=dict)

    def mean(self, what: str = "kl") -> npt.NDArray[np.float64]:
        """Over all scored tokens together, ``[n, W]``; ``what`` is "kl" or "loss"."""
        values: npt.NDArray[np.float64] = getattr(self, what)
        weights = self.n_scored / max(int(self.n_scored.sum()), 1)
        return np.asarray(values @ weights)

    def save(self, path: Path | str) -> None:
        """Write one .npz file.

        Raises:
            OutputError: it cannot be written.
        """
        arrays = {
            "blocks": np.asarray(self.blocks, dtype=np.int64).reshape(-1, 3),
            "widths": np.asarray(self.widths),
            "kl": self.kl,
            "loss": self.loss,
            "n_scored": self.n_scored,
            "reference_loss": self.reference_loss,
        }
        save_arrays(Path(path), _KIND, _VERSION, arrays, self.meta)

    @classmethod
    def load(cls, path: Path | str, *, model: str | None = None) -> Damage:
        """Read what :meth:`save` wrote; ``model`` is the fingerprint it must carry.

        Raises:
            CheckpointError: no such file, damaged, or of another model.
        """
        arrays, meta = load_arrays(Path(path), _KIND, _VERSION)
        check_fingerprint(relative(Path(path)), str(meta.get("model", "")), model)
        rows = arrays.pop("blocks").tolist()
        blocks = tuple(BlockRef(layer, expert, Block(b)) for layer, expert, b in rows)
        widths = tuple(int(w) for w in arrays.pop("widths"))
        return cls(blocks, widths, **arrays, meta=meta)


@contextmanager
def replaced(weight: Tensor) -> Iterator[Callable[[Tensor], None]]:
    """Yields a function that overwrites ``weight`` in place; the original bits come back."""
    original = weight.detach().clone()

    def replace(new: Tensor) -> None:
        weight.copy_(new)

    try:
        yield replace
    finally:
        weight.copy_(original)


@torch.no_grad()
def measure_damage(
    model: nn.Module,
    stacks: Stacks,
    blocks: Sequence[BlockRef],
    widths: Sequence[int],
    input_ids: Tensor,
    mask: Tensor | None = None,
    *,
    batch: int | None = None,
    implementation: str | None = None,
    progress: Progress | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Damage:
    """Lower each block to each width alone and measure what it does to every prompt.

    Args:
        model: a Transformers model with experts, weights in memory.
        stacks: the encoded matrices of the layers of ``blocks``.
        blocks: which matrices.
        widths: bits to read them at.
        input_ids: prompts ``[P, T]``, padded to one length.
        mask: True on real tokens; padding is not scored.
        batch: prompts at a time; by default as many as leave room for the reference's logits
            (12 bytes for each, about 0.4 GB on a CPU and 6.4 GB on a GPU).
        implementation: of the experts; by default what the model uses now.
        progress: called with (passes done, passes in all).
        meta: kept with the result, e.g. fingerprints.

    Raises:
        UnknownNameError: a block the model does not have.
    """
    ids, real = check_prompts(input_ids, mask)
    device = input_device(model)
    ids, real = ids.to(device), real.to(device)
    modules = {layer.layer_index: layer for layer in experts_layers(model)}
    for ref in blocks:
        layer = modules.get(ref.layer_index)
        if layer is None or not 0 <= ref.expert < layer.n_experts or ref.layer_index not in stacks:
            raise UnknownNameError(
                f"block {tuple(map(int, ref))} is none of the encoded blocks: experts are in "
                f"layers {sorted(set(modules) & set(stacks))}"
            )
    weights = {i: block_weights(layer.module) for i, layer in modules.items()}
    n_vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    n_values = 1 << (29 if device.type == "cuda" else 25)
    size = batch or max(1, n_values // (ids.shape[1] * n_vocabulary))
    shape = (len(blocks), len(widths), len(ids))
    kl = torch.zeros(shape, dtype=torch.float64, device=device)
    loss, losses = torch.zeros_like(kl), torch.zeros(len(ids), dtype=torch.float64, device=device)
    done, total = 0, len(blocks) * len(widths) * -(-len(ids) // size)
    switch = nullcontext() if implementation is None else use_experts(model, implementation)
    with switch:
        for start in range(0, len(ids), size):
            at = slice(start, start + size)
            replay = Replay(model, ids[at], real[at])
            reference = Reference.of(replay, n_vocabulary)
            losses[at] = reference.per_prompt([reference.losses])
            for row, ref in enumerate(blocks):
                weight = weights[ref.layer_index][ref.block][ref.expert]
                stack = stacks[ref.layer_index][ref.block]
                with replaced(weight) as replace:
                    for column, n_bits in enumerate(widths):
                        replace(stack.decode(n_bits, ref.expert))
                        found = reference.compare(replay, ref.layer_index)
                        kl[row, column, at], loss[row, column, at] = found
                        done += 1
                        if progress is not None:
                            progress(done, total)
    return Damage(
        tuple(blocks),
        tuple(widths),
        kl.cpu().numpy(),
        loss.cpu().numpy(),
        scored_tokens(real).sum(dim=1).cpu().numpy(),
        losses.cpu().numpy(),
        dict(meta or {}),
    )
