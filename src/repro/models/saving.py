"""Write a checkpoint folder so that an interruption never leaves half of one.

Transformers writes files one after another into their final place; here it writes into a
temporary folder, whose files then replace the old ones, the index and the configuration
(what a loader reads first) last.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from repro.files import output_error

MAX_SHARD = "14MB"  # small files travel and diff better than one large one
_LAST = ("model.safetensors.index.json", "config.json")


def write_folder(folder: Path, *writers: Callable[[str], Any]) -> None:
    """Let each of ``writers`` write into a temporary folder, then move its files to ``folder``.

    Weight files of an earlier checkpoint that the new one has not are removed.

    Raises:
        OutputError: the folder cannot be made or written, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=".part") as temporary:
            # The weights' library makes files that only their owner may read; others may read ours.
            probe = Path(temporary) / "probe"
            probe.touch()
            mode = probe.stat().st_mode
            probe.unlink()
            for write in writers:
                write(temporary)
            names = sorted(os.listdir(temporary), key=lambda name: (name in _LAST, name))
            for name in names:
                os.chmod(Path(temporary) / name, mode)
                os.replace(Path(temporary) / name, folder / name)
    except (OSError, SafetensorError) as error:
        cause = error if isinstance(error, OSError) else OSError(str(error))
        raise output_error(folder, cause) from error
    if any(name.endswith(".safetensors") for name in names):
        for path in folder.glob("model*.safetensors*"):
            if path.name not in names:
                path.unlink()


def save_checkpoint(folder: Path, model: Any, tokenizer: Any) -> None:
    """``model`` (as it is, bf16 for a bundled one) and ``tokenizer``, loadable by Transformers."""
    write_folder(
        folder,
        lambda path: model.save_pretrained(path, max_shard_size=MAX_SHARD),
        tokenizer.save_pretrained,
    )
