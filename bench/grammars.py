"""What a response_format costs: decode steps of hadal-tiny in which every request has a grammar,
beside the same without.

`python -m bench.grammars [--model mid | mid-v3] [--batch 32] [--drafts 0] [--own]`; mid-v3 has as
many tokens in its vocabulary as V3. With `--own` each request has a schema of its own, which no other
has the automata of. The two take turns, a round each; figures are
those of the median step and of the tenth quickest of a hundred, which other work on the machine
disturbs less. `wait` is how long a step stood still for masks; the rest of what they take runs
beside the step, on cores that it shares. `CPU` is processor time a step, of the thread that computes
and of the whole process; with one thread (`--threads 1`) their difference is what masks take beside it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench.checkpoints import mid_model
from hadal.core.messages import BLOCK_TOKENS
from hadal.core.plans import MASK, Chunk, DecodePlan, Grammar, Join, PrefillPlan, Sampling, StepDone
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.load import AS_STORED, load_weights
from hadal.model.runner import ModelRunner
from hadal.perf.shapes import DEEPSEEK_V3
from hadal.runtime.resolve import model_folder
from hadal.tokens.grammars import Grammars, grammar_text
from hadal.tokens.table import read_token_table


def schema_of(name: str) -> dict[str, Any]:
    """Of a list so long that no request ends; `name`: what one of its items' properties is called."""
    properties = {
        name: {"type": "string"},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
    item = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 1000}


MODELS = {
    "hadal-tiny": lambda: model_folder(""),
    "mid": mid_model,
    "mid-v3": lambda: mid_model(DEEPSEEK_V3.vocab_size),
}
CONTEXT, NUM_STEPS, NUM_WARM, NUM_ROUNDS = 64, 60, 3, 6


class TimedGrammars(Grammars):
    """Notes how long each step's masks took."""

    seconds: ClassVar[list[float]] = []

    def allow(self, *rows: Any) -> None:
        """See Grammars."""
        start_s = time.perf_counter()
        super().allow(*rows)
        self.seconds.append(time.perf_counter() - start_s)


class Round(NamedTuple):
    """`waits`: for masks, in each step. Processor time is that of a step on the mean."""

    steps: list[float]
    waits: list[float]
    num_tokens: int
    own_cpu_s: float
    cpu_s: float


class Rank:
    """A runner whose slots are all taken."""

    def __init__(self, folder: Path, batch: int, num_drafts: int) -> None:
        weights = load_weights(folder, held=AS_STORED, with_mtp=num_drafts > 0)
        config = weights.config
        self._blocks_each = -(-(CONTEXT + (NUM_STEPS + 4) * (1 + num_drafts)) // BLOCK_TOKENS)
        num_layers = config.num_hidden_layers + (num_drafts > 0)
        cache = KvCache(config, 1 + batch * self._blocks_each, num_layers=num_layers)
        self._runner = ModelRunner(
            DeepseekV3(weights, cache),
            batch,
            num_drafts_max=num_drafts,
            grammars=TimedGrammars(lambda: read_token_table(folder), config.vocab_size),
        )
        self._batch, self._num_drafts, self._ids = batch, num_drafts, count()
        rng = random.Random(1)
        self._prompts = [[rng.randrange(20, 400) for _ in range(CONTEXT)] for _ in range(batch)]

    def round(self, grammars: Sequence[Grammar | None]) -> Round:
        """All requests from their prompts on, which take turns in `grammars`."""
        joins = []
        for slot, prompt in enumerate(self._prompts):
            grammar = grammars[slot % len(grammars)]
            sampling = Sampling(temperature=1.0, seed=slot, grammar=grammar)
            first = 1 + slot * self._blocks_each
            blocks = tuple(range(first, first + self._blocks_each))
            chunk = Chunk(f"r{slot}", tuple(prompt), 0, blocks[:1], sampling, 0)
            (token,) = self._execute(PrefillPlan(next(self._ids), (chunk,))).tokens
            joins.append(Join(slot, blocks, CONTEXT, token, 1, sampling, output=(token,)))
        plan = DecodePlan(
            next(self._ids),
            tuple(range(self._batch)),
            tuple(joins),
            (),
            num_drafts=self._num_drafts,
        )
        steps, waits, num_tokens = [], [], 0
        for number in range(NUM_STEPS):
            if number == NUM_WARM:
                own_s, all_s = time.thread_time(), time.process_time()
            start_s = time.perf_counter()
            done = self._execute(plan)
            if number >= NUM_WARM:
                steps.append(time.perf_counter() - start_s)
                waits.append(sum(op.seconds for op in done.op_times if op.op == MASK))
                num_tokens += len(done.tokens)
            plan = DecodePlan(next(self._ids), (), (), (), num_drafts=self._num_drafts)
        cpu_s = time.thread_time() - own_s, time.process_time() - all_s
        return Round(steps, waits, num_tokens, *(spent / len(steps) for spent in cpu_s))

    def _execute(self, plan: DecodePlan | PrefillPlan) -> StepDone:
        done = self._runner.execute(plan)
        assert isinstance(done, StepDone)
        assert done.error is None, done.error
        return done


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for requests without a grammar, and one for those with."""
    parser = argparse.ArgumentParser(prog="bench.grammars")
    parser.add_argument("--model", choices=tuple(MODELS), default="hadal-tiny")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--own", action="store_true", help="a schema of its own for each")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    rank = Rank(MODELS[asked.model](), asked.batch, asked.drafts)
    names = [f"name{slot}" for slot in range(asked.batch)] if asked.own else ["name"]
    held = [Grammar(grammar_text(schema_of(name), follows_reasoning=False), (1,)) for name in names]
    kinds: dict[str, Sequence[Grammar | None]] = {"free": [None], "json_schema": held}
    rounds: dict[str, list[Round]] = {name: [] for name in kinds}
    for number in range(1 + NUM_ROUNDS):
        for name, wanted in kinds.items():
            found = rank.round(wanted)
            if number:
                rounds[name].append(found)
    steps = {name: [s for one in of_kind for s in one.steps] for name, of_kind in rounds.items()}
    title = (
        f"{asked.model}: a step of {asked.batch}, {asked.drafts} drafts, {asked.threads} threads"
    )
    columns = "step, ms", "wait, ms", "quick step, ms", "beside free", "CPU, ms", "tokens a slot"
    table = Table("", *columns, title=title)
    quick = {name: statistics.quantiles(of_kind, n=10)[0] for name, of_kind in steps.items()}
    for name, of_kind in rounds.items():
        waits = [wait for one in of_kind for wait in one.waits]
        own, whole = (min(column) for column in zip(*(one[3:] for one in of_kind), strict=True))
        table.add_row(
            name,
            f"{1e3 * statistics.median(steps[name]):.2f}",
            f"{1e3 * statistics.median(waits):.3f}",
            f"{1e3 * quick[name]:.2f}",
            f"{quick[name] / quick['free'] - 1:+.1%}",
            f"{1e3 * own:.2f} of {1e3 * whole:.2f}",
            f"{sum(one.num_tokens for one in of_kind) / len(steps[name]) / asked.batch:.2f}",
        )
    Console().print(table)
    masks_s = statistics.median(TimedGrammars.seconds)
    Console().print(f"masks of a step, beside it: median {1e3 * masks_s:.3f} ms")


if __name__ == "__main__":
    main()
