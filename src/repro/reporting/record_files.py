"""Files of records: lines as they are, or packed.

The one idea: a line says everything about its number, so lines repeat much.  Committed files
of many points are kept packed (``gzip -n``; ``zcat`` shows them), all others are plain, and
whoever reads or writes need not care which.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from repro.files import write_bytes, write_text

PACKED = ".jsonl.gz"


def record_files(folder: Path) -> list[Path]:
    """Files of records in a folder, packed or not."""
    return sorted([*folder.glob("*.jsonl"), *folder.glob(f"*{PACKED}")])


def read_lines(path: Path) -> str:
    """The text of a file."""
    if path.name.endswith(PACKED):
        return gzip.decompress(path.read_bytes()).decode("utf-8")
    return path.read_text(encoding="utf-8")


def write_lines(path: Path, text: str) -> None:
    """Write a file, whole or not at all; the same text gives the same bytes.

    Raises:
        OutputError: it cannot be written.
    """
    if path.name.endswith(PACKED):
        write_bytes(path, gzip.compress(text.encode("utf-8"), mtime=0))
    else:
        write_text(path, text)
