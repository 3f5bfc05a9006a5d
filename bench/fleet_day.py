"""Simulate the published day under the production fleet role, with load as a fluid instead of requests.
Prints the nodes hour by hour, and the effect of each setting on their number.

    python -m bench.fleet_day [--seed N] [--hours-only]

Capacities are taken from published points instead of the step model, so the tables show the effect of the
*policy*. Decode: 128 requests per GPU at 55 ms per token (DeepSeek's profile) and 88 at 47.6 ms (its day's
mean). Prefill: 7,839 tokens/s per GPU, with 43.7 % of a prompt to compute. The promise is 20 tokens/s per
user, a TPOT of 50 ms. The shape of the day is known from the day before. Dollars are node-hours at $2 per
GPU-hour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.tables import parser_of, table_of
from hadal.core.arrays import Floats
from hadal.lab.sim.day.fluid import Faults, FluidDay
from hadal.lab.sim.day.hours import Day
from hadal.lab.sim.day.published import FIRST_HOUR, SHAPE, DemandCurve
from hadal.lab.sim.day.vessels import UnitModel
from hadal.policy.capacity import DecodePoint, decode_capacity
from hadal.policy.demand import FLAT, DayShape
from hadal.policy.scaling import RoleRules, ScalingRules, Units
from hadal.roles.fleet.fleet import Fleet

NODE_HOUR_USD = 16.0
PUBLISHED_MEAN, PUBLISHED_PEAK = 226.75, 278
TPOT_S = 0.050
DECODE_RANKS = 144
PREFILL_TOKENS_PER_S = 32 * 7839 / (266 / 608)
NUM_COLUMNS = 130
"""Characters per line that the tables need."""
WARM_HOURS = 6
"""Hours that are run before the day and not counted, because the run starts with no units and a queue."""


def tpot_s(batch: Floats) -> Floats:
    """Return the TPOT in seconds of a batch per GPU, from a line through the two published points."""
    return 0.0313 + 0.000185 * batch


def capacity() -> float:
    """Return the tokens/s of a decode unit that keeps TPOT_S, from a table like a step model's."""
    batches = np.arange(8.0, 257.0, 8.0)
    tpots = tpot_s(batches)
    return decode_capacity(
        [
            DecodePoint(float(tpot), float(DECODE_RANKS * batch / tpot))
            for batch, tpot in zip(batches, tpots, strict=True)
        ],
        TPOT_S,
    )


RULES = ScalingRules(
    RoleRules(4, 0.6, 5, 60, 3, 2),
    RoleRules(18, 1.0, 1, 16, 1, 0),
    num_nodes_max=500,
    start_s=600.0,
)
FAULTS = Faults()


@dataclass(frozen=True)
class Setting:
    """Settings of one run of the day."""

    rules: ScalingRules = RULES
    faults: Faults = FAULTS
    shape: DayShape = SHAPE
    decode_tokens_per_s: float = 0.0
    """Tokens/s of a decode unit that the fleet assumes; 0: `capacity()`."""


def run(setting: Setting, seed: int) -> Day:
    """Run the published day, noon to noon."""
    fleet = Fleet(
        setting.rules,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
        decode_tokens_per_s=setting.decode_tokens_per_s or capacity(),
        shape=setting.shape,
    )
    model = UnitModel(PREFILL_TOKENS_PER_S, DECODE_RANKS, tpot_s, 256.0)
    start = 3600.0 * (FIRST_HOUR - WARM_HOURS)
    fluid = FluidDay(
        fleet, DemandCurve(), model, setting.faults, np.random.default_rng(seed), start=start
    )
    fluid.run(60 * WARM_HOURS)
    return fluid.run_day()


def what_ifs(base: Setting) -> Iterator[tuple[str, Setting]]:
    """Yield (name, setting), with one thing changed at a time."""
    rules, prefill, decode = base.rules, base.rules.prefill, base.rules.decode

    def under(**changes: Any) -> Setting:
        return replace(base, rules=replace(rules, **changes))

    def starting(real_s: float, believed_s: float) -> Setting:
        return replace(under(start_s=believed_s), faults=replace(base.faults, start_s=real_s))

    def between(floor: Units, most: Units) -> Setting:
        return under(
            prefill=replace(prefill, num_min=floor.prefill, num_max=most.prefill),
            decode=replace(decode, num_min=floor.decode, num_max=most.decode),
        )

    most = Units(prefill.num_max, decode.num_max)
    for use in (0.9, 0.8):
        yield f"head-room: decode used to {use:.0%}", under(decode=replace(decode, use=use))
    for minutes in (1, 30, 60):
        yield f"start-up takes {minutes} min", starting(60.0 * minutes, 60.0 * minutes)
    yield "start-up takes 30 min, and the fleet believes 3", starting(1800.0, 180.0)
    yield "nothing known of the day", replace(base, shape=FLAT)
    yield "the same, start-up takes 60 min", replace(starting(3600.0, 3600.0), shape=FLAT)
    for hours in (0.0, 2.0, 6.0):
        yield f"a unit is held for {hours:g} h", under(hold_s=3600.0 * hours)
    for num in (4, 7):
        yield f"floor of {num} bundles", between(Units(3 * num + 2, num), most)
    yield (
        "each role by itself, no bundles",
        under(
            prefill=replace(prefill, num_bundle=0, num_extra=0, num_min=1),
            decode=replace(decode, num_bundle=0),
        ),
    )
    yield (
        "10 % of starts fail, a node dies every 500 h",
        replace(
            base,
            faults=replace(
                base.faults, start_fail_share=0.1, node_failures_per_s=1.0 / (500 * 3600.0)
            ),
        ),
    )
    yield "noise of 10 % a minute", replace(base, faults=replace(base.faults, noise=0.1))
    yield "nodes of the published peak, and no more", under(num_nodes_max=PUBLISHED_PEAK)
    yield "static: the peak's nodes all day", between(Units(29, 9), Units(29, 9))


def hours_table(day: Day) -> Table:
    """Return a table with a row for each hour."""
    table = table_of(
        (
            "hour|nodes mean|peak|prefill|decode|in, 10^9|out, 10^9|prefill use|batch a GPU"
            "|tokens/s/user|longest wait, s"
        ),
        "The day, hour by hour (Beijing)",
        num_left=0,
    )
    for hour in day.hours:
        table.add_row(
            f"{hour.hour:02}:00",
            f"{hour.nodes_mean:.1f}",
            f"{hour.nodes_peak}",
            f"{hour.prefill_nodes_mean:.1f}",
            f"{hour.decode_nodes_mean:.1f}",
            f"{hour.tokens_in / 1e9:.2f}",
            f"{hour.tokens_out / 1e9:.2f}",
            f"{hour.prefill_use:.0%}",
            f"{hour.batch_mean:.0f}",
            f"{hour.tokens_per_s_user:.1f}",
            f"{hour.wait_s_max:.1f}",
        )
    prefill_rate = day.tokens_in / 86_400 / day.prefill_nodes_mean
    decode_rate = day.tokens_out / 86_400 / day.decode_nodes_mean
    table.caption = (
        f"mean {day.nodes_mean:.2f} nodes (published {PUBLISHED_MEAN},"
        f" {day.nodes_mean / PUBLISHED_MEAN - 1:+.1%}), peak {day.nodes_peak} ({PUBLISHED_PEAK});"
        f" {prefill_rate:,.0f} in and {decode_rate:,.0f} out tokens/s a node (73.7k and 14.8k);"
        f" {day.tokens_per_s_user:.1f} tokens/s/user (20-22); {day.num_changes} changes"
    )
    return table


def main() -> None:
    """Print the hours, and the effect of each change."""
    parser = parser_of("fleet_day", __doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours-only", action="store_true", help="leave out what moves them")
    arguments = parser.parse_args()
    console = Console(width=max(NUM_COLUMNS, Console().width))
    base = Setting()
    first = run(base, arguments.seed)
    console.print(hours_table(first))
    if arguments.hours_only:
        return
    table = table_of(
        "|nodes mean|peak|least|changes|$ a day|slowest hour, tokens/s/user|longest wait, s",
        "What moves it: one thing at a time",
    )
    for name, setting in [("as above", base), *what_ifs(base)]:
        day = first if setting == base else run(setting, arguments.seed)
        table.add_row(
            name,
            f"{day.nodes_mean:.1f}",
            f"{day.nodes_peak}",
            f"{day.nodes_min}",
            f"{day.num_changes}",
            f"{day.node_hours * NODE_HOUR_USD:,.0f}",
            f"{min(hour.tokens_per_s_user for hour in day.hours):.1f}",
            f"{day.wait_s_max:.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
