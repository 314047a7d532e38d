"""Training: a run is fixed by its recipe, can be interrupted anywhere, and says what is wrong."""

import json
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import (
    STREAMS,
    SmallSpec,
    small_config,
    small_recipe,
    small_tokenizer,
    small_trainer,
    write_corpora,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from repro.errors import CheckpointError, OutputError, ReproError
from repro.models import average, train, trainer
from repro.models.average import average_weights, revived_experts
from repro.models.balance import BalanceController
from repro.models.loading import load_model
from repro.models.optim import Muon
from repro.models.revive import revive_experts
from repro.models.trainer import CHECKPOINT, LOG, RECIPE, initial_model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run of both phases."""
    out = tmp_path_factory.mktemp("finished")
    run = small_trainer(small_recipe(), data, out)
    assert not run.resume()
    run.run()
    run.save_model()
    return out


def log_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / CHECKPOINT, weights_only=True)["model"]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.endswith(("_s", "_per_s"))} for row in rows]


# --- one run


def test_the_log_tells_the_run(finished: Path) -> None:
    rows = log_rows(finished)
    assert [row["step"] for row in rows] == [1, 2, 4, 6, 7]
    assert all(row["of"] == 7 and row["tokens"] == 256 * row["step"] for row in rows)
    validated = {row["step"]: row["validation_nats"] for row in rows if "validation_nats" in row}
    assert list(validated) == [4, 7]
    assert set(validated[4]) == set(validated[7])
    assert {"python", "tasks", "wikitext2", "word-problems"} <= set(validated[4])
    # Nonsense of 30 words is learned from the first steps on.
    assert rows[-1]["loss_nats"] < rows[0]["loss_nats"] - 0.05
    assert abs(rows[0]["loss_nats"] - torch.log(torch.tensor(384.0)).item()) < 0.3


def test_the_result_loads_with_plain_transformers(finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished)
    assert model.dtype is torch.bfloat16
    trained = weights(finished)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[name].bfloat16()), name
    text = "the cat saw 12 birds"
    assert (
        AutoTokenizer.from_pretrained(finished)(text)["input_ids"]
        == (small_tokenizer()(text)["input_ids"])
    )
    assert json.loads((finished / RECIPE).read_text()) == small_recipe().to_dict()
    load_model(finished, device="cpu")
    modes = {path.name: path.stat().st_mode & 0o777 for path in finished.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == 0o644
    assert not [name for name in modes if name.endswith(".part")]


@pytest.mark.parametrize(("model", "stop"), [("moe-fine", 2), ("moe-fine", 5), ("moe-shared", 3)])
def test_a_resumed_run_ends_with_the_same_bits(
    model: str, stop: int, data: Path, tmp_path: Path
) -> None:
    """Also when it stops between two logged steps, and in the second phase."""
    recipe = small_recipe(model)
    whole = small_trainer(recipe, data, tmp_path / "whole")
    whole.run()
    small_trainer(recipe, data, tmp_path / "parts").run(stop_after=stop)
    second = small_trainer(recipe, data, tmp_path / "parts")
    assert second.resume()
    assert second.step == stop
    second.run()
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    one, two = without_times(log_rows(tmp_path / "whole")), log_rows(tmp_path / "parts")
    shared = {row["step"] for row in one} & {row["step"] for row in two}
    assert shared >= {1, 2, 4, 6, 7}
    by_step = {row["step"]: row for row in without_times(two)}
    for row in one:
        told = by_step[row["step"]]
        assert {k: told[k] for k in row} == row


def test_another_seed_is_another_run(data: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        run = small_trainer(small_recipe(seed=seed), data, tmp_path / str(seed))
        run.run(stop_after=1)
    assert not torch.equal(
        weights(tmp_path / "0")["model.norm.weight"], weights(tmp_path / "1")["model.norm.weight"]
    )


def test_steps_logged_after_the_last_checkpoint_are_not_told_twice(
    data: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(checkpoint_every=4, log_every=1)
    run = small_trainer(recipe, data, tmp_path)
    run.run(stop_after=4)
    run.log({"step": 5, "loss_nats": 99.0})  # then it was killed
    with open(tmp_path / LOG, "a") as handle:
        handle.write('{"step": 6, "los')
    again = small_trainer(recipe, data, tmp_path)
    assert again.resume()
    again.run()
    assert [row["step"] for row in log_rows(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert all(row["loss_nats"] < 9 for row in log_rows(tmp_path))


def test_a_log_without_a_checkpoint_begins_anew(data: Path, tmp_path: Path) -> None:
    (tmp_path / LOG).write_text('{"step": 1, "loss_nats": 99.0}\n')
    run = small_trainer(small_recipe(), data, tmp_path)
    assert not run.resume()
    assert (tmp_path / LOG).read_text() == ""


def test_adamw_alone_trains_too(data: Path, tmp_path: Path) -> None:
    run = small_trainer(small_recipe(optimizer="adamw", learning_rate=3e-3), data, tmp_path)
    assert not any(isinstance(o, Muon) for o in run.optimizers)
    run.run()
    rows = log_rows(tmp_path)
    assert rows[-1]["loss_nats"] < rows[0]["loss_nats"] - 0.05


def test_rates_follow_the_recipe_in_both_optimizers(data: Path, tmp_path: Path) -> None:
    recipe = small_recipe()
    run = small_trainer(recipe, data, tmp_path)
    for step in range(recipe.n_steps):
        run.train_step()
        rates = {group["lr"] for o in run.optimizers for group in o.param_groups}
        assert rates == {recipe.rate(step)}


def test_norms_and_biases_do_not_decay(data: Path, tmp_path: Path) -> None:
    run = small_trainer(small_recipe("moe-shared"), data, tmp_path)
    adam, muon = run.optimizers
    decay = {id(p): g["weight_decay"] for g in adam.param_groups for p in g["params"]}
    decay |= {id(p): g["weight_decay"] for g in muon.param_groups for p in g["params"]}
    for name, parameter in run.model.named_parameters():
        assert decay[id(parameter)] == (0.0 if parameter.ndim < 2 else 0.1), name


# --- what goes wrong


def test_a_checkpoint_of_another_recipe_is_refused(finished: Path, data: Path) -> None:
    run = small_trainer(small_recipe(learning_rate=1e-3), data, finished)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt' belongs to another recipe: remove"):
        run.resume()


@pytest.mark.parametrize("damage", ["cut", "junk"])
def test_a_damaged_checkpoint_is_one_sentence(
    damage: str, finished: Path, data: Path, tmp_path: Path
) -> None:
    whole = (finished / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(whole[:-5000] if damage == "cut" else b"junk" * 100)
    run = small_trainer(small_recipe(), data, tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt' is damaged .*remove it") as caught:
        run.resume()
    assert "\n" not in str(caught.value)


def test_a_diverged_run_stops_with_a_sentence_and_keeps_the_checkpoint(
    data: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(log_every=100, checkpoint_every=3)
    run = small_trainer(recipe, data, tmp_path)
    run.run(stop_after=3)
    good = (tmp_path / CHECKPOINT).read_bytes()
    with torch.no_grad():
        run.model.model.embed_tokens.weight[5:].fill_(float("nan"))
    with pytest.raises(ReproError, match=r"loss is NaN or infinite at step 6 of 7: .*--out.*rate"):
        run.run()
    assert (tmp_path / CHECKPOINT).read_bytes() == good
    for line in (tmp_path / LOG).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_weights_that_blew_up_in_the_last_update_are_not_kept(data: Path, tmp_path: Path) -> None:
    run = small_trainer(small_recipe(), data, tmp_path)
    run.run(stop_after=2)
    good = (tmp_path / CHECKPOINT).read_bytes()
    with torch.no_grad():
        run.model.model.norm.weight[0] = float("inf")
    with pytest.raises(ReproError, match=r"weights of model\.norm\.weight is NaN or infinite"):
        run.save_checkpoint()
    assert (tmp_path / CHECKPOINT).read_bytes() == good


def test_a_full_disk_leaves_the_old_checkpoint(data: Path, tmp_path: Path) -> None:
    """A file-size limit on the process is what a full disk is to it."""
    run = small_trainer(small_recipe(), data, tmp_path)
    run.run(stop_after=1)
    good = (tmp_path / CHECKPOINT).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) // 2, hard))
        with pytest.raises(OutputError, match=r"cannot write .*checkpoint\.pt'.*free space"):
            run.save_checkpoint()
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        with pytest.raises(OutputError, match="cannot write .*free space"):
            run.save_model()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / CHECKPOINT).read_bytes() == good
    assert sorted(path.name for path in tmp_path.iterdir()) == [CHECKPOINT, LOG]


# --- balance


def test_the_coefficient_rises_under_the_target_and_falls_above() -> None:
    recipe = small_recipe(balance_target=0.5, balance_floor=1e-4)
    controller = BalanceController(recipe, 2, 4, torch.device("cpu"))
    uneven_and_even = torch.tensor([[40.0, 0, 0, 0], [10.0, 10, 10, 10]])
    for _ in range(300):
        controller.update(uneven_and_even)
    low, high = controller.effective_share().tolist()
    assert low == pytest.approx(0.25, abs=1e-3)  # one of four
    assert high == pytest.approx(1.0, abs=1e-3)
    assert controller.coefficient[0] > recipe.balance_start
    assert controller.coefficient[1] == pytest.approx(1e-4)  # never under the floor
    for _ in range(3000):
        controller.update(uneven_and_even)
    assert controller.coefficient[0] == pytest.approx(0.1)  # nor over a tenth


def test_the_balance_loss_moves_the_router_towards_even_use(data: Path, tmp_path: Path) -> None:
    shares = {}
    for strength in (1e-9, 0.1):
        recipe = small_recipe(
            short_steps=12, long_steps=0, balance_start=strength, balance_rate=0.0, log_every=100
        )
        run = small_trainer(recipe, data, tmp_path / str(strength))
        with torch.no_grad():
            for layer in run.model.model.layers:
                layer.mlp.gate.weight.mul_(20.0)  # begins with strong preferences
        run.run()
        shares[strength] = run.balance.effective_share().mean().item()
    assert shares[0.1] > shares[1e-9] + 0.005


# --- second stage: revive and average


def idle_model() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(small_config("moe-fine"))
    counts = torch.full((2, 6), 10.0)
    counts[0, 4], counts[0, 1] = 0.0, 30.0
    return model, counts


def test_an_idle_expert_becomes_a_copy_of_a_busy_one_and_nothing_else_changes() -> None:
    model, counts = idle_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert revive_experts(model, counts, 0.1, torch.Generator().manual_seed(0)) == [(0, 4, 1)]
    after = {name: p.detach() for name, p in model.named_parameters()}
    prefix = "model.layers.0.mlp."
    for part in ("experts.gate_up_proj", "experts.down_proj"):
        old, new = before[prefix + part], after[prefix + part]
        gap = (new[4] - old[1]).std() / old[1].std()
        assert 0.03 < gap < 0.07, part  # the copy is near, not equal
        others = [0, 1, 2, 3, 5]
        assert torch.equal(new[others], old[others]), part
    old, new = before[prefix + "gate.weight"], after[prefix + "gate.weight"]
    assert torch.equal(new[[0, 2, 3, 5]], old[[0, 2, 3, 5]])
    # The two rows part in opposite directions from where the busy one was.
    torch.testing.assert_close((new[4] + new[1]) / 2, old[1])
    assert (new[4] - old[1]).norm() / old[1].norm() == pytest.approx(0.3, rel=1e-3)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {prefix + p for p in ("gate.weight", *_EXPERTS)}


_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def test_two_idle_experts_copy_two_different_busy_ones() -> None:
    model, counts = idle_model()
    counts[1, 0] = counts[1, 5] = 0.0
    counts[1, 2], counts[1, 3] = 40.0, 20.0
    replaced = revive_experts(model, counts, 0.1, torch.Generator().manual_seed(0))
    assert replaced == [(0, 4, 1), (1, 0, 2), (1, 5, 3)]


def test_nothing_is_revived_when_all_have_traffic() -> None:
    model, counts = idle_model()
    before = [p.clone() for p in model.parameters()]
    assert revive_experts(model, counts.clamp_min(9.0), 0.1, torch.Generator()) == []
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.fixture(scope="module")
def second_stage(finished: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second stage whose start has an expert that no token reaches."""
    start = tmp_path_factory.mktemp("start")
    model, tokenizer = load_model(finished, device="cpu")
    with torch.no_grad():
        gate = model.model.layers[1].mlp.gate.weight
        # Two of these four are positive for any token, so a row of zeros is never in the top two.
        gate[1], gate[4], gate[2] = -gate[0], -gate[3], 0.0
    model.bfloat16().save_pretrained(start)
    tokenizer.save_pretrained(start)
    out = tmp_path_factory.mktemp("second")
    recipe = small_recipe(seed=1, revive_below=0.05, balance_floor=3e-4)
    run = small_trainer(recipe, data, out, start_from=start)
    run.run()
    run.save_model()
    return out


def test_a_second_stage_starts_from_weights_and_revives(second_stage: Path) -> None:
    first = log_rows(second_stage)[0]
    assert first["step"] == 0
    assert [1, 2] in [pair[:2] for pair in first["revived_layer_expert_source"]]
    assert (1, 2) in revived_experts(second_stage)
    assert log_rows(second_stage)[1]["step"] == 1


def test_a_start_of_another_architecture_is_refused(finished: Path) -> None:
    recipe = small_recipe("moe-shared")
    with pytest.raises(
        CheckpointError, match="model_type=qwen3_moe where moe-shared has qwen2_moe"
    ):
        initial_model(recipe, finished, small_config("moe-shared"))


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_averaged_once(tied: bool) -> None:
    """Tied tables stand twice in a state dict; they must not move twice."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = small_config("moe-shared", tie_word_embeddings=tied)
        models.append(AutoModelForCausalLM.from_config(config))
    first = {name: p.clone() for name, p in models[0].named_parameters()}
    second = {name: p.clone() for name, p in models[1].named_parameters()}
    average_weights(*models, 0.35, [(1, 4)])
    for name, parameter in models[0].named_parameters():
        expected = first[name] + 0.35 * (second[name] - first[name])
        if name.startswith("model.layers.1.mlp.") and name.endswith(("gate.weight", *_EXPERTS)):
            if "shared" not in name:
                expected[4] = second[name][4]
        torch.testing.assert_close(parameter, expected, msg=lambda text, n=name: f"{n}: {text}")
    for name, parameter in models[1].named_parameters():
        assert torch.equal(parameter, second[name]), name


def test_models_of_different_shape_are_not_averaged() -> None:
    one = AutoModelForCausalLM.from_config(small_config("moe-fine"))
    other = AutoModelForCausalLM.from_config(small_config("moe-fine", num_experts=4))
    with pytest.raises(CheckpointError, match="two stages differ"):
        average_weights(one, other, 0.5, [])


def test_the_command_averages_two_folders(
    finished: Path, second_stage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(finished), str(second_stage), "--share", "0.25", "--out", str(tmp_path)]
    assert average.main(arguments) == 0
    model, _ = load_model(tmp_path, device="cpu")
    one, two = (load_model(folder, device="cpu")[0] for folder in (finished, second_stage))
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = torch.lerp(one.state_dict()[name], two.state_dict()[name], 0.25)
    torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-2, atol=1e-5)
    recipe = json.loads((tmp_path / RECIPE).read_text())
    assert recipe["share_of_second_stage"] == 0.25
    assert [stage["seed"] for stage in recipe["stages"]] == [0, 1]
    for number, folder in enumerate((finished, second_stage), 1):
        copied = tmp_path / f"training-stage{number}.jsonl"
        assert copied.read_bytes() == (folder / LOG).read_bytes()
    capsys.readouterr()
    assert average.main([str(second_stage), str(finished), "--share", "2", "--out", "x"]) == 2
    assert capsys.readouterr().err.startswith("error: share 2.0 is not possible: ")
    assert average.main([str(second_stage), str(finished), "--share", "0.5", "--out", "x"]) == 2
    assert "no training.jsonl that names revived experts" in capsys.readouterr().err
    assert average.main([str(tmp_path / "x"), str(finished), "--share", "0.5", "--out", "x"]) == 2
    assert "'x' holds no recipe.json and training.jsonl" in capsys.readouterr().err


# --- the command line


@pytest.fixture
def bundled(root: Path) -> str:
    return str(root / "data" / "models" / "moe-fine")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "moe-fin"}, "unknown recipe 'moe-fin' (did you mean 'moe-fine'?)"),
        ({"--data": "absent"}, "data folder 'absent' does not exist: correct --data or REPRO_"),
        ({"--data": None}, "give --data or set REPRO_DATA_DIR"),
        ({"--tokenizer": "absent"}, "no tokenizer.json in 'absent'"),
        ({"--device": "tpu"}, "device 'tpu' does not exist: use auto, cpu or cuda"),
        ({"--device": "mps"}, "device 'mps' is not supported: use auto, cpu or cuda"),
        ({"constants": ["seed"]}, "recipe constant 'seed' has no value: write NAME=VALUE"),
        ({"constants": ["sed=1"]}, "unknown recipe constant 'sed' (did you mean 'seed'?)"),
        ({"constants": ["seed=one"]}, "seed='one' is not possible: give a whole number"),
        ({"constants": ["model=moe-shared"]}, "unknown recipe constant 'model'"),
        ({"constants": ["optimizer=sgd"]}, "optimizer='sgd' is not possible: use muon or adamw"),
        ({"--start-from": "absent"}, "no checkpoint folder 'absent'"),
        ({"--out": "file"}, "cannot write 'file' (File exists)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_one_sentence(
    changes: dict[str, Any],
    said: str,
    bundled: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    Path("file").touch()
    options = {"--data": str(data), "--tokenizer": bundled, "--out": "out", "--device": "cpu"}
    arguments = [changes.pop("model", "moe-fine"), *changes.pop("constants", [])]
    for name, value in {**options, **changes}.items():
        arguments += [name, value] if value is not None else []
    code = train.main(arguments)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert not list(Path().glob("out/*"))


def test_an_incomplete_data_folder_names_the_file(
    bundled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["moe-fine", "--data", str(tmp_path), "--tokenizer", bundled, "--device", "cpu"]
    assert train.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "source 'wikitext2' is missing: expected 'general/wikitext2_train.txt.xz'" in said
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without GPU says")
def test_a_missing_gpu_is_one_sentence(
    bundled: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["moe-fine", "--data", str(data), "--tokenizer", bundled, "--out", str(tmp_path)]
    assert train.main([*arguments, "--device", "cuda"]) == 2
    assert "device 'cuda' is not on this machine" in capsys.readouterr().err


def test_ctrl_c_and_the_same_command_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real signal, sent as soon as there is a checkpoint; then the same command."""
    build = trainer.build_streams
    monkeypatch.setattr(trainer, "get_spec", SmallSpec)
    monkeypatch.setattr(trainer, "build_streams", lambda *a, **k: build(*a, **{**k, **STREAMS}))
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")
    out = tmp_path / "out"
    options = {"--data": data, "--tokenizer": tmp_path / "tokenizer", "--out": out}
    options |= {"--device": "cpu", "--cache": data / "cache"}
    constants = {**small_recipe().to_dict(), "short_steps": 4000, "checkpoint_every": 1}
    del constants["model"]
    arguments = ["moe-fine", *(str(x) for pair in options.items() for x in pair)]
    arguments += [f"{name}={value}" for name, value in constants.items()]

    def interrupt() -> None:
        end = time.monotonic() + 60
        while not (out / CHECKPOINT).exists() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    code = train.main(arguments)
    waiting.join()
    assert code == train.INTERRUPTED
    said = capsys.readouterr().err
    assert said == "\ninterrupted: run the same command to go on from the last checkpoint\n"
    assert sorted(path.name for path in out.iterdir()) == [CHECKPOINT, LOG]
    step = torch.load(out / CHECKPOINT, weights_only=True)["step"]
    assert 0 < step < 4003
    assert train.main([*arguments, "--stop-after", str(step + 2)]) == 0
    said = capsys.readouterr().out
    assert f"resuming at step {step} of 4003" in said
    assert f"stopped at step {step + 2} of 4003" in said
    assert not (out / "config.json").exists()  # half trained is not a result
