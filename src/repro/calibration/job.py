"""One calibration: what it was asked for, and its stages for single layers.

The one idea: a layer is encoded, judged and measured before the next one is encoded, and what
was found is written at once with a description of everything it depends on.  A file with the
same description is taken instead of doing the work again; any other is refused by name.

Letters: E experts, B blocks, W widths, N rows, K columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from repro.calibration.arrays import label_of, load_arrays, save_arrays
from repro.calibration.blocks import BlockRef
from repro.calibration.collect import Calibration, collect, layer_file
from repro.calibration.damage import Damage, measure_damage
from repro.calibration.fingerprints import prompts_fingerprint
from repro.calibration.prompts import EncodedPrompts
from repro.calibration.sensitivity import Kind, sensitivity
from repro.calibration.statistics import LayerStatistics, importance
from repro.calibration.table import LayerSensitivity, SensitivityTable, build_table
from repro.contract import Block
from repro.errors import CheckpointError
from repro.files import write_text
from repro.formats.encoded import EncodedStack

_KIND, _VERSION = "sensitivity of a layer", 1
SUMMARY_VERSION = 1


class StackFormat(Protocol):
    """Encodes all experts of a block at once."""

    def encode_stack(self, weight: Tensor, importance: Tensor | None = None) -> EncodedStack:
        """``weight[E, N, K]``."""
        ...


@dataclass(frozen=True)
class Options:
    """What a calibration does; part of what a resumed run must agree on."""

    max_tokens: int = 1024  # of a prompt
    kind: str = "auto"  # of sensitivity: Fisher where the model is in memory, else output
    n_blocks: int = 96  # measured one by one for the heads; 0: no heads
    damage_prompts: int = 24  # so many, spread over all prompts, for damage and heads
    micro_batch: int = 4
    seed: int = 0
    hessians: bool = False  # also the second moments of the inputs, for "-gptq" formats


@dataclass
class Encoded:
    """A layer's matrices, encoded when somebody asks for them."""

    weights: tuple[Tensor, Tensor]
    importances: tuple[Tensor, Tensor]
    encoder: StackFormat
    _stacks: tuple[EncodedStack, EncodedStack] | None = None

    @property
    def stacks(self) -> tuple[EncodedStack, EncodedStack]:
        """Encoded at the first use, then kept."""
        if self._stacks is None:
            gate_up, down = (
                self.encoder.encode_stack(w.float(), i.to(w.device))
                for w, i in zip(self.weights, self.importances, strict=True)
            )
            self._stacks = gate_up, down
        return self._stacks


@dataclass(frozen=True)
class Job:
    """A folder and what is to be in it."""

    out: Path
    options: Options
    kind: Kind
    encoder: StackFormat
    ticks: Callable[[str], Callable[[int, int], None]]

    @property
    def statistics_folder(self) -> Path:
        """Where the statistics lie."""
        return self.out / "statistics"

    def statistics(
        self, model: nn.Module, prompts: EncodedPrompts, fingerprint: str, *, streamed: bool
    ) -> Calibration:
        """Of all layers; ``fingerprint`` is the model's.  Streamed, they are only on disk."""
        return collect(
            model,
            prompts.input_ids,
            prompts.mask,
            fisher=self.kind == "fisher",
            hessians=self.options.hessians or self.kind == "covariance",
            seed=self.options.seed,
            micro_batch=None if streamed else self.options.micro_batch,
            folder=self.statistics_folder,
            keep=not streamed,
            fingerprint=fingerprint,
            progress=self.ticks("statistics"),
        )

    def encoded(self, stats: LayerStatistics, weights: tuple[Tensor, Tensor]) -> Encoded:
        """The layer's matrices, not yet encoded."""
        gate_up, down = (importance(stats, block) for block in Block)
        return Encoded(weights, (gate_up, down), self.encoder)

    def sensitivity(
        self, stats: LayerStatistics, encoded: Encoded, calibration: Calibration
    ) -> LayerSensitivity:
        """Of all blocks of the layer at all widths."""
        path = layer_file(self.out / "layers", stats.layer_index)
        meta = self._described(calibration)
        if path.exists():
            arrays, earlier = load_arrays(path, _KIND, _VERSION)
            _check_same(path, earlier, meta)
        else:
            found = [
                sensitivity(w, stack, stats, block, self.kind)
                for block, w, stack in zip(Block, encoded.weights, encoded.stacks, strict=True)
            ]
            arrays = {
                "s": np.stack(found, axis=1),
                "widths": np.asarray(encoded.stacks[0].widths),
                "few_tokens": stats.few_tokens.numpy(),
                "usage": stats.usage().numpy(),
                "mass": stats.mass.numpy() / max(stats.n_tokens, 1),
            }
            save_arrays(path, _KIND, _VERSION, arrays, meta)
        widths = tuple(int(w) for w in arrays.pop("widths"))
        return LayerSensitivity(stats.layer_index, widths, **arrays)

    def damage(
        self,
        model: nn.Module,
        encoded: Encoded,
        blocks: tuple[BlockRef, ...],
        ids: Tensor,
        mask: Tensor,
        calibration: Calibration,
    ) -> Damage:
        """Of some blocks of one layer, at all widths, prompt by prompt."""
        path = layer_file(self.out / "damage", blocks[0].layer_index)
        meta = {
            **self._described(calibration),
            "measured_on": prompts_fingerprint(ids, mask),
            "blocks": [list(map(int, ref)) for ref in blocks],
        }
        if path.exists():
            found = Damage.load(path)
            _check_same(path, found.meta, meta)
            return found
        found = measure_damage(
            model,
            {blocks[0].layer_index: encoded.stacks},
            blocks,
            encoded.stacks[0].widths,
            ids,
            mask,
            progress=self.ticks(f"damage, layer {blocks[0].layer_index}"),
            meta=meta,
        )
        found.save(path)
        return found

    def table(self, layers: list[LayerSensitivity], calibration: Calibration) -> SensitivityTable:
        """All layers together."""
        return build_table(layers, self.kind, self._described(calibration))

    def summary(
        self,
        table: SensitivityTable,
        prompts: EncodedPrompts,
        heads: list[dict[str, Any]],
        no_heads: str,
    ) -> dict[str, Any]:
        """What was done, as JSON; ``no_heads`` says why there are none."""
        content = {
            "summary_version": SUMMARY_VERSION,
            **table.meta,
            "kind": table.kind,
            "widths": list(table.widths),
            "layer_ids": list(table.layer_ids),
            "n_prompts": int(prompts.input_ids.shape[0]),
            "n_prompts_cut": prompts.n_cut,
            "n_prompts_empty": prompts.n_empty,
            "n_experts_few_tokens": int(table.few_tokens.sum()),
            "n_experts": int(table.few_tokens.size),
            "options": asdict(self.options),
            "heads": heads,
            "no_heads": no_heads,
        }
        write_text(self.out / "summary.json", json.dumps(content, indent=1, sort_keys=True) + "\n")
        return content

    def _described(self, calibration: Calibration) -> dict[str, Any]:
        meta = calibration.meta
        return {
            "model": meta["model"],
            "prompts": meta["prompts"],
            "n_tokens": meta["n_tokens"],
            "sensitivity": self.kind,
            "encoder": repr(self.encoder),
        }


def _check_same(path: Path, earlier: dict[str, Any], now: dict[str, Any]) -> None:
    changed = sorted(k for k in now if earlier.get(k) != now[k])
    if changed:
        raise CheckpointError(
            f"{label_of(path)!r} was made with another {', '.join(changed)}: "
            "use the same, or another folder"
        )
