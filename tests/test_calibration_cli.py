"""From an operator's prompts to a quantised checkpoint with its sensitivities and heads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from repro import load_model
from repro.calibration.attached import attach, attached, importance_of
from repro.cli import app
from repro.errors import CheckpointError
from repro.models.quantized import load_quantized

PROMPTS = [
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "def add(a, b):\n    return a + b\n",
    "The river rises in the hills and runs south to the sea.",
    "for i in range(10):\n    print(i)\n",
    "A train leaves at noon and arrives at five. How long does it take?",
    "Once the rain had stopped, the birds came back to the garden.",
]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("operator")
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    calibration, checkpoint = root / "calibration", root / "quantised"
    said = invoke(
        "calibrate", "moe-shared", "--prompts", str(prompts), "--out", str(calibration),
        "--device", "cpu", "--max-tokens", "16", "--n-blocks", "2",
    )  # fmt: skip
    assert "6 prompts" in said
    said = invoke(
        "quantize", "moe-shared", "--out", str(checkpoint), "--calibration", str(calibration),
        "--device", "cpu",
    )  # fmt: skip
    assert "sensitivity.npz, heads.json" in said and "2, 3, 4, 5, 6, 7, 8 bits" in said
    return calibration, checkpoint


def test_the_checkpoint_serves_and_carries_its_calibration(folders: tuple[Path, Path]) -> None:
    calibration, checkpoint = folders
    model, tokenizer = load_model(checkpoint, device="cpu", n_bits=6)
    original, _ = load_model("moe-shared", device="cpu")
    ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        difference = (model(ids).logits - original(ids).logits).abs().max()
    assert 0 < float(difference) < 1.0
    source = load_quantized(checkpoint).manifest.fingerprint
    table, heads = attached(checkpoint, model=source)
    assert table is not None and heads is not None
    assert table.s.shape == (4, 16, 2, 7) and bool((table.s[..., 0] >= table.s[..., -1]).all())
    with pytest.raises(CheckpointError):
        attached(checkpoint, model="another")
    assert attach(calibration, checkpoint) == ["sensitivity.npz", "heads.json"]


def test_a_calibration_of_another_model_is_refused(folders: tuple[Path, Path]) -> None:
    calibration, _ = folders
    result = CliRunner().invoke(
        app,
        ["quantize", "moe-fine", "--out", str(calibration.parent / "no"), "--calibration",
         str(calibration), "--device", "cpu"],
    )  # fmt: skip
    assert result.exit_code == 2 and not (calibration.parent / "no").exists()
    assert "error:" in result.output and len(result.output.splitlines()) == 1
    with pytest.raises(CheckpointError, match="repro calibrate"):
        importance_of(calibration.parent / "nothing-here")


def test_what_was_not_attached_is_none(tmp_path: Path) -> None:
    assert attached(tmp_path) == (None, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("int9-g64", "unknown format"), ("int4-g64-gptq", "calibration")],
)
def test_formats_that_cannot_be_made_are_refused(name: str, expected: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["quantize", "moe-shared", "--out", str(out), "--format", name, "--device", "cpu"]
    )
    assert result.exit_code == 2 and expected in result.output, result.output


def test_second_moments_reach_the_formats_that_need_them(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    calibration, _ = folders
    arguments = ["quantize", "moe-shared", "--format", "int4-g64-gptq", "--device", "cpu"]
    result = CliRunner().invoke(
        app, [*arguments, "--out", str(tmp_path / "no"), "--calibration", str(calibration)]
    )
    assert result.exit_code == 2 and "--hessians" in result.output, result.output
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS[2::3]))
    invoke(
        "calibrate", "moe-shared", "--prompts", str(prompts), "--out", str(tmp_path / "with"),
        "--device", "cpu", "--max-tokens", "16", "--streamed", "--hessians",
    )  # fmt: skip
    by_layer = importance_of(tmp_path / "with", hessians=True)
    found = by_layer(0)
    n_experts, _, n_columns = found["gate_up"].shape
    assert found["gate_up_hessian"].shape == (n_experts, n_columns, n_columns)
    assert set(importance_of(tmp_path / "with")(0)) == {"gate_up", "down"}
    with pytest.raises(CheckpointError, match=r"statistics/layer-099\.npz"):
        by_layer(99)


def test_what_an_earlier_calibration_left_is_not_kept(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    calibration, checkpoint = folders
    mine = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, mine)
    shutil.copytree(calibration, tmp_path / "without")
    (tmp_path / "without" / "heads.json").unlink()
    assert attach(tmp_path / "without", mine) == ["sensitivity.npz"]
    assert not (mine / "heads.json").exists()
    (tmp_path / "without" / "heads.json").write_text("{")
    with pytest.raises(CheckpointError, match="heads"):
        importance_of(tmp_path / "without")
    with pytest.raises(CheckpointError, match="heads"):
        attach(tmp_path / "without", mine)
