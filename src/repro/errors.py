"""Errors a user can act on.

One rule for all of them: the message is one sentence that names the offending
value and says what to do about it.  The command line prints the sentence and
exits with ``exit_code``; notebooks show it as the last line of the traceback.
Programming mistakes stay ordinary ``TypeError``/``AssertionError``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ReproError(Exception):
    """Base of every error that bad input, data or hardware can cause."""

    exit_code = 2


class UnknownNameError(ReproError, ValueError):
    """A model, workload, profile, experiment or parameter that does not exist."""


class CheckpointError(ReproError):
    """A checkpoint that is truncated, incomplete or of an unsupported layout."""


class DataUnavailableError(ReproError):
    """A data set, folder or hub that cannot be read from here."""


class OutputError(ReproError, OSError):
    """A result that cannot be written: read-only folder, full disk."""


class MissingDeviceError(ReproError):
    """A device was asked for that this machine does not have."""


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> UnknownNameError:
    """Build the error for ``name`` not being one of ``choices`` (with the nearest one)."""
    known = sorted(choices)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return UnknownNameError(f"unknown {kind} {name!r}{hint}: choose one of {', '.join(known)}")
