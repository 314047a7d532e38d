"""Writing files so that an interruption or a full disk leaves the old one whole."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from repro.errors import OutputError


def output_error(path: Path, error: OSError) -> OutputError:
    """The one sentence for a failed write to ``path``."""
    reason = error.strerror or str(error)
    return OutputError(
        f"cannot write {str(path)!r} ({reason}): free space there, fix its permissions, "
        "or name another folder"
    )


@contextmanager
def atomic_path(target: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; on success it replaces ``target`` in one step.

    Raises:
        OutputError: the folder cannot be made or written, or the disk is full.
    """
    target = Path(target)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, target)
    except OutputError:
        raise
    except OSError as error:
        raise output_error(target, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_text(target: Path | str, text: str) -> None:
    """Write ``text`` (UTF-8, ``\\n`` line ends) to ``target``, whole or not at all."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_bytes(target: Path | str, data: bytes) -> None:
    """Write ``data`` to ``target``, whole or not at all."""
    with atomic_path(target) as temporary:
        temporary.write_bytes(data)
