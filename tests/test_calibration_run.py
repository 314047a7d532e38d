"""``calibrate``: a prompts file in, a folder out; interrupted, resumed, streamed, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_training import small_tokenizer

from repro.calibration.collect import collect, layer_file
from repro.calibration.heads import Heads
from repro.calibration.progress import Ticker
from repro.calibration.prompts import encode_prompts, read_prompts
from repro.calibration.run import Options, calibrate
from repro.calibration.table import SensitivityTable
from repro.contract import Block
from repro.errors import CheckpointError, DataUnavailableError, UnknownNameError
from repro.models.integrity import fingerprint
from repro.models.loading import load_model
from repro.models.streaming import streamed_model
from repro.models.tiny import tiny_model

OPTIONS = Options(max_tokens=24, n_blocks=8, damage_prompts=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("qwen3_moe", vocab_size=384).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rng = np.random.default_rng(0)
    words = "one river of small stones runs beside the old garden wall".split()
    rows = [
        {"prompt": " ".join(rng.choice(words, int(rng.integers(4, 12)))), "domain": f"d{i % 2}"}
        for i in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _quiet(stage):
    return lambda done, total: None


def _run(checkpoint, prompts, out, options=OPTIONS, **more):
    return calibrate(
        checkpoint, prompts, out, device="cpu", options=options, progress=_quiet, **more
    )


@pytest.fixture(scope="module")
def finished(checkpoint, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return out, _run(checkpoint, prompts, out)


def _contents(folder: Path) -> dict[str, object]:
    """What the files say: archives carry a date, so arrays are compared."""
    found: dict[str, object] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".npz":
            with np.load(path) as file:
                found[name] = {k: (file[k].dtype.str, file[k].tobytes()) for k in file.files}
        else:
            found[name] = path.read_bytes()
    return found


def test_everything_is_there(finished, checkpoint):
    out, summary = finished
    mark = fingerprint(checkpoint)
    table = SensitivityTable.load(out / "sensitivity.npz", model=mark)
    assert table.s.shape == (2, 8, 2, 7) and table.widths == (2, 3, 4, 5, 6, 7, 8)
    assert np.isfinite(table.s).all() and (table.s >= 0).all()
    assert table.kind == summary["kind"] == "fisher+measured"
    assert (table.s[..., 0] > table.s[..., -1]).all()
    heads = Heads.load(out / "heads.json", model=mark)
    assert len(heads.heads) == 2 * 28
    assert heads.eta(Block.DOWN, 4, 3, np.ones(3)) > 0
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["n_prompts"] == 10 and summary["no_heads"] == ""
    assert len(summary["heads"]) == 2 * 28
    assert summary["n_experts_few_tokens"] > 0  # a few dozen tokens for 16 experts


@pytest.mark.parametrize(
    "lost",
    [
        ["statistics/layer-001.npz", "layers/layer-001.npz"],
        ["damage/layer-000.npz", "heads.json"],
        ["layers/layer-000.npz", "sensitivity.npz", "summary.json"],
    ],
)
def test_an_interrupted_run_ends_like_a_whole_one(lost, finished, checkpoint, prompts, tmp_path):
    out, _ = finished
    for path in out.rglob("*"):
        name = path.relative_to(out).as_posix()
        if path.is_file() and name not in lost:
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_bytes(path.read_bytes())
    _run(checkpoint, prompts, tmp_path)
    assert _contents(tmp_path) == _contents(out)


def test_other_work_in_the_folder_is_refused(finished, checkpoint, prompts, tmp_path):
    out, _ = finished
    other = tmp_path / "other.txt"
    other.write_text("entirely different words\n")
    with pytest.raises(CheckpointError, match="another prompts"):
        _run(checkpoint, other, out)
    with pytest.raises(CheckpointError, match="another fisher"):
        _run(checkpoint, prompts, out, Options(max_tokens=24, seed=1))
    with pytest.raises(CheckpointError, match="another blocks"):
        _run(checkpoint, prompts, out, Options(max_tokens=24, n_blocks=9, damage_prompts=8))


def test_streamed_equals_in_memory(checkpoint, prompts, tmp_path):
    summary = _run(checkpoint, prompts, tmp_path / "s", streamed=True)
    assert "streamed" in summary["no_heads"] and summary["heads"] == []
    assert not (tmp_path / "s" / "heads.json").exists()
    table = SensitivityTable.load(tmp_path / "s" / "sensitivity.npz", model=fingerprint(checkpoint))
    options = Options(max_tokens=24, n_blocks=0, kind="output")
    same = _run(checkpoint, prompts, tmp_path / "m", options)
    assert same["no_heads"] == "none were asked for"
    memory = SensitivityTable.load(tmp_path / "m" / "sensitivity.npz")
    assert table.kind == memory.kind == "output"
    np.testing.assert_array_equal(table.usage, memory.usage)
    np.testing.assert_allclose(table.s, memory.s, rtol=0.05)
    with pytest.raises(CheckpointError, match="load it into memory for Fisher"):
        _run(checkpoint, prompts, tmp_path / "f", Options(kind="fisher"), streamed=True)


def test_a_streamed_layer_is_written_before_the_next_one_runs(checkpoint, tmp_path):
    """And survives whatever happens then."""
    ids = torch.randint(2, 300, (6, 8), generator=torch.Generator().manual_seed(0))
    there = []

    def interrupted(layer_index: int) -> None:
        there.append([path.name for path in sorted(tmp_path.glob("*.npz"))])
        if layer_index == 1:
            raise KeyboardInterrupt

    with streamed_model(checkpoint, micro_batch=4, on_layer=interrupted) as (model, _):
        with pytest.raises(KeyboardInterrupt):
            collect(model, ids, folder=tmp_path, fingerprint="f", keep=False)
    assert there[0] == ["layer-000.npz"]
    layer_file(tmp_path, 1).unlink()
    kept = layer_file(tmp_path, 0).stat().st_mtime_ns
    with streamed_model(checkpoint, micro_batch=4) as (model, _):
        found = collect(model, ids, folder=tmp_path, fingerprint="f")
        assert collect(model, ids, folder=tmp_path, fingerprint="f", keep=False).layers == ()
        with pytest.raises(CheckpointError, match="fingerprint of the checkpoint"):
            collect(model, ids)
    assert layer_file(tmp_path, 0).stat().st_mtime_ns == kept
    memory = collect(load_model(checkpoint, device="cpu")[0], ids)
    for one, other in zip(found.layers, memory.layers, strict=True):
        assert torch.equal(one.counts, other.counts)
        torch.testing.assert_close(one.down_moment, other.down_moment)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "prompts 'bad.txt' are empty"),
        (b"\n  \n", "prompts 'bad.txt' are empty"),
        (b"\xff\xfe\x00\x12", "no UTF-8 text"),
        (b"PK\x03\x04\x00\x00", "zero bytes"),
        (b'{"prompt": "a"}\nplain\n', "line 2 of prompts 'bad.txt' is no JSON object"),
        (
            b'{"prompt": "a"}\n\n{"question": "b"}\n',
            "line 3 of prompts 'bad.txt' is no JSON object",
        ),
        (b'{"text": 5}\n', "line 1 of prompts 'bad.txt' is no JSON object"),
    ],
)
def test_files_that_are_no_prompts(data, message, tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(DataUnavailableError, match=message):
        read_prompts(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.jsonl", '{"prompt": "a"\n{"prompt": "b"}\n'),  # else its braces would be prompts
        ("p.jsonl", '["a", "b"]\n'),
        ("p.json", '[\n {"prompt": "a"}\n]\n'),
        ("p.jsonl", '{"prompt": ' + "[" * 100_000 + "\n"),
        ("p.txt", '{"prompt": "\\ud800 half a pair"}\n'),
    ],
)
def test_json_that_holds_no_prompt_is_not_taken_for_text(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataUnavailableError, match="line 1 of prompts 'p"):
        read_prompts(tmp_path / name)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "missing.txt"):
        with pytest.raises(DataUnavailableError, match="cannot be read"):
            read_prompts(path)


def test_prompts_are_read_and_padded_on_the_left(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufefffirst prompt\r\n\r\n{not json, but a prompt\nlast".encode())
    found = read_prompts(path)
    assert found.texts == ("first prompt", "{not json, but a prompt", "last")
    assert found.domains is None
    path.write_text('{"text": "b"}\n{"prompt": "a", "text": "c", "domain": "x"}')
    assert read_prompts(path).texts == ("b", "a") and read_prompts(path).domains == ("", "x")
    encoded = encode_prompts(small_tokenizer(), found, 5)
    lengths = encoded.mask.sum(dim=1)
    assert encoded.input_ids.shape == (3, 5) and encoded.n_cut == 2 and lengths.max() == 5
    assert bool(encoded.mask[:, -1].all())
    assert torch.equal(encoded.mask, encoded.mask.sort(dim=1).values)
    with pytest.raises(DataUnavailableError, match="max_tokens=0"):
        encode_prompts(small_tokenizer(), found, 0)


def test_one_token_gives_sensitivities_and_says_what_it_cannot_give(checkpoint, tmp_path):
    """Nothing is scored, so Fisher information would be zero and every lowering free."""
    (tmp_path / "one.txt").write_text("a")
    options = Options(n_blocks=4)
    summary = calibrate(
        checkpoint, tmp_path / "one.txt", tmp_path / "out", device="cpu", options=options
    )
    assert summary["n_tokens"] == 1 and summary["kind"] == "output"
    assert "no prompt has two tokens" in summary["no_heads"] and summary["heads"] == []
    table = SensitivityTable.load(tmp_path / "out" / "sensitivity.npz")
    assert np.isfinite(table.s).all() and (table.s > 0).all()
    with pytest.raises(DataUnavailableError, match="kind='output'"):
        calibrate(
            checkpoint, tmp_path / "one.txt", tmp_path / "no", device="cpu",
            options=replace(options, kind="fisher"),
        )  # fmt: skip


def test_unknown_kinds_are_named(checkpoint, prompts, tmp_path):
    with pytest.raises(UnknownNameError, match="'fischer'.*fisher"):
        _run(checkpoint, prompts, tmp_path, Options(kind="fischer"))


def test_progress_says_how_long_it_takes(capsys):
    now = [0.0]
    tick = Ticker(clock=lambda: now[0])("damage")
    for done in range(1, 101):
        now[0] += 0.5
        tick(done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "damage: 1 of 100, 50 s left"
    assert lines[-1] == "damage: 100 of 100, 0 s left"
    assert len(lines) == 26  # one in two seconds, and the last


def test_work_of_an_earlier_run_is_not_counted_as_fast(capsys):
    now = [0.0]
    tick = Ticker(clock=lambda: now[0])("layers")
    for done in (91, 92):
        now[0] += 10.0
        tick(done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "layers: 91 of 100, 90 s left",
        "layers: 92 of 100, 80 s left",
    ]
