"""Tensor files: any type and shape comes back, in our hands and in the library's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from repro.errors import CheckpointError, OutputError
from repro.models import tensor_files
from repro.models.tensor_files import (
    DTYPES,
    hash_file,
    read_metadata,
    stored_tensors,
    write_tensors,
)

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
described = st.dictionaries(
    st.text("abc.0", min_size=1, max_size=6),
    st.tuples(st.sampled_from(sorted(DTYPES)), shapes),
    min_size=1,
    max_size=5,
)


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator)
    return values.to(dtype)


@settings(max_examples=60)
@given(described, st.integers(0, 1000))
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any], seed: int
) -> None:
    made = {name: filled(DTYPES[d], shape, seed) for name, (d, shape) in tensors.items()}
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    digest = write_tensors(path, made, {"note": "ä"})
    assert digest == hash_file(path)
    assert path.stat().st_size == tensor_files.file_bytes(made, {"note": "ä"})
    assert read_metadata(path) == {"format": "pt", "note": "ä"}
    stored = stored_tensors(path)
    library = load_file(path)
    assert stored.keys() == library.keys() == made.keys()
    for name, tensor in made.items():
        for found in (stored[name].read(), library[name]):
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert torch.equal(found, tensor)
        assert stored[name].offset % tensor.dtype.itemsize == 0
    again = path.with_name("again.safetensors")  # from file to file, without holding them all
    assert write_tensors(again, stored, {"note": "ä"}) == digest
    save_file(made, path)  # what the library writes is read, too
    assert all(torch.equal(t.read(), made[name]) for name, t in stored_tensors(path).items())


@given(st.integers(1, 9), st.data())
def test_rows_are_read_in_part(
    tmp_path_factory: pytest.TempPathFactory, n_rows: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, n_rows))
    last = data.draw(st.integers(first, n_rows))
    tensor = filled(torch.bfloat16, (n_rows, 3, 2), n_rows)
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    write_tensors(path, {"x": tensor}, {})
    target = torch.full((last - first, 3, 2), float("nan"), dtype=torch.bfloat16)
    stored_tensors(path)["x"].read_into(target, first)
    assert torch.equal(target, tensor[first:last])


def test_a_shape_that_contradicts_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": torch.zeros(4, 3)}, {})
    path.write_bytes(path.read_bytes().replace(b"[4,3]", b"[4,4]"))
    with pytest.raises(CheckpointError, match="gives 'x' another number of bytes"):
        stored_tensors(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": torch.zeros(4)}, {})
    before = path.read_bytes()
    lost = stored_tensors(path) | {}
    lost["y"] = tensor_files.StoredTensor(tmp_path / "gone", "y", torch.float32, (2,), 0)
    with pytest.raises(CheckpointError, match="cannot read 'y' from 'gone'"):
        write_tensors(path, lost, {})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        write_tensors(tmp_path / "file" / "x", {"x": torch.zeros(4)}, {})
