"""Notebooks keep the conventions that make them readable, comparable and small.

Every rule is a function from a notebook to its offences, so that a test can show each of them
failing on a notebook made wrong on purpose.
"""

import ast
import base64
import configparser
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat import v4 as make

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

MAX_NOTEBOOK_BYTES = 300_000
MAX_PNG_BYTES = 60_000
MAX_CELL_LINES = 20
MAX_COLUMNS = 79
TAGS = {
    "parameters", "nbval-check-output", "nbval-ignore-output", "gpu", "raises-exception",
    "solution",
}  # fmt: skip
ABSOLUTE = re.compile(r"(?<![\w.:/~-])/(?:home|root|tmp|usr|var|opt|Users|mnt|work)/|[A-Z]:\\\\")


def _code(nb: NotebookNode) -> list[NotebookNode]:
    return [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]


def _tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def _outputs(nb: NotebookNode) -> list[NotebookNode]:
    return [output for cell in _code(nb) for output in cell.outputs]


def _texts(nb: NotebookNode) -> str:
    """All that a reader sees as text: sources and text outputs."""
    parts = [cell.source for cell in nb.cells]
    for output in _outputs(nb):
        parts.append(output.get("text", ""))
        data = output.get("data", {})
        parts += [str(value) for kind, value in data.items() if kind.startswith("text/")]
    return "\n".join(parts)


def opening(nb: NotebookNode) -> list[str]:
    """Title and claim first; then the parameters; prose and code take turns."""
    first = nb.cells[0]
    lines = first.source.splitlines()
    offences = []
    if first.cell_type != "markdown" or not re.match(r"# \d\d ", lines[0] if lines else ""):
        offences.append("the first cell is not '# NN Title'")
    if not any(line.startswith(">") for line in lines):
        offences.append("the first cell has no claim (a '>' line)")
    return offences


def parameters(nb: NotebookNode) -> list[str]:
    """Exactly one cell tagged so, literals only, before any of its names is used."""
    tagged = [i for i, cell in enumerate(_code(nb)) if "parameters" in _tags(cell)]
    if len(tagged) != 1:
        return [f"{len(tagged)} cells tagged parameters"]
    cell = _code(nb)[tagged[0]]
    names, offences = set(), []
    for node in ast.parse(cell.source).body:
        if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) for t in node.targets):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            try:
                ast.literal_eval(node.value)
                continue
            except ValueError:
                pass
        offences.append(f"parameters cell holds more than literals: {ast.unparse(node)}")
    for earlier in _code(nb)[: tagged[0]]:
        used = {n.id for n in ast.walk(ast.parse(_plain(earlier))) if isinstance(n, ast.Name)}
        offences += [f"{name} is used before the parameters cell" for name in sorted(used & names)]
    return offences


def _plain(cell: NotebookNode) -> str:
    return "\n".join(line for line in cell.source.splitlines() if not line.startswith(("%", "!")))


def tags(nb: NotebookNode) -> list[str]:
    """Only the tags that are explained to readers."""
    return sorted({t for cell in nb.cells for t in _tags(cell)} - TAGS)


def executed_in_order(nb: NotebookNode) -> list[str]:
    """From an empty kernel, top to bottom: counts 1, 2, 3, ..."""
    counts = [cell.execution_count for cell in _code(nb)]
    return [] if counts == list(range(1, len(counts) + 1)) else [f"execution counts {counts}"]


def quiet(nb: NotebookNode) -> list[str]:
    """No stderr, no error without the tag for it, no warning."""
    offences = []
    for cell in _code(nb):
        for output in cell.outputs:
            if output.get("name") == "stderr":
                offences.append(f"stderr: {output.text[:80]}")
            if output.output_type == "error" and "raises-exception" not in _tags(cell):
                offences.append(f"error: {output.ename}")
            if re.search(r"\w*Warning\b:", output.get("text", "")):
                offences.append(f"warning: {output.text[:80]}")
    return offences


def short_cells(nb: NotebookNode) -> list[str]:
    """One thing per cell, readable at notebook width."""
    offences = []
    for cell in _code(nb):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        if len(lines) > MAX_CELL_LINES:
            offences.append(f"{len(lines)} lines: {lines[0]}")
        offences += [f"{len(line)} columns: {line}" for line in lines if len(line) > MAX_COLUMNS]
    return offences


def prose(nb: NotebookNode) -> list[str]:
    """No code cell follows another without a sentence between, but for set-up and exercises."""
    offences, n_code = [], 0
    for before, cell in zip(nb.cells, nb.cells[1:], strict=False):
        n_code += cell.cell_type == "code"
        if before.cell_type == cell.cell_type == "code" and n_code > 3:
            offences.append(f"no prose before: {cell.source.splitlines()[0]}")
    return offences


def no_machine(nb: NotebookNode) -> list[str]:
    """No absolute path, no path edits, no star imports, no object addresses."""
    text = _texts(nb)
    found = [f"absolute path: {m.group()}" for m in ABSOLUTE.finditer(text)]
    found += re.findall(r"sys\.path|import \*|at 0x[0-9a-f]{6,}", text)
    return found


def small_pictures(nb: NotebookNode) -> list[str]:
    """Pictures are PNG of bearable size."""
    offences = []
    for output in _outputs(nb):
        data = output.get("data", {})
        if "image/svg+xml" in data:
            offences.append("an SVG output: it differs in every run")
        n_bytes = len(base64.b64decode(data.get("image/png", "")))
        if n_bytes > MAX_PNG_BYTES:
            offences.append(f"PNG of {n_bytes} bytes")
    return offences


def clean_metadata(nb: NotebookNode) -> list[str]:
    """Nothing that changes with every execution."""
    keys = {f"notebook {k}" for k in nb.metadata if k in ("papermill", "language_info", "widgets")}
    keys |= {f"cell {k}" for c in nb.cells for k in c.metadata if k in ("papermill", "execution")}
    return sorted(keys)


RULES: list[Callable[[NotebookNode], list[str]]] = [
    opening, parameters, tags, executed_in_order, quiet, short_cells, prose, no_machine,
    small_pictures, clean_metadata,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_rule(path: Path, rule: Callable[[NotebookNode], list[str]]) -> None:
    assert rule(nbformat.read(path, as_version=4)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_size(path: Path) -> None:
    assert path.stat().st_size <= MAX_NOTEBOOK_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_in_the_table_of_contents(path: Path, root: Path) -> None:
    assert path.name in (root / "README.md").read_text(encoding="utf-8")


def _stream(text: str, name: str = "stdout") -> NotebookNode:
    return make.new_output("stream", name=name, text=text)


def _cell(source: str, count: int, *outputs: Any, tags: tuple[str, ...] = ()) -> NotebookNode:
    metadata = {"tags": list(tags)} if tags else {}
    return make.new_code_cell(
        source, execution_count=count, outputs=list(outputs), metadata=metadata
    )


def _good() -> NotebookNode:
    return make.new_notebook(
        cells=[
            make.new_markdown_cell("# 07 Title\n\n> One claim."),
            _cell("seed = 0\nprofile = 'tiny'", 1, tags=("parameters",)),
            make.new_markdown_cell("Now it is used."),
            _cell("print(seed)", 2, _stream("0\n")),
        ]
    )


def _png(n_bytes: int) -> NotebookNode:
    data = {"image/png": base64.b64encode(bytes(n_bytes)).decode()}
    return make.new_output("display_data", data=data)


def test_a_good_notebook_passes_every_rule() -> None:
    assert {rule.__name__: rule(_good()) for rule in RULES if rule(_good())} == {}


@pytest.mark.parametrize(
    ("rule", "extra"),
    [
        (parameters, _cell("x = 1", 3, tags=("parameters",))),
        (tags, _cell("x = 1", 3, tags=("hide",))),
        (executed_in_order, _cell("x = 1", 5)),
        (quiet, _cell("x = 1", 3, _stream("UserWarning: old\n", "stderr"))),
        (quiet, _cell("x = 1", 3, _stream("FutureWarning: soon\n"))),
        (quiet, _cell("x", 3, make.new_output("error", ename="NameError"))),
        (short_cells, _cell("x = 1\n" * 21, 3)),
        (short_cells, _cell("x = '" + "x" * 80 + "'", 3)),
        (no_machine, _cell("x", 3, _stream("/" + "home/me/data\n"))),
        (no_machine, _cell("import sys; sys.path.append('.')", 3)),
        (small_pictures, _cell("x", 3, _png(MAX_PNG_BYTES + 1))),
    ],
)
def test_each_rule_sees_its_offence(
    rule: Callable[[NotebookNode], list[str]], extra: NotebookNode
) -> None:
    bad = _good()
    bad.cells += [make.new_markdown_cell("More."), extra]
    assert rule(bad)


def test_late_and_computed_parameters_are_seen() -> None:
    late = _good()
    late.cells.insert(1, _cell("print(seed)", 1))
    assert parameters(late) == ["seed is used before the parameters cell"]
    computed = _good()
    computed.cells[1].source = "seed = max(1, 2)"
    assert len(parameters(computed)) == 1


def test_missing_title_and_prose_are_seen() -> None:
    bad = _good()
    bad.cells[0].source = "Title"
    assert len(opening(bad)) == 2
    bad.cells += [_cell("a = 1", 3), _cell("b = 1", 4)]
    assert prose(bad)


def test_sanitizer_hides_no_more_than_it_must(root: Path) -> None:
    """Each pattern is needed by some stored output, and none swallows a whole line."""
    config = configparser.RawConfigParser()
    config.read(root / "tests" / "nbval_sanitize.cfg")
    texts = "\n".join(
        json.dumps([c.get("outputs") for c in json.loads(path.read_text("utf-8"))["cells"]])
        for path in NOTEBOOKS
    )
    for section in config.sections():
        pattern = re.compile(config[section]["regex"])
        assert not pattern.search("hot experts carry the traffic, 43 of 128 in layer 7"), section
        if NOTEBOOKS:
            assert pattern.search(texts), f"[{section}] matches no stored output: remove it"
