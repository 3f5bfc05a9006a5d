"""Measure the shares of two tenants on one server: one keeps many streams open; the other is absent, has
left, or has two streams.

    python -m bench.tenants [--quick] [--model hadal-tiny|mid] [--checkout OLD]

Each stream is followed by another as soon as it ends: about 64 tokens in, 60 out, greedy. A tenant's rate is all its
tokens over the time from its first request to its last token; times are those of the tenant with two streams.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.checkpoints import MODELS, SHIPPED, stored_model
from bench.load import first_ms, keep_asking, rate, spans, token_ms
from bench.machine import describe
from bench.server import Running, serving
from bench.subject import ROOT
from bench.tables import parser_of, table_of
from hadal.apps.bench.request import Sample

HEAVY, LIGHT = "heavy-key", "light-key"
NUM_HEAVY, NUM_LIGHT = 32, 2
NUM_IN, NUM_OUT = 64, 60
SECONDS = 8.0
NUM_BEFORE = 10
"""Requests that the other tenant sends before it leaves."""


async def run(
    running: Running, model: str, tenants: dict[str, int], seconds: float
) -> dict[str, list[Sample]]:
    """Return each tenant's finished streams. `tenants`: key -> number of concurrent streams."""
    until_s = time.perf_counter() + seconds
    keys = [key for key, number in tenants.items() for _ in range(number)]
    found = await asyncio.gather(
        *(
            keep_asking(running.address, model, (NUM_IN, NUM_OUT), until_s, random.Random(key), key)
            for key in keys
        )
    )
    streams: dict[str, list[Sample]] = {key: [] for key in tenants}
    for key, done in zip(keys, found, strict=True):
        streams[key] += done
    return streams


def row(name: str, streams: dict[str, list[Sample]]) -> tuple[str, ...]:
    """Return a table row: the rates of both tenants, and the times of the one with two streams."""
    light = streams.get(LIGHT, [])
    cells = [name, f"{rate(streams[HEAVY]):.0f}" if HEAVY in streams else ""]
    if not light:
        return (*cells, "", "", "")
    return (*cells, f"{rate(light):.0f}", spans(token_ms(light), 2), spans(first_ms(light), 1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("tenants", __doc__, "hadal-tiny, two seconds each")
    parser.add_argument("--model", choices=("hadal-tiny", "mid"), default="hadal-tiny")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="another checkout of Hadal")
    options = parser.parse_args(arguments)
    console, seconds = Console(), 2.0 if options.quick else SECONDS
    folder = (
        SHIPPED if options.model == SHIPPED.name else stored_model("mid", "fp8", MODELS / "mid-fp8")
    )
    console.print(f"[bold]two tenants, {options.model}[/bold]: {describe()}")
    table = table_of(
        f"the other tenant|{NUM_HEAVY} streams, tokens/s|two streams, tokens/s"
        "|ms between tokens, p50, p95|ms to the first, p50, p95",
        num_left=5,
    )
    deployment = f'model = "{folder}"\nmodel_name = "{folder.name}"\n'
    keys = {"HADAL_API_KEYS": f"{HEAVY},{LIGHT}"}
    with serving(deployment, keys, checkout=options.checkout) as running:

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
