"""Compare Hadal's rule for placing decode requests with the rules of other systems, on 144 simulated ranks:
with exact loads, with stale loads, and with requests that move.

    python -m bench.balance_decode [--quick] [--seeds 2] [--trigger 1.02]

Balance is the ranks' mean load divided by their largest load, averaged over steps. Efficiency is the time
that evenly loaded steps would take, divided by the actual time. The published traces are read from
HADAL_SHARED_DATA or shared/data beside the checkout, and skipped if missing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from bench.decode_rules import PEERS, rule
from bench.decode_world import Result, UnitReport, World, r1_load, trace_loads
from bench.shared_data import AZURE, MOONCAKE, why_missing
from bench.tables import parser_of, table_of
from hadal.policy.decode_balance import Arrival, place
from hadal.policy.decode_moves import Move, MoveTerms, choose_moves

NUM_RANKS, NUM_SLOTS, NUM_RUNNING = 144, 128, 96
STALE_STEPS = 4
"""Age of stale loads in steps; 4 steps take about 200 ms."""
OURS = "ours"
TARGETS = {"r1-like": (0.93, 0.98), "mooncake-conv": (0.96, 0.98), "azure-conv": (0.98, 0.99)}
"""Load -> (target of KV balance, target of request balance) for our rule without moves."""
MOVED_TARGET = "targets .98, .98, efficiency .99, at most 2.5 % moved"
PLACE_TARGET_US = 50.0


@dataclass(frozen=True)
class Case:
    name: str
    stale_steps: int = 0
    terms: MoveTerms | None = None


def run(load: UnitReport, case: Case, num_steps: int, seed: int) -> Result:
    """Start with a loaded unit, run `num_steps` // 2 steps as warm-up, then measure `num_steps` steps."""
    world = World(
        load,
        num_ranks=NUM_RANKS,
        num_slots=NUM_SLOTS,
        num_running=NUM_RUNNING,
        stale_steps=case.stale_steps,
        seed=seed,
    )
    place_all, result = rule(case.name, seed), Result()
    num_warm = num_steps // 2
    for step in range(num_warm + num_steps):
        if step:
            world.arrive()
        world.report()
        num_waiting = len(world.waiting)
        if num_waiting:
            start_s = time.process_time()
            ranks = place_all(world, list(world.waiting))
            if step >= num_warm:
                result.rule_s.append((time.process_time() - start_s) / num_waiting)
                result.num_arrived += len(ranks)
            for rank in ranks:
                world.seat(rank, world.waiting.popleft())
        if case.terms is not None:
            moves = choose_moves(world.exact, world.movable(), case.terms, preempts=True)
            for move in moves:
                world.move(move)
            result.num_moved += len(moves) if step >= num_warm else 0
        world.run_step(result if step >= num_warm else None)
    world.check()
    return result


def measure(
    console: Console, load: UnitReport, cases: Sequence[Case], num_steps: int, num_seeds: int
) -> None:
    """Print one table with a row for each case."""
    title = (
        f"{load.name}: {load.mean_kv:.0f} tokens of KV a request, output {load.output_N.mean():.0f}"
    )
    table = table_of(
        "rule|kv|requests|efficiency|moved|running|us a placement",
        f"{title}; {num_steps} steps, {num_seeds} seeds",
    )
    for case in cases:
        results = [run(load, case, num_steps, seed) for seed in range(num_seeds)]
        num = sum(result.num_steps for result in results)
        kv = sum(result.kv for result in results) / num
        requests = sum(result.requests for result in results) / num
        efficiency = sum(result.ideal_s for result in results) / sum(
            result.actual_s for result in results
        )
        moved = sum(result.num_moved for result in results) / max(
            sum(result.num_arrived for result in results), 1
        )
        name = case.name
        if case.stale_steps:
            name += f", loads {case.stale_steps} steps old"
        if case.terms is not None:
            name += f", moves above {case.terms.trigger:g}"
        table.add_row(
            name,
            f"{kv:.3f}",
            f"{requests:.3f}",
            f"{efficiency:.3f}",
            f"{moved:.2%}" if case.terms else "-",
            f"{sum(result.num_running for result in results) / num:.1f}",
            f"{1e6 * statistics.median(seconds for result in results for seconds in result.rule_s):.0f}",
        )
    console.print(table)
    kv_target, requests_target = TARGETS[load.name]
    console.print(
        f"ours without moves: targets {kv_target:g} and {requests_target:g}; with: {MOVED_TARGET}; "
        f"{STALE_STEPS} steps stale: less than two points; bound 1."
    )


def show_time(console: Console) -> None:
    """Print the CPU time of a placement and of a choice of moves. A step with one arrival takes the most time
    per placement, because no other arrival shares the cost of the step's snapshot.
    """
    world = World(
        r1_load(num=1000),
        num_ranks=NUM_RANKS,
        num_slots=NUM_SLOTS,
        num_running=NUM_RUNNING,
        stale_steps=0,
        seed=0,
    )
    for rank, waiting in zip(
        rule(OURS, 0)(world, list(world.waiting)), list(world.waiting), strict=False
    ):
        world.seat(rank, waiting)
    for _ in range(100):
        world.run_step(None)  # Let some requests end and leave free slots.
    view = world.exact
    for num in (1, 16):
        arrivals = [Arrival(1000 + 10 * index, 2000) for index in range(num)]
        place_s = []
        for _ in range(200):
            start_s = time.process_time()
            place(view, arrivals, preempts=True)
            place_s.append((time.process_time() - start_s) / num)
        console.print(
            f"{num} arrivals a step: {1e6 * statistics.median(place_s):.0f} us of processor time a"
            f" placement (target {PLACE_TARGET_US:g})"
        )
    # This trigger is always met, so this is the most expensive decision: it uses the whole budget
    # of moves.
    running, terms, decide_s, moves = (
        world.movable(),
        MoveTerms(trigger=1.0, gain_steps=1e6),
        [],
        list[Move](),
    )
    for _ in range(50):
        start_s = time.process_time()
        moves = choose_moves(view, running, terms, preempts=True)
        decide_s.append(time.process_time() - start_s)
    console.print(
        f"moves: {1e3 * statistics.median(decide_s):.2f} ms of processor time for {len(moves)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("balance_decode", __doc__, "one seed, few steps")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--trigger", type=float, default=MoveTerms().trigger, help="move above this share of a rank"
    )
    options = parser.parse_args(arguments)
    console = Console()
    terms = MoveTerms(trigger=options.trigger)
    cases = [
        *(Case(name) for name in PEERS),
        Case(OURS),
        Case("least requests (vLLM)", STALE_STEPS),
        Case(OURS, STALE_STEPS),
        Case(OURS, 0, terms),
    ]
    loads = [r1_load(), *trace_loads()]
    if len(loads) == 1:
        console.print(f"[yellow]{why_missing(MOONCAKE, AZURE)}[/]")
    for load in loads:
        # Long outputs need more steps until the initial state no longer matters.
        num_steps = 300 if options.quick else (3000 if load.output_N.mean() > 1000 else 1500)
        measure(console, load, cases, num_steps, 1 if options.quick else options.seeds)
    show_time(console)


if __name__ == "__main__":
    main()
