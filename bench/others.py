"""Measure how requests slow down other requests on the same server: a batch slows a user's streams, and
running streams slow a new prompt.

    python -m bench.others [--quick] [--checkout OLD]

On hadal-tiny: 400 requests, 32 at a time, compared with 400 like them as lines of a batch; two streams alone and
beside a batch of 2,000 lines. On hadal-tiny and mid: time to first token of a prompt of 512 tokens beside 16 streams.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.checkpoints import MODELS, SHIPPED, stored_model
from bench.load import first_ms, keep_asking, run_load, spans, token_ms
from bench.machine import describe
from bench.server import Running, asked, serving
from bench.subject import ROOT
from bench.tables import parser_of, table_of
from hadal.apps.bench.request import Sample

NUM_LINES, NUM_LONG = 400, 2000
SECONDS = 6.0


def question(number: int) -> dict[str, Any]:
    """Return a request that hadal-tiny was taught to answer."""
    text = f"What is {number % 90} + {3 * number % 97}?"
    messages = [{"role": "user", "content": text}]
    return {"model": SHIPPED.name, "messages": messages, "max_tokens": 100, "temperature": 0}


def upload(running: Running, num_lines: int) -> str:
    """Start a batch of `num_lines` requests and return its id."""
    lines = (
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(map(question, range(num_lines)))
    )
    content = "\n".join(map(json.dumps, lines)).encode()
    reply = httpx.post(
        f"{running.status.url}/v1/files",
        data={"purpose": "batch"},
        files={"file": ("a.jsonl", content)},
        timeout=120,
    )
    body = {
        "input_file_id": reply.raise_for_status().json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    return str(asked(running.address, "POST", "/v1/batches", body)["id"])


def batch_s(running: Running) -> float:
    """Return the seconds that a batch of NUM_LINES requests takes."""
    start_s = time.perf_counter()
    path = f"/v1/batches/{upload(running, NUM_LINES)}"
    while (state := asked(running.address, "GET", path)["status"]) != "completed":
        if state in ("failed", "expired", "cancelled"):
            raise RuntimeError(f"the batch is {state}")
        time.sleep(0.05)
    return time.perf_counter() - start_s


def direct_s(running: Running, round_: int) -> float:
    """Return the seconds that NUM_LINES requests take, 32 at a time."""
    start_s = time.perf_counter()
    bodies = [question(1000 * round_ + number) for number in range(NUM_LINES)]
    asyncio.run(run_load(running.address, bodies, 32))
    return time.perf_counter() - start_s


async def two_streams(running: Running, seconds: float) -> list[Sample]:
    """Return the measurements of a user who keeps two streams open for `seconds`."""
    until_s, rng = time.perf_counter() + seconds, random.Random(seconds)
    one, other = await asyncio.gather(
        *(keep_asking(running.address, SHIPPED.name, (40, 80), until_s, rng) for _ in range(2))
    )
    return one + other


async def prompts_beside(running: Running, model: str, seconds: float) -> list[Sample]:
    """Return the measurements of 512-token prompts that were sent while 16 streams ran."""
    until_s, rng = time.perf_counter() + seconds, random.Random(7)
    beside = [keep_asking(running.address, model, (20, 300), until_s, rng) for _ in range(16)]
    prompts = keep_asking(running.address, model, (512, 2), until_s - 1.0, rng)
    found = await asyncio.gather(prompts, *beside)
    return found[0][1:]  # The first prompt was sent while the streams were still starting.


def times(name: str, streams: Sequence[Sample]) -> tuple[str, str, str]:
    """Return a table row: `name`, ms between tokens, ms to the first token."""
    return name, spans(token_ms(streams), 2), spans(first_ms(streams), 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("others", __doc__, "hadal-tiny alone, two seconds each")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="another checkout of Hadal")
    options = parser.parse_args(arguments)
    console, seconds = Console(width=110), 2.0 if options.quick else SECONDS
    console.print(f"[bold]requests beside others[/bold]: {describe()}")
    table = table_of("what|ms between tokens, p50, p95|ms to the first, p50, p95", num_left=3)
    with serving(checkout=options.checkout) as running:
        direct_s(running, 9)
        for round_ in range(1 if options.quick else 3):
            direct, batch = direct_s(running, round_), batch_s(running)
            console.print(
                f"  {NUM_LINES} requests, 32 at a time {direct:.2f} s, as a batch {batch:.2f} s:"
                f" {direct / batch:.2f} of their rate"
            )
        alone = asyncio.run(two_streams(running, seconds))
        table.add_row(*times("two streams", alone))
        batch_id = upload(running, NUM_LONG)
        beside = asyncio.run(two_streams(running, seconds + 0.1))
        table.add_row(*times("two streams beside a batch", beside))
        asked(running.address, "POST", f"/v1/batches/{batch_id}/cancel", {})
    folders = [SHIPPED]
    if not options.quick:
        folders.append(stored_model("mid", "fp8", MODELS / "mid-fp8"))
    for folder in folders:
        model = f'model = "{folder}"\nmodel_name = "{folder.name}"\n'
        with serving(model, checkout=options.checkout) as running:
            found = asyncio.run(prompts_beside(running, folder.name, 2 * seconds))
            table.add_row(*times(f"512 tokens beside 16 streams, {folder.name}", found))
    console.print(table)


if __name__ == "__main__":
    main()
