"""Running the notebooks headlessly, skipping what has not changed, showing the state.

The functions are imported on first use, so that ``repro status`` stays quick.
"""

from __future__ import annotations

from collections.abc import Sequence


def reproduce(profile: str, *, force: bool = False, source: str | None = None) -> int:
    """Execute the notebooks of ``profile``, draw the figures, write the report, verify."""
    from repro.pipeline import driver

    return driver.reproduce(profile, force=force, source=source)


def refresh(names: Sequence[str]) -> int:
    """Execute notebooks in place with their defaults; all of them when none is named."""
    from repro.pipeline.refreshing import refresh as run

    return run(names)


def status(profile: str) -> int:
    """Print what is up to date and what would run."""
    from repro.pipeline import driver

    return driver.status(profile)
