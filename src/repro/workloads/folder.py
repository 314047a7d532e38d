"""Source ``folder``: data sets from a local folder, named by ``REPRO_DATA_DIR`` or ``data_dir``.

The layout is ``general/``, ``math/``, ``code/`` and ``eval_mc/`` with JSON lines or
plain text, each file plain or ``.xz``.  A file is read only as far as it is needed,
and what is wrong with it is said with its name and line.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

from repro.errors import DataUnavailableError
from repro.workloads.declarations import DataSet, Document, Domain, Extract, Request
from repro.workloads.rows import read_rows

ENVIRONMENT_NAME = "REPRO_DATA_DIR"
_RESTORE = "copy the file again, or use source='embedded'"


def data_folder(data_dir: Path | None = None) -> Path:
    """The data folder: ``data_dir``, else ``REPRO_DATA_DIR``.

    Raises:
        DataUnavailableError: none is named, or it is no folder.
    """
    named = data_dir or os.environ.get(ENVIRONMENT_NAME)
    if not named:
        raise DataUnavailableError(
            f"source 'folder' needs a data folder: set {ENVIRONMENT_NAME} or pass data_dir, "
            "or use source='embedded'"
        )
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise DataUnavailableError(
            f"data folder {str(folder)!r} does not exist: correct {ENVIRONMENT_NAME} or data_dir, "
            "or use source='embedded'"
        )
    return folder


def find_file(folder: Path, relative: str) -> Path:
    """``relative`` or ``relative.xz`` below ``folder``.

    Raises:
        DataUnavailableError: neither is there.
    """
    for candidate in (folder / f"{relative}.xz", folder / relative):
        if candidate.is_file():
            return candidate
    raise DataUnavailableError(
        f"data folder {str(folder)!r} has neither {relative!r} nor {relative + '.xz'!r}: "
        "add the file, or use source='embedded'"
    )


def _open(path: Path) -> IO[bytes]:
    return lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb")


def _unreadable(name: str, error: Exception) -> DataUnavailableError:
    if isinstance(error, EOFError):
        reason = "it is truncated"
    elif isinstance(error, lzma.LZMAError):
        reason = f"it is not valid .xz data, {error}"
    elif isinstance(error, UnicodeDecodeError):
        reason = f"it is not UTF-8, {error.reason} at byte {error.start}"
    else:
        reason = getattr(error, "strerror", None) or str(error)
    return DataUnavailableError(f"cannot read {name!r} ({reason}): {_RESTORE}")


def _lines(path: Path, name: str) -> Iterator[tuple[int, bytes]]:
    try:
        with _open(path) as handle:
            yield from enumerate(handle, 1)
    except (EOFError, lzma.LZMAError, OSError) as error:
        raise _unreadable(name, error) from error


def read_jsonl(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    """Pairs of where and value, one per line that is not blank.

    Raises:
        DataUnavailableError: truncated, not UTF-8, or a line that is not JSON.
    """
    for number, line in _lines(path, name):
        if not line.strip():
            continue
        where = f"line {number} of {name!r}"
        try:
            yield where, json.loads(line)
        except ValueError as error:
            reason = getattr(error, "msg", None) or getattr(error, "reason", str(error))
            raise DataUnavailableError(
                f"{where} is not valid JSON ({reason}): {_RESTORE}"
            ) from error


def _whole_text(data_set: DataSet, path: Path, name: str) -> Extract:
    try:
        with _open(path) as handle:
            text = handle.read().decode("utf-8")
    except (EOFError, lzma.LZMAError, OSError, UnicodeDecodeError) as error:
        raise _unreadable(name, error) from error
    if not text.strip():
        raise DataUnavailableError(f"{name!r} holds no text: {_RESTORE}")
    return Extract((Document(data_set.name, text),), {"rule": "whole file"})


class FolderSource:
    """Reads the ``folder`` place of a data set."""

    options: frozenset[str] = frozenset()
    defaults: ClassVar[dict[Domain, str]] = {
        "text": "wikitext2",
        "math": "gsm8k",
        "code": "humaneval",
    }

    def read(self, data_set: DataSet, request: Request) -> Extract:
        """Read ``data_set`` from the data folder of ``request``."""
        place = data_set.folder
        assert place is not None, data_set.name
        path = find_file(data_folder(request.data_dir), place.path)
        if place.path.endswith(".txt"):
            extract = _whole_text(data_set, path, place.path)
        else:
            rows = read_jsonl(path, place.path)
            extract = read_rows(data_set, rows, request, item=place.item, remedy=_RESTORE)
        # Named without .xz: the packing of the file is no property of the workload.
        return Extract(extract.documents, {"file": place.path, **extract.provenance}, extract.items)


SOURCE = FolderSource()
