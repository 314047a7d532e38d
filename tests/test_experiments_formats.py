"""The experiments on formats: the exact yardstick, nesting, quality against bytes, bytes."""

from __future__ import annotations

import shutil
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import profiles
from repro.calibration.blocks import block_weights
from repro.contract import Block
from repro.experiments import format_bytes, format_curve, nesting
from repro.experiments.evaluation import Evaluation, expert_bytes, n_weights
from repro.experiments.format_curve import Point, at_bytes
from repro.formats.any_precision import AnyPrecision
from repro.formats.encoded import EncodedStack
from repro.formats.exact import exact_errors
from repro.models.published import PUBLISHED
from repro.models.specs import SPECS
from repro.models.tiny import tiny_model
from repro.reporting import format_records
from repro.reporting.records import RecordStore

PROFILE = profiles.get(
    "tiny",
    models=("moe-fine",),
    bootstrap_samples=50,
    calibration_prompts=2,
    calibration_tokens=32,
    eval_prompts=3,
    eval_tokens=32,
)
FORMATS = {
    "bf16": (16,),
    "any-precision": (2, 3, 4, 8),
    "any-precision-r1": (2, 4),
    "int3-g32": (3,),
    "int3-g32-gptq": (3,),
}


@pytest.fixture(scope="module")
def project(root: Path, tmp_path_factory) -> Path:
    """An empty project with a random model of 8 experts, and the real tokenizer."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "notebooks").mkdir()
    (folder / "data").mkdir()
    (folder / "data/paper").symlink_to(root / "data/paper", target_is_directory=True)
    torch.manual_seed(0)
    model = tiny_model("qwen3_moe", vocab_size=8192, num_experts=8, moe_intermediate_size=32)
    for name, weight in model.named_parameters():
        if "experts" in name:  # loud experts, so that rounding them shows
            weight.data.mul_(20)
    model.save_pretrained(folder / "data/models/moe-fine")
    models = root / "data/models"
    tokenizer = next(d for d in models.iterdir() if (d / "tokenizer.json").is_file())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / "data/models/moe-fine" / name)
    return folder


@pytest.fixture(autouse=True)
def _here(project: Path, monkeypatch):
    monkeypatch.setenv("REPRO_ROOT", str(project))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def evaluation(project: Path) -> Evaluation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_ROOT", str(project))
        return Evaluation(PROFILE, "moe-fine", device="cpu", source="embedded")


# The exact yardstick -------------------------------------------------------------------


def by_trying(values: np.ndarray, weights: np.ndarray, n_levels: int) -> float:
    """Least error over all ways to cut the sorted values into at most ``n_levels`` runs."""
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    best = np.inf
    for cuts in combinations(range(1, len(values)), min(n_levels, len(values)) - 1):
        total = 0.0
        for run in np.split(np.arange(len(values)), cuts):
            mass = weights[run].sum()
            mean = (weights[run] * values[run]).sum() / mass if mass else 0.0
            total += float((weights[run] * (values[run] - mean) ** 2).sum())
        best = min(best, total)
    return best


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 10_000))
def test_the_exact_error_is_the_least_of_all_cuts(n_values, n_levels, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n_values).round(1)
    weights = rng.integers(0, 3, n_values).astype(float)
    found = exact_errors(torch.tensor(values)[None], torch.tensor(weights)[None], [n_levels])
    assert found.item() == pytest.approx(by_trying(values, weights, n_levels), abs=1e-9)


def test_more_levels_never_err_more_and_enough_levels_do_not_err():
    rows = nesting.draw("student-t5", (3, 200), 1)
    found = exact_errors(rows, torch.ones_like(rows), [1, 2, 4, 8, 16, 200])
    assert bool((found.diff(dim=-1) < 0).all())
    centred = rows.double() - rows.double().mean(dim=-1, keepdim=True)
    assert torch.allclose(found[:, 0], centred.square().sum(dim=-1))
    assert float(found[:, -1].max()) < 1e-9


def test_rows_in_one_call_or_alone_and_beyond_one_tile_are_alike():
    rows = nesting.draw("gaussian", (3, 150), 2)
    weights = rows.abs() + 0.1
    together = exact_errors(rows, weights, [3, 7])
    alone = torch.cat(
        [exact_errors(r[None], w[None], [3, 7]) for r, w in zip(rows, weights, strict=True)]
    )
    assert torch.allclose(together, alone, rtol=1e-12)
    assert torch.allclose(exact_errors(rows.flip(-1), weights.flip(-1), [3, 7]), together)


@pytest.mark.parametrize("levels", [[], [0]])
def test_a_number_of_levels_that_is_none_is_refused(levels):
    with pytest.raises(ValueError, match="n_levels"):
        exact_errors(torch.zeros(1, 4), torch.ones(1, 4), levels)
    with pytest.raises(ValueError, match="weights"):
        exact_errors(torch.zeros(1, 4), torch.ones(1, 5), [2])


# Nesting -------------------------------------------------------------------------------


def test_no_code_beats_the_exact_one_and_the_seed_is_nearly_exact():
    rows = nesting.draw("gaussian", (1, 24, 256), 0)
    weights = nesting.draw("gaussian", (1, 24, 256), 5).abs() + 0.05
    errors = nesting.compare(rows, weights, 24, 24)
    exact = errors["exact"]
    assert exact.shape == (24, len(nesting.WIDTHS))
    for rows_per_lut in nesting.TABLES:
        assert bool((errors[rows_per_lut] >= exact * (1 - 1e-4)).all()), rows_per_lut
    ratio = errors[1].sum(dim=0) / exact.sum(dim=0)
    assert float(ratio[nesting.WIDTHS.index(3)]) < 1.03
    shared = errors[0].sum(dim=0) / exact.sum(dim=0)
    assert bool((shared[1:] > ratio[1:]).all())  # sharing a table costs


def test_rows_are_the_same_each_time_and_differ_by_kind():
    first = nesting.draw("gaussian", (2, 64), 0)
    assert torch.equal(first, nesting.draw("gaussian", (2, 64), 0))
    assert not torch.equal(first, nesting.draw("gaussian", (2, 64), 1))
    tails = [nesting.draw(d, (1, 20_000), 0).abs().max() for d in ("gaussian", "student-t5")]
    assert tails[1] > 2 * tails[0]


def test_joining_keeps_the_order_and_leaves_out_a_rest():
    matrix = torch.arange(3 * 700).view(3, 700)
    assert torch.equal(nesting.joined(matrix), torch.arange(2 * 1024).view(2, 1024))


def test_nesting_is_measured_and_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(nesting, "ROW_LENGTHS", {"cpu": (64, 128)})
    monkeypatch.setattr(nesting, "N_ROWS", {"cpu": 6})
    monkeypatch.setattr(nesting, "WIDE_ROWS", {"cpu": 1})
    monkeypatch.setattr(nesting, "SAMPLED_EXPERTS", {"cpu": 2})
    records = nesting.run(PROFILE, RecordStore("tiny", root=tmp_path))
    assert len(records) == 2 * 5 + 2 * 5  # two distributions, two blocks; tables and statistics
    random = next(r for r in records if r.config["data"] == "gaussian")
    places = format_records.penalties(random)
    assert set(places) == {(64, 2), (64, 3), (64, 4), (128, 2), (128, 3), (128, 4), (128, 5)}
    assert random.config["compared_rows"] == [6, 6, 6, 6, 6, 6, 6]
    (short,) = (r for r in records if r.metric == "penalty_max" and r.config.get("block") == "down")
    assert format_records.penalties(short).keys() == {(1024, b) for b in nesting.WIDTHS}
    assert short.config["compared_rows"] == [2, 2, 2, 1, 1]
    blocks = {format_records.data_name(r) for r in records if r.config["weighted"]}
    assert blocks == {"moe-fine gate_up", "moe-fine down"}
    for record in records:
        if record.metric == "penalty_max":
            assert min(record.series) >= 0.999
    again = RecordStore("tiny", root=tmp_path)
    nesting.run(PROFILE, again)
    assert (again.n_measured, again.n_loaded) == (0, 3)


# Quality against bytes -----------------------------------------------------------------


def point(name: str, n_bytes: int, losses: list[float]) -> Point:
    return Point(name, 3, n_bytes, 8 * n_bytes / 1000, {"text": np.array(losses)})


def test_between_two_widths_the_loss_is_interpolated_in_bytes():
    curve = [point("any-precision", 400, [1.0, 2.0]), point("any-precision", 300, [2.0, 6.0])]
    assert at_bytes(curve, 325, "text").tolist() == [1.75, 5.0]
    assert at_bytes(curve, 400, "text").tolist() == [1.0, 2.0]
    assert at_bytes(curve, 401, "text") is None
    assert at_bytes(curve, 299, "text") is None


def test_comparisons_pair_windows_and_leave_out_what_is_too_wide():
    points = [
        point("any-precision", 300, [3.0, 5.0]),
        point("any-precision", 500, [1.0, 3.0]),
        point("any-precision-r1", 300, [2.0, 3.9]),
        point("any-precision-r1", 500, [2.0, 4.0]),
        point("int3-g64", 400, [2.5, 4.5]),
        point("int4-g32", 570, [0.0, 0.0]),  # 4.56 bits
        point("int2-g128", 299, [9.0, 9.0]),  # below the curve: nothing is extrapolated
    ]
    draws = np.array([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    found = {m.labels["curve"]: m for m in format_curve.comparisons(points, "text", draws, {})}
    default = found[format_curve.DEFAULT]
    assert default.labels["points"] == ["int3-g64"]
    # (2.0, 4.0) less (2.5, 4.5): windows differ, their differences do not.
    assert list(default.series) == [-0.5, -0.5, -0.5]
    best = found[format_curve.BEST]  # r1 gives (2.0, 3.95)
    assert best.series[0] == pytest.approx(-0.525)
    assert best.series[1] == pytest.approx(-0.55, abs=0.01)


@pytest.fixture(scope="module")
def measured(evaluation: Evaluation):
    before = [weight.clone() for layer in evaluation.layers for weight in
              block_weights(layer.module)]  # fmt: skip
    found = format_curve.measure_model(evaluation, FORMATS)
    after = [weight for layer in evaluation.layers for weight in block_weights(layer.module)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return found


def test_every_format_is_measured_on_every_domain(measured, evaluation):
    rises = [m for m in measured if m.metric == "loss_increase"]
    assert {m.labels["domain"] for m in rises} == {"text", "math", "code"}
    size = next(m for m in measured if m.metric == "expert_bytes")
    names = [
        "bf16",
        *(f"any-precision@{b}" for b in FORMATS["any-precision"]),
        *(f"any-precision-r1@{b}" for b in FORMATS["any-precision-r1"]),
        "int3-g32",
        "int3-g32-gptq",
    ]
    assert size.labels["points"] == names
    for rise in rises:
        assert rise.labels["points"] == names and rise.n == PROFILE.eval_prompts
        values, lows, highs = np.array(rise.series).reshape(3, -1)
        assert (lows <= values + 1e-12).all() and (values <= highs + 1e-12).all()
    by_name = {
        m.labels["domain"]: dict(zip(names, m.series[: len(names)], strict=True)) for m in rises
    }
    mean = {name: np.mean([abs(v[name]) for v in by_name.values()]) for name in names}
    assert mean["bf16"] < mean["any-precision@2"]
    assert mean["any-precision@8"] < mean["any-precision@2"]
    counted = dict(zip(names, size.series, strict=True))
    assert counted["int3-g32"] == counted["int3-g32-gptq"]
    assert counted["any-precision-r1@4"] > counted["any-precision@4"]
    stacks = evaluation.encode("any-precision")
    assert counted["any-precision@4"] == expert_bytes(stacks, 4)
    assert size.labels["n_weights"] == n_weights(stacks)
    assert counted["bf16"] == 2 * n_weights(stacks)


def test_the_rise_is_that_of_the_decoded_weights(measured, evaluation):
    name = evaluation.workloads["math"]
    ids = evaluation.windows(name, PROFILE.eval_prompts, PROFILE.eval_tokens)
    before = evaluation.token_losses(ids).mean()
    with evaluation.restored():
        evaluation.put(evaluation.encode("int3-g32"), 3)
        after = evaluation.token_losses(ids).mean()
    (rise,) = (
        m for m in measured if m.metric == "loss_increase" and m.labels["domain"] == "math"
    )  # fmt: skip
    place = rise.labels["points"].index("int3-g32")
    assert rise.series[place] == pytest.approx(after - before, rel=1e-4, abs=1e-6)


def test_a_table_whose_error_rises_is_counted(measured, evaluation):
    found = [m for m in measured if m.metric == "tables_not_falling"]
    assert [m.labels["format"] for m in found] == ["any-precision", "any-precision-r1"]
    for measurement in found:
        assert measurement.value == 0 and measurement.n > 0
        assert (np.diff(measurement.series) < 0).all()
    stacks = evaluation.encode("any-precision")
    layer = evaluation.layers[0].layer_index
    good = stacks[layer][Block.DOWN]
    tables = good.tensors["lut5"].clone()
    tables[3, 0] = tables[3, 0].flip(-1)  # one table of one expert, its entries turned round
    broken = EncodedStack(good.scheme, {**good.tensors, "lut5": tables})
    stacks[layer][Block.DOWN] = broken
    assert format_curve.falling(evaluation, "any-precision", stacks).value == 1


def test_errors_of_tables_by_hand():
    weight = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    matters = torch.rand(2, 1, 12, generator=torch.Generator().manual_seed(1)) + 0.1
    stack = AnyPrecision(rows_per_lut=2).encode_stack(weight, matters)
    errors, power = format_curve.table_errors(stack, weight, matters)
    assert errors.shape == (2, 3, 7) and power.shape == (2, 3)
    wrong = ((stack.decode(4, expert=1) - weight[1]) ** 2 * matters[1])[4:5].sum()
    assert float(errors[1, 2, 2]) == pytest.approx(float(wrong), rel=1e-5)
    assert float(power[0, 0]) == pytest.approx(float((weight[0] ** 2 * matters[0])[:2].sum()))


def test_a_whole_run_is_recorded_once(tmp_path, monkeypatch):
    monkeypatch.setattr(
        format_curve, "FORMATS", {"cpu": {"any-precision": (2, 4), "int3-g64": (3,)}}
    )
    store = RecordStore("tiny", root=tmp_path)
    records = format_curve.run(PROFILE, store)
    claims = {record.claim for record in records}
    assert claims == {
        format_records.CURVE, format_records.BYTES, format_records.PAGES, format_records.SPEED,
    }  # fmt: skip
    again = RecordStore("tiny", root=tmp_path)
    assert len(format_curve.run(PROFILE, again)) == len(records)
    assert (again.n_measured, again.n_loaded) == (0, 3)
    assert sum(len(record.line()) for record in records) < 100_000


def test_formats_of_the_cpu_are_some_of_all():
    assert set(format_curve.CPU_FORMATS) < set(format_curve.ALL_FORMATS)
    for name, widths in format_curve.CPU_FORMATS.items():
        assert set(widths) <= set(format_curve.ALL_FORMATS[name])


# Bytes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dimensions(project: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_ROOT", str(project))
        return format_bytes.measure_dimensions(("moe-fine",))


def row(measurement, name: str) -> list[float]:
    names = measurement.labels["dimensions"]
    width = len(measurement.series) // len(names)
    return list(measurement.series)[names.index(name) * width :][:width]


@pytest.mark.parametrize("rows", format_bytes.TABLES)
def test_bytes_from_shapes_are_those_of_encoded_weights(dimensions, rows):
    (found,) = (
        m
        for m in dimensions
        if m.metric == "bits_per_weight"
        and m.labels["format"] == f"any-precision, {format_bytes._shared(rows)}"
    )
    shapes = format_bytes.all_shapes(("moe-fine",))["moe-fine"]
    stacks = [AnyPrecision(rows_per_lut=rows).encode_stack(torch.randn(1, *s)) for s in shapes]
    weights = sum(n * k for n, k in shapes)
    for n_bits, bits in zip(found.labels["widths"], row(found, "moe-fine"), strict=True):
        by_numel = sum(
            stack[0].tensors[spec.name].numel() * stack[0].tensors[spec.name].element_size()
            for stack in stacks
            for spec in stack[0].specs(n_bits)
        )
        assert bits == pytest.approx(8 * by_numel / weights, rel=1e-5)


def test_tables_of_every_row_cost_what_was_counted_by_hand(dimensions):
    (found,) = (
        m
        for m in dimensions
        if m.metric == "table_bits_per_weight" and m.labels["format"] == format_records.PER_ROW
    )
    assert set(found.labels["dimensions"]) == {"moe-fine", *PUBLISHED}
    six = sum(row(found, "Qwen3-30B-A3B")[1:])  # 3 to 8 bits: 1,008 bytes for each row
    n_rows, n_weights = 2 * 768 + 2048, 3 * 2048 * 768
    assert six == pytest.approx(8 * 1008 * n_rows / n_weights, rel=1e-5)
    assert round(six, 1) == 6.1


def test_integers_at_published_dimensions(dimensions):
    (found,) = (m for m in dimensions if m.labels["format"] == "group-affine")
    place = found.labels["points"].index("int4-g128")
    assert row(found, "Qwen3-30B-A3B")[place] == 4.125
    assert row(found, "Gemma-4-26B-A4B")[place] > 4.125  # 704 columns: a short group a row


def test_unused_bytes_by_hand(dimensions):
    (found,) = (
        m
        for m in dimensions
        if m.metric == "unused_share" and m.labels["format"] == format_records.PER_ROW
    )
    pages = list(found.labels["page_bytes"])
    at_four = row(found, "Qwen3-30B-A3B")[2 * len(pages) :][: len(pages)]
    # Planes of 1,536 x 2,048 and 2,048 x 768 bits, tables of 32 bytes a row: multiples of 16 KiB.
    assert at_four == [0.0] * len(pages)
    assert row(found, "moe-fine")[-1] > 0.5  # a plane of 32 columns is 256 bytes


def test_bundled_dimensions_are_read_from_their_configuration(project):
    SPECS["moe-shared"].config().save_pretrained(project / "data/models/moe-shared")
    assert format_bytes.all_shapes(("moe-shared",))["moe-shared"] == ((256, 256), (256, 128))
