"""Train hadal-tiny from nothing, for a given number of minutes, and export it into the run's folder
at the end.

`python -m train --minutes 90 --run <folder>`. Resumes from the folder's checkpoint if there is one.
"""

import argparse
import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from train.data import Batch, batches
from train.export import export
from train.model import Config, Model, MoE
from train.optim import make_optimizers, schedule
from train.tokenizer import load_or_build

MTP_WEIGHT = 0.2
# Of the MTP layer applied to its own state: a second draft is used less often than a first.
MTP_SECOND_WEIGHT = 0.1 * MTP_WEIGHT
# Share of the run after which the MTP layer is trained again: it learns fast on a good model.
MTP_FROM = 0.72


class Losses(NamedTuple):
    """What one batch gives: of the next token, of the MTP layer, of its second application, and
    whether each token's target is the greedy choice. A loss that was not wanted is 0.
    """

    main: Tensor
    mtp: Tensor
    second: Tensor
    hits: Tensor

    @property
    def total(self) -> Tensor:
        return self.main + MTP_WEIGHT * self.mtp + MTP_SECOND_WEIGHT * self.second


def losses(model: Model, batch: Batch, with_mtp: bool = True, with_second: bool = False) -> Losses:
    """Return the losses of a batch; `with_second` needs `with_mtp`."""
    h = model.hidden(batch.tokens, batch.positions, batch.bounds)
    rows = _rows(batch.targets)
    logits = model.lm_head(h[rows])
    loss = F.cross_entropy(logits, batch.targets[rows])
    mtp_loss = second_loss = torch.zeros(())
    if with_mtp:
        # Late, the MTP layer follows the model and does not pull at it.
        mtp_loss, second_loss = _mtp_losses(model, batch, h.detach(), with_second)
    greedy = torch.full_like(batch.targets, -100)
    greedy[rows] = logits.detach().argmax(-1)
    return Losses(loss, mtp_loss, second_loss, greedy == batch.targets)


def _mtp_losses(model: Model, batch: Batch, h: Tensor, with_second: bool) -> tuple[Tensor, Tensor]:
    text = (h, batch.next_tokens, batch.positions, batch.bounds)
    states = model.mtp_hidden(*text)
    rows = _rows(batch.mtp_targets)
    first = F.cross_entropy(model.lm_head(states[rows]), batch.mtp_targets[rows])
    if not with_second:
        return first, torch.zeros(())
    rows = _rows(batch.second_targets).sort()[0]
    # Not detached: the first application learns to leave in its state what the second needs, which
    # gained 19 points of accepted second drafts, detached 11 (README.md). The token is the text's;
    # serving has its own first draft, the same wherever the second draft is looked at. The experts'
    # load counts both applications, as it does there.
    again = model.mtp_second_hidden(*text, states, rows, batch.second_tokens[rows])
    return first, F.cross_entropy(model.lm_head(again), batch.second_targets[rows])


def _rows(targets: Tensor) -> Tensor:
    """Return the rows with a target, and a few without so that their number is one of few (see
    `batches`).
    """
    wanted = (targets >= 0).nonzero()[:, 0]
    spare = (targets < 0).nonzero()[:, 0]
    return torch.cat([wanted, spare[: -len(wanted) % 512]])


@torch.no_grad()
def check(model: Model, held_out: list[Batch]) -> tuple[float, dict[str, float]]:
    """Return the loss and, per task, how many replies are right at every token when the true tokens
    are fed.
    """
    right, total, sums = defaultdict(int), defaultdict(int), 0.0
    for batch in held_out:
        found = losses(model, batch, with_mtp=False)
        sums += found.main.item()
        wrong = set(batch.sequence[(batch.targets >= 0) & ~found.hits].tolist())
        for index, example in enumerate(batch.examples):
            total[example.task] += 1
            right[example.task] += index not in wrong
    return sums / len(held_out), {task: right[task] / total[task] for task in sorted(total)}


def balance(model: Model, gamma: float) -> list[float]:
    """Move every expert's bias a step toward equal load (V3 report 2.1.2); return max/mean load per
    layer.
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
    """A training run in a folder: model, optimisers, how long it has trained, and its log."""

    def __init__(self, folder: Path, minutes: float, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.folder, self.seconds = folder, minutes * 60
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer = load_or_build(folder / "tokenizer.json")
        self.model = Model(Config(vocab_size=self.tokenizer.get_vocab_size()))
        self.optimizers = make_optimizers(self.model, lr)
        self.step, self.num_tokens, self.elapsed = 0, 0, 0.0
        self.stopping = False
        path = folder / "checkpoint.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self.step, self.num_tokens, self.elapsed = (
                state["step"],
                state["num_tokens"],
                state["elapsed"],
            )

    def stop(self, *_: object) -> None:
        """Save after the step under way and leave; the same command resumes."""
        self.stopping = True

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "num_tokens": self.num_tokens,
            "elapsed": self.elapsed,
        }
        torch.save(state, self.folder / "checkpoint.tmp")
        os.replace(self.folder / "checkpoint.tmp", self.folder / "checkpoint.pt")

    def log(self, **fields: object) -> None:
        fields = {"minute": round(self.elapsed / 60, 1), "step": self.step, **fields}
        print("  ".join(f"{k} {v}" for k, v in fields.items()), flush=True)
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def update(self, batch: Batch) -> tuple[Losses, list[float]]:
        """Take one optimiser step; return the losses and the expert load skew per layer."""
        progress = self.elapsed / self.seconds
        # bf16 products are faster and good enough, until the end is fitted to the arithmetic of
        # serving.
        torch.backends.mkldnn.matmul.fp32_precision = "bf16" if progress < 0.97 else "ieee"
        with_mtp = progress < 0.03 or (progress >= MTP_FROM and self.step % 2 == 0)
        # A layer that does not draft well yet has nothing to teach its second application.
        with_second = with_mtp and progress >= MTP_FROM and MTP_SECOND_WEIGHT > 0
        found = losses(self.model, batch, with_mtp, with_second)
        found.total.backward()
        torch.nn.utils.clip_grad_norm_(
            [p for g in self.optimizers[1].param_groups for p in g["params"]], 1.0
        )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * schedule(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # Balanced firmly at first so that every expert learns, hardly at all late: real routing
        # stays skewed.
        gamma = max(5e-4, 2e-3 * min(1.0, (1 - progress / 0.6) / 0.6)) if progress < 0.85 else 0.0
        skew = balance(self.model, gamma)
        self.step += 1
        self.num_tokens += len(batch.tokens)
        return found, skew

    def train(self, batch_tokens: int, check_every_s: float, save_every_s: float) -> None:
        """Train until the time is used up."""
        stream = batches(self.tokenizer, 1000 + self.step, batch_tokens)
        held_out_stream = batches(self.tokenizer, 5, 8192, want_held_out=True)
        held_out = [next(held_out_stream) for _ in range(6)]
        last_log = last_check = last_save = self.elapsed
        tokens_before = self.num_tokens
        while self.elapsed < self.seconds and not self.stopping:
            begin = time.perf_counter()
            found, skew = self.update(next(stream))
            self.elapsed += time.perf_counter() - begin
            if self.elapsed - last_log > 20:
                speed = (self.num_tokens - tokens_before) / (self.elapsed - last_log)
                self.log(
                    loss=round(found.main.item(), 4),
                    mtp=round(found.mtp.item(), 4),
                    second=round(found.second.item(), 4),
                    tok_s=round(speed),
                    mtok=round(self.num_tokens / 1e6, 2),
                    skew=[round(s, 1) for s in skew],
                )
                last_log, tokens_before = self.elapsed, self.num_tokens
            if self.elapsed - last_check > check_every_s or self.elapsed >= self.seconds:
                begin = time.perf_counter()
                loss, tasks = check(self.model, held_out)
                balance(self.model, 0.0)  # The check's tokens are not load.
                self.log(held_out_loss=round(loss, 4), **{k: round(v, 3) for k, v in tasks.items()})
                self.elapsed += time.perf_counter() - begin
                last_check = self.elapsed
            if (
                self.elapsed - last_save > save_every_s
                or self.elapsed >= self.seconds
                or self.stopping
            ):
                self.save()
                last_save = self.elapsed


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("train/runs/hadal-tiny"))
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--lr", type=float, default=0.008)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check-minutes", type=float, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run = Run(args.run, args.minutes, args.lr, args.seed)
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters", flush=True)
    signal.signal(signal.SIGTERM, run.stop)
    run.train(args.batch_tokens, args.check_minutes * 60, 240)
    if not run.stopping:
        export(run.model, run.tokenizer, args.run / "model")
        print(f"published folder: {args.run / 'model'}")


if __name__ == "__main__":
    main()
