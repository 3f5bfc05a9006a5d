"""Decoding with drafts beside decoding without, on one rank: tokens/s as a ratio, in one run.

    python -m bench.drafts [--model tiny|mid|mid-fp8 ...] [--batch 1 8 32] [--quick]

The middle model's weights are random, and the prompts are for hadal-tiny, so little that a module
drafts is right: a coin says which drafts are, at equal cost (what was drafted is written over, after
it was computed, with the token that will be drawn, or another one). Every number of drafts runs in
turn on the same requests, and their tokens are compared; "auto" chooses as a leader does, and
"falls" is the same with a coin that falls to nothing halfway. "off" is a rank without the module,
"0" one that has it and makes no drafts. Knows no server.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from bench.checkpoints import MODELS, SHIPPED, stored_model
from bench.machine import describe
from bench.subject import prompts
from hadal.core.messages import BLOCK_TOKENS
from hadal.core.plans import Chunk, DecodePlan, Join, PrefillPlan, Sampling, StepDone, StepPlan
from hadal.kernels.library import isa
from hadal.model.cache import KvCache
from hadal.model.checkpoint import AS_FP32, AS_STORED, load_weights
from hadal.model.deepseek import DeepseekV3
from hadal.model.drafts import Drafter
from hadal.model.runner import ModelRunner
from hadal.policy.drafts import DraftChooser

GREEDY = Sampling(temperature=0.0)
CONTEXT = 128
NUM_DRAFTS_MAX = 3
NUM_AUTO_MAX = 2
PATIENCE_STEPS = 600
"""Of a run of "auto": it has to find out first."""
Coin = Callable[[int], float]
"""Position behind the prompt -> how often a draft for it is right."""


class CoinDrafter(Drafter):
    """Drafts as ever, then writes over what was drafted: the token that comes, as often as the coin
    says, else another one.
    """

    coin: Coin | None = None
    texts: dict[int, np.ndarray]
    """Slot -> what it will draw, by position."""

    def draft(self, num_drafts, slots_N, positions_N, *more) -> None:  # type: ignore[no-untyped-def]
        super().draft(num_drafts, slots_N, positions_N, *more)
        if self.coin is None:
            return
        for slot, position in zip(slots_N.tolist(), positions_N.tolist(), strict=True):
            for place in range(num_drafts):
                text = self.texts[slot]
                token = int(text[min(position + 1 + place, len(text) - 1)])
                is_right = random.random() < self.coin(position - CONTEXT)
                self.drafts_SK[slot, place] = token if is_right else token ^ 1


class Rank:
    """A runner with a module, and the requests that it decodes again and again."""

    def __init__(self, folder: Path, *, is_fp32: bool, batch: int, num_tokens: int) -> None:
        weights = load_weights(folder, held=AS_FP32 if is_fp32 else AS_STORED, with_mtp=True)
        self._config = config = weights.config
        length = CONTEXT + num_tokens + 2 * (1 + NUM_DRAFTS_MAX)
        self._blocks_each = -(-length // BLOCK_TOKENS)
        cache = KvCache(
            config, 1 + batch * self._blocks_each, num_layers=config.num_hidden_layers + 1
        )
        self._drafting = ModelRunner(
            DeepseekV3(weights, cache), batch, num_drafts_max=NUM_DRAFTS_MAX
        )
        module = self._drafting._module
        assert module is not None
        self.drafter = self._drafting._drafter = CoinDrafter(module, batch, NUM_DRAFTS_MAX)
        # Without a module, and without its layer in the cache.
        plain = KvCache(config, 1 + batch * self._blocks_each)
        self._plain = ModelRunner(DeepseekV3(replace(weights, mtp=None), plain), batch)
        self._step_ids = count()
        self.num_tokens = num_tokens
        self._prompts = prompts(batch, CONTEXT, config.vocab_size, 1)
        for runner in (self._plain, self._drafting):
            self._runner = runner
            prefilled = [self._prefill(slot, prompt) for slot, prompt in enumerate(self._prompts)]
        self._firsts = prefilled
        self.drafter.texts = {}
        self.drafter.coin = None
        _, texts = self.decode(lambda: 0, num_tokens + 2 * (1 + NUM_DRAFTS_MAX))
        self._texts = texts
        self.drafter.texts = {
            slot: np.array([*self._prompts[slot], *text]) for slot, text in texts.items()
        }

    def use(self, *, drafts: bool) -> None:
        """Decode with the runner that can draft, or with the other one, from now on."""
        self._runner = self._drafting if drafts else self._plain

    def decode(
        self,
        choose: Callable[[], int],
        num_tokens: int = 0,
        done: Callable[[int, int, StepDone], None] = lambda checked, drafts, step: None,
    ) -> tuple[float, dict[int, list[int]]]:
        """(tokens/s, texts) of all requests going on for so many tokens each, at least; `done` hears
        of every step.
        """
        num_tokens = num_tokens or self.num_tokens
        slots = range(len(self._prompts))
        texts = {slot: [self._firsts[slot]] for slot in slots}
        joins = tuple(
            Join(slot, self._blocks(slot), CONTEXT, self._firsts[slot], 1, GREEDY) for slot in slots
        )
        leaves: tuple[int, ...] = tuple(slots)
        checked, num_made, start_s = 0, 0, time.perf_counter()
        while min(map(len, texts.values())) < num_tokens:
            drafts = choose()
            step = self._execute(
                DecodePlan(next(self._step_ids), leaves, joins, (), num_drafts=drafts)
            )
            joins, leaves = (), ()
            done(checked, drafts, step)
            checked = drafts
            num_made += len(step.tokens)
            for slot, token in zip(step.keys, step.tokens, strict=True):
                texts[slot].append(token)
        seconds = time.perf_counter() - start_s
        return num_made / seconds, texts

    def check(self, texts: dict[int, list[int]]) -> None:
        """Raise RuntimeError unless these are the tokens that come without drafts."""
        for slot, text in texts.items():
            known = self._texts[slot]
            if text[: len(known)] != known[: len(text)]:
                raise RuntimeError(f"slot {slot} drew other tokens with drafts")

    def _prefill(self, slot: int, prompt: list[int]) -> int:
        blocks = self._blocks(slot)[: -(-CONTEXT // BLOCK_TOKENS)]
        chunk = Chunk(f"r{slot}", tuple(prompt), 0, blocks, GREEDY, 0)
        return self._execute(PrefillPlan(next(self._step_ids), (chunk,))).tokens[0]

    def _blocks(self, slot: int) -> tuple[int, ...]:
        first = 1 + slot * self._blocks_each
        return tuple(range(first, first + self._blocks_each))

    def _execute(self, plan: StepPlan) -> StepDone:
        done = self._runner.execute(plan)
        assert isinstance(done, StepDone)
        if done.error is not None:
            raise RuntimeError(done.error)
        return done


def automatic(rank: Rank, batch: int, chooser: DraftChooser) -> tuple[float, list[int]]:
    """(tokens/s, how many drafts each step made) with drafts chosen as a leader chooses them."""
    chosen = []

    def choose() -> int:
        chosen.append(chooser.choose(batch))
        return chosen[-1]

    def done(checked: int, drafts: int, step: StepDone) -> None:
        chooser.done(batch, checked, drafts, [step.elapsed_s], step.drafts)

    rate, texts = rank.decode(choose, done=done)
    rank.check(texts)
    return rate, chosen


def measure(console: Console, name: str, rank: Rank, batch: int, coin: float, rounds: int) -> None:
    """One line: every number of drafts, and auto, beside a rank that cannot draft."""

    def falling(position: int) -> float:
        return coin if position < rank.num_tokens // 2 else 0.0

    numbers = range(1 + NUM_DRAFTS_MAX)
    ways = ["off", *map(str, numbers), "auto", *(["falls"] if coin else [])]
    ratios: dict[str, list[float]] = {way: [] for way in ways[1:]}
    choosers = {way: DraftChooser(NUM_AUTO_MAX) for way in ("auto", "falls")}
    used = [0] * (1 + NUM_AUTO_MAX)
    rates: list[float] = []
    for turn in range(-1, rounds):
        found: dict[str, float] = {}
        for way in ways if turn % 2 else ways[::-1]:
            rank.drafter.coin = lambda _: coin
            if way == "falls":
                rank.drafter.coin = falling
            rank.use(drafts=True)
            if way in ("auto", "falls"):
                # It learns once, as a unit does, and is measured while it goes on.
                found[way], chosen = automatic(rank, batch, choosers[way])
                if way == "auto" and turn >= 0:
                    used = [used[num] + chosen.count(num) for num in range(1 + NUM_AUTO_MAX)]
                continue
            rank.use(drafts=way != "off")
            number = 0 if way == "off" else int(way)
            found[way], texts = rank.decode(lambda number=number: number)  # type: ignore[misc]
            rank.check(texts)
        if turn < 0:
            continue  # Everything was touched once.
        rates.append(found["off"])
        for way in ratios:
            ratios[way].append(found[way] / found["off"])
    each = "  ".join(f"{way} {statistics.median(of):.3f}" for way, of in ratios.items())
    shares = "/".join(f"{num / max(1, sum(used)):.0%}" for num in used)
    accepted = f"{coin:g}"
    console.print(
        f"  {name} batch {batch:2d}, right {accepted:4s}: off {statistics.median(rates):6.0f} tokens/s"
        f"  {each}  [dim](auto made 0/1/2: {shares})[/dim]"
    )


def folder_of(model: str) -> tuple[Path, bool]:
    """(folder, whether FP32 is computed with)."""
    if model == "tiny":
        return SHIPPED, False
    kind = "fp8" if model == "mid-fp8" else "bf16"
    return stored_model("mid_mtp", kind, MODELS / f"mid-mtp-{kind}"), model == "mid"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drafts", description=__doc__.split("\n\n", 1)[0]
    )
    parser.add_argument("--model", nargs="+", default=["tiny", "mid", "mid-fp8"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--coin", nargs="+", type=float, default=[0.97, 0.8, 0.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=PATIENCE_STEPS, help="of each request")
    parser.add_argument("--quick", action="store_true", help="two rounds of 200 tokens")
    options = parser.parse_args(arguments)
    rounds, num_tokens = (2, 200) if options.quick else (options.rounds, options.tokens)
    console = Console(width=200)
    console.print(f"[bold]drafts[/bold]: {describe()}, {isa()} kernels; times as many tokens/s")
    torch.manual_seed(0)
    for model in options.model:
        folder, is_fp32 = folder_of(model)
        for batch in options.batch:
            rank = Rank(folder, is_fp32=is_fp32, batch=batch, num_tokens=num_tokens)
            for coin in options.coin:
                measure(console, model, rank, batch, coin, rounds)
            del rank


if __name__ == "__main__":
    main(sys.argv[1:])
