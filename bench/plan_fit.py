"""Compare `hadal plan` for prefill units with simulated units: seconds per step, TTFT.

    python -m bench.plan_fit [--quick]

A simulated unit receives DeepSeek's published prompts (log-normal lengths, Poisson arrivals) at the rate at
which the planner expects a given number of prompts per rank and step. Printed: the simulated step and TTFT;
the planner's price of a step with as many tokens and its TTFT at the rate (lab/sim/plan/units); and the
constants that would have fitted best. Needs no GPU and no data.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console

from bench.tables import parser_of, table_of
from hadal.core.balance import OFF
from hadal.core.config import DECODE, PREFILL, CacheConfig, Deployment, LimitsConfig, UnitsConfig
from hadal.lab.perf.hardware import hardware_named
from hadal.lab.perf.step import StepModel
from hadal.lab.sim.day.hour_window import uncollected
from hadal.lab.sim.plan.deploy import prompts_max
from hadal.lab.sim.plan.measure import CONTEXT_MAX, arrivals
from hadal.lab.sim.plan.traffic import Traffic
from hadal.lab.sim.plan.units import (
    PAIRS_UNEVEN,
    STEPS_BEFORE,
    TOKENS_UNEVEN,
    TTFT_TAIL,
    UNEVEN_POWER,
    Pricing,
    tail_of,
)
from hadal.lab.sim.world.seen import quantiles
from hadal.lab.sim.world.world import FleetWorld
from hadal.perf.shapes import DEEPSEEK_V3
from hadal.policy.slo import Slo

TRAFFIC = Traffic(kv_length=4989.0)
PROMPTS = (0.3, 0.7, 1.2, 1.8, 2.5)
"""Planned prompts per rank and step."""
QUICK_PROMPTS = (0.4, 1.6)
PROMPTS_RANGE = (0.05, 10.0)
"""Range of prompts per rank and step in which a rate for a TTFT is searched."""
SEEDS, QUICK_SEEDS = (1, 2), (1,)
SETTLE_STEPS, MEASURE_STEPS = 12.0, 150.0
"""Durations before and during the measurement, in steps of the planned length."""
REQUESTS_MIN = 2000
"""Minimum number of measured requests: with fewer, a p99 means little."""
POWERS = (0.5, 0.75, 1.0)
LOADS = (("light", 0.0, 0.5), ("middling", 0.5, 1.5), ("heavy", 1.5, math.inf))
"""(name, from, below) in simulated prompts per rank and step."""
QUANTILES = (0.9, 0.99)
Uneven = tuple[float, float, float]
NOW: Uneven = (TOKENS_UNEVEN, PAIRS_UNEVEN, UNEVEN_POWER)
_NONE_WAITS = 100_000


@dataclass(frozen=True)
class Unit:
    """A prefill unit to simulate."""

    hardware: str
    num_ranks: int
    num_redundant: int
    chunk_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.hardware} EP{self.num_ranks}+{self.num_redundant}, {self.chunk_tokens // 1024}K"
        )


UNITS = (
    Unit("h800", 16, 0, 8192),
    Unit("h800", 32, 0, 16384),
    Unit("h800", 32, 32, 16384),
    Unit("gb200", 8, 0, 16384),
    Unit("gb200", 16, 0, 16384),
    Unit("gb200", 32, 32, 16384),
)
QUICK_UNITS = (UNITS[0], UNITS[2], UNITS[3])


@dataclass(frozen=True)
class Point:
    """One unit simulated at one rate."""

    unit: Unit
    planned_prompts: float
    """Prompts per rank and step at this rate, from the planner."""
    tokens: float
    """Simulated tokens per rank and step, mean."""
    step_s: float
    ttft_s: float
    """Mean TTFT, seconds."""
    tails: tuple[float, ...]
    """QUANTILES of TTFT, as multiples of its mean."""
    num_requests: int
    two_share: float
    """Share of working time in steps of two micro-batches."""

    @property
    def prompts(self) -> float:
        return self.tokens / TRAFFIC.tokens_new


def pricing_of(unit: Unit, uneven: Uneven = NOW) -> Pricing:
    """Return the planner's pricing for such a unit."""
    return Pricing(
        hardware_named(unit.hardware),
        DEEPSEEK_V3,
        TRAFFIC,
        Slo(2.0, 0.05),
        tokens_uneven=uneven[0],
        pairs_uneven=uneven[1],
        uneven_power=uneven[2],
    )


def model_of(unit: Unit) -> StepModel:
    """Return the step model of a unit. Raises ValueError if the unit is impossible."""
    model = pricing_of(unit).step_model(PREFILL, unit.num_ranks, unit.num_redundant)
    if model is None:
        raise ValueError(f"there is no {unit}.")
    return model


def simulate(
    unit: Unit,
    model: StepModel,
    prompts: float,
    seed: int,
    *,
    num_steps: float = MEASURE_STEPS,
    requests_min: int = REQUESTS_MIN,
) -> Point:
    """Run the unit at the rate that is planned to give `prompts` prompts per rank and step."""
    rng = np.random.default_rng(seed)
    step_s = pricing_of(unit).prefill_price(model, prompts * TRAFFIC.tokens_new).seconds
    per_s = unit.num_ranks * prompts / step_s
    settle_s = SETTLE_STEPS * step_s
    end_s = settle_s + max(num_steps * step_s, requests_min / per_s)
    come = arrivals(TRAFFIC, per_s, end_s, rng)
    # Decode has no work: the measurement ends with a prompt's first token.
    requests = replace(come, tokens_out=np.ones_like(come.tokens_out))
    slots = prompts_max(unit.chunk_tokens, TRAFFIC)
    config = Deployment(
        chunk_tokens=unit.chunk_tokens,
        cache=CacheConfig(memory=OFF),
        prefill=UnitsConfig(
            1,
            ranks=unit.num_ranks,
            redundant_experts=unit.num_redundant,
            max_requests=slots,
            max_waiting=_NONE_WAITS,
        ),
        decode=UnitsConfig(1, ranks=16, max_requests=64, max_waiting=_NONE_WAITS),
        limits=LimitsConfig(max_running=_NONE_WAITS, max_queued=_NONE_WAITS),
    )
    models = {PREFILL: model, DECODE: StepModel(16, model.hardware)}
    world = FleetWorld(config, models, requests, max_context=CONTEXT_MAX)
    with uncollected():
        world.run(end_s)
    seen = world.read(settle_s, end_s)
    mean_s = float(seen.ttft_s.mean())
    return Point(
        unit,
        prompts,
        seen.prefill.tokens / seen.prefill.num_steps / unit.num_ranks,
        seen.prefill.step_s,
        mean_s,
        tuple(seconds / mean_s for seconds in quantiles(seen.ttft_s, QUANTILES)),
        len(seen.ttft_s),
        seen.prefill.two_micro_batches_share,
    )


def price_s(point: Point, model: StepModel, uneven: Uneven = NOW) -> float:
    """Return the priced seconds of a step with the simulated number of tokens."""
    return pricing_of(point.unit, uneven).prefill_price(model, point.tokens).seconds


def own_steps(point: Point) -> float:
    return pricing_of(point.unit).own_steps(point.unit.chunk_tokens)


def steps_before(point: Point) -> float:
    """Return the number of simulated steps that a prompt waited besides its own."""
    return point.ttft_s / point.step_s - own_steps(point)


def planned_ttft_s(point: Point, model: StepModel, before: float = STEPS_BEFORE) -> float:
    """Return the planned TTFT at the simulated rate."""
    step_s = (
        pricing_of(point.unit)
        .prefill_price(model, point.planned_prompts * TRAFFIC.tokens_new)
        .seconds
    )
    return step_s * (before + own_steps(point))


def rate_share(point: Point, model: StepModel) -> float:
    """Return the rate at which the planner expects the simulated TTFT, divided by the simulated rate."""
    pricing, own = pricing_of(point.unit), own_steps(point)

    def step_s(prompts: float) -> float:
        return pricing.prefill_price(model, prompts * TRAFFIC.tokens_new).seconds

    low, high = PROMPTS_RANGE
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (
            (middle, high)
            if step_s(middle) * (STEPS_BEFORE + own) <= point.ttft_s
            else (low, middle)
        )
    return low / step_s(low) / (point.planned_prompts / step_s(point.planned_prompts))


def fit_uneven(
    points: Sequence[Point], models: dict[Unit, StepModel], power: float = UNEVEN_POWER
) -> Uneven:
    """Return the constants with the least mean square of log(priced / simulated step time), for this power."""

    def error(at: tuple[float, float]) -> float:
        return float(
            np.mean(
                [
                    math.log(price_s(point, models[point.unit], (*at, power)) / point.step_s) ** 2
                    for point in points
                ]
            )
        )

    return *_least(error, (TOKENS_UNEVEN, PAIRS_UNEVEN)), power


def _least(
    error: Callable[[tuple[float, float]], float], start: tuple[float, float]
) -> tuple[float, float]:
    """Return the point >= 0 where `error` is least: search around it, move if that is better, else
    halve the distance.
    """
    at, best, size = start, error(start), 0.4
    while size > 0.02:
        around = [
            (max(0.0, at[0] + size * x), max(0.0, at[1] + size * y))
            for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1))
        ]
        errors = [error(one) for one in around]
        if min(errors) < best:
            best = min(errors)
            at = around[errors.index(best)]
        else:
            size /= 2.0
    return at


def fit_tail(points: Sequence[Point]) -> float:
    """Return the TTFT_TAIL with the least mean square of log(planned / simulated) over all points and QUANTILES."""
    ratios = [
        tail / -math.log1p(-quantile)
        for point in points
        for quantile, tail in zip(QUANTILES, point.tails, strict=True)
    ]
    return math.exp(float(np.mean(np.log(ratios))))


def show_points(console: Console, points: Sequence[Point], models: dict[Unit, StepModel]) -> None:
    """Print a row for each point."""
    table = table_of(
        "unit|prompts|came|step s|priced|in two|TTFT s|planned|before|p90|p99",
        "prompts of a rank's step as planned and as they came; steps before a prompt's own",
    )
    for point in points:
        model = models[point.unit]
        priced_s = price_s(point, model)
        planned_s = planned_ttft_s(point, model)
        table.add_row(
            str(point.unit),
            f"{point.planned_prompts:.1f}",
            f"{point.prompts:.2f}",
            f"{point.step_s:.3f}",
            f"{priced_s:.3f} ({priced_s / point.step_s - 1.0:+.0%})",
            f"{point.two_share:.0%}",
            f"{point.ttft_s:.2f}",
            f"{planned_s:.2f} ({planned_s / point.ttft_s - 1.0:+.0%})",
            f"{steps_before(point):.2f}",
            *(f"{tail:.2f}" for tail in point.tails),
        )
    console.print(table)


def show_fits(console: Console, points: Sequence[Point], models: dict[Unit, StepModel]) -> None:
    """Print the errors with the current constants and with the best fitting ones."""

    def show_priced(name: str, uneven: Uneven) -> None:
        ratios = [price_s(point, models[point.unit], uneven) / point.step_s for point in points]
        by_load = [
            f"{load} {math.expm1(float(np.mean(np.log(some)))):+.0%}"
            for load, low, high in LOADS
            if (
                some := [
                    ratio
                    for ratio, at in zip(ratios, points, strict=True)
                    if low <= at.prompts < high
                ]
            )
        ]
        constants = f"{uneven[0]:.2f}, {uneven[1]:.2f}, {uneven[2]:g}"
        console.print(f"  {name} {constants}: {errors(ratios)}; {', '.join(by_load)}")

    console.print("TOKENS_UNEVEN, PAIRS_UNEVEN, UNEVEN_POWER: a step of as many tokens is priced")
    show_priced("now", NOW)
    for power in POWERS:
        show_priced("best", fit_uneven(points, models, power))
    before = [steps_before(point) for point in points]
    planned = errors(planned_ttft_s(point, models[point.unit]) / point.ttft_s for point in points)
    console.print(f"STEPS_BEFORE {STEPS_BEFORE:g}: TTFT at a rate is planned {planned}")
    shares = errors(rate_share(point, models[point.unit]) for point in points)
    console.print(f"  for the TTFT that was simulated a rate is planned that is {shares}")
    console.print(
        f"  simulated {min(before):.2f} to {max(before):.2f} steps, mean"
        f" {float(np.mean(before)):.2f}"
    )
    tails = [
        f"p{quantile * 100:g} is {tail_of(quantile):.2f} times the mean, simulated"
        f" {min(point.tails[i] for point in points):.2f} to"
        f" {max(point.tails[i] for point in points):.2f}"
        for i, quantile in enumerate(QUANTILES)
    ]
    console.print(f"TTFT_TAIL {TTFT_TAIL:g}: {'; '.join(tails)}")
    tail = fit_tail(points)
    console.print(f"  best {tail:.2f}")


def errors(ratios: Iterable[float]) -> str:
    """Return the errors of planned values as text. `ratios`: planned / simulated."""
    logs = np.log(list(ratios))
    least, mean, most = (math.expm1(float(log)) for log in (logs.min(), logs.mean(), logs.max()))
    return f"{least:+.0%} to {most:+.0%}, mean {mean:+.0%}, deviation {logs.std():.0%}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate the points, print them, and fit the constants."""
    parser = parser_of("plan_fit", __doc__, "three units at two rates, ten seconds")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=120)
    began_s = time.process_time()
    units, loads, seeds = (
        (QUICK_UNITS, QUICK_PROMPTS, QUICK_SEEDS) if options.quick else (UNITS, PROMPTS, SEEDS)
    )
    models = {unit: model_of(unit) for unit in units}
    points = []
    with console.status("simulating") as status:
        for unit, prompts, seed in itertools.product(units, loads, seeds):
            status.update(f"{unit} at {prompts:g} prompts a rank")
            points.append(simulate(unit, models[unit], prompts, seed))
    simulated_s = time.process_time() - began_s
    show_points(console, points, models)
    show_fits(console, points, models)
    console.print(
        f"{len(points)} units simulated in {simulated_s:.0f} s of a processor, "
        f"{time.process_time() - began_s:.0f} s with the fit"
    )


if __name__ == "__main__":
    main()
