"""One training run: a model, its optimisers, its streams, its log and its checkpoint.

The run is fixed by recipe and corpora.  A checkpoint holds everything needed to go on, is
replaced in one step, and belongs to one recipe; a run that was interrupted and resumed ends
with the weights of one that was not (on a CPU bit for bit, by test).
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from repro.errors import CheckpointError, ReproError
from repro.files import atomic_path, output_error, write_text
from repro.models.balance import BalanceController
from repro.models.loading import load_model
from repro.models.optim import Muon, split_parameters
from repro.models.recipe import Recipe
from repro.models.revive import revive_experts
from repro.models.saving import save_checkpoint
from repro.models.specs import get_spec
from repro.models.streams import Sampler, Stream, build_streams
from repro.models.training_forward import TrainingForward

CHECKPOINT = "checkpoint.pt"
LOG = "training.jsonl"
RECIPE = "recipe.json"
_SHAPE_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "vocab_size",
)


def initial_model(recipe: Recipe, start_from: Path | None = None, config: Any = None) -> Any:
    """The Transformers model training begins with, in float32.

    Untrained: normal weights of 0.02; the outputs of attention and of routed experts, which
    add up over the layers, scaled down.  ``start_from``: the weights of a checkpoint folder
    instead.  ``config``: another configuration than the model's own, for small trials.

    Raises:
        CheckpointError: ``start_from`` is damaged or another model.
    """
    config = config or get_spec(recipe.model).config()
    if start_from is not None:
        model = load_model(start_from, device="cpu", dtype="float32")[0].train()
        for field in _SHAPE_FIELDS:
            theirs, ours = getattr(model.config, field, None), getattr(config, field, None)
            if theirs != ours:
                raise CheckpointError(
                    f"checkpoint {str(start_from)!r} has {field}={theirs} where {recipe.model} "
                    f"has {ours}: start from a checkpoint of {recipe.model}"
                )
        return model
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shrink = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                std = 0.02 * (shrink if name.endswith(("o_proj.weight", "down_proj")) else 1.0)
                torch.nn.init.normal_(parameter, std=std)
    return model


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
        config: Any = None,
    ) -> None:
        self.recipe, self.tokenizer, self.out_dir, self.device = recipe, tokenizer, out_dir, device
        self.data_dir, self.cache_dir = data_dir, cache_dir
        self.stream_settings = stream_settings or {}
        on_gpu = device.type == "cuda"
        self.model = initial_model(recipe, start_from, config).to(device)
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
        n_layers, n_experts = self.model.config.num_hidden_layers, self.model.config.num_experts
        self.balance = BalanceController(recipe, n_layers, n_experts, device)
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
        ids = sampler.batch(recipe.batch_tokens // seq, self.generator)
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
            ids = torch.from_numpy(stream.validation_windows(32, seq + 1).astype("int64"))
            if len(ids):
                losses, _, _ = self.validation_forward(ids.to(self.device))
                found[stream.source.name] = round(losses.mean().item(), 4)
        return found

    def save_checkpoint(self) -> None:
        """Everything needed to go on, replaced in one step.

        Raises:
            ReproError: weights are not finite; the checkpoint before stays.
            OutputError: the folder cannot be written, or the disk is full.
        """
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise self._diverged(f"weights of {name}")
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
            try:
                torch.save(state, temporary)
            except RuntimeError as error:  # what its writer makes of a full disk
                raise output_error(self.out_dir / CHECKPOINT, OSError(str(error))) from error

    def resume(self) -> bool:
        """Continue from a checkpoint of the very same recipe, if there is one.

        Rows that an earlier run logged after its last checkpoint are dropped: these steps are
        done again.

        Raises:
            CheckpointError: the checkpoint is damaged or of another recipe.
        """
        path = self.out_dir / CHECKPOINT
        found = path.is_file()
        if found:
            self._load_checkpoint(path)
        log = self.out_dir / LOG
        if log.is_file():
            lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
            write_text(log, "".join(x for x in lines if found and _step_of(x) <= self.step))
        return found

    def _load_checkpoint(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            recipe = state["recipe"]
        except Exception as error:  # torch raises several kinds, its own and zip's
            raise CheckpointError(
                f"{str(path)!r} is damaged ({type(error).__name__}): remove it to start again"
            ) from error
        if recipe != self.recipe.to_dict():
            raise CheckpointError(
                f"{str(path)!r} belongs to another recipe: remove it or choose another --out"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.balance.load(state["balance"])
        self.generator.set_state(state["generator"].cpu())
        self.step, self.trained_s = state["step"], state["trained_s"]

    def log(self, row: dict[str, Any]) -> None:
        """Print one line and append it to the log."""
        line = json.dumps(row, sort_keys=True)
        print(line, flush=True)
        try:
            with open(self.out_dir / LOG, "a", encoding="utf-8") as handle:
                handle.write(line + "\n")
        except OSError as error:
            raise output_error(self.out_dir / LOG, error) from error

    def run(self, stop_after: int | None = None) -> None:
        """Train to the end of the recipe, or to step ``stop_after``, and write a checkpoint.

        Raises:
            ReproError: loss or weights are not finite any more; the last checkpoint is from before.
        """
        recipe = self.recipe
        end = recipe.n_steps if stop_after is None else min(recipe.n_steps, stop_after)
        if self.step == 0 and recipe.revive_below > 0:
            self.revive()
        mark, mark_step = time.perf_counter(), self.step
        while self.step < end:
            loss, balance = self.train_step()
            log_due = self.step == 1 or self.step % recipe.log_every == 0 or self.step == end
            save_due = self.step % recipe.checkpoint_every == 0 or self.step == end
            if not (log_due or save_due):
                continue
            value = loss.item()  # waits for the device; the clock is read after it
            if not math.isfinite(value):
                raise self._diverged("loss")
            if log_due:
                now = time.perf_counter()
                self.trained_s += now - mark
                row = self._row(value, balance.item(), (now - mark) / (self.step - mark_step))
                if self.step % recipe.validate_every == 0 or self.step == end:
                    row["validation_nats"] = self.validate()
                    row["coefficient"] = [round(x, 5) for x in self.balance.coefficient.tolist()]
                self.log(row)
                mark, mark_step = time.perf_counter(), self.step
            if save_due:
                self.save_checkpoint()

    def _diverged(self, what: str) -> ReproError:
        return ReproError(
            f"{what} is NaN or infinite at step {self.step} of {self.recipe.n_steps}: train again "
            f"into another --out with a learning_rate under {self.recipe.learning_rate}"
        )

    def _row(self, loss: float, balance: float, seconds_per_step: float) -> dict[str, Any]:
        """What the log says of the step that just ended."""
        recipe = self.recipe
        return {
            "step": self.step,
            "of": recipe.n_steps,
            "tokens": self.step * recipe.batch_tokens,
            "loss_nats": round(loss, 4),
            "balance": round(balance, 4),
            "effective_share": [round(x, 3) for x in self.balance.effective_share().tolist()],
            "tokens_per_s": round(recipe.batch_tokens / seconds_per_step),
            "remaining_s": round((recipe.n_steps - self.step) * seconds_per_step),
            "trained_s": round(self.trained_s, 1),
        }

    def save_model(self) -> None:
        """bf16 safetensors, config, tokenizer and recipe, loadable by plain Transformers."""
        model = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.bfloat16)
        model.load_state_dict({k: v.to(torch.bfloat16) for k, v in self.model.state_dict().items()})
        save_checkpoint(self.out_dir, model, self.tokenizer)
        recipe = json.dumps(self.recipe.to_dict(), indent=1, sort_keys=True)
        write_text(self.out_dir / RECIPE, recipe + "\n")


def _step_of(line: str) -> float:
    """Step of a row of the log; of a row that an interruption cut off, infinity."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
