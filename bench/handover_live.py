"""How much later decode's first token comes because prefill and decode are two processes.

    python -m bench.handover_live [--quick]

Served, with each transport: from sending a prompt to its first token (prefill's) and to its second
(decode's, for which the KV had to be handed over). Beside it, in turn, one process that does both
with the same runner on one pool: the prompt in the chunks of the deployment, then a decode step.
The aim is the issue's: the second token no more than 10 % later than there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from rich.console import Console

from bench.checkpoints import ROOT, SHIPPED, mid_model
from bench.client import stream
from bench.server import Running, launched, wait_ready
from bench.subject import prompts
from hadal.core.config import Deployment
from hadal.core.messages import BLOCK_TOKENS
from hadal.core.model_config import read_model_config
from hadal.core.plans import Chunk, DecodePlan, Join, PrefillPlan, Sampling, StepPlan
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.load import load_weights
from hadal.model.runner import ModelRunner
from hadal.runtime.host import SWITCH_INTERVAL_S
from hadal.runtime.transfer.nixl import package

AIM = 1.10
NUM_OUTPUT = 2
"""The answer ends with the second token: its time is that of the last bytes, even where one read
holds both.
"""
GREEDY = Sampling(temperature=0.0)
AS_BETWEEN_HOSTS = {"UCX_TLS": "tcp,self"}
THREADS = "[prefill]\nthreads = 1\n[decode]\nthreads = 1\n"
"""One on either side: two wait for one another where cores are shared, by chance as long as
anything measured here.
"""
OPENMP = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""As the supervisor has it for its children. They have sessions of their own too: to each session
Linux gives the same share of busy cores (sched(7), autogroup).
"""


class BothRoles:
    """Prefill and decode of one request at a time, in this process, on one pool."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        config = read_model_config(folder)
        num_blocks = -(-config.max_position_embeddings // BLOCK_TOKENS)
        self._blocks = tuple(range(1, 1 + num_blocks))
        self._runner = ModelRunner(
            DeepseekV3(load_weights(folder), KvCache(config, 1 + num_blocks)), 1
        )
        self._step_ids = count()

    def ask(self, prompt: list[int]) -> tuple[float, float]:
        """Seconds to the first token and to the second."""
        begun_s, chunk_tokens, token = time.perf_counter(), Deployment().chunk_tokens, -1
        for start in range(0, len(prompt), chunk_tokens):
            tokens = tuple(prompt[start : start + chunk_tokens])
            end = start + len(tokens)
            sampling = GREEDY if end == len(prompt) else None
            chunk = Chunk("r", tokens, start, self._blocks[: -(-end // BLOCK_TOKENS)], sampling, 0)
            token = self._execute(PrefillPlan(next(self._step_ids), (chunk,)))
        first_s = time.perf_counter() - begun_s
        join = Join(0, self._blocks, len(prompt), token, 1, GREEDY)
        self._execute(DecodePlan(next(self._step_ids), (), (join,), ()))
        second_s = time.perf_counter() - begun_s
        self._execute(DecodePlan(next(self._step_ids), (0,), (), ()))
        return first_s, second_s

    def _execute(self, plan: StepPlan) -> int:
        done = self._runner.execute(plan)
        if done.error is not None:
            raise RuntimeError(done.error)
        return done.tokens[0] if done.tokens else -1


def answer(folder: Path) -> None:
    """Ask BothRoles what stdin says, a prompt a line, and print the seconds."""
    both = BothRoles(folder)
    for line in sys.stdin:
        print(json.dumps(both.ask(json.loads(line))), flush=True)


@dataclass(frozen=True)
class Sizes:
    folder: Path
    num_tokens: int
    num_rounds: int


@dataclass(frozen=True)
class Round:
    """One prompt served, and another of the same length in one process: seconds to the first and
    second token.
    """

    served: tuple[float, float]
    alone: tuple[float, float]


async def _served(running: Running, model: str, prompt: list[int]) -> tuple[float, float]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
    }
    found = await stream(running.address, "/v1/completions", body)
    if found.error is not None or found.num_tokens != NUM_OUTPUT:
        raise RuntimeError(f"the answer is {found}")
    return found.piece_times_s[0] - found.started_s, found.piece_times_s[-1] - found.started_s


def rounds(handover: str, sizes: Sizes, alone: subprocess.Popen[str]) -> list[Round]:
    """Served and alone in turn; the first of each is not counted: connections, agents, pages."""
    assert alone.stdin is not None
    assert alone.stdout is not None
    config, found = read_model_config(sizes.folder), []
    deployment = (
        f'model = "{sizes.folder}"\nhandover = "{handover}"\n[cache]\nmemory = "off"\n' + THREADS
    )
    with launched(deployment, AS_BETWEEN_HOSTS) as running:
        wait_ready(running)
        for _ in range(1 + sizes.num_rounds):
            prompt = prompts(1, sizes.num_tokens, config.vocab_size, secrets.randbits(30))[0]
            served = asyncio.run(_served(running, sizes.folder.name, prompt))
            alone.stdin.write(json.dumps(prompt) + "\n")
            alone.stdin.flush()
            first_s, second_s = json.loads(alone.stdout.readline())
            found.append(Round(served, (first_s, second_s)))
    return found[1:]


def report(console: Console, handover: str, found: Sequence[Round]) -> None:
    """Both ratios: of the second token's time, which what else runs on the machine moves by far
    more than a hand-over takes; and of the second token's time in one process to the same plus what
    the gap between tokens is longer by.
    """
    served, alone = [one.served for one in found], [one.alone for one in found]
    (first_s, second_s, gap_s), (first_alone_s, second_alone_s, gap_alone_s) = (
        _middle(served),
        _middle(alone),
    )
    ratios = sorted(one.served[1] / one.alone[1] for one in found)
    ratio = statistics.median(ratios)
    mark = "[green]✓[/green]" if ratio <= AIM else "[red]✗[/red]"
    console.print(
        f"  {handover:5s} first token {first_s:.3f} s, second {second_s:.3f} s, {1e3 * gap_s:.0f}"
        f" ms between them; one process {first_alone_s:.3f} s, {second_alone_s:.3f} s,"
        f" {1e3 * gap_alone_s:.0f} ms"
    )
    console.print(
        f"        second token {ratio:.3f}x {mark} [dim](aim {AIM}; {len(found)} rounds,"
        f" {ratios[0]:.3f} to {ratios[-1]:.3f})[/dim], by the gap alone"
        f" {1 + (gap_s - gap_alone_s) / second_alone_s:.4f}x"
    )


def _middle(times: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Medians: first token, second token, and the gap between them."""
    gaps = [second_s - first_s for first_s, second_s in times]
    first, second = ([pair[i] for pair in times] for i in (0, 1))
    return statistics.median(first), statistics.median(second), statistics.median(gaps)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.handover_live", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="hadal-tiny instead of the mid model")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.answer:
        answer(options.answer)
        return
    console = Console(width=140)
    folder = SHIPPED if options.quick else mid_model()
    longest = read_model_config(folder).max_position_embeddings - NUM_OUTPUT - 1
    sizes = Sizes(folder, min(4000, longest), 5 if options.quick else 3)
    console.print(
        f"decode's first token after a prompt of {sizes.num_tokens} tokens, {folder.name}"
    )
    command = [sys.executable, "-m", "bench.handover_live", "--answer", str(folder)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **OPENMP},
    ) as alone:
        for handover in ("shm", "tcp", *(["nixl"] if package() else [])):
            report(console, handover, rounds(handover, sizes, alone))
        assert alone.stdin is not None
        alone.stdin.close()


if __name__ == "__main__":
    main()
