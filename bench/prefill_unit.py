"""Throughput of one simulated prefill unit on the published day, and the value of each of its balancers.

    python -m bench.prefill_unit [--quick] [--seeds 3]

The unit is EP32 on H800, under the same leader (scheduler) as on a server. Prompt lengths and cache hits are
those of the day, and the queue is never empty. "Even" is the step model's price of the same steps with equal
tokens and attention on all ranks, and equal loads of all experts up to chance. "Share of even" is the
computed rate divided by the even one: the rest is the loss that balancing leaves. A step takes seconds, so a
run has only some dozen steps: the table has means over seeds, and the rates' extremes. Seconds are simulated:
the figures depend only on the code and the seeds, not on the load of the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.tables import parser_of, table_of
from hadal.core.balance import OFF, TURNS
from hadal.core.config import PREFILL
from hadal.lab.perf.layer import MicroBatchLoad
from hadal.lab.perf.step import StepModel
from hadal.lab.sim.day.cache import CacheDay
from hadal.lab.sim.day.curves import prefill_reading, prefill_world
from hadal.lab.sim.day.demand import DemandFigures, cache_day, day_demand
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.runners import StepWork
from hadal.lab.sim.world.seen import StepReading, part_inside
from hadal.lab.sim.world.world import FleetWorld
from hadal.lab.simulate.stages import expert_ranks
from hadal.overlap.plan import SCHEDULES, Schedule

SEEDS = 3
QUICK_S = 8.0
QUICK_LOAD_SCALE = 1_000
QUICK_CACHE_SAMPLE = 40_000.0
"""Cache sampling rate of a quick run: one session in this many is simulated. The cache then hits 56.2 %
of the day's tokens, and 56.5 % at the study's rate.
"""
NUM_COLUMNS = 140
"""Characters per line that the table needs."""


def placed(study: Study) -> dict[str, float]:
    """Return role -> imbalance that its placement of experts leaves: the ranks' largest load divided by their
    mean.
    """
    return {role: ranks.imbalance for role, ranks in expert_ranks(study).items()}


def settings(study: Study) -> Iterator[tuple[str, Study]]:
    """Yield (name, study): unchanged, then with one balancer changed at a time."""
    unit = study.prefill
    for what, changed in (
        ("balanced", unit),
        ("request_balance off", replace(unit, request_balance=OFF)),
        ("request_balance turns", replace(unit, request_balance=TURNS)),
        ("expert_balance off", replace(unit, expert_balance=OFF)),
    ):
        yield what, replace(study, prefill=changed)


@dataclass(frozen=True)
class Run:
    """Measurements of one unit."""

    reading: StepReading
    even_per_s: float
    """Tokens per second if the unit's steps were even (see `even_per_s` below)."""

    @property
    def computed_per_s(self) -> float:
        """Tokens per second of working time."""
        return self.reading.tokens / (self.reading.num_steps * self.reading.step_s)

    @property
    def share(self) -> float:
        return self.computed_per_s / self.even_per_s


def measured(study: Study, load: DemandFigures, cache: CacheDay | None) -> Run:
    """Run the study's unit and return its measurements."""
    world = prefill_world(study, placed(study), load, cache)
    return Run(prefill_reading(study, world), even_per_s(study, world))


def even_per_s(study: Study, world: FleetWorld) -> float:
    """Return the tokens/s of the measured steps as if each had been spread evenly over ranks and
    micro-batches.
    """
    begin_s, model = study.window.settle_s, study.step_model(PREFILL, 1.0)
    end_s = begin_s + study.window.prefill_seconds
    tokens, even_s = 0.0, 0.0
    for _, at_s, step_s, work in world.log.steps[PREFILL]:
        part = float(part_inside(at_s, step_s, begin_s, end_s))
        if part > 0.0 and work.tokens:
            tokens += part * work.tokens
            even_s += part * even_step_s(model, work)
    return tokens / even_s


def even_step_s(model: StepModel, work: StepWork) -> float:
    """Return the seconds of the cheapest schedule for the same work, spread equally over all ranks
    and micro-batches.
    """

    def price_s(schedule: Schedule) -> float:
        num = 1 if schedule.offset is None else 2
        by = 1.0 / (num * model.num_ranks)
        imbalance = model.expected_imbalance(PREFILL, work.tokens * by, work.tokens / work.texts)
        batch = MicroBatchLoad(
            work.tokens * by,
            work.positions * by,
            work.context_tokens * by,
            work.tokens * by,
            imbalance,
        )
        num_rows = work.texts / model.num_ranks
        return model.price_works(PREFILL, schedule, [batch] * num, num_rows=num_rows).seconds

    return min(map(price_s, SCHEDULES.values()))


def table(rows: Sequence[tuple[str, Sequence[Run]]]) -> Table:
    """Return a table of all settings, compared with the first."""
    found = table_of(
        (
            "|computed, tokens/s|least|most|of the first|even, tokens/s|share of even"
            "|s a step|max/mean of tokens|of attention|of experts"
        ),
        "A prefill unit that is always busy",
    )

    def mean(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
        return float(np.mean([of(run) for run in runs]))

    first = mean(rows[0][1], lambda run: run.computed_per_s)
    for what, runs in rows:
        rates = [run.computed_per_s for run in runs]
        rate = float(np.mean(rates))
        found.add_row(
            what,
            f"{rate:,.0f}",
            f"{min(rates):,.0f}",
            f"{max(rates):,.0f}",
            f"{rate / first:.1%}",
            f"{mean(runs, lambda run: run.even_per_s):,.0f}",
            f"{mean(runs, lambda run: run.share):.1%}",
            f"{mean(runs, lambda run: run.reading.step_s):.2f}",
            f"{mean(runs, lambda run: run.reading.tokens_imbalance):.2f}",
            f"{mean(runs, lambda run: run.reading.positions_imbalance):.2f}",
            f"{mean(runs, lambda run: run.reading.expert_imbalance):.2f}",
        )
    return found


def main(arguments: Sequence[str] = ()) -> None:
    """Print the table."""
    parser = parser_of("prefill_unit", __doc__, "8 s of one seed, a smaller sample of the day")
    parser.add_argument("--seeds", type=int, default=0, help="so many, from 1 on (3, quick 1)")
    options = parser.parse_args(arguments)
    seeds = range(1, 1 + (options.seeds or (1 if options.quick else SEEDS)))
    study = Study()
    if options.quick:
        study = replace(study, window=replace(study.window, prefill_seconds=QUICK_S))
    sample = replace(study.cache, sample=QUICK_CACHE_SAMPLE) if options.quick else study.cache
    cache = cache_day(replace(study, cache=sample))
    load = day_demand(study, cache, QUICK_LOAD_SCALE if options.quick else 0).figures()
    console = Console(width=max(NUM_COLUMNS, Console().width), highlight=False)
    console.print(
        f"{study.prefill.ranks} ranks of {study.hardware}; prompts of {load.tokens_in:,.0f} tokens,"
        f" {load.hit_share:.1%} of them found; {study.window.prefill_seconds:g} s simulated of"
        f" each, seeds {[*seeds]}"
    )
    console.print(
        table(
            [
                (what, [measured(replace(one, seed=seed), load, cache) for seed in seeds])
                for what, one in settings(study)
            ]
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
