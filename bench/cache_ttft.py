"""Time to the first token of a long prompt, by where its KV is: nowhere, in memory, on disk.

    python -m bench.cache_ttft [--quick] [--folder F]

The mid-size model, one prefill and one decode unit, one request at a time. A first server computes
prompts nobody sent before (cold) and is asked them again (memory). A second one, which keeps
nothing in memory, finds them on the disk, whose pages the kernel was told to forget before every
request. What a prompt has beyond full blocks is computed in any case.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.checkpoints import MID, mid_model
from bench.client import stream
from bench.server import Running, launched, wait_ready
from hadal.core.messages import BLOCK_TOKENS
from hadal.runtime.store.segments import Segment, segment_numbers

SIZES = (512, 1024, 2048, 4000)
"""Prompt tokens; the last is what the model's 4096 positions leave room for."""
NUM_REPEATS = 5
MAX_TOKENS = 4
AIM = 0.1
"""A hit on disk costs at most this share of computing it."""
QUIET_S, WRITTEN_TIMEOUT_S = 1.0, 60.0
STORED = "hadal_cache_stored_blocks_total"
KINDS = ("cold", "memory", "disk")

Prompt = tuple[int, ...]


def prompts_of(size: int, num: int) -> list[Prompt]:
    """Texts without sense; the same in every run."""
    rng = random.Random(size)
    return [tuple(rng.randrange(2, MID["vocab_size"]) for _ in range(size)) for _ in range(num)]


def deployment(folder: Path, memory: str) -> str:
    """With room in memory for every prompt."""
    return (
        f'model = "{mid_model()}"\n[prefill]\nkv_memory_mb = 1024\n[decode]\nkv_memory_mb = 128\n'
        f'[cache]\nfolder = "{folder}"\nmemory = "{memory}"\ndisk_mb = 2048\n'
    )


def first_token_s(running: Running, prompt: Prompt, num_cached: int) -> float:
    """Ask; the reply must say that so many tokens were cached. Raises RuntimeError otherwise."""
    body = {
        "model": "mid",
        "prompt": list(prompt),
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    result = asyncio.run(stream(running.address, "/v1/completions", body))
    if result.error is not None:
        raise RuntimeError(result.error)
    if result.num_cached_tokens != num_cached:
        raise RuntimeError(
            f"{result.num_cached_tokens} of {len(prompt)} tokens were cached; expected {num_cached}"
        )
    return result.first_s


def wait_written(running: Running) -> None:
    """Until the server writes no more blocks."""
    deadline_s, since_s, seen = time.monotonic() + WRITTEN_TIMEOUT_S, time.monotonic(), -1.0
    while time.monotonic() - since_s < QUIET_S:
        stored = sum(value for name, value in running.metrics().items() if name.startswith(STORED))
        if stored != seen:
            since_s, seen = time.monotonic(), stored
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"after {WRITTEN_TIMEOUT_S:.0f} s blocks are still being written")
        time.sleep(0.1)


def drop_pages(folder: Path) -> None:
    """Let the kernel forget its copies of the segments: the next read is the disk's."""
    for number in segment_numbers(folder):
        segment = Segment.open(folder, number)
        segment.sync()
        segment.drop_pages()
        segment.close()


def measure(
    folder: Path, sizes: Sequence[int], num_repeats: int
) -> dict[tuple[int, str], list[float]]:
    """Seconds to the first token by prompt tokens and kind, `num_repeats` of each."""
    size_to_prompts = {size: prompts_of(size, num_repeats) for size in sizes}
    seconds: dict[tuple[int, str], list[float]] = {
        (size, kind): [] for size in sizes for kind in KINDS
    }
    (warm_up,) = prompts_of(600, 1)
    with launched(deployment(folder, "auto")) as running:
        wait_ready(running)
        first_token_s(running, warm_up, 0)
        for size, prompts in size_to_prompts.items():
            cached = (size - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            for prompt in prompts:
                seconds[size, "cold"].append(first_token_s(running, prompt, 0))
                wait_written(running)
                seconds[size, "memory"].append(first_token_s(running, prompt, cached))
    with launched(deployment(folder, "off")) as running:
        wait_ready(running)
        first_token_s(running, warm_up, (len(warm_up) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        for size, prompts in size_to_prompts.items():
            for prompt in prompts:
                drop_pages(folder)
                cached = (size - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                seconds[size, "disk"].append(first_token_s(running, prompt, cached))
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cache_ttft", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="two sizes, three times each")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; a temporary one is made in it"
    )
    options = parser.parse_args(arguments)
    console = Console()
    sizes, num_repeats = (SIZES[::3], 3) if options.quick else (SIZES, NUM_REPEATS)
    with tempfile.TemporaryDirectory(prefix="hadal-b-", dir=options.folder) as name:
        seconds = measure(Path(name), sizes, num_repeats)
    table = Table(title="time to first token, mid-size model", title_justify="left")
    for column in (
        "prompt",
        *(f"{kind} ms" for kind in KINDS),
        "memory / cold",
        "disk / cold",
        "worst disk ms",
    ):
        table.add_column(column, justify="right")
    for size in sizes:
        medians = {kind: 1e3 * statistics.median(seconds[size, kind]) for kind in KINDS}
        table.add_row(
            f"{size:,}",
            *(f"{medians[kind]:,.1f}" for kind in KINDS),
            f"{medians['memory'] / medians['cold']:.3f}",
            f"{medians['disk'] / medians['cold']:.3f}",
            f"{1e3 * max(seconds[size, 'disk']):,.1f}",
        )
    console.print(table)
    share = statistics.median(seconds[sizes[-1], "disk"]) / statistics.median(
        seconds[sizes[-1], "cold"]
    )
    mark = "[green]✓[/green]" if share <= AIM else "[red]✗[/red]"
    console.print(
        f"  {sizes[-1]:,} tokens out of the disk: {share:.3f} of cold {mark} [dim](aim {AIM})[/dim]"
    )


if __name__ == "__main__":
    main()
