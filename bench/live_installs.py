"""What installing experts costs the steps that run meanwhile: their periods during installations
and outside of them.

The load is of one task at a time and changes to another after a while, so that experts have to move
again. Which steps an installation spans is said by the unit's leader in its log: from the step
after which staging began to the one with the flip. A server without the balancer, under the same
load, says what its measuring and planning cost.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.live_load import Ask, ClosedLoop, balance_of, http_client, read_metrics
from bench.live_rounds import LOOK_S, MODEL, Scene, until_busy
from bench.live_steps import Period, Step, periods, watch_steps
from bench.server import Running
from bench.tables import percentile

FLIPPED = (
    r"^\S+ {unit} .*MoE layer (\d+) flipped in step (\d+), begun after step (-?\d+); replicas"
    r" moved: (\d+)"
)
STAGING = (
    r"^\S+ {unit} .*MoE layer (\d+): staging begins after step (-?\d+); replicas to move:"
    r" ([1-9]\d*)"
)


@dataclass(frozen=True)
class Flip:
    """One layer's installation."""

    layer: int
    begun_step_id: int
    step_id: int
    num_moved: int


@dataclass(frozen=True)
class Look:
    """The gauges at one moment."""

    time_s: float
    balance: dict[str, float]
    num_flipped: float


@dataclass(frozen=True)
class Watched:
    """A stretch of serving."""

    flips: list[Flip]
    periods: list[Period]
    looks: list[list[Look]]
    """By regime."""

    def during(self) -> list[float]:
        """Periods of the steps during installations, seconds."""
        ids = {i for flip in self.flips for i in range(flip.begun_step_id + 1, flip.step_id + 1)}
        return [period.seconds for period in self.periods if period.step_id in ids]

    def outside(self) -> list[float]:
        ids = {i for flip in self.flips for i in range(flip.begun_step_id + 1, flip.step_id + 1)}
        return [period.seconds for period in self.periods if period.step_id not in ids]


def read_flips(log: str, unit: str) -> list[Flip]:
    """What a server's log says of a unit's installations."""
    found = re.findall(FLIPPED.format(unit=re.escape(unit)), log, re.M)
    return [
        Flip(int(layer), int(begun), int(step), int(moved)) for layer, step, begun, moved in found
    ]


async def watch(
    scene: Scene, running: Running, regimes: Sequence[Sequence[Ask]], regime_s: float
) -> Watched:
    """Serve each regime for so long; take every step and, twice a second, the gauges."""
    steps: list[Step] = []
    looks: list[list[Look]] = []
    end_s = float("inf")
    async with http_client(running.status.url, scene.num_clients) as http:
        loop = ClosedLoop(http, MODEL, regimes[0], scene.num_clients)
        async with loop:
            await until_busy(scene, http, loop)
            watching = asyncio.create_task(
                watch_steps(http, scene.unit, steps, lambda: time.perf_counter() > end_s)
            )
            try:
                for asks in regimes:
                    loop.asks = asks
                    looks.append([])
                    until_s = time.perf_counter() + regime_s
                    while time.perf_counter() < until_s:
                        await asyncio.sleep(LOOK_S)
                        loop.check()
                        metrics = await read_metrics(http)
                        flipped = metrics.get(
                            f'hadal_layers_flipped_total{{unit="{scene.unit}"}}', 0.0
                        )
                        looks[-1].append(
                            Look(time.perf_counter(), balance_of(metrics, scene.unit), flipped)
                        )
                end_s = 0.0
                await (
                    watching
                )  # While the load goes on: a trace is answered when its steps were made.
            finally:
                watching.cancel()
    log = running.log.read_text(errors="replace")
    return Watched(read_flips(log, scene.unit), periods(steps), looks)


def told(seconds: Sequence[float]) -> str:
    """Median and 99th percentile, for people."""
    if not seconds:
        return "no steps"
    p50, p99 = statistics.median(seconds), percentile(list(seconds), 0.99)
    return f"{len(seconds)} steps, p50 {1e3 * p50:.2f} ms, p99 {1e3 * p99:.2f} ms"


def ratio(during: Sequence[float], outside: Sequence[float]) -> float | None:
    """p99 of one over p99 of the other; None if either is empty."""
    if not during or not outside:
        return None
    return percentile(list(during), 0.99) / percentile(list(outside), 0.99)


def first_and_last(
    looks: Sequence[Look], objective: str, num: int = 6
) -> tuple[float, float] | None:
    """A gauge at the begin and at the end of a regime: medians of `num` looks."""
    values = [look.balance[objective] for look in looks if objective in look.balance]
    if len(values) < 2:
        return None
    return statistics.median(values[:num]), statistics.median(values[-num:])
