"""``report.html``: one self-contained page with everything produced so far.

One idea: the page is a view of records, tables and figures; it measures nothing and holds
no number that is not computed from them.  Pictures are embedded and there is no outside
resource, so the file can be sent alone.  The same records give the same bytes.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from repro.files import write_text
from repro.reporting import contradictions, paper, paper_tables, sentences, style
from repro.reporting.claims import evaluate_all
from repro.reporting.figures import FIGURES, folder
from repro.reporting.grouping import devices, distinct
from repro.reporting.records import Record, RecordStore, command, is_current
from repro.reporting.tables import Table
from repro.reporting.verify import verdict_word

TITLE = "Expert precision that changes while serving: what was reproduced"


@dataclass(frozen=True)
class Section:
    """One table or figure of a paper: its pictures, tables, and the sentence about them."""

    id: str
    title: str
    claims: tuple[str, ...]
    experiment: str
    sentence: Callable[[Sequence[Record]], str]
    figures: tuple[str, ...] = ()
    tables: tuple[Callable[[Sequence[Record]], Table], ...] = ()
    paper: tuple[str, ...] = ()  # tables of data/paper that the rows come from


SECTIONS: tuple[Section, ...] = (
    Section(
        "table1",
        "DynaExq Table 1: experts activated in decode",
        ("DynaExq Table 1",),
        "activation",
        sentences.table1,
        ("table1_decode_activation",),
        (paper_tables.table1,),
        ("table1_decode_activation",),
    ),
    Section(
        "table2",
        "DynaExq Table 2: experts activated in prefill",
        ("DynaExq Table 2",),
        "activation",
        sentences.table2,
        ("table2_prefill_activation",),
        (paper_tables.table2,),
        ("table2_prefill_activation",),
    ),
    Section(
        "table2-length",
        "Beside Table 2: prefill by prompt length",
        ("DynaExq Table 2 (length)",),
        "activation",
        sentences.table2_length,
        ("activation_vs_prompt_length",),
        (paper_tables.table2_length,),
    ),
    Section(
        "figure2",
        "DynaExq Figure 2: heavy tail and shifting hot sets",
        ("DynaExq Figure 2", paper_tables.MIXED),
        "heavy-tail",
        sentences.figure2,
        ("figure2_heavy_tail", "figure2_top10"),
        (paper_tables.heavy_tail, paper_tables.overlap),
    ),
    Section(
        "table3",
        "DynaExq Table 3: models and bytes per expert",
        ("DynaExq Table 3",),
        "model-table",
        sentences.table3,
        (),
        (paper_tables.table3,),
        ("table3_models", "model_configs"),
    ),
)

OPEN_POINTS: tuple[tuple[str, str], ...] = (
    ("DynaExq Figures 5, 8 and 11", "not described in any text available to us; content unknown"),
    ("DynaExq Table 3, body in version 3", "not available; the rows shown are the authors' draft"),
    ("DynaExq Table 4", "accuracy under a memory cap: not yet reproduced"),
    ("DynaExq Figure 1", "GPU wait under offloading: not yet reproduced"),
    ("DynaExq Figure 3", "perplexity against demoted experts: not yet reproduced"),
    ("DynaExq Figure 4", "the architecture: to be drawn from the running engine"),
    (
        "DynaExq Figures 6, 7, 9 and 10",
        "latency and throughput: not yet reproduced; the text gives no curve values",
    ),
    (
        "PagedWeight, all tables",
        "not yet reproduced; the paper itself was not available, its numbers are second-hand",
    ),
    (
        "Qwen3-30B-A3B and the other published models",
        "their weights are not part of this package; the rows measured here are of small models "
        "trained for it, so percentages are compared in kind, not in value",
    ),
)


def write_report(profile: str) -> Path:
    """Write the page of ``profile`` from its records and its drawn figures."""
    records = RecordStore(profile).read()
    target = folder(profile) / "report.html"
    write_text(target, render(profile, records, folder(profile)))
    return target


def render(profile: str, records: Sequence[Record], figures: Path) -> str:
    """The page as text; figures that are drawn in folder ``figures`` are embedded."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("repro.reporting", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    found = evaluate_all(records)
    findings = contradictions.items()
    return environment.get_template("report.html.j2").render(
        title=TITLE,
        lead=_lead(records),
        facts=_facts(profile, records),
        claims=[
            {
                "code": result.claim.code,
                "sentence": result.claim.sentence,
                "source": result.claim.source,
                "tolerance": result.claim.tolerance,
                "found": result.found,
                "verdict": verdict_word(result),
                "css": verdict_word(result).replace(" ", "-"),
            }
            for result in found
        ],
        verdict_summary=_count(verdict_word(result) for result in found) + ".",
        items=[_item(profile, section, records, figures) for section in SECTIONS],
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


def _count(words: Any) -> str:
    return ", ".join(f"{word} {count}" for word, count in Counter(words).items())


def _lead(records: Sequence[Record]) -> str:
    if not records:
        return "Nothing has been measured in this profile yet: run make reproduce."
    return (
        "Measurements on small Mixture-of-Experts models that were trained for this package, "
        "beside every number that the DynaExq paper or its authors stated. Our rows, bounds and "
        "the papers' rows are kept apart; what the authors withdrew is shown and marked."
    )


def _facts(profile: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    times = sorted(
        str(record.provenance["time"]["utc_start"])
        for record in records
        if record.provenance.get("time", {}).get("utc_start")
    )
    wall_s = {
        record.key: float(record.provenance.get("time", {}).get("wall_s") or 0.0)
        for record in records
    }
    facts = [
        ("profile", profile),
        ("records", f"{len(records)} of {_count_experiments(records)}"),
        ("device", ", ".join(devices(records)) or "none"),
        ("code", _commits(records)),
        ("measured", f"{times[0]} to {times[-1]}" if times else "not yet"),
        ("measuring took", f"{sum(wall_s.values()):.0f} s in {len(wall_s)} points"),
        ("workloads", ", ".join(sorted(map(str, distinct(records, "workload")))) or "none"),
        ("source", ", ".join(sorted(map(str, distinct(records, "source")))) or "none"),
        ("versions", _versions(records)),
    ]
    return facts


def _count_experiments(records: Sequence[Record]) -> str:
    names = sorted({record.experiment for record in records})
    return f"{len(names)} experiments ({', '.join(names)})" if names else "no experiment"


def _commits(records: Sequence[Record]) -> str:
    seen: dict[str, None] = {}
    for record in records:
        git = record.provenance.get("git", {})
        commit = git.get("commit")
        text = "outside a git clone" if commit is None else f"commit {commit[:10]}"
        seen[f"{text} with local changes" if git.get("dirty") else text] = None
    return ", ".join(sorted(seen)) or "none"


def _versions(records: Sequence[Record]) -> str:
    seen = {
        ", ".join(
            f"{name} {number}"
            for name, number in record.provenance.get("versions", {}).items()
            if number
        )
        for record in records
    }
    return "; ".join(sorted(seen - {""})) or "none"


def _item(
    profile: str, section: Section, records: Sequence[Record], figures: Path
) -> dict[str, Any]:
    chosen = [record for record in records if record.claim in section.claims]
    current = Counter(is_current(record) for record in chosen)
    if not chosen:
        state = "not measured"
    elif current[False]:
        state = f"{current[False]} of {len(chosen)} records were measured by older code"
    else:
        state = "measured by the code of today"
    sources = distinct(chosen, "source") or [None]
    return {
        "id": section.id,
        "title": section.title,
        "sentence": section.sentence(records),
        "figures": [
            picture
            for name in section.figures
            if (picture := _picture(name, figures, chosen)) is not None
        ],
        "tables": [
            {"title": table.title, "html": jinja2.utils.markupsafe.Markup(table.to_html())}
            for build in section.tables
            if (table := build(records))
        ],
        "commands": [command(section.experiment, profile, source) for source in sources],
        "devices": ", ".join(devices(chosen)) or "none",
        "commits": _commits(chosen),
        "current": state,
        "paper_sources": list(
            dict.fromkeys(
                str(row["source"]) for name in section.paper for row in paper.load_table(name)
            )
        ),
        "record_keys": sorted({record.key for record in chosen}),
    }


def _picture(name: str, figures: Path, chosen: Sequence[Record]) -> dict[str, Any] | None:
    path = figures / f"{name}.png"
    if not chosen or not path.is_file():
        return None
    data = path.read_bytes()
    width, height = style.png_size(data)
    return {
        "title": FIGURES[name].title,
        "data": base64.b64encode(data).decode("ascii"),
        "width": width,
        "height": height,
        "devices": ", ".join(devices(chosen)),
        "n_records": len(FIGURES[name].records(chosen)),
    }
