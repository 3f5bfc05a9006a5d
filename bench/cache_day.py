"""DeepSeek's published day from the simulator's load and a disk cache of finite size.

    python -m bench.cache_day [--quick] [--scale N] [--seed N]

lengths: from one session in 100, which leaves them noise of a few tenths of a percent. hits: from
the ledgers that serve, for one session in `--scale`. "expected" is what that cache's memory (how
likely a text is found by the time since its last use) would have found for the lengths' sample: the
same figure with less noise. age: how long what makes room had not been used, mean of the day.
found, by time since the last use: of a session's own text. best: what a cache would find that
forgets nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hadal.policy.demand import DAY_S
from hadal.policy.eviction import Lru
from hadal.sim.day.cache import BUDGET_BYTES, IDLE_EDGES_S, CacheDay, simulate_cache
from hadal.sim.day.clock import DEEPSEEK_SHARES, hour_beijing, hour_index
from hadal.sim.day.published import HOUR_S
from hadal.sim.day.window import window
from hadal.sim.sessions import WorkloadParams, generate
from hadal.sim.workload import Workload

PUBLISHED = {
    "tokens in, B a day": 608.0,
    "tokens out, B a day": 168.0,
    "in / out": 608 / 168,
    "mean KV length": 4989.0,
}
PUBLISHED_HIT = 0.563
LENGTHS_SCALE, SCALE, QUICK_SCALE = 100, 8000, 40_000
CHANGES: dict[str, dict[str, Any]] = {
    "1/10 of the budget": {"budget_bytes": BUDGET_BYTES / 10},
    "1/2": {"budget_bytes": BUDGET_BYTES / 2},
    "default": {},
    "x 2": {"budget_bytes": BUDGET_BYTES * 2},
    "LRU instead of ARC": {"policy": Lru},
    "answers after reasoning not written": {"keeps_reasoned": False},
}
WARM_S = 3 * DAY_S
"""So that twice the budget is full and settled as well."""
SPAN_S = 30.0
NAMES_S = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


def lengths(workload: Workload) -> Table:
    """The day's totals beside the published ones."""
    tokens_in, tokens_out = (
        float(column.sum()) for column in (workload.tokens_in, workload.tokens_out)
    )
    scaled = LENGTHS_SCALE / 1e9
    ours = (
        tokens_in * scaled,
        tokens_out * scaled,
        tokens_in / tokens_out,
        workload.kv_length_mean,
    )
    table = Table("", "published", "ours", "error", title=f"lengths, {len(workload):,} requests")
    for (name, value), mine in zip(PUBLISHED.items(), ours, strict=True):
        table.add_row(name, f"{value:,.2f}", f"{mine:,.2f}", f"{mine / value - 1:+.2%}")
    return table


def budgets(days: dict[str, CacheDay], workload: Workload, took_s: dict[str, float]) -> Table:
    """How hits follow from what there is room for."""
    columns = ("", "PB", "hits", "expected", "best", "written PB/day", "age h", "s")
    table = Table(*columns, title=f"hits, {PUBLISHED_HIT:.1%} published")
    for name, day in days.items():
        budget = CHANGES[name].get("budget_bytes", BUDGET_BYTES)
        age_h = day.eviction_age_mean_s / HOUR_S
        table.add_row(
            name,
            f"{budget / 1e15:.1f}",
            f"{day.hit_share:.1%}",
            f"{day.hit_share_of(workload):.1%}",
            f"{day.findable_share:.1%}",
            f"{day.bytes_written / 1e15:.1f}",
            f"{age_h:.1f}",
            f"{took_s[name]:.0f}",
        )
    return table


def hours(day: CacheDay, workload: Workload) -> Table:
    """The default day, by hour: tokens of the lengths' sample, what was written and its age of the
    other one.
    """
    titles = (
        "Beijing",
        "tokens in B",
        "of the shape",
        "hits",
        "tokens out B",
        "written PB",
        "age h",
    )
    table = Table(*titles, title="by hour")
    hour, scaled = hour_index(workload.arrival_s), LENGTHS_SCALE / 1e9
    columns = workload.tokens_in, day.tokens_expected(workload), workload.tokens_out
    by_hour = [np.bincount(hour, column, 24) * scaled for column in columns]
    for index in range(24):
        tokens_in, hit, out = (values[index] for values in by_hour)
        share = tokens_in / by_hour[0].sum() / DEEPSEEK_SHARES[index] - 1
        written = day.blocks_written[index] / day.blocks_written.sum() * day.bytes_written / 1e15
        table.add_row(
            f"{hour_beijing(index):02}:00",
            f"{tokens_in:.1f}",
            f"{share:+.1%}",
            f"{hit / tokens_in:.1%}",
            f"{out:.2f}",
            f"{written:.2f}",
            f"{day.eviction_age_s[index] / HOUR_S:.1f}",
        )
    return table


def ages(days: dict[str, CacheDay]) -> Table:
    """How long texts stay."""
    table = Table(
        "since the last use", "of what goes on", *days, title="found of a session's own text"
    )
    rows = {name: day.hits_by_idle() for name, day in days.items()}
    total = next(iter(rows.values()))[0]
    for index, edge_s in enumerate(IDLE_EDGES_S[1:]):
        found = [f"{share[index]:.0%}" if own[index] else "" for own, share in rows.values()]
        said = next(
            (
                f"up to {edge_s / unit:.0f} {name}"
                for unit, name in NAMES_S
                if unit <= edge_s < np.inf
            ),
            "more",
        )
        table.add_row(said, f"{total[index] / total.sum():.1%}", *found)
    return table


def windows(params: WorkloadParams, day: CacheDay, seed: int) -> Table:
    """Half a minute of the fleet's whole load, at the day's peak and in its trough, beside what the
    day says.
    """
    columns = ("from", "requests/s", "tokens in B/h", "tokens out B/h", "hits", "running", "s")
    table = Table(*columns, title="windows at the full rate")
    for at_s in (10.5 * HOUR_S, 16.5 * HOUR_S):
        begin_s = time.perf_counter()
        seen = window(params, at_s, at_s + SPAN_S, HOUR_S, np.random.default_rng(seed), day)
        took_s = time.perf_counter() - begin_s
        came = seen.workload.take(np.arange(len(seen.workload)) >= seen.num_running)
        per_hour = HOUR_S / SPAN_S / 1e9
        hit = seen.tokens_cached[seen.num_running :].sum() / came.tokens_in.sum()
        table.add_row(
            f"{hour_beijing(int(at_s // HOUR_S)):02}:30",
            f"{len(came) / SPAN_S:,.0f}",
            f"{came.tokens_in.sum() * per_hour:.1f}",
            f"{came.tokens_out.sum() * per_hour:.2f}",
            f"{hit:.1%}",
            f"{seen.num_running:,}",
            f"{took_s:.1f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cache_day", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"one session in {QUICK_SCALE}: rough figures"
    )
    parser.add_argument(
        "--scale", type=float, default=SCALE, help="one session in so many meets the ledgers"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    scale = QUICK_SCALE if options.quick else options.scale
    params, console = WorkloadParams(), Console()
    workload = generate(params, 0.0, DAY_S, np.random.default_rng(options.seed), LENGTHS_SCALE)
    console.print(lengths(workload))
    days, took_s = {}, {}
    for name, change in CHANGES.items():
        begin_s = time.perf_counter()
        days[name] = simulate_cache(
            params, np.random.default_rng(options.seed), scale=scale, warm_s=WARM_S, **change
        )
        took_s[name] = time.perf_counter() - begin_s
    console.print(budgets(days, workload, took_s))
    console.print(ages({name: days[name] for name in ("default", "LRU instead of ARC")}))
    console.print(hours(days["default"], workload))
    console.print(windows(params, days["default"], options.seed))


if __name__ == "__main__":
    main(sys.argv[1:])
