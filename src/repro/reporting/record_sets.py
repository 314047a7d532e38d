"""Which records a page shows, side by side and never mixed, and how each set is called.

One idea: a number is read with where it comes from.  The default profile is measured where
the page is made; the records of every other profile are committed, so its page shows them
too, each set under a label of its own: "measured here", or "recorded on" what, when.  What
was measured on the bundled models when they were trained is a third kind of set.

The page of any other profile shows that profile alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repro import profiles
from repro.reporting import model_records
from repro.reporting.grouping import devices, distinct
from repro.reporting.records import Record, RecordStore

MODELS = "models"
"""Name of the set of what was measured on the bundled models when they were trained."""
ABOUT = {
    profiles.DEFAULT: "what every reader can measure: text that the environment itself contains",
    "public": "the public test sets WikiText-2, GSM8K and HumanEval, with longer prompts",
    "gpu": "more and longer prompts on a GPU",
    MODELS: "what was measured on the bundled models when they were trained",
}


@dataclass(frozen=True)
class RecordSet:
    """Records that belong together: those of one profile, or of the bundled models."""

    name: str
    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        """``measured here: <device>, <date>`` or ``recorded on <device>, <date>``."""
        return label_of(self.name, self.records)


def record_sets(profile: str) -> list[RecordSet]:
    """The sets on the page of ``profile``: its own first, even when it is empty."""
    sets = [RecordSet(name, tuple(RecordStore(name).read())) for name in _shown(profile)]
    kept = [item for item in sets if item.records or item.name == profile]
    models = RecordSet(MODELS, tuple(model_records.read()))
    return [*kept, *([models] if models.records else [])]


def input_files(profile: str) -> list[Path]:
    """Every file that those records are read from."""
    stores = [RecordStore(name) for name in _shown(profile)]
    files = [store.path(name) for store in stores for name in store.experiments()]
    return [*files, *model_records.files()]


def _shown(profile: str) -> list[str]:
    others = [name for name in profiles.PROFILES if name != profile]
    return [profile, *(others if profile == profiles.DEFAULT else [])]


def dates(records: Sequence[Record]) -> str:
    """The day, or the first and the last, on which the records were measured."""
    found = sorted(
        {
            str(start)[:10]
            for record in records
            if (start := record.provenance.get("time", {}).get("utc_start"))
        }
    )
    return " to ".join(dict.fromkeys([found[0], found[-1]])) if found else "unknown date"


def label_of(name: str, records: Sequence[Record]) -> str:
    """How the records of the set ``name`` are called wherever they are shown."""
    if not records:
        return "not measured yet"
    where = ", ".join(devices(records)) or "no device"
    if name != profiles.DEFAULT:
        return f"recorded on {where}, {dates(records)}"
    how = "measured" if any(record.kind == "measured" for record in records) else "computed"
    return f"{how} here: {where}, {dates(records)}"


def footnote(records: Sequence[Record]) -> str:
    """What a picture of committed records says about itself; empty for the default profile."""
    names = [str(name) for name in distinct(records, "profile")]
    if not names or names == [profiles.DEFAULT]:
        return ""
    sources = ", ".join(map(str, distinct(records, "source")))
    text = f"Profile {', '.join(names)}, {label_of(names[0], records)}"
    return f"{text}; workloads from source {sources}." if sources else f"{text}."
