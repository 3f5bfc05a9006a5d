"""Load for a server with OpenAI's API. A level is a request rate, a concurrency or a trace's speed.
Open load sends requests at given times (Poisson, or a trace's), even if earlier ones have not
finished. Latency counts from a request's due time, so that a late client hides no delay. Closed
load keeps a fixed number of requests open: when one ends, the next starts. Does not depend on the
API or the making of prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import httpx
import numpy as np
from numpy.random import Generator

from hadal.apps.bench.calibration import Calibration, calibrate, first_model
from hadal.apps.bench.lengths import BenchAsk, Lengths, TraceLoad
from hadal.apps.bench.request import BenchError, Sample, Target, client_for, measure
from hadal.apps.bench.texts import Texts

MAX_OPEN = 4096
"""Maximum number of open requests of an open load; further due requests count as errors (FULL)."""
FULL = f"not sent: {MAX_OPEN} requests were open"
LATE = "not sent: this client was late by more than --timeout"
STOPPED = "stopped"
"""Error of a request that Ctrl-C interrupted; the server did not cause it."""


@dataclass(frozen=True)
class Level:
    """One load level."""

    kind: str
    """"rate" (`value` in requests/s), "concurrency" (open requests) or "trace" (speed-up)."""
    value: float

    @property
    def name(self) -> str:
        """Name of the level in tables."""
        return {
            "rate": f"{self.value:g}/s",
            "concurrency": f"{self.value:g} at once",
            "trace": f"trace x{self.value:g}",
        }[self.kind]

    def arrivals(
        self, rng: Generator, trace: TraceLoad | None, end_s: float, num_max: int
    ) -> Iterator[float]:
        """Yield an open load's due times before `end_s`, in seconds after its start."""
        if self.kind == "trace":
            assert trace is not None
            times: Iterator[float] = (at_s / self.value for at_s in trace.at_s)
        else:
            times = _poisson(rng, self.value)
        for _, at_s in zip(range(num_max), times, strict=False):
            if at_s >= end_s:
                return
            yield at_s


def _poisson(rng: Generator, rate: float) -> Iterator[float]:
    at_s = 0.0
    while True:
        at_s += float(rng.exponential(1.0 / rate))
        yield at_s


@dataclass
class LevelRun:
    """Samples of a running or completed level."""

    level: Level
    samples: list[Sample] = field(default_factory=list)
    num_open: int = 0
    elapsed_s: float = 0.0
    """Time from the level's start to the last end of a request so far. For a completed rate level
    that did not reach its number of requests, at least the level's duration.
    """


@dataclass(frozen=True)
class LoadPlan:
    """Duration of each level, and number and lengths of its requests."""

    duration_s: float
    """Time after a level's start during which requests are sent."""
    num_requests: int
    """Largest number of requests per level."""
    tokens_in: Lengths
    tokens_out: Lengths
    trace: TraceLoad | None = None
    seed: int = 0

    def asks(self, rng: Generator) -> Iterator[BenchAsk]:
        """Yield requests without end: a trace starts again from its first request."""
        while True:
            if self.trace is not None:
                yield from self.trace.asks
            else:
                sizes = (lengths.draw(rng, 64) for lengths in (self.tokens_in, self.tokens_out))
                yield from (BenchAsk(*both) for both in zip(*sizes, strict=True))


async def warm_up(
    client: httpx.AsyncClient, found: Calibration, plan: LoadPlan, num_requests: int
) -> None:
    """Send unmeasured requests in parallel. Raises BenchError if none is answered."""
    asks = plan.asks(np.random.default_rng([plan.seed, 1 << 20]))
    samples = [Sample(0.0) for _ in range(num_requests)]
    await asyncio.gather(
        *(
            measure(
                client, found.target, found.body(ask, (1 << 40) + number), sample, time.monotonic
            )
            for number, (ask, sample) in enumerate(zip(asks, samples, strict=False))
        )
    )
    if samples and all(sample.error for sample in samples):
        raise BenchError(
            f"none of the {num_requests} warm-up requests was answered: {samples[0].error}."
        )


async def run_level(
    client: httpx.AsyncClient, found: Calibration, plan: LoadPlan, number: int, run: LevelRun
) -> None:
    """Run level `number`: start requests until its duration is over, its number of requests is
    reached or the trace ends; then wait for open ones. Samples are added to `run` as requests
    start, so that they remain after a cancellation.
    """
    rng = np.random.default_rng([plan.seed, number])
    asks, start_s = plan.asks(rng), time.monotonic()

    def now() -> float:
        return time.monotonic() - start_s

    async def send(due_s: float) -> None:
        ask = next(asks)
        sample = Sample(due_s)
        run.samples.append(sample)
        run.num_open += 1
        body = found.body(ask, (number << 24) + len(run.samples))
        try:
            await measure(client, found.target, body, sample, now)
        except asyncio.CancelledError:
            sample.error, sample.end_s = STOPPED, now()
            raise
        finally:
            run.num_open -= 1
            run.elapsed_s = now()

    async def stay() -> None:
        while now() < plan.duration_s and len(run.samples) < plan.num_requests:
            await send(now())

    async with asyncio.TaskGroup() as tasks:
        if run.level.kind == "concurrency":
            for _ in range(min(int(run.level.value), plan.num_requests)):
                tasks.create_task(stay())
        else:
            for due_s in run.level.arrivals(rng, plan.trace, plan.duration_s, plan.num_requests):
                await asyncio.sleep(max(0.0, due_s - now()))
                is_late = now() > due_s + found.target.timeout_s
                if is_late or run.num_open >= MAX_OPEN:
                    error = LATE if is_late else FULL
                    run.samples.append(Sample(due_s, sent_s=now(), end_s=now(), error=error))
                else:
                    tasks.create_task(send(due_s))
    if run.level.kind == "rate" and len(run.samples) < plan.num_requests:
        # The rate includes time without arrivals at the level's end.
        run.elapsed_s = max(run.elapsed_s, plan.duration_s)


async def run_levels(
    target: Target,
    texts: Texts,
    plan: LoadPlan,
    levels: Sequence[Level],
    num_warm_up: int,
    runs: list[LevelRun],
    notes: list[str],
    tell: Callable[[str, float], None],
) -> str:
    """Run all levels in turn, fill `runs` and `notes`, and return the model's name. `tell` is
    called with the progress and the elapsed seconds of load. Raises BenchError.
    """
    async with client_for(target) as client:
        tell("connecting to the server", 0.0)
        if not target.model:
            target = replace(target, model=await first_model(client, target.url))
        found = await calibrate(client, target, texts)
        notes += found.notes
        tell(f"warming up with {num_warm_up} requests", 0.0)
        await warm_up(client, found, plan, num_warm_up)
        for number, level in enumerate(levels):
            run = LevelRun(level)
            runs.append(run)
            telling = asyncio.create_task(_tell(run, number, plan, tell))
            try:
                await run_level(client, found, plan, number, run)
            finally:
                telling.cancel()
    return target.model


async def _tell(
    run: LevelRun, number: int, plan: LoadPlan, tell: Callable[[str, float], None]
) -> None:
    start_s = time.monotonic()
    while True:
        passed_s = time.monotonic() - start_s
        num_done = len(run.samples) - run.num_open
        tell(
            f"{run.level.name}: {num_done} done, {run.num_open} open",
            number * plan.duration_s + min(passed_s, plan.duration_s),
        )
        await asyncio.sleep(0.25)
