"""The doctor finds what is missing, says what to do, and survives a broken machine."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from repro import doctor
from repro.profiles import PROFILES


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with both models, tiny but whole."""
    (tmp_path / "notebooks").mkdir()
    for name in PROFILES["tiny"].models:
        folder = tmp_path / "data" / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        save_file({"weight": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    return tmp_path


def _models() -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor._models()}


def test_whole_models_are_found(project: Path) -> None:
    assert {check.state for check in _models().values()} == {"ok"}


def test_a_missing_model_blocks_and_has_a_remedy(project: Path) -> None:
    (project / "data/models/moe-fine/model.safetensors").unlink()
    check = _models()["model moe-fine"]
    assert check.state == "missing"
    assert check.needed
    assert check.detail == "data/models/moe-fine has no model.safetensors"
    assert "git checkout -- data/models/moe-fine" in check.remedy
    assert doctor.blockers({"models": list(doctor._models())}) == [check]


@pytest.mark.parametrize("n_bytes", [0, 5, 20, -1])
def test_a_truncated_model_is_seen(project: Path, n_bytes: int) -> None:
    path = project / "data/models/moe-shared/model.safetensors"
    path.write_bytes(path.read_bytes()[:n_bytes])
    check = _models()["model moe-shared"]
    assert (check.state, check.needed) == ("missing", True)
    assert "truncated" in check.detail


def test_a_missing_part_of_a_split_model_is_named(project: Path) -> None:
    folder = project / "data/models/moe-fine"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    assert "has no model-00002-of-00002.safetensors" in _models()["model moe-fine"].detail
    save_file({"b": np.ones(3, np.float32)}, folder / parts["b"])
    assert _models()["model moe-fine"].state == "ok"


def test_a_package_that_cannot_be_imported_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a broken binary raises: here an error that is no ImportError."""
    (tmp_path / "broken_binary.py").write_text("raise OSError('libc10.so: cannot\\nopen')")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = doctor._package("broken_binary")
    assert (check.state, check.needed) == ("missing", True)
    assert check.detail == "cannot be imported (libc10.so: cannot open)"
    assert check.remedy


def test_it_runs_where_no_package_is_installed(root: Path, project: Path) -> None:
    code = f"import sys; sys.path.append({str(root / 'src')!r}); from repro import doctor; "
    code += "sys.exit(doctor.main(as_json=True))"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["ready"] is False
    states = {c["name"]: c["state"] for checks in report["checks"].values() for c in checks}
    assert states["torch"] == "missing"
    assert states["Python"] == "ok"
    assert states["model moe-fine"] == "ok"


def test_this_machine_is_ready(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tests' own environment has all that `make reproduce` needs."""
    assert doctor.main() == 0
    said = capsys.readouterr().out
    assert said.rstrip().endswith("ready: `make reproduce` can run here")
    assert "torch" in said


def test_a_wrong_data_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_DATA_DIR", "/no/such/folder")
    (check,) = (c for c in doctor._hub() if c.name == "REPRO_DATA_DIR")
    assert check.state == "missing"
    assert "'/no/such/folder'" in check.detail


def test_outside_a_clone_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    report = doctor.examine()
    assert "project" in {check.name for check in doctor.blockers(report)}
