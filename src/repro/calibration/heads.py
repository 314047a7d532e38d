"""Prompt residual heads: how much more, or less, this prompt suffers than the average one.

The one idea (PagedWeight's eta): offline sensitivity and online routing mass say what lowering
a block costs on average; a small linear head per (block type, transition) predicts from three
input norms of the current prompt the logarithm of what they leave unexplained,

    damage = g * mass ratio * eta,      eta = exp(confidence * clip(head(norms)))

A head also carries the constant between the units of g and the measured damage.  Extended
heads, which are not PagedWeight's, see the mass ratio as a fourth feature: where damage is not
proportional to it, they learn its power.  Heads are stored beside the checkpoint as JSON.
NumPy only.

Left out: interactions between blocks.  Damages of single blocks are added by the planner.

Letters: P prompts, L layers, E experts, F features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.calibration.arrays import check_fingerprint
from repro.calibration.ridge import Fit
from repro.contract import Block
from repro.errors import CheckpointError, unknown_name
from repro.files import write_text
from repro.paths import relative

LAYOUT_VERSION = 1
FEATURE_NAMES = ("mean_norm", "rms_norm", "max_norm")
EXTENDED_NAMES = (*FEATURE_NAMES, "mass_ratio")
TRANSFORM = "natural logarithm, standardised by the training examples"
FloatArray = npt.NDArray[np.float64]
Transition = tuple[int, int]
"""Bits before and after; 16 before means unchanged."""


@dataclass(frozen=True)
class Head:
    """One (block type, transition)."""

    block: Block
    n_from: int
    n_to: int
    fit: Fit
    n_examples: int
    excluded: Mapping[str, int] = field(default_factory=dict)  # why examples had no target

    def eta(self, features: FloatArray) -> FloatArray:
        """``[..., F] -> [...]``; features of zero (nothing known) count as average ones."""
        return np.exp(self.fit.log_eta(features))


@dataclass(frozen=True)
class Heads:
    """All heads of a model."""

    heads: Mapping[tuple[Block, int, int], Head]
    meta: Mapping[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = FEATURE_NAMES

    def head(self, block: Block, n_from: int, n_to: int) -> Head:
        """The head of a transition.

        Raises:
            UnknownNameError: none was trained for it.
        """
        if (block, n_from, n_to) not in self.heads:
            known = [f"{b.name.lower()} {i}->{j}" for b, i, j in self.heads]
            raise unknown_name("head", f"{block.name.lower()} {n_from}->{n_to}", known)
        return self.heads[block, n_from, n_to]

    def eta(self, block: Block, n_from: int, n_to: int, features: FloatArray) -> FloatArray:
        """Factor on ``g * mass ratio`` for prompts with these features, ``[..., F] -> [...]``."""
        return self.head(block, n_from, n_to).eta(features)

    def save(self, path: Path | str) -> None:
        """Write JSON.

        Raises:
            OutputError: it cannot be written.
        """
        rows = [
            {
                "block": head.block.name.lower(),
                "from": head.n_from,
                "to": head.n_to,
                "n_examples": head.n_examples,
                "excluded": dict(head.excluded),
                **asdict(head.fit),
            }
            for head in self.heads.values()
        ]
        content = {
            "kind": "prompt residual heads",
            "layout_version": LAYOUT_VERSION,
            "features": list(self.features),
            "transform": TRANSFORM,
            "meta": dict(self.meta),
            "heads": rows,
        }
        write_text(path, json.dumps(content, indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, path: Path | str, *, model: str | None = None) -> Heads:
        """Read what :meth:`save` wrote; ``model`` is the fingerprint they must carry.

        Raises:
            CheckpointError: no such file, damaged, of another layout or of another model.
        """
        path = Path(path)
        label = relative(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["layout_version"]
            if content["kind"] != "prompt residual heads":
                raise KeyError("kind")
        except FileNotFoundError as error:
            raise CheckpointError(f"no heads at {label!r}: calibrate first") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(label, error) from error
        features = tuple(content.get("features", ()))
        if version != LAYOUT_VERSION or features not in (FEATURE_NAMES, EXTENDED_NAMES):
            raise CheckpointError(
                f"{label!r} holds heads of layout {version}, this version reads "
                f"{LAYOUT_VERSION}: calibrate again"
            )
        try:
            meta = dict(content["meta"])
            heads = [_head_from_json(row, len(features)) for row in content["heads"]]
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(label, error) from error
        check_fingerprint(label, str(meta.get("model", "")), model)
        return cls({(h.block, h.n_from, h.n_to): h for h in heads}, meta, features)


def _damaged(label: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{label!r} is not a whole file of heads ({type(error).__name__}): "
        "delete it and calibrate again"
    )


def _head_from_json(row: Mapping[str, Any], n_features: int) -> Head:
    low, high = row["clip"]
    fit = Fit(
        center=tuple(map(float, row["center"])),
        scale=tuple(map(float, row["scale"])),
        weights=tuple(map(float, row["weights"])),
        intercept=float(row["intercept"]),
        clip=(float(low), float(high)),
        confidence=float(row["confidence"]),
        alpha=float(row["alpha"]),
    )
    if not len(fit.center) == len(fit.scale) == len(fit.weights) == n_features:
        raise ValueError("one weight per feature")
    block = Block[str(row["block"]).upper()]
    excluded = {str(k): int(v) for k, v in row["excluded"].items()}
    return Head(block, int(row["from"]), int(row["to"]), fit, int(row["n_examples"]), excluded)
