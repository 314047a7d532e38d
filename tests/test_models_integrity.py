"""Checkpoint files are judged by their own headers before anything is loaded."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from torch import nn

from repro.errors import CheckpointError
from repro.models.integrity import (
    INDEX,
    SINGLE,
    check_experts,
    check_files,
    check_finite,
    check_loading,
    count_parameters,
    fingerprint,
    read_header,
    weight_files,
)

TENSORS = {
    "model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "model.norm.weight": np.ones(5, dtype=np.float16),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / SINGLE)
    return tmp_path


def write_raw(path: Path, header: Any, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def assert_one_sentence(error: BaseException) -> None:
    assert "\n" not in str(error)
    assert ": " in str(error)


# --- headers


def test_a_header_tells_names_types_and_shapes(checkpoint: Path) -> None:
    header = read_header(checkpoint / SINGLE)
    assert {name: (t["dtype"], t["shape"]) for name, t in header.items()} == {
        "model.embed_tokens.weight": ("F32", [4, 3]),
        "model.norm.weight": ("F16", [5]),
    }
    assert count_parameters(checkpoint) == 17


@given(keep=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(keep: float, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("cut")
    save_file(TENSORS, folder / SINGLE)
    whole = (folder / SINGLE).read_bytes()
    cut = int(keep * len(whole))
    (folder / SINGLE).write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=r"'model\.safetensors' .*copy it again") as caught:
        read_header(folder / SINGLE)
    assert_one_sentence(caught.value)
    if cut > 8 + struct.unpack("<Q", whole[:8])[0]:
        assert f"has {cut:,} bytes where its header promises {len(whole):,}" in str(caught.value)


def test_a_file_with_something_behind_it_is_refused(checkpoint: Path) -> None:
    with open(checkpoint / SINGLE, "ab") as handle:
        handle.write(b"\0")
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        read_header(checkpoint / SINGLE)


@pytest.mark.parametrize(
    "header",
    [
        b"[1, 2]",
        b"7",
        b"{",
        b"\xff\xfe{}",
        {"a": 1},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": []}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": "04"}},
        {"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}},
        {"a": {"dtype": "", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"shape": [1], "data_offsets": [0, 4]}},
    ],
    ids=str,
)
def test_a_damaged_header_is_one_sentence(header: Any, tmp_path: Path) -> None:
    write_raw(tmp_path / SINGLE, header, b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"'model\.safetensors' is not a whole") as caught:
        read_header(tmp_path / SINGLE)
    assert_one_sentence(caught.value)


def test_a_header_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(CheckpointError, match="header cut off"):
        read_header(tmp_path / SINGLE)


def test_a_file_without_tensors_is_whole(tmp_path: Path) -> None:
    write_raw(tmp_path / SINGLE, {"__metadata__": {"format": "pt"}})
    assert read_header(tmp_path / SINGLE) == {}


# --- which files


def sharded(folder: Path) -> Path:
    for number, (name, tensor) in enumerate(TENSORS.items(), 1):
        save_file({name: tensor}, folder / f"model-{number:05}-of-00002.safetensors")
    weight_map = {name: f"model-{i:05}-of-00002.safetensors" for i, name in enumerate(TENSORS, 1)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_shards_are_found_in_order(tmp_path: Path) -> None:
    names = [path.name for path in weight_files(sharded(tmp_path))]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert count_parameters(tmp_path) == 17


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    """Else the files that are checked would not be the ones that are loaded."""
    sharded(tmp_path)
    save_file(TENSORS, tmp_path / SINGLE)
    assert weight_files(tmp_path) == [tmp_path / SINGLE]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 'model-00002-of-00002\.safetensors'"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe{", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}',
     b'{"weight_map": {"a": 5}}', b'{"weight_map": {"a": null}}', b'{"weight_map": {"a": [1]}}'],
)  # fmt: skip
def test_a_damaged_index_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"'{INDEX}' in .* is damaged") as caught:
        weight_files(tmp_path)
    assert_one_sentence(caught.value)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="holds no 'model.safetensors' and no .*not read"):
        weight_files(tmp_path)


# --- what is in them


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3", "F8_E5M2", "F4", "F6_E2M3", "I16"])
def test_codes_of_a_quantiser_are_refused(dtype: str, tmp_path: Path) -> None:
    """Without scales they would load as numbers that look like weights."""
    write_raw(tmp_path / SINGLE, {"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}},
              b"\0" * 4)  # fmt: skip
    with pytest.raises(CheckpointError, match=f"stores 'w' as {dtype}, codes of a quantiser"):
        check_files(tmp_path, 4)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"])
def test_weights_and_counters_pass(dtype: str, tmp_path: Path) -> None:
    write_raw(tmp_path / SINGLE, {"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 8]}},
              b"\0" * 8)  # fmt: skip
    check_files(tmp_path, 4)


NAMES = [
    f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
    for layer in range(2)
    for expert in range(4)
    for part in ("gate_proj", "up_proj", "down_proj")
]


@given(missing=st.sampled_from(NAMES))
def test_the_expert_that_is_missing_is_named(missing: str) -> None:
    check_experts("x", NAMES, 4)
    with pytest.raises(CheckpointError, match=r"3 of 4 experts are there") as caught:
        check_experts("x", [name for name in NAMES if name != missing], 4)
    assert repr(missing) in str(caught.value)


def test_packed_experts_and_shared_ones_are_left_to_the_loader() -> None:
    check_experts("x", ["model.layers.0.mlp.experts.gate_up_proj"], 4)
    check_experts("x", ["model.layers.0.mlp.shared_experts.up_proj.weight"], 4)


def test_a_fingerprint_tells_any_change(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{}")
    first = fingerprint(checkpoint)
    assert first == fingerprint(checkpoint)
    data = bytearray((checkpoint / SINGLE).read_bytes())
    data[-1] ^= 1
    (checkpoint / SINGLE).write_bytes(bytes(data))
    second = fingerprint(checkpoint)
    (checkpoint / "config.json").write_text("{ }")
    assert len({first, second, fingerprint(checkpoint)}) == 3


# --- after loading


@pytest.mark.parametrize(
    "key", ["missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"]
)
def test_a_loading_report_with_anything_in_it_is_refused(key: str) -> None:
    clean = {"missing_keys": set(), "mismatched_keys": set(), "unexpected_keys": set()}
    check_loading("x", clean)
    check_loading("x", {})
    with pytest.raises(CheckpointError, match=r"'x': 5 tensors .*\(k0, k1, k2 and 2 more\)"):
        check_loading("x", {**clean, key: {f"k{i}" for i in range(5)}})


def test_mismatched_shapes_are_named_by_tensor() -> None:
    report = {"mismatched_keys": {("w", torch.Size([2]), torch.Size([3]))}}
    with pytest.raises(CheckpointError, match=r"1 tensors have another shape .*\(w\)"):
        check_loading("x", report)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_single_bad_value_is_found_and_named(value: float, dtype: torch.dtype) -> None:
    module = nn.Linear(7, 5).to(dtype)
    check_finite("x", module)
    with torch.no_grad():
        module.weight[3, 2] = value
    with pytest.raises(CheckpointError, match="1 values of 'weight' are NaN or infinite"):
        check_finite("x", module)


def test_large_weights_are_finite() -> None:
    module = nn.Linear(50, 50).half()
    nn.init.constant_(module.weight, 60000.0)  # their sum is not, in half precision
    check_finite("x", module)
