"""Compare servers with drafts (speculative decoding) with one without: tokens/s and time between tokens at
the client, in alternating rounds, on hadal-tiny's own tasks.

    python -m bench.drafts_served [--drafts auto 1 2] [--concurrency 1 8] [--rounds 5] [--chats 32]

All servers run at once, but only one gets requests at a time; the clients share their cores. Sampling is
greedy, so all servers must give the same number of tokens; this is checked. The ratio of
tokens/s is the median of the rounds' ratios; that of the time between tokens is a ratio of medians. The prefill
step is the server's own smoothed `hadal_step_ms` at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import track

from bench.load import bodies, num_tokens, run_load, token_ms
from bench.machine import describe
from bench.server import Running, launched, wait_ready
from bench.tables import parser_of
from hadal.apps.bench.request import Sample
from hadal.kernels.library import isa

OFF = "0"
PREFILL_STEP = 'hadal_step_ms{unit="prefill-0"}'


def once(server: Running, num_chats: int, concurrency: int) -> tuple[float, list[Sample]]:
    """Run all chats once. Return (tokens/s, answers)."""
    requests = [{**body, "temperature": 0} for body in bodies(num_chats)]
    start_s = time.perf_counter()
    samples = asyncio.run(run_load(server.address, requests, concurrency))
    return num_tokens(samples) / (time.perf_counter() - start_s), samples


def accepted(server: Running) -> str:
    """Return the accepted share of all drafts so far, by position in a step, as text."""
    sums: dict[str, dict[str, float]] = {}
    for key, value in server.metrics().items():
        for kind in ("tried", "accepted"):
            if key.startswith(f"hadal_drafts_{kind}_total"):
                place = key.split('place="')[1].split('"')[0]
                of_place = sums.setdefault(place, {"tried": 0.0, "accepted": 0.0})
                of_place[kind] += value
    return ", ".join(
        f"{of['accepted'] / of['tried']:.1%} of {of['tried']:.0f}"
        for _, of in sorted(sums.items())
        if of["tried"]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("drafts_served", __doc__)
    parser.add_argument("--drafts", nargs="+", default=["auto", "1", "2"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chats", type=int, default=32, help="in a round")
    options = parser.parse_args(arguments)
    console = Console(width=120)
    console.print(f"[bold]drafts, served[/bold]: {describe()}, {isa()} kernels")
    with contextlib.ExitStack() as stack:
        servers = {}
        for drafts in [OFF, *options.drafts]:
            value = f'"{drafts}"' if drafts == "auto" else drafts
            servers[drafts] = stack.enter_context(launched(f"[decode]\ndrafts = {value}\n"))
        for server in servers.values():
            wait_ready(server)
        for concurrency in options.concurrency:
            rates: dict[str, list[float]] = {drafts: [] for drafts in servers}
            pauses: dict[str, list[float]] = {drafts: [] for drafts in servers}
            lengths = set()
            for turn in track(range(-1, options.rounds), f"{concurrency} at once", console=console):
                for drafts in servers if turn % 2 else [*servers][::-1]:
                    rate, answers = once(servers[drafts], options.chats, concurrency)
                    lengths.add(num_tokens(answers))
                    if turn >= 0:  # Turn -1 is a warm-up.
                        rates[drafts].append(rate)
                        pauses[drafts] += token_ms(answers)
            if len(lengths) != 1:
                raise RuntimeError(f"the answers differ: {lengths} tokens")
            for drafts, of in rates.items():
                ratios = [rate / off for rate, off in zip(of, rates[OFF], strict=True)]
                between = statistics.median(pauses[drafts]) / statistics.median(pauses[OFF])
                console.print(
                    f"  {concurrency} at once, {drafts} drafts: {statistics.median(of):5.0f} tokens/s,"
                    f" {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f});"
                    f" between tokens {between:.2f};"
                    f" a prefill step {servers[drafts].metrics()[PREFILL_STEP]:.1f} ms;"
                    f" right {accepted(servers[drafts]) or 'none'}"
                )


if __name__ == "__main__":
    main(sys.argv[1:])
