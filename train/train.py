"""Train hadal-tiny from random weights for a given number of steps, and export it into the run's
folder at the end.

`python -m train --run <folder>` resumes from the folder's checkpoint if there is one: weights,
optimisers and the next batch. Everything depends only on the seed and the step. So a resumed run
gives the result of an uninterrupted one, except for the order in which threads add numbers.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hadal.progress import Bar
from train.data import Batch, made_ahead, make_batch
from train.export import export, load
from train.model import Config, Model, MoE
from train.optim import make_optimizers, schedule
from train.tokenizer import load_or_build, spellings

DRAFTS_FROM = 0.82
"""Share of the run after which the model is frozen and only its MTP layer is trained. The layer
then learns from a trained model, and costs nothing until then.
"""
SECOND_WEIGHT = 0.3
"""Weight of the second application's loss: a second draft is used less often than a first."""
FEW_TARGETS = 1024
"""Number of targets below which a batch gets a lower weight: a batch of one long prompt has a single short reply."""
CHECK_STEPS = 500
NUM_STEPS = 22_000


class Losses(NamedTuple):
    """Loss that a step minimises (`total`), and its parts; 0 for a part that this step does not train."""

    total: Tensor
    main: float = 0.0
    """Loss of the next token."""
    first: float = 0.0
    """Loss of the MTP layer."""
    second: float = 0.0
    """Loss of the MTP layer applied to its own state."""


def main_loss(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss of the next token, and whether each token's target is the greedy choice."""
    rows = _rows(batch.targets)
    logits = model.lm_head(model.hidden(batch.tokens, batch.positions, batch.bounds, rows))
    greedy = torch.full_like(batch.targets, -100)
    greedy[rows] = logits.detach().argmax(-1)
    return _mean(logits, batch.targets[rows]), greedy == batch.targets


def draft_losses(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the losses of the MTP layer and of its second application; the main model gets no gradient."""
    with torch.no_grad():
        h = model.hidden(batch.tokens, batch.positions, batch.bounds)
    text = (h, batch.next_tokens, batch.positions, batch.bounds)
    states = model.mtp_hidden(*text)
    rows = _rows(batch.mtp_targets)
    first = _mean(model.lm_head(states[rows]), batch.mtp_targets[rows])
    rows = _rows(batch.second_targets).sort()[0]
    # Not detached: the first application learns to prepare its state for the second. In a trial
    # this raised the accepted share of second drafts by 19 percentage points; with detached states
    # it rose by 11. The token here is the text's. Serving uses the first draft instead, which is
    # the same token whenever the second draft counts. The experts' load counts both applications,
    # as in serving.
    again = model.mtp_second_hidden(*text, states, rows, batch.second_tokens[rows])
    return first, _mean(model.lm_head(again), batch.second_targets[rows])


def _mean(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over the targets; 0 if there are none."""
    num = int((targets >= 0).sum())
    return F.cross_entropy(logits, targets, reduction="sum") / max(num, 1)


def _rows(targets: Tensor) -> Tensor:
    """Return the rows with a target, and up to 511 without, so that the number of rows is a multiple of 512:
    products are recompiled for every shape (see `make_batch`).
    """
    wanted = (targets >= 0).nonzero()[:, 0]
    spare = (targets < 0).nonzero()[:, 0]
    return torch.cat([wanted, spare[: -len(wanted) % 512]])


@torch.no_grad()
def check(model: Model, held_out: list[Batch]) -> tuple[float, dict[str, float]]:
    """Return the loss and, per task, the share of replies that are right at every token when fed
    the true tokens.
    """
    right, total, sums = defaultdict(int), defaultdict(int), 0.0
    for batch in held_out:
        loss, is_right = main_loss(model, batch)
        sums += loss.item()
        wrong = set(batch.sequence[(batch.targets >= 0) & ~is_right].tolist())
        for index, example in enumerate(batch.examples):
            total[example.task] += 1
            right[example.task] += index not in wrong
    return sums / len(held_out), {task: right[task] / total[task] for task in sorted(total)}


def balance(model: nn.Module, gamma: float) -> list[float]:
    """Move every expert's bias toward equal load (V3 report 2.1.2). Return each layer's largest load divided
    by its mean.
    """
    skew = []
    for module in model.modules():
        if isinstance(module, MoE):
            load = module.counts
            if load.sum() == 0:
                continue
            skew.append((load.max() / load.mean()).item())
            module.gate.e_score_correction_bias += gamma * torch.sign(load.mean() - load)
            load.zero_()
    return skew


class Run:
    """A training run in a folder: model, optimisers, progress, and log."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, float],
        config: Config | None = None,
        start: Path | None = None,
    ) -> None:
        """Start or resume a run. `settings`: steps, lr, batch_tokens and seed, which must be equal
        when the run is resumed. `start`: a published folder; the run begins with its shape, weights
        and tokenizer.

        Raises ValueError if the folder's checkpoint has other settings, or another tokenizer than
        the one stored beside it.
        """
        torch.manual_seed(int(settings["seed"]))
        self.folder = folder
        self.num_steps, self.batch_tokens = int(settings["steps"]), int(settings["batch_tokens"])
        folder.mkdir(parents=True, exist_ok=True)
        begins = not (folder / "checkpoint.pt").exists()
        if start is not None and begins:
            shutil.copy(start / "tokenizer.json", folder)
        self.tokenizer = load_or_build(folder / "tokenizer.json")
        digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        self.settings: dict[str, float | str] = {**settings, "tokenizer": digest[:16]}
        if start is not None:
            self.model = load(start)[0]
        else:
            self.model = Model(config or Config(vocab_size=self.tokenizer.get_vocab_size()))
            if begins:
                self.model.begin_alike(spellings(self.tokenizer))
        self.optimizers = make_optimizers(self.model, settings["lr"])
        self.step, self.num_tokens, self.elapsed = 0, 0, 0.0
        self.stopping = False
        if not begins:
            self._load()

    def _load(self) -> None:
        state = torch.load(self.folder / "checkpoint.pt", weights_only=True)
        if state["settings"] != self.settings:
            raise ValueError(
                f"{self.folder} holds a run with {state['settings']}, not {self.settings};"
                " give the same settings and tokenizer, or another folder."
            )
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.step, self.num_tokens = state["step"], state["num_tokens"]
        self.elapsed = state["elapsed"]

    def stop(self, *_: object) -> None:
        """Request a stop after the current step, with a checkpoint; the same command resumes."""
        self.stopping = True

    def save(self) -> None:
        """Write the checkpoint. If the process is killed meanwhile, the previous checkpoint remains."""
        state = {
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "num_tokens": self.num_tokens,
            "elapsed": self.elapsed,
        }
        aside = self.folder / "checkpoint.tmp"
        with aside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.folder / "checkpoint.pt")

    def log(self, **fields: object) -> None:
        """Add a line of JSON to log.jsonl in the run's folder."""
        fields = {"minute": round(self.elapsed / 60, 1), "step": self.step, **fields}
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def update(self, batch: Batch) -> tuple[Losses, list[float]]:
        """Take one optimiser step. Return the losses, and per layer the largest expert load divided by the mean."""
        progress = self.step / self.num_steps
        if drafts := progress >= DRAFTS_FROM:
            progress = (progress - DRAFTS_FROM) / (1 - DRAFTS_FROM)
        else:
            progress /= DRAFTS_FROM
        # bf16 products are faster on CPUs that have them, and precise enough. The last steps use
        # FP32, to fit the model to the arithmetic of serving.
        torch.backends.mkldnn.matmul.fp32_precision = "bf16" if progress < 0.97 else "ieee"
        self.model.requires_grad_(not drafts)
        self.model.mtp.requires_grad_(drafts)
        if drafts:
            first, second = draft_losses(self.model, batch)
            total = first + SECOND_WEIGHT * second
            found = Losses(total, first=first.item(), second=second.item())
        else:
            total = main_loss(self.model, batch)[0]
            found = Losses(total, total.item())
        # A batch of one long prompt with one short reply counts less than a batch of forty replies.
        share = min(1.0, int((batch.targets >= 0).sum()) / FEW_TARGETS)
        (found.total * share).backward()
        torch.nn.utils.clip_grad_norm_(
            [p for g in self.optimizers[1].param_groups for p in g["params"]], 1.0
        )
        self.step += 1
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * schedule(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # Balance strongly at first, so that every expert learns, and hardly at all late: real
        # routing stays skewed.
        gamma = max(5e-4, 2e-3 * min(1.0, (1 - progress / 0.6) / 0.6)) if progress < 0.85 else 0.0
        skew = balance(self.model.mtp if drafts else self.model, gamma)
        self.num_tokens += len(batch.tokens)
        return found, skew

    def train(self, save_every_s: float, check_steps: int = CHECK_STEPS) -> None:
        """Train to the last step, or until `stop` is called."""
        seed = 1000 + int(self.settings["seed"])
        numbers = range(self.step, self.num_steps)
        stream = iter(made_ahead(self.tokenizer, seed, self.batch_tokens, numbers))
        held_out = [make_batch(self.tokenizer, 5, i, 2 * self.batch_tokens, True) for i in range(5)]
        last_log, last_save, from_step = self.elapsed, self.elapsed, self.step
        with Bar("train", self.num_steps, period_s=60) as bar:
            while self.step < self.num_steps and not self.stopping:
                begin = time.perf_counter()
                found, skew = self.update(next(stream))
                self.elapsed += time.perf_counter() - begin
                a_step = (self.elapsed - last_log) / max(1, self.step - from_step)
                bar.update(self._progress(found, a_step), done=self.step)
                if self.elapsed - last_log > 60:
                    self._log_losses(found, skew, self.batch_tokens / a_step)
                    last_log, from_step = self.elapsed, self.step
                if self.step % check_steps == 0 or self.step == self.num_steps:
                    loss, tasks = check(self.model, held_out)
                    balance(self.model, 0.0)  # The check's tokens must not count as load.
                    self.log(
                        held_out_loss=round(loss, 4), **{k: round(v, 3) for k, v in tasks.items()}
                    )
                if self.elapsed - last_save > save_every_s:
                    self.save()
                    last_save = self.elapsed
            self.save()

    def _progress(self, found: Losses, step_s: float) -> str:
        left = round((self.num_steps - self.step) * step_s / 60)
        return (
            f"step {self.step:,} of {self.num_steps:,}, loss {found.total.item():.3f},"
            f" {left // 60} h {left % 60:02} min left"
        )

    def _log_losses(self, found: Losses, skew: list[float], speed: float) -> None:
        self.log(
            loss=round(found.main, 4),
            first_draft=round(found.first, 4),
            second_draft=round(found.second, 4),
            tok_s=round(speed),
            mtok=round(self.num_tokens / 1e6, 2),
            skew=[round(s, 1) for s in skew],
        )


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("train/runs/hadal-tiny"))
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-minutes", type=float, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--start", type=Path, help="a published folder to begin with, instead of from nothing"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = {
        "steps": args.steps,
        "lr": args.lr,
        "batch_tokens": args.batch_tokens,
        "seed": args.seed,
    }
    run = Run(args.run, settings, start=args.start)
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters", flush=True)
    signal.signal(signal.SIGTERM, run.stop)
    signal.signal(signal.SIGINT, run.stop)
    run.train(args.save_minutes * 60)
    if run.step == run.num_steps:
        export(run.model, run.tokenizer, args.run / "model")
        print(f"published folder: {args.run / 'model'}")


if __name__ == "__main__":
    main()
