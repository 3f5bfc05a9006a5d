"""What one simulated prefill unit of the published day computes, and how much of it each of its balancers is worth.

    python -m bench.prefill_unit [--quick]

EP32 on H800 under the leader that serves, with prompts as long as the day's, as much of them found as its cache has,
and always more of them than it can do. "Even" is what the step model says of the same steps if all ranks had the same
tokens and the same attention, and all experts the same load but for chance; so the share is what balancing leaves.
Seconds are simulated: the figures are a function of the code and the seed, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from bench.day_parts import cache_of, placed
from hadal.core.balance import OFF, TURNS
from hadal.core.config import PREFILL
from hadal.sim.cache_day import CacheDay
from hadal.sim.day_load import LoadFigures, day_load
from hadal.sim.study import Study
from hadal.sim.unit_curves import prefill_reading
from hadal.sim.world_seen import StepReading

QUICK_S = 8.0
QUICK_LOAD_SCALE = 1_000
NUM_COLUMNS = 130
"""Of characters: the table needs so many."""


def settings(study: Study) -> Iterator[tuple[str, Study]]:
    """(what, study): as it is, then one balancer changed at a time."""
    unit = study.prefill
    for what, changed in (
        ("balanced", unit), ("request_balance off", replace(unit, request_balance=OFF)),
        ("request_balance turns", replace(unit, request_balance=TURNS)),
        ("expert_balance off", replace(unit, expert_balance=OFF)),
    ):  # fmt: skip
        yield what, replace(study, prefill=changed)


def measured(study: Study, load: LoadFigures, cache: CacheDay | None) -> StepReading:
    """The unit's steps."""
    return prefill_reading(study, placed(study), load, cache)


def computed_per_s(reading: StepReading) -> float:
    """Tokens of a unit, per second in which it worked."""
    return reading.tokens / (reading.num_steps * reading.step_s)


def even_per_s(study: Study, reading: StepReading) -> float:
    """The same if nothing were uneven: the mean step's tokens and positions on every rank."""
    ranks = study.prefill.ranks
    tokens_per_rank = reading.tokens / reading.num_steps / ranks
    # A text of so many new tokens behind so many found ones has as many positions a token as were measured.
    new = tokens_per_rank / reading.requests_per_rank
    found = max(0.0, reading.positions_per_token - (new + 1.0) / 2.0)
    priced = study.step_model(PREFILL, 1.0).prefill(tokens_per_rank, new + found, found)
    return ranks * priced.tokens_per_s_gpu


def table(rows: Sequence[tuple[str, Study, StepReading]]) -> Table:
    """All settings, beside the first."""
    found = Table(title="A prefill unit that is always busy", title_justify="left")
    found.add_column("", no_wrap=True)
    for column in (
        "computed, tokens/s", "of the first", "even, tokens/s", "share of even", "tokens a rank and step",
        "max/mean of tokens", "of attention", "of experts",
    ):  # fmt: skip
        found.add_column(column, justify="right")
    first = computed_per_s(rows[0][2])
    for what, study, reading in rows:
        rate, even = computed_per_s(reading), even_per_s(study, reading)
        found.add_row(
            what, f"{rate:,.0f}", f"{rate / first:.1%}", f"{even:,.0f}", f"{rate / even:.1%}",
            f"{reading.tokens / reading.num_steps / study.prefill.ranks:,.0f}", f"{reading.tokens_imbalance:.3f}",
            f"{reading.positions_imbalance:.3f}", f"{reading.expert_imbalance:.3f}",
        )  # fmt: skip
    return found


def main(arguments: Sequence[str] = ()) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="bench prefill_unit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="8 s of each, a smaller sample of the day and its cache")
    options = parser.parse_args(arguments)
    study = Study()
    if options.quick:
        study = replace(study, window=replace(study.window, prefill_seconds=QUICK_S))
    cache = cache_of(study, quick=options.quick)
    load = day_load(study, cache, QUICK_LOAD_SCALE if options.quick else 0).figures()
    console = Console(width=max(NUM_COLUMNS, Console().width), highlight=False)
    console.print(
        f"{study.prefill.ranks} ranks of {study.hardware}, seed {study.seed}; prompts of {load.tokens_in:,.0f} tokens, "
        f"{load.hit_share:.1%} of them found; {study.window.prefill_seconds:g} s simulated of each"
    )
    console.print(table([(what, one, measured(one, load, cache)) for what, one in settings(study)]))


if __name__ == "__main__":
    main(sys.argv[1:])
