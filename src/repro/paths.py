"""Where things live: the only module that spells a folder of the project.

The project folder is the one that holds ``notebooks/`` and ``data/``.  It is found
from ``REPRO_ROOT``, else from the source tree this module was imported from
(editable install), else from the working directory and its parents (wheel).
"""

from __future__ import annotations

import os
from pathlib import Path

from repro.errors import DataUnavailableError


def _is_root(folder: Path) -> bool:
    return (folder / "notebooks").is_dir() and (folder / "data").is_dir()


def project_root() -> Path:
    """Folder of the project.

    Raises:
        DataUnavailableError: no such folder, e.g. a wheel used outside a clone.
    """
    override = os.environ.get("REPRO_ROOT")
    if override:
        root = Path(override).expanduser().resolve()
        if not _is_root(root):
            raise DataUnavailableError(
                f"REPRO_ROOT={override!r} holds no notebooks/ and data/: "
                "point it at a clone of the project"
            )
        return root
    here = Path(__file__).resolve()
    cwd = Path.cwd().resolve()
    for folder in (*here.parents[2:3], cwd, *cwd.parents):
        if _is_root(folder):
            return folder
    raise DataUnavailableError(
        f"no project folder (with notebooks/ and data/) at or above {str(cwd)!r}: "
        "run inside a clone or set REPRO_ROOT to one"
    )


def data_dir() -> Path:
    """``data/`` of the project."""
    return project_root() / "data"


def models_dir() -> Path:
    """Bundled trained models, one folder each."""
    return data_dir() / "models"


def paper_dir() -> Path:
    """CSV tables with every number the papers or their authors state."""
    return data_dir() / "paper"


def records_dir(profile: str) -> Path:
    """Measurement records of one profile: ``data/records/<profile>``."""
    return data_dir() / "records" / profile


def traces_dir() -> Path:
    """Committed routing traces."""
    return data_dir() / "traces"


def runs_dir(profile: str) -> Path:
    """Executed notebooks, logs and stamps of the pipeline (not committed)."""
    return data_dir() / "runs" / profile


def cache_dir() -> Path:
    """Things that can be made again at any time (not committed)."""
    return data_dir() / "cache"


def notebooks_dir() -> Path:
    """The ordered notebooks."""
    return project_root() / "notebooks"


def figures_dir() -> Path:
    """Figures (PNG + JSON) and ``report.html``."""
    return project_root() / "figures"


def relative(path: Path) -> str:
    """``path`` as seen from the project root, for messages and records (no machine paths)."""
    try:
        return path.resolve().relative_to(project_root()).as_posix()
    except ValueError:
        return path.name
