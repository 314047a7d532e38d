"""Train a bundled model: ``python -m repro.models.train MODEL --data DIR --out DIR``.

Seeded, logged (one JSON line each ``log_every`` steps), resumable (a checkpoint is
replaced atomically; a run with the same recipe continues from it), and the same code on
a CPU (tests) and a GPU.  Writes bf16 safetensors, tokenizer, config and ``training.jsonl``
into OUT, then measures the result (``repro.models.quality``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from repro.errors import MissingDeviceError, ReproError
from repro.files import atomic_path, write_text
from repro.models.loading import load_model
from repro.models.optim import Muon, split_parameters
from repro.models.recipe import Recipe, get_recipe
from repro.models.revive import revive_experts
from repro.models.specs import get_spec
from repro.models.streams import Sampler, Stream, build_streams
from repro.models.training_forward import TrainingForward

CHECKPOINT = "checkpoint.pt"
LOG = "training.jsonl"
MAX_SHARD = "14MB"  # small files travel and diff better than one large one


def initial_model(recipe: Recipe, start_from: Path | None = None) -> Any:
    """The Transformers model training begins with, in float32.

    Untrained: normal weights of 0.02, output projections scaled down.  ``start_from``: the
    weights of a checkpoint folder instead.
    """
    if start_from is not None:
        return load_model(start_from, device="cpu", dtype="float32")[0].train()
    config = get_spec(recipe.model).config()
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shrink = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                std = 0.02 * (shrink if name.endswith(("o_proj.weight", "down_proj")) else 1.0)
                torch.nn.init.normal_(parameter, std=std)
    return model


class BalanceController:
    """Moves each layer's balance coefficient so that effective experts stay near the target."""

    def __init__(self, recipe: Recipe, n_layers: int, n_experts: int, device: torch.device) -> None:
        self.recipe = recipe
        self.coefficient = torch.full((n_layers,), recipe.balance_start, device=device)
        self.traffic = torch.full((n_layers, n_experts), 1.0 / n_experts, device=device)

    def effective_share(self) -> Tensor:
        """exp(entropy) of the traffic over E, per layer."""
        entropy = -(self.traffic * self.traffic.clamp_min(1e-12).log()).sum(-1)
        return entropy.exp() / self.traffic.shape[1]

    def update(self, counts: Tensor) -> None:
        """One step with the routed counts [layers, E] of the batch."""
        self.traffic.lerp_(counts / counts.sum(-1, keepdim=True), 0.05)
        gap = self.recipe.balance_target - self.effective_share()
        self.coefficient.mul_((self.recipe.balance_rate * gap * 10).clamp(-0.05, 0.05).exp())
        self.coefficient.clamp_(self.recipe.balance_floor, 0.1)

    def state(self) -> dict[str, Tensor]:
        """For the checkpoint."""
        return {"coefficient": self.coefficient, "traffic": self.traffic}

    def load(self, state: dict[str, Tensor]) -> None:
        """From the checkpoint."""
        self.coefficient.copy_(state["coefficient"])
        self.traffic.copy_(state["traffic"])


class Trainer:
    """One training run."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        data_dir: Path,
        out_dir: Path,
        cache_dir: Path,
        device: torch.device,
        compiled: bool,
        stream_settings: dict[str, int] | None = None,
        start_from: Path | None = None,
    ) -> None:
        self.recipe, self.tokenizer, self.out_dir, self.device = recipe, tokenizer, out_dir, device
        self.data_dir, self.cache_dir = data_dir, cache_dir
        self.stream_settings = stream_settings or {}
        on_gpu = device.type == "cuda"
        self.model = initial_model(recipe, start_from).to(device)
        compute_dtype = torch.bfloat16 if on_gpu else torch.float32
        self.forward = TrainingForward(self.model, compute_dtype, compiled)
        # Validation batches have other shapes: uncompiled, they cost no recompilation.
        self.validation_forward = TrainingForward(self.model, compute_dtype, compiled=False)
        groups, rest = split_parameters(self.model)
        lr, decay = recipe.learning_rate, recipe.weight_decay
        norms = [p for p in rest if p.ndim < 2]
        tables = [p for p in rest if p.ndim >= 2]
        if recipe.optimizer == "adamw":
            tables += [p for g in groups for p in g["params"]]
        adam_groups = [
            {"params": tables, "weight_decay": decay},
            {"params": norms, "weight_decay": 0.0},
        ]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(adam_groups, lr=lr, betas=(0.9, 0.95), fused=on_gpu)
        ]
        if recipe.optimizer == "muon":
            self.optimizers.append(Muon(groups, lr=lr, weight_decay=decay))
        elif recipe.optimizer != "adamw":
            raise ReproError(f"optimizer {recipe.optimizer!r} is unknown: use 'muon' or 'adamw'")
        config = self.model.config
        self.balance = BalanceController(
            recipe, config.num_hidden_layers, config.num_experts, device
        )
        self.generator = torch.Generator(device).manual_seed(recipe.seed)
        self.step = 0
        self.trained_s = 0.0
        self._streams: dict[int, tuple[list[Stream], Sampler]] = {}

    def streams(self, seq_tokens: int) -> tuple[list[Stream], Sampler]:
        """Streams and sampler for one sequence length; the other length's are let go."""
        if seq_tokens not in self._streams:
            self._streams.clear()
            streams = build_streams(
                self.tokenizer,
                self.data_dir,
                self.cache_dir,
                seq_tokens=seq_tokens,
                seed=self.recipe.seed,
                **self.stream_settings,
            )
            self._streams[seq_tokens] = (streams, Sampler(streams, seq_tokens, self.device))
        return self._streams[seq_tokens]

    @torch.no_grad()
    def revive(self, n_batches: int = 8) -> None:
        """Replace experts without traffic, as the recipe says, before the first step."""
        recipe = self.recipe
        _, sampler = self.streams(recipe.seq_tokens(0))
        counts = sum(
            self.validation_forward(sampler.batch(16, self.generator))[2] for _ in range(n_batches)
        )
        assert isinstance(counts, Tensor)
        replaced = revive_experts(self.model, counts, recipe.revive_below, self.generator)
        self.log({"step": 0, "revived_layer_expert_source": replaced})

    def train_step(self) -> tuple[Tensor, Tensor]:
        """One optimiser step; returns (mean loss, mean balance) without a host sync."""
        recipe, seq = self.recipe, self.recipe.seq_tokens(self.step)
        _, sampler = self.streams(seq)
        ids = sampler.batch(max(1, recipe.batch_tokens // seq), self.generator)
        losses, balance, counts = self.forward(ids)
        loss = losses.mean()
        (loss + (self.balance.coefficient * balance).sum()).backward()
        self.balance.update(counts)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm, foreach=True)
        rate = recipe.rate(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), balance.mean().detach()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean loss in nats per token of each source's validation slice."""
        seq = self.recipe.short_tokens
        streams, _ = self.streams(self.recipe.seq_tokens(max(0, self.step - 1)))
        found = {}
        for stream in streams:
            n = min(32, stream.validation.size // (seq + 1))
            if n == 0:
                continue
            ids = torch.from_numpy(stream.validation[: n * (seq + 1)].astype("int64"))
            losses, _, _ = self.validation_forward(ids.view(n, seq + 1).to(self.device))
            found[stream.source.name] = round(losses.mean().item(), 4)
        return found

    def save_checkpoint(self) -> None:
        """Everything needed to go on, replaced in one step."""
        state = {
            "recipe": self.recipe.to_dict(),
            "step": self.step,
            "trained_s": self.trained_s,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "balance": self.balance.state(),
            "generator": self.generator.get_state(),
        }
        with atomic_path(self.out_dir / CHECKPOINT) as temporary:
            torch.save(state, temporary)

    def resume(self) -> bool:
        """Continue from a checkpoint of the very same recipe, if there is one."""
        path = self.out_dir / CHECKPOINT
        if not path.is_file():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["recipe"] != self.recipe.to_dict():
            raise ReproError(
                f"{str(path)!r} belongs to another recipe: remove it or choose another --out"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.balance.load(state["balance"])
        self.generator.set_state(state["generator"].cpu())
        self.step, self.trained_s = state["step"], state["trained_s"]
        return True

    def log(self, row: dict[str, Any]) -> None:
        """Print one line and append it to the log."""
        line = json.dumps(row, sort_keys=True)
        print(line, flush=True)
        with open(self.out_dir / LOG, "a", encoding="utf-8") as handle:
            handle.write(line + "\n")

    def run(self, stop_after: int | None = None) -> None:
        """Train to the end of the recipe (or ``stop_after`` steps, for tests of resuming)."""
        recipe = self.recipe
        end = min(recipe.n_steps, stop_after or recipe.n_steps)
        if self.step == 0 and recipe.revive_below > 0:
            self.revive()
        mark, mark_step = time.perf_counter(), self.step
        while self.step < end:
            loss, balance = self.train_step()
            due = self.step == 1 or self.step % recipe.log_every == 0 or self.step == end
            if due:
                value = loss.item()
                now = time.perf_counter()
                self.trained_s += now - mark
                speed = (self.step - mark_step) * recipe.batch_tokens / (now - mark)
                left = (recipe.n_steps - self.step) * recipe.batch_tokens / speed
                row = {
                    "step": self.step,
                    "of": recipe.n_steps,
                    "tokens": self.step * recipe.batch_tokens,
                    "loss_nats": round(value, 4),
                    "balance": round(balance.item(), 4),
                    "effective_share": [
                        round(x, 3) for x in self.balance.effective_share().tolist()
                    ],
                    "tokens_per_s": round(speed),
                    "remaining_s": round(left),
                    "trained_s": round(self.trained_s, 1),
                }
                if self.step % recipe.validate_every == 0 or self.step == end:
                    row["validation_nats"] = self.validate()
                    row["coefficient"] = [round(x, 5) for x in self.balance.coefficient.tolist()]
                self.log(row)
                if value != value:
                    raise ReproError(
                        f"loss is NaN at step {self.step}: lower learning_rate and resume from "
                        "the last checkpoint"
                    )
                mark, mark_step = time.perf_counter(), self.step
            if self.step % recipe.checkpoint_every == 0 or self.step == end:
                self.save_checkpoint()

    def save_model(self) -> None:
        """bf16 safetensors, config and tokenizer, loadable by plain Transformers."""
        model = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.bfloat16)
        model.load_state_dict({k: v.to(torch.bfloat16) for k, v in self.model.state_dict().items()})
        model.save_pretrained(self.out_dir, max_shard_size=MAX_SHARD)
        self.tokenizer.save_pretrained(self.out_dir)
        write_text(
            self.out_dir / "recipe.json",
            json.dumps(self.recipe.to_dict(), indent=1, sort_keys=True) + "\n",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the training program."""
    parser = argparse.ArgumentParser(prog="python -m repro.models.train", description=__doc__)
    parser.add_argument("model", help="bundled model: moe-fine or moe-shared")
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--cache", type=Path, help="token streams (default OUT/streams)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="run the layers as they are")
    parser.add_argument("--stop-after", type=int, help="stop after this many steps")
    parser.add_argument("--start-from", type=Path, help="second stage from this checkpoint")
    parser.add_argument("constants", nargs="*", help="recipe constants, NAME=VALUE")
    args = parser.parse_args(arguments)
    try:
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise MissingDeviceError(
                f"device {args.device!r} is not here: use --device cpu or a machine with a GPU"
            )
        overrides = dict(c.split("=", 1) for c in args.constants)
        recipe = get_recipe(args.model, overrides, second_stage=args.start_from is not None)
        torch.set_float32_matmul_precision("high")
        args.out.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(
            recipe,
            PreTrainedTokenizerFast.from_pretrained(args.tokenizer),
            args.data,
            args.out,
            args.cache or args.out / "streams",
            torch.device(args.device),
            not args.no_compile,
            start_from=args.start_from,
        )
        if trainer.resume():
            print(f"resuming at step {trainer.step} of {recipe.n_steps}", flush=True)
        trainer.run(args.stop_after)
        trainer.save_model()
    except ReproError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
