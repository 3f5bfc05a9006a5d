"""Run every benchmark in turn: `make bench`, or `python -m bench [--quick] [engine|served|overlap ...]`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from bench import (
    attacks,
    balance_decode,
    balance_experts,
    balance_live,
    balance_prefill,
    claims,
    control_plane,
    engine,
    hosts,
    load,
    overlap,
    plan_fit,
    prefill_unit,
    recording,
    rows,
    served,
)
from bench.shared_data import NAME_TO_SOURCE, why_missing

BENCHMARKS: dict[str, Callable[[Sequence[str]], None]] = {
    module.__name__.removeprefix("bench."): module.main
    for module in (
        *(engine, served, load, overlap, hosts, attacks, rows, balance_experts, balance_decode),
        *(balance_prefill, balance_live, control_plane, prefill_unit, recording, plan_fit),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few minutes in all, rough figures")
    parser.add_argument("names", nargs="*", help=f"{', '.join(BENCHMARKS)}; default: all")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}. Known: {', '.join(BENCHMARKS)}.")
    console = Console()
    load_1min = os.getloadavg()[0]
    if load_1min > 0.5 * (os.cpu_count() or 1):
        console.print(
            f"[yellow]the machine is busy (load {load_1min:.1f}); figures will be low and"
            " uneven[/yellow]"
        )
    if absent := why_missing(*NAME_TO_SOURCE):
        console.print(f"[yellow]{absent}[/yellow]")
    start = time.monotonic()
    for name in options.names or BENCHMARKS:
        console.rule(name)
        BENCHMARKS[name](["--quick"] if options.quick else [])
    claims.print_summary(console)
    console.print(f"[dim]all benchmarks: {(time.monotonic() - start) / 60:.0f} min[/dim]")


if __name__ == "__main__":
    main()
