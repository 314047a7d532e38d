"""The report page: self-contained, complete, the same bytes for the same records."""

import base64
import html
import re
from html.parser import HTMLParser

import pytest
from test_reporting_demotion import add_demotion
from test_reporting_samples import add_activation, add_all, add_models, project
from test_reporting_serving import add_serving

from repro.files import write_bytes
from repro.paths import records_dir
from repro.reporting import contradictions, sentences
from repro.reporting.claims import CLAIMS
from repro.reporting.figures import FIGURES, draw_all
from repro.reporting.paper import load_table
from repro.reporting.records import RecordStore
from repro.reporting.report import OPEN_POINTS, SECTIONS, write_report

COMMITTED = [
    records_dir("gpu") / f"{name}.jsonl" for name in ("nesting", "format-curve", "sensitivity")
]


class Page(HTMLParser):
    """Collects tags with their attributes and checks that they nest."""

    VOID = ("meta", "img", "br", "link", "input", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        root = project(tmp_path_factory.mktemp("project"), patch)
        add_models(root)
        add_all(RecordStore("tiny"))
        add_all(RecordStore("public"))
        for profile in ("tiny", "public"):
            add_demotion(RecordStore(profile))
            add_serving(RecordStore(profile))
            for file in COMMITTED:  # as real as samples can be
                write_bytes(RecordStore(profile).root / file.name, file.read_bytes())
        draw_all("tiny")
        path = write_report("tiny")
        assert path == root / "figures" / "report.html"
        first = path.read_bytes()
        write_report("tiny")
        assert path.read_bytes() == first
        yield first.decode("utf-8")


def test_nothing_is_loaded_from_elsewhere(page):
    parsed = Page(page)
    for tag, attributes in parsed.tags:
        assert tag not in ("script", "link", "iframe")
        for name in ("src", "srcset", "data", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:")
        assert (attributes.get("href") or "#").startswith("#")
    assert "url(" not in page
    assert "@import" not in page
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)


def test_every_link_of_the_contents_has_its_place(page):
    parsed = Page(page)
    ids = {attributes.get("id") for _, attributes in parsed.tags}
    assert {attributes["href"][1:] for attributes in parsed.all("a")} <= ids


def test_it_reads_on_a_phone(page):
    parsed = Page(page)
    (viewport,) = [a for a in parsed.all("meta") if a.get("name") == "viewport"]
    assert "width=device-width" in viewport["content"]
    n_tables = len(parsed.all("table"))
    ours = {section.id: len(section.tables) for section in SECTIONS}
    published = 6  # Tables 1, 2, 3, the overlap, and two of Figure 3
    assert n_tables == ours.pop("models") + 2 * sum(ours.values()) + published
    assert len([a for a in parsed.all("div") if a.get("class") == "scroll"]) == n_tables


def test_every_figure_is_embedded_with_words_for_it(page):
    images = Page(page).all("img")
    assert len(images) == 2 * (len(FIGURES) - 1) + 1  # tiny and public; one of the models
    for image in images:
        data = base64.b64decode(image["src"].split(",", 1)[1])
        assert data.startswith(b"\x89PNG")
        assert len(image["alt"]) > 40
        assert int(image["width"]) <= 720


def test_verdicts_findings_and_what_is_open_are_there(page):
    for claim in CLAIMS:
        assert f"<strong>{claim.code}</strong>" in page
    for item in contradictions.items():
        assert f"<strong>{item.code}</strong>" in page
    assert "saves 55 %" in page
    for name, _ in OPEN_POINTS:
        assert name in page
    assert "Figures 5, 8 and 11" in page
    assert "python -m repro measure activation --profile tiny" in page
    for record in RecordStore("tiny").read():
        assert record.key in page
    for row in load_table("table1_decode_activation"):
        assert html.escape(row["source"]).replace("&#x27;", "&#39;") in page


def test_every_set_of_records_has_its_label(page):
    text = re.sub(r"base64,[^\"]*", "", page)
    for section in SECTIONS[1:]:
        part = text.split(f'<section id="{section.id}">')[1].split("</section>")[0]
        here, recorded = part.index(">tiny <small>"), part.index(">public <small>recorded on ")
        verb = "computed" if section.id == "table3" else "measured"
        assert part.index(f"<small>{verb} here: ") < recorded
        assert here < recorded
        if ">published <small>" in part:
            ours = part.split(">published <small>")[0]
            assert 'class="paper' not in ours and 'class="corrected' not in ours
            assert 'class="ours' not in part.split(">published <small>")[1]
    assert "recorded on Some GPU, a CPU, 2026-01-02 to 2026-01-03" in text
    assert text.count("python -m repro measure activation --profile public") == 3


def test_the_models_are_there_with_their_targets(page):
    part = page.split('<section id="models">')[1].split("</section>")[0]
    assert "GSM8K 0.8500 (target 0.86)" in part
    assert "75 % stage 1 and 25 % stage 2" in part
    assert "effective experts 60 to 70 % of E by layer, 0 unused" in part
    assert "python -m repro.models.train moe-fine" in part


def test_a_profile_of_its_own_shows_itself_alone(tmp_path, monkeypatch):
    root = project(tmp_path, monkeypatch)
    add_activation(RecordStore("tiny"))
    add_activation(RecordStore("public"))
    path = write_report("public")
    assert path == root / "figures" / "public" / "report.html"
    assert "profile tiny" not in path.read_text()
    assert "measured here:" not in path.read_text()
    assert "recorded on" in path.read_text()


def test_a_page_without_records_says_so(tmp_path, monkeypatch):
    project(tmp_path, monkeypatch)
    text = write_report("tiny").read_text()
    Page(text)
    assert "Nothing has been measured in this profile yet" in text
    assert text.count("Not measured in this profile yet.") == len(SECTIONS)
    assert "<img" not in text


def test_sentences_follow_the_numbers(tmp_path):
    store = RecordStore("tiny", root=tmp_path)
    add_activation(store)
    records = store.read()
    at_32 = [
        record.value
        for record in records
        if record.claim == "DynaExq Table 1"
        and record.metric == "activation_ratio"
        and record.config["model"] == "moe-fine"
        and record.config["protocol"] == "decode_mean"
        and record.config["batch_size"] == 32
    ]
    text = sentences.table1(records)
    assert f"moe-fine {min(at_32):.0f} to {max(at_32):.0f} % averaged over decode steps" in text
    assert "62.0 %" not in text  # what was published is a sentence of its own
    assert "62.0 %" in sentences.table1_paper()
    assert "26.0 %" in sentences.table1_paper()
    assert "from 128 tokens on" in sentences.table2_length(records)
    assert sentences.span([3.2, 3.4]) == "3 %"


def test_older_code_is_said(tmp_path, monkeypatch):
    project(tmp_path, monkeypatch)
    store = RecordStore("tiny")
    add_activation(store)
    text = store.path("activation").read_text()
    digest = store.read("activation")[0].provenance["sources"]["digest"]
    store.path("activation").write_text(text.replace(digest, "0" * 16))
    assert "were measured by older code" in write_report("tiny").read_text()
