"""Arrays with a description, in one ``.npz`` file that says what it is.

The one idea: every file of this room carries its kind, a layout version and the fingerprints
of what it was made from, and reading it checks all three before anything else.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.errors import CheckpointError
from repro.files import atomic_path
from repro.paths import relative

_META = "meta_json"

Arrays = dict[str, npt.NDArray[Any]]


def label_of(path: Path) -> str:
    """What to call a file in messages; files of several folders have the same name."""
    label = relative(path)
    return label if "/" in label else f"{path.resolve().parent.name}/{label}"


def save_arrays(
    path: Path, kind: str, version: int, arrays: Mapping[str, npt.NDArray[Any]], meta: Any
) -> None:
    """Write arrays and a JSON-able description, whole or not at all.

    Raises:
        OutputError: the folder cannot be written or the disk is full.
    """
    text = json.dumps({"kind": kind, "version": version, "meta": meta}, sort_keys=True)
    data = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    with atomic_path(path) as temporary:
        with open(temporary, "wb") as handle:
            everything: dict[str, Any] = {**arrays, _META: data}
            np.savez(handle, **everything)


def load_arrays(
    path: Path, kind: str, version: int, *, only_meta: bool = False
) -> tuple[Arrays, Any]:
    """The inverse of :func:`save_arrays`: ``(arrays, meta)``; arrays are left out on demand.

    Raises:
        CheckpointError: no such file, truncated, of another kind or of another version.
    """
    label = label_of(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            wanted = [_META] if only_meta else file.files
            arrays = {name: file[name] for name in wanted}
        head = json.loads(arrays.pop(_META).tobytes().decode("utf-8"))
        found, at = str(head["kind"]), int(head["version"])
    except FileNotFoundError as error:
        raise CheckpointError(f"no {kind} file {label!r}: calibrate first, to the end") from error
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{label!r} is not a whole {kind} file ({type(error).__name__}): "
            "delete it and calibrate again"
        ) from error
    if found != kind:
        raise CheckpointError(f"{label!r} holds {found}, not {kind}: give the right file")
    if at != version:
        raise CheckpointError(
            f"{label!r} is {kind} of layout {at}, this version reads {version}: calibrate again"
        )
    return arrays, head["meta"]


def check_fingerprint(label: str, found: str, expected: str | None, of_what: str = "model") -> None:
    """Refuse what was made from something else; no expectation accepts everything.

    Raises:
        CheckpointError: names the file and both fingerprints.
    """
    if expected is not None and found != expected:
        raise CheckpointError(
            f"{label!r} was made from another {of_what} ({found[:12]}, not {expected[:12]}): "
            "calibrate this one, or give another folder"
        )
