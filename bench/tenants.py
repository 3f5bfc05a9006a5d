"""What two tenants of one server get: one that keeps many streams open, and one that is absent, has
left, or has two streams.

    python -m bench.tenants [--quick] [--model hadal-tiny|mid] [--checkout OLD]

Each stream is asked for again as soon as it ends: about 64 tokens in, 60 out, greedy. Rates are of all
tokens that came while all streams ran; times are of the tenant with two streams.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.checkpoints import MODELS, SHIPPED, stored_model
from bench.client import Stream, percentile, stream
from bench.machine import describe
from bench.server import Running, launched, wait_ready
from bench.subject import ROOT

HEAVY, LIGHT = "heavy-key", "light-key"
NUM_HEAVY, NUM_LIGHT = 32, 2
NUM_IN, NUM_OUT = 64, 60
SECONDS = 8.0
NUM_BEFORE = 10
"""Requests of the tenant that leaves."""


async def keep_open(running: Running, model: str, key: str, until_s: float) -> list[Stream]:
    """Ask for one stream after the other."""
    rng, done = random.Random(key), []
    while time.perf_counter() < until_s:
        prompt = [rng.randrange(20, 1000) for _ in range(NUM_IN)]
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_OUT, "ignore_eos": True}
        body["temperature"] = 0
        done.append(await stream(running.address, "/v1/completions", body, key))
        if done[-1].error:
            raise RuntimeError(done[-1].error)
    return done


async def run(
    running: Running, model: str, tenants: dict[str, int], seconds: float
) -> dict[str, list[Stream]]:
    """Return each tenant's finished streams. `tenants`: key -> streams at once."""
    until_s = time.perf_counter() + seconds
    keys = [key for key, number in tenants.items() for _ in range(number)]
    found = await asyncio.gather(*(keep_open(running, model, key, until_s) for key in keys))
    streams: dict[str, list[Stream]] = {key: [] for key in tenants}
    for key, done in zip(keys, found, strict=True):
        streams[key] += done
    return streams


def rate(streams: Sequence[Stream]) -> float:
    """Return tokens a second."""
    first_s = min(each.started_s for each in streams)
    last_s = max(each.piece_times_s[-1] for each in streams)
    return sum(each.num_tokens for each in streams) / (last_s - first_s)


def row(name: str, streams: dict[str, list[Stream]]) -> tuple[str, ...]:
    """Return a line of the table."""
    light = streams.get(LIGHT, [])
    cells = [name, f"{rate(streams[HEAVY]):.0f}" if HEAVY in streams else ""]
    if not light:
        return (*cells, "", "", "")
    between = [1e3 * each.per_token_s for each in light]
    first = [1e3 * each.first_s for each in light]
    return (
        *cells,
        f"{rate(light):.0f}",
        f"{statistics.median(between):.2f}, {percentile(between, 0.95):.2f}",
        f"{statistics.median(first):.1f}, {percentile(first, 0.95):.1f}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tenants", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="hadal-tiny, two seconds each")
    parser.add_argument("--model", choices=("hadal-tiny", "mid"), default="hadal-tiny")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="another checkout of Hadal")
    options = parser.parse_args(arguments)
    console, seconds = Console(), 2.0 if options.quick else SECONDS
    folder = (
        SHIPPED if options.model == SHIPPED.name else stored_model("mid", "fp8", MODELS / "mid-fp8")
    )
    console.print(f"[bold]two tenants, {options.model}[/bold]: {describe()}")
    table = Table()
    for column in (
        "the other tenant",
        f"{NUM_HEAVY} streams, tokens/s",
        "two streams, tokens/s",
        "ms between tokens, p50, p95",
        "ms to the first, p50, p95",
    ):
        table.add_column(column)
    deployment = f'model = "{folder}"\nmodel_name = "{folder.name}"\n'
    keys = {"HADAL_API_KEYS": f"{HEAVY},{LIGHT}"}
    with launched(deployment, keys, checkout=options.checkout) as running:
        wait_ready(running)

        def measure(name: str, tenants: dict[str, int]) -> None:
            table.add_row(*row(name, asyncio.run(run(running, folder.name, tenants, seconds))))

        asyncio.run(run(running, folder.name, {HEAVY: NUM_HEAVY}, 1.0))
        measure("never came", {HEAVY: NUM_HEAVY})
        for _ in range(NUM_BEFORE):
            asyncio.run(run(running, folder.name, {LIGHT: 1}, 0.001))
        measure("left", {HEAVY: NUM_HEAVY})
        measure("two streams, alone", {LIGHT: NUM_LIGHT})
        measure("two streams", {HEAVY: NUM_HEAVY, LIGHT: NUM_LIGHT})
    console.print(table)


if __name__ == "__main__":
    main()
