"""A served model under load: tokens per second, time to first token and between tokens, as
concurrency grows.

    python -m bench.load [--quick] [--requests 500]

Prompts are held-out questions of the tasks the shipped model knows, answers end where it ends them.
Closed loop: a client sends its next request when the last is answered. The clients run on the same
cores as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.checkpoints import SHIPPED
from bench.client import Stream, percentile, stream
from bench.server import launched, wait_ready
from bench.subject import ROOT
from evals.run import held_out_examples

CONCURRENCIES = (1, 8, 32, 64)


def bodies(num_requests: int) -> list[dict[str, Any]]:
    """Chat requests of mixed lengths, the same in every run."""
    examples = held_out_examples(max(1, num_requests // 8), seed=11)
    return [
        {
            "model": SHIPPED.name,
            "messages": list(examples[i % len(examples)].messages),
            "seed": i,
            "temperature": 0.6,
        }
        for i in range(num_requests)
    ]


async def run_load(
    address: tuple[str, int], requests: Sequence[dict[str, Any]], concurrency: int
) -> list[Stream]:
    """Send all requests, `concurrency` at a time."""
    waiting = iter(requests)
    results: list[Stream] = []

    async def client() -> None:
        for body in waiting:
            results.append(await stream(address, "/v1/chat/completions", body))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.load", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="32 requests, concurrency 1 and 32")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="another checkout of Hadal")
    options = parser.parse_args(arguments)
    console = Console()
    table = Table(title="hadal serve, hadal-tiny, chat requests", title_justify="left")
    for name in (
        "concurrency",
        "requests",
        "tokens/s out",
        "ttft p50 ms",
        "p99",
        "per token p50 ms",
        "p99",
        "errors",
    ):
        table.add_column(name, justify="right")
    with launched(checkout=options.checkout) as running:
        wait_ready(running)
        asyncio.run(run_load(running.address, bodies(16), 8))  # Warm-up.
        for concurrency in (1, 32) if options.quick else CONCURRENCIES:
            num_requests = (
                32
                if options.quick
                else min(options.requests, 32 + options.requests * concurrency // 64)
            )
            start = time.perf_counter()
            results = asyncio.run(run_load(running.address, bodies(num_requests), concurrency))
            seconds = time.perf_counter() - start
            table.add_row(*row(concurrency, results, seconds))
            console.print(f"  [dim]concurrency {concurrency}: {seconds:.1f} s[/dim]")
    console.print(table)


def row(concurrency: int, results: list[Stream], seconds: float) -> list[str]:
    """One line of the table."""
    good = [result for result in results if result.error is None]
    if not good:
        return [str(concurrency), str(len(results)), *["-"] * 5, str(len(results))]
    first_ms = [1e3 * result.first_s for result in good]
    token_ms = [1e3 * result.per_token_s for result in good if result.num_tokens > 1] or [0.0]
    return [
        str(concurrency),
        str(len(results)),
        f"{sum(result.num_tokens for result in good) / seconds:,.0f}",
        f"{statistics.median(first_ms):.0f}",
        f"{percentile(first_ms, 0.99):.0f}",
        f"{statistics.median(token_ms):.2f}",
        f"{percentile(token_ms, 0.99):.2f}",
        str(len(results) - len(good)),
    ]


if __name__ == "__main__":
    main()
