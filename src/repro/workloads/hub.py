"""Source ``hub``: data sets from Hugging Face, the only source that may use the network.

One named file of the repository is fetched into the user's own Hugging Face cache (so a
second load, or an offline machine with that cache, needs no network), then its rows
are streamed with ``datasets``.  Two habits of the libraries are worked around: an
unreachable hub is retried for 23 seconds, so reachability is asked first; and reading
even local files sends a download count, which is switched off here.

With ``local_root=FOLDER`` the same files are read from ``FOLDER/<repository>/<file>``.
"""

from __future__ import annotations

import os
import re
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from repro.errors import DataUnavailableError
from repro.workloads.declarations import DataSet, Domain, Extract, HubFile, Request
from repro.workloads.rows import read_rows

DEFAULT_REVISION = "main"
REACH_TIMEOUT_S = 5.0
_OFFLINE_NAMES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = {"1", "ON", "YES", "TRUE"}
_COMMIT = re.compile(r"[0-9a-f]{40}")


def _remedy(data_set: DataSet) -> str:
    if data_set.folder is not None:
        return "set REPRO_DATA_DIR and use source='folder', or use source='embedded'"
    return "or use source='embedded'"


def _unavailable(data_set: DataSet, reason: str, advice: str) -> DataUnavailableError:
    assert data_set.hub is not None
    return DataUnavailableError(
        f"workload {data_set.name!r} ({data_set.hub.file!r} of {data_set.hub.repo!r}) cannot be "
        f"loaded from the hub: {reason}; {advice}, {_remedy(data_set)}"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip().rstrip('.')}" if lines else repr(error)


# --- fetching ---------------------------------------------------------------------------


def is_offline() -> bool:
    """Whether the user asked the Hugging Face libraries to stay off the network."""
    import huggingface_hub.constants

    asked = any(os.environ.get(name, "").upper() in _TRUE for name in _OFFLINE_NAMES)
    return asked or bool(huggingface_hub.constants.HF_HUB_OFFLINE)


def why_unreachable(endpoint: str) -> str | None:
    """Why no connection to ``endpoint`` can be made, or None if one can."""
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=REACH_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return None  # it answered
    except urllib.error.URLError as error:
        # Certificates are the business of the hub client, which may know others.
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except OSError as error:
        return str(error)
    return None


def fetch(
    data_set: DataSet,
    *,
    revision: str = DEFAULT_REVISION,
    cache_dir: str | Path | None = None,
) -> tuple[Path, str | None]:
    """The data set's file in the Hugging Face cache, and the commit it belongs to.

    Raises:
        DataUnavailableError: offline, unreachable, gated, or not in that revision.
    """
    try:
        from huggingface_hub import constants, errors, hf_hub_download
    except ImportError as error:
        raise _unavailable(
            data_set, "huggingface_hub is not installed", "run `pip install datasets`"
        ) from error
    place = data_set.hub
    assert place is not None, data_set.name
    get: Callable[..., str] = partial(
        hf_hub_download,
        place.repo,
        place.file,
        repo_type="dataset",
        revision=revision,
        cache_dir=cache_dir,
    )
    try:
        cached: str | None = get(local_files_only=True)
    except errors.LocalEntryNotFoundError:
        cached = None
    if cached is None and is_offline():
        raise _unavailable(
            data_set,
            "HF_HUB_OFFLINE is set and the Hugging Face cache does not have the file",
            "unset HF_HUB_OFFLINE to download it",
        )
    # A commit never changes, a branch may: only the latter is looked up when a copy is there.
    if cached is None or not (is_offline() or _COMMIT.fullmatch(revision)):
        endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        reason = why_unreachable(endpoint)
        if reason is None:
            cached = _download(data_set, revision, endpoint, partial(get, endpoint=endpoint))
        elif cached is None:
            raise _unavailable(
                data_set, f"{endpoint} is unreachable ({reason})", "connect to the network"
            )
    return Path(cached), _commit_of(Path(cached))


def _download(data_set: DataSet, revision: str, endpoint: str, get: Callable[[], str]) -> str:
    from huggingface_hub import errors

    assert data_set.hub is not None
    page = f"{endpoint}/datasets/{data_set.hub.repo}"
    try:
        return get()
    except errors.GatedRepoError as error:
        raise _unavailable(
            data_set,
            "the data set is gated",
            f"accept its terms at {page} and log in with `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        reason = f"the repository has no revision {revision!r}"
        raise _unavailable(data_set, reason, f"choose one listed at {page}/commits/main") from error
    except errors.RepositoryNotFoundError as error:
        raise _unavailable(
            data_set,
            "the repository does not exist or is not open to you",
            f"look at {page} and log in with `hf auth login` if it is private",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        reason = f"the connection was lost ({_first_line(error.__cause__ or error)})"
        raise _unavailable(data_set, reason, "try again later") from error
    except errors.EntryNotFoundError as error:
        raise _unavailable(
            data_set,
            f"revision {revision!r} does not have the file",
            "give revision= an earlier commit",
        ) from error
    except Exception as error:  # whatever HTTP library and disk raise: the reason is passed on
        raise _unavailable(data_set, _first_line(error), "try again later") from error


def _commit_of(path: Path) -> str | None:
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else None


# --- reading ----------------------------------------------------------------------------


@contextmanager
def _no_download_count() -> Iterator[None]:
    """``datasets`` reports every load to its servers, local files included: not here."""
    config: Any = import_module("datasets.config")
    before = getattr(config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = before


def stream_rows(data_set: DataSet, path: Path) -> Iterator[tuple[str, Any]]:
    """Pairs of where and row of a fetched file.

    Raises:
        DataUnavailableError: ``datasets`` is missing or cannot read the file.
    """
    try:
        load_dataset = import_module("datasets").load_dataset
    except ImportError as error:
        raise _unavailable(
            data_set, "the package 'datasets' is not installed", "run `pip install datasets`"
        ) from error
    place = data_set.hub
    assert place is not None, data_set.name
    located = f"zip://{place.member}::{path}" if place.member else str(path)
    reader: dict[str, Any] = {}
    try:
        # Streaming keeps nothing, so the lock files of the library go to a passing folder.
        with _no_download_count(), tempfile.TemporaryDirectory() as scratch:
            reader["cache_dir"] = scratch
            if place.format == "csv":
                # Cells stay text: "NA" is an answer there and 1.50 is not 1.5.
                reader["converters"] = _text_converters(path)
            rows = load_dataset(
                place.format, data_files={"rows": located}, split="rows", streaming=True, **reader
            )
        for number, row in enumerate(rows, 1):
            yield f"row {number} of {place.file!r}", row
    except Exception as error:  # parsers of three formats and archives; the reason is passed on
        raise _unavailable(
            data_set,
            f"the file cannot be read ({_first_line(error)})",
            "delete it from the cache and load again",
        ) from error


def _text_converters(path: Path) -> dict[int, Any]:
    import csv

    with path.open(encoding="utf-8-sig", newline="") as handle:
        header = next(csv.reader(handle), [])
    return dict.fromkeys(range(len(header)), str)


class HubSource:
    """Reads the ``hub`` place of a data set."""

    options = frozenset({"revision", "local_root", "cache_dir"})
    defaults: ClassVar[dict[Domain, str]] = {
        "text": "wikitext2",
        "math": "gsm8k",
        "code": "humaneval",
    }

    def read(self, data_set: DataSet, request: Request) -> Extract:
        """Read ``data_set`` from the hub, its cache, or a local copy of the repository."""
        place = data_set.hub
        assert place is not None, data_set.name
        revision = request.options.get("revision") or DEFAULT_REVISION
        local_root = request.options.get("local_root")
        if local_root is not None:
            path, commit = _local_file(data_set, Path(local_root)), None
        else:
            path, commit = fetch(
                data_set, revision=revision, cache_dir=request.options.get("cache_dir")
            )
        extract = read_rows(
            data_set,
            stream_rows(data_set, path),
            request,
            item=place.item,
            join=place.join,
            remedy="give revision= a commit that fits, or use source='embedded'",
        )
        about: dict[str, Any] = {"repo": place.repo, "file": _file_name(place)}
        about |= {"local_copy": True} if local_root else {"revision": revision, "commit": commit}
        if place.item is not None:
            about["seed"] = request.seed
        return Extract(extract.documents, {**about, **extract.provenance}, extract.items)


def _file_name(place: HubFile) -> str:
    return f"{place.file}:{place.member}" if place.member else place.file


def _local_file(data_set: DataSet, root: Path) -> Path:
    assert data_set.hub is not None
    path = root / data_set.hub.repo / data_set.hub.file
    if not path.is_file():
        raise DataUnavailableError(
            f"workload {data_set.name!r} is missing from local_root {str(root)!r}: expected "
            f"{data_set.hub.repo}/{data_set.hub.file} below it; copy it there, or drop local_root"
        )
    return path


SOURCE = HubSource()
