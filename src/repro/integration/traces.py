"""Routing traces: which experts every token chose, small enough to commit.

The one idea: a router's choices are all that the activation and heavy-tail measurements,
the policies and the simulator need of a model.  Recorded once, a trace answers for every
batch size and prompt length by taking part of it (routing of a token depends only on the
tokens before it), and it holds no text.

File: an ordinary ``.npz`` whose arrays are compressed with LZMA, plus a JSON header.  Each
entry carries a checksum and a fixed date, so the same trace is the same bytes.

Axes: S sequences, T tokens, L layers with experts, k choices in the router's order.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from repro.errors import CheckpointError
from repro.files import write_bytes

FORMAT = "repro-routing-trace"
VERSION = 1

Selection = Sequence[int] | npt.NDArray[np.integer[Any]] | slice | None
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class ReplayStep:
    """One forward step of a trace: a whole prompt, or one token of each sequence."""

    step: int
    top_k_index: npt.NDArray[np.unsignedinteger[Any]]  # [S, t, L, k]
    mask: npt.NDArray[np.bool_]  # [S, t]
    weights: npt.NDArray[np.float16] | None  # [S, t, L, k]

    def counts(self, n_experts: int) -> npt.NDArray[np.int64]:
        """Choices per (layer, expert) in this step, real tokens only."""
        return _counts(self.top_k_index, self.mask, n_experts)


@dataclass
class RoutingTrace:
    """Routing of S sequences of T tokens through L layers."""

    top_k_index: npt.NDArray[np.unsignedinteger[Any]]  # [S, T, L, k]
    mask: npt.NDArray[np.bool_]  # [S, T] real tokens
    weights: npt.NDArray[np.float16] | None  # as top_k_index
    n_experts: int
    layer_ids: list[int]
    meta: dict[str, Any] = field(default_factory=dict)
    step_tokens: list[int] | None = None
    """Tokens of each forward step along T (a prefill of 8 and 2 decode steps: [8, 1, 1]).
    None: each token is a step."""

    def __post_init__(self) -> None:
        index = self.top_k_index
        if index.ndim != 4 or self.mask.shape != index.shape[:2]:
            raise ValueError(f"index of shape {index.shape} with a mask of {self.mask.shape}")
        if len(self.layer_ids) != index.shape[2]:
            raise ValueError(f"{len(self.layer_ids)} layer ids for {index.shape[2]} layers")
        if self.weights is not None and self.weights.shape != index.shape:
            raise ValueError(f"weights of shape {self.weights.shape}, index {index.shape}")
        if self.step_tokens is not None and sum(self.step_tokens) != index.shape[1]:
            raise ValueError(f"steps of {self.step_tokens} tokens, trace of {index.shape[1]}")
        real = index[self.mask]
        if real.size and not 0 <= int(real.min()) <= int(real.max()) < self.n_experts:
            worst = int(real.max()) if real.max() >= self.n_experts else int(real.min())
            raise ValueError(f"expert {worst} of {self.n_experts}")
        # Padding holds zeros, so that equal routing is equal bytes.
        padding = ~self.mask
        dtype = np.dtype(index_dtype(self.n_experts))
        self.top_k_index = index.astype(dtype, copy=bool(padding.any()))
        if padding.any():
            self.top_k_index[padding] = 0
            if self.weights is not None:
                self.weights = self.weights.copy()
                self.weights[padding] = 0

    @property
    def n_sequences(self) -> int:
        """Number of sequences (prompts)."""
        return int(self.top_k_index.shape[0])

    @property
    def n_tokens(self) -> int:
        """Length of the token axis, padding included."""
        return int(self.top_k_index.shape[1])

    @property
    def n_layers(self) -> int:
        """Layers with experts."""
        return int(self.top_k_index.shape[2])

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return int(self.top_k_index.shape[3])

    def steps(self) -> list[int]:
        """Tokens of each step along the token axis."""
        return [1] * self.n_tokens if self.step_tokens is None else list(self.step_tokens)

    def select(self, sequences: Selection = None, tokens: Selection = None) -> RoutingTrace:
        """The part with these sequences and token positions (indices, slices, or all).

        A sequence may be named twice, as a bootstrap does.
        """
        s = slice(None) if sequences is None else sequences
        t = slice(None) if tokens is None else tokens
        steps = self.step_tokens
        if steps is not None and tokens is not None:
            owner = np.repeat(np.arange(len(steps)), steps)[t]
            if (np.diff(owner) < 0).any():
                raise ValueError("tokens of a trace with steps are selected in order")
            steps = [int(n) for n in np.unique(owner, return_counts=True)[1]]
        return RoutingTrace(
            top_k_index=self.top_k_index[s][:, t],
            mask=self.mask[s][:, t],
            weights=None if self.weights is None else self.weights[s][:, t],
            n_experts=self.n_experts,
            layer_ids=list(self.layer_ids),
            meta=dict(self.meta),
            step_tokens=steps,
        )

    def counts(self) -> npt.NDArray[np.int64]:
        """How often each expert was chosen by real tokens: ``[layers, experts]``."""
        return _counts(self.top_k_index, self.mask, self.n_experts)

    def counts_per_sequence(self) -> npt.NDArray[np.int64]:
        """The same for each sequence, ``[sequences, layers, experts]``: resampling adds these."""
        rows = [
            _counts(self.top_k_index[i], self.mask[i], self.n_experts) for i in range(len(self))
        ]
        shape = (0, self.n_layers, self.n_experts)
        return np.stack(rows) if rows else np.zeros(shape, dtype=np.int64)

    def mass(self) -> npt.NDArray[np.float64]:
        """Sum of routing weights of real tokens: ``[layers, experts]``.

        Raises:
            ValueError: the trace was recorded or saved without weights.
        """
        if self.weights is None:
            raise ValueError("this trace has no weights: record it with keep_weights=True")
        return _bins(self.top_k_index, self.mask, self.n_experts, self.weights)

    def n_real_tokens(self) -> int:
        """Tokens that are no padding."""
        return int(self.mask.sum())

    def distinct_per_step(
        self, sequences: Selection = None, tokens: Selection = None
    ) -> npt.NDArray[np.int64]:
        """Distinct experts that a batch of these sequences activates: ``[steps, layers]``."""
        presence = self.select(sequences, tokens).presence()
        return np.asarray(presence.any(axis=0).sum(axis=-1), dtype=np.int64)

    def presence(self) -> npt.NDArray[np.bool_]:
        """Whether a sequence used an expert in a step: ``[sequences, steps, layers, experts]``.

        A batch activates what any of its sequences uses, so batches are unions of these.
        """
        shape = (self.n_sequences, len(self.steps()), self.n_layers, self.n_experts)
        present = np.zeros(shape, dtype=np.bool_)
        sequence, token = np.nonzero(self.mask)
        owner = np.repeat(np.arange(shape[1]), self.steps())[token]
        chosen = self.top_k_index[sequence, token].astype(np.int64)  # [real tokens, L, k]
        layer = np.arange(self.n_layers)[None, :, None]
        present[sequence[:, None, None], owner[:, None, None], layer, chosen] = True
        return present

    def __len__(self) -> int:
        return self.n_sequences

    def save(self, path: Path | str, *, with_weights: bool = False) -> None:
        """Write the trace, whole or not at all.

        Weights are left out unless asked for: they take four times the room.

        Raises:
            OutputError: the folder cannot be written.
            ValueError: weights were asked for and there are none.
        """
        if with_weights and self.weights is None:
            raise ValueError("this trace has no weights to save")
        header = {
            "format": FORMAT,
            "version": VERSION,
            "n_experts": self.n_experts,
            "layer_ids": [int(i) for i in self.layer_ids],
            "step_tokens": self.step_tokens,
            "meta": self.meta,
        }
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        arrays: dict[str, npt.NDArray[Any]] = {
            "header": np.frombuffer(text.encode(), dtype=np.uint8),
            # All layers of a token together: a token that returns brings most of its
            # experts with it, and the compressor finds them (3.3 bits a choice of 48 experts
            # on trained models, where layer by layer takes 3.5 and plain bits 6).
            "top_k_index": np.ascontiguousarray(self.top_k_index),
            "mask": self.mask,
        }
        if with_weights and self.weights is not None:
            arrays["weights"] = np.ascontiguousarray(self.weights)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression=zipfile.ZIP_LZMA) as archive:
            for name, array in arrays.items():
                entry = zipfile.ZipInfo(f"{name}.npy", date_time=_FIXED_DATE)
                entry.compress_type = zipfile.ZIP_LZMA
                data = io.BytesIO()
                np.lib.format.write_array(data, array, allow_pickle=False)
                archive.writestr(entry, data.getvalue())
        write_bytes(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path | str) -> RoutingTrace:
        """Read a trace.

        Raises:
            CheckpointError: no such file, or it is truncated, damaged or something else.
        """
        path = Path(path)
        try:
            with np.load(path, allow_pickle=False) as archive:
                if "header" not in archive:
                    raise CheckpointError(
                        f"{path.name!r} is not a routing trace (no header): record it again"
                    )
                header = json.loads(archive["header"].tobytes())
                _check_header(path, header)
                index, mask = archive["top_k_index"], archive["mask"]
                weights = archive["weights"] if "weights" in archive else None
            return cls(
                top_k_index=index,
                mask=mask,
                weights=weights,
                n_experts=header["n_experts"],
                layer_ids=header["layer_ids"],
                meta=header["meta"],
                step_tokens=header["step_tokens"],
            )
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CheckpointError(f"no trace {path.name!r}: record it first") from error
        except Exception as error:  # damaged bytes fail in more ways than can be listed
            raise CheckpointError(
                f"{path.name!r} is truncated, damaged or no routing trace "
                f"({type(error).__name__}): delete it and record it again"
            ) from error


def replay(trace: RoutingTrace) -> Iterator[ReplayStep]:
    """The steps of a trace in order, as a policy or a simulator is fed."""
    start = 0
    for number, n_tokens in enumerate(trace.steps()):
        part = slice(start, start + n_tokens)
        yield ReplayStep(
            step=number,
            top_k_index=trace.top_k_index[:, part],
            mask=trace.mask[:, part],
            weights=None if trace.weights is None else trace.weights[:, part],
        )
        start += n_tokens


def index_dtype(n_experts: int) -> type[np.uint8] | type[np.uint16]:
    """Smallest type that holds an expert's number."""
    return np.uint8 if n_experts <= 256 else np.uint16


def _check_header(path: Path, header: dict[str, Any]) -> None:
    if header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path.name!r} is not a routing trace (format {header.get('format')!r}): "
            "record it again"
        )
    if header.get("version") != VERSION:
        raise CheckpointError(
            f"{path.name!r} has trace version {header.get('version')!r}, this is {VERSION}: "
            "record it again"
        )


def _bins(
    index: npt.NDArray[Any],
    mask: npt.NDArray[np.bool_],
    n_experts: int,
    weights: npt.NDArray[Any] | None,
) -> npt.NDArray[Any]:
    real = index[mask]  # [tokens, L, k]
    n_layers = real.shape[1]
    slots = real + np.arange(n_layers, dtype=np.int64)[None, :, None] * n_experts
    values = None if weights is None else weights[mask].astype(np.float64).reshape(-1)
    flat = np.bincount(slots.reshape(-1), weights=values, minlength=n_layers * n_experts)
    return flat.reshape(n_layers, n_experts)


def _counts(
    index: npt.NDArray[Any], mask: npt.NDArray[np.bool_], n_experts: int
) -> npt.NDArray[np.int64]:
    return cast("npt.NDArray[np.int64]", _bins(index, mask, n_experts, None).astype(np.int64))
