"""``report.html``: one self-contained page with everything produced so far.

One idea: the page is a view of records, tables and figures; it measures nothing and holds
no number that is not computed from them.  Each section shows one set of records after the
other (measured here, recorded elsewhere) and what was published below them, each under a
label of its own.  Pictures are embedded and there is no outside resource, so the file can
be sent alone.  The same records give the same bytes.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from repro import profiles
from repro.files import write_text
from repro.reporting import contradictions, paper, style
from repro.reporting.figures import FIGURES, folder, set_folder
from repro.reporting.grouping import devices, distinct
from repro.reporting.record_sets import ABOUT, MODELS, RecordSet, dates, label_of, record_sets
from repro.reporting.records import Record, command, is_current
from repro.reporting.report_sections import OPEN_POINTS, SECTIONS, Section
from repro.reporting.sentences import NOTHING
from repro.reporting.tables import Table
from repro.reporting.verify import Verdicts, verdict_word, verdicts

TITLE = "Expert precision that changes while serving: what was reproduced"


def write_report(profile: str) -> Path:
    """Write the page of ``profile`` from its sets of records and their drawn figures."""
    target = folder(profile) / "report.html"
    write_text(target, render(profile, record_sets(profile)))
    return target


def render(profile: str, sets: Sequence[RecordSet]) -> str:
    """The page as text; figures that are drawn already are embedded."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("repro.reporting", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    found = verdicts(sets)
    findings = contradictions.items()
    return environment.get_template("report.html.j2").render(
        title=TITLE,
        lead=_lead(sets),
        sets=[_set(item) for item in sets],
        claims=[_claim(row) for row in found],
        verdict_summary=[
            (item.name, _count(verdict_word(row.measured[item.name]) for row in answered))
            for item in sets
            if (answered := [row for row in found if item.name in row.measured])
        ],
        items=[_section(profile, section, sets) for section in SECTIONS],
        findings=[
            {
                "code": item.code,
                "title": item.title,
                "evidence": item.evidence,
                "verdict": item.verdict,
                "conclusion": item.conclusion,
                "tables": ", ".join(paper.table_path(name).name for name in item.tables),
            }
            for item in findings
        ],
        finding_summary=f"{len(findings)} checks: "
        + _count(item.verdict for item in findings)
        + ".",
        words_only=contradictions.WORDS_ONLY,
        open_points=OPEN_POINTS,
        status_codes=paper.STATUS.items(),
    )


def _count(words: Iterable[str]) -> str:
    return ", ".join(f"{word} {count}" for word, count in Counter(words).items())


def _lead(sets: Sequence[RecordSet]) -> str:
    if not sets[0].records:
        return "Nothing has been measured in this profile yet: run make reproduce."
    return (
        "Measurements on small Mixture-of-Experts models that were trained for this package, "
        "beside every number that the DynaExq paper or its authors stated. Our rows, bounds and "
        "the papers' rows are kept apart; what the authors withdrew is shown and marked."
    )


def _set(item: RecordSet) -> dict[str, Any]:
    """One row of the overview."""
    records = item.records
    wall_s = {
        record.key: float(record.provenance.get("time", {}).get("wall_s") or 0.0)
        for record in records
    }
    took = f"{sum(wall_s.values()):.0f} s in {len(wall_s)} points" if any(wall_s.values()) else ""
    return {
        "name": item.name,
        "label": item.label,
        "here": item.name == profiles.DEFAULT,
        "facts": [
            (name, text)
            for name, text in (
                ("what", ABOUT.get(item.name, "")),
                ("workloads", ", ".join(sorted(map(str, distinct(records, "workload"))))),
                ("source of workloads", ", ".join(sorted(map(str, distinct(records, "source"))))),
                ("records", f"{len(records)} of {_experiments(records)}" if records else "none"),
                ("measuring took", took),
                ("code", _commits(records)),
                ("versions", _versions(records)),
            )
            if text
        ],
    }


def _experiments(records: Sequence[Record]) -> str:
    names = sorted({record.experiment for record in records})
    return f"{len(names)} experiment{'s' * (len(names) > 1)} ({', '.join(names)})"


def _commits(records: Sequence[Record]) -> str:
    seen: set[str] = set()
    for record in records:
        git = record.provenance.get("git")
        if git is None:
            continue
        commit = git.get("commit")
        text = "outside a git clone" if commit is None else f"commit {commit[:10]}"
        seen.add(f"{text} with local changes" if git.get("dirty") else text)
    return ", ".join(sorted(seen))


def _versions(records: Sequence[Record]) -> str:
    seen = {
        ", ".join(
            f"{name} {number}"
            for name, number in record.provenance.get("versions", {}).items()
            if number
        )
        for record in records
    }
    return "; ".join(sorted(seen - {""}))


def _claim(row: Verdicts) -> dict[str, Any]:
    asked = row.measured or {"": next(iter(row.results.values()))}
    return {
        "code": row.claim.code,
        "sentence": row.claim.sentence,
        "source": row.claim.source,
        "tolerance": row.claim.tolerance,
        "results": [
            {
                "set": name,
                "verdict": verdict_word(result),
                "css": verdict_word(result).replace(" ", "-"),
                "found": result.found,
            }
            for name, result in asked.items()
        ],
    }


def _section(profile: str, section: Section, sets: Sequence[RecordSet]) -> dict[str, Any]:
    blocks = [_block(profile, section, item) for item in sets if section.records(item.records)]
    published = [build(()).part("paper") for build in section.tables]
    return {
        "id": section.id,
        "title": section.title,
        "blocks": blocks,
        "nothing": NOTHING if not blocks else "",
        "published": section.published() if section.published else "",
        "published_tables": [_table(table) for table in published if table.has_numbers],
        "paper_sources": list(
            dict.fromkeys(
                str(row["source"]) for name in section.paper for row in paper.load_table(name)
            )
        ),
    }


def _block(profile: str, section: Section, item: RecordSet) -> dict[str, Any]:
    """What one set of records has to say in one section."""
    chosen = section.records(item.records)
    current = Counter(is_current(record) for record in chosen)
    if current[False]:
        state = f"{current[False]} of {len(chosen)} records were measured by older code"
    elif current[True]:
        state = "measured by the code of today"
    else:
        state = "the records do not say which code measured them"
    sources = distinct(chosen, "source") or [None]
    commands = [command(section.experiment, item.name, source) for source in sources]
    if item.name == MODELS:
        commands = sorted({str(record.provenance["command"]) for record in chosen})
    where = set_folder(profile, item.name)
    return {
        "name": item.name,
        "here": item.name == profiles.DEFAULT,
        "label": label_of(item.name, chosen),
        "sentence": section.sentence(item.records),
        "figures": [
            picture
            for name in section.figures
            if (picture := _picture(name, where, chosen)) is not None
        ],
        "tables": [
            _table(table)
            for build in section.tables
            if (table := build(item.records).part("ours")).rows
        ],
        "commands": commands,
        "devices": ", ".join(devices(chosen)) or "none",
        "measured": dates(chosen),
        "commits": _commits(chosen),
        "current": state,
        "record_keys": sorted({record.key for record in chosen}),
    }


def _table(table: Table) -> dict[str, Any]:
    return {"title": table.title, "html": jinja2.utils.markupsafe.Markup(table.to_html())}


def _picture(name: str, folder: Path, chosen: Sequence[Record]) -> dict[str, Any] | None:
    path = folder / f"{name}.png"
    of_figure = FIGURES[name].records(chosen)
    if not of_figure or not path.is_file():
        return None
    data = path.read_bytes()
    width, height = style.png_size(data)
    return {
        "title": FIGURES[name].title,
        "data": base64.b64encode(data).decode("ascii"),
        "width": width,
        "height": height,
        "n_records": len(of_figure),
    }
