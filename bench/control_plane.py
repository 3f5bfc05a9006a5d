"""Measure which share of a fleet one core can schedule: the production roles at the published size, with
steps that take the step model's times.

    python -m bench.control_plane [--quick] [--seconds N] [--profile] [--collect]

9 decode units of 144 ranks and 29 prefill units of 32; 2,000 requests/s (about the published peak) with 1,650
tokens to compute and 400 to generate, exponentially distributed. `--quick`: a ninth of the fleet. Figures are
CPU time of this process. Garbage collection of cycles is off: nothing here is cyclic, and scanning a fleet's
many objects takes time.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console

from bench.tables import parser_of, table_of
from hadal.core.config import CacheConfig, Deployment, LimitsConfig, UnitsConfig
from hadal.lab.perf.step import StepModel
from hadal.lab.sim.world.requests import Requests
from hadal.lab.sim.world.world import FleetWorld

REQUESTS_PER_S = 2_000.0
TOKENS_IN, TOKENS_OUT = 1_650.0, 400.0
PLACED_DECODE = 1.15
"""Imbalance that expert placement leaves with two expert slots per rank (see lab/perf/step)."""


def fleet(num_decode: int, num_prefill: int) -> Deployment:
    """Return a deployment with units as published (DeepSeek-V3/R1 inference overview)."""
    return Deployment(
        prefill=UnitsConfig(
            num_prefill, ranks=32, redundant_experts=32, max_requests=64, max_waiting=10_000
        ),
        decode=UnitsConfig(
            num_decode, ranks=144, redundant_experts=32, max_requests=128, max_waiting=10_000
        ),
        limits=LimitsConfig(max_running=1_000_000, max_queued=1_000_000),
        cache=CacheConfig(memory="off"),
        chunk_tokens=16_384,
    )


def requests(per_s: float, until_s: float) -> Requests:
    """Return requests with Poisson arrivals and exponential lengths."""
    rng = np.random.default_rng(1)
    size = int(rng.poisson(per_s * until_s))
    lengths = (
        np.ceil(rng.exponential(mean, size)).astype(np.int64) for mean in (TOKENS_IN, TOKENS_OUT)
    )
    return Requests(np.sort(rng.uniform(0.1, until_s, size)), *lengths)


def main(arguments: Sequence[str] = ()) -> None:
    """Run the simulation and print a table."""
    parser = parser_of("control_plane", __doc__, "a ninth of the fleet, for 10 s")
    parser.add_argument("--seconds", type=float, default=0.0, help="simulated (20, quick 10)")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument(
        "--collect", action="store_true", help="leave the collector of cyclic garbage on"
    )
    options = parser.parse_args(arguments)
    num_decode, num_prefill, part = (1, 3, 9.0) if options.quick else (9, 29, 1.0)
    until_s = options.seconds or (10.0 if options.quick else 20.0)
    models = {"prefill": StepModel(32), "decode": StepModel(144, placed=PLACED_DECODE)}
    asked = requests(REQUESTS_PER_S / part, until_s)
    world = FleetWorld(fleet(num_decode, num_prefill), models, asked)
    profile = cProfile.Profile() if options.profile else None
    if not options.collect:
        gc.disable()
    began_s = time.process_time()
    if profile is not None:
        profile.runcall(world.run, until_s)
    else:
        world.run(until_s)
    cpu_s = time.process_time() - began_s
    report(world, until_s, cpu_s)
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def report(world: FleetWorld, until_s: float, cpu_s: float) -> None:
    """Print one table: what was simulated, and its cost in CPU time."""
    seen, asked = world.seen, world.requests
    num_events = sum(process.num_events for process in world.processes.values())
    num_steps = sum(process.num_steps for process in world.processes.values())
    is_long = asked.tokens_out > 20
    tpot_s = (seen.end_s - seen.first_token_s)[is_long] / (asked.tokens_out[is_long] - 1)
    title = f"{len(world.processes) - 1} units, {until_s:g} s simulated in {cpu_s:.1f} s of a core"
    table = table_of("|", title, num_left=2)
    for name, value in (
        ("requests that came", f"{len(asked):,}"),
        ("ended, failed", f"{int(np.isfinite(seen.end_s).sum()):,}, {int(seen.is_failed.sum())}"),
        ("requests/s, events/s of a core", f"{len(asked) / cpu_s:,.0f}, {num_events / cpu_s:,.0f}"),
        ("events, steps of units", f"{num_events:,}, {num_steps:,}"),
        ("us an event, steps among them", f"{1e6 * cpu_s / num_events:.0f}"),
        ("TTFT, median", f"{np.nanmedian(seen.first_token_s - asked.arrival_s):.2f} s"),
        ("TPOT, mean of those that ended", f"{1e3 * np.nanmean(tpot_s):.1f} ms"),
        ("problems of the ledgers", str(len(world.check()))),
    ):
        table.add_row(name, value)
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
