"""Measure what recording (HADAL_RECORD) costs a server: microseconds and bytes per recorded call of a role.

    python -m bench.recording [--quick] [--requests 300] [--folder FOLDER]

Records `hadal serve` under chat requests, 32 at a time. Then the same recorder writes the events and effects of its
roles again, call by call, without the roles, and is timed: each call's time is the median of several rounds. One
series has no pauses; the other sleeps for a millisecond before each call, so that the processor's caches are about as
cold as those of a server waiting for a message. `--folder`: use an existing recording instead of a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.load import bodies, run_load
from bench.server import serving
from bench.tables import parser_of, percentile, table_of
from hadal.roles.recording import AnyEffect, AnyEvent, Call, RecordedRole, Recording
from hadal.runtime.recorder import RECORD, read_recordings, recorded

CONCURRENCY = 32
REQUESTS = 300
ROUNDS = 5
APART_S = 0.001
APART_CALLS = 1_000
"""Number of calls of each process, from its first on, that are timed with pauses."""
NUM_COLUMNS = 110
"""Characters per line that the table needs."""


@dataclass(frozen=True)
class Cost:
    """Cost of recording one process's calls."""

    process: str
    span_s: float
    """Seconds from the process's first call to its last."""
    calls_us: tuple[float, ...]
    """Extra time per recorded call, without pauses."""
    apart_us: tuple[float, ...]
    """Extra time per recorded call, with a pause before each."""
    num_bytes: int
    """Bytes of the recording, including its opening (deployment and run)."""

    @property
    def call_bytes(self) -> float:
        return self.num_bytes / len(self.calls_us)

    @property
    def core_share(self) -> float:
        """Share of a core over `span_s`, computed from the calls with pauses."""
        return (
            1e-6 * statistics.fmean(self.apart_us) * len(self.calls_us) / self.span_s
            if self.span_s
            else 0.0
        )


class Echo:
    """A role that returns another role's recorded effects, in the same order."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._answers = iter([list(call.effects) for call in calls])

    def start(self, now_s: float) -> list[AnyEffect]:
        return next(self._answers)

    def handle(self, now_s: float, *events: AnyEvent) -> list[AnyEffect]:
        return next(self._answers)


def cost_of(recording: Recording, folder: Path, rounds: int = ROUNDS) -> Cost:
    """Record a process's calls again, each round in its own folder. Raises ValueError without calls."""
    calls = recording.calls
    if not calls:
        raise ValueError(f"{recording.process} has no calls.")

    def median_us(way: str, count: int, apart_s: float) -> tuple[float, ...]:
        rounds_us = [
            again(recording, folder / f"{way}-{number}", count, apart_s) for number in range(rounds)
        ]
        return tuple(map(statistics.median, zip(*rounds_us, strict=True)))

    in_a_row_us = median_us(f"{recording.process}-row", len(calls), 0.0)
    apart_us = median_us(f"{recording.process}-apart", APART_CALLS, APART_S)
    num_bytes = sum(
        path.stat().st_size for path in (folder / f"{recording.process}-row-0").iterdir()
    )
    return Cost(
        recording.process, calls[-1].now_s - calls[0].now_s, in_a_row_us, apart_us, num_bytes
    )


def again(recording: Recording, folder: Path, count: int, apart_s: float) -> list[float]:
    """Record the first `count` calls into a folder. Return the extra microseconds of each call."""
    calls, opening = recording.calls[:count], recording.opening
    with recording_into(folder):
        noted = recorded(
            Echo(calls), recording.process, opening.made, opening.run_id, opening.deployment
        )
    bare_us = times_us(Echo(calls), calls, apart_s)
    return [new - bare for new, bare in zip(times_us(noted, calls, apart_s), bare_us, strict=True)]


def times_us(role: RecordedRole, calls: Sequence[Call], apart_s: float) -> list[float]:
    """Return the microseconds of each call, with `apart_s` seconds of pause before each."""
    found, was_on = [], gc.isenabled()
    gc.disable()
    try:
        for call in calls:
            act = role.handle if call.events else role.start
            if apart_s:
                time.sleep(apart_s)
            begun_ns = time.perf_counter_ns()
            act(call.now_s, *call.events)
            found.append((time.perf_counter_ns() - begun_ns) / 1e3)
    finally:
        if was_on:
            gc.enable()
    return found


@contextlib.contextmanager
def recording_into(folder: Path) -> Iterator[None]:
    """Record the roles that are made inside the block into `folder`."""
    before = os.environ.get(RECORD)
    os.environ[RECORD] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[RECORD]
        else:
            os.environ[RECORD] = before


def serve(folder: Path, num_requests: int) -> None:
    """Record a server that answers `num_requests` requests."""
    with serving(environment={RECORD: str(folder)}) as running:
        asyncio.run(run_load(running.address, bodies(num_requests), CONCURRENCY))


def table(costs: Sequence[Cost]) -> Table:
    """Return a table with a row for each process."""
    found = table_of(
        "process|calls|in a row|1 ms apart|bytes a call|of a core",
        "What it costs to record a call, us: mean (median, p99)",
    )
    for cost in costs:
        found.add_row(
            cost.process,
            f"{len(cost.calls_us):,}",
            shown(cost.calls_us),
            shown(cost.apart_us),
            f"{cost.call_bytes:,.0f}",
            f"{cost.core_share:.2%}",
        )
    return found


def shown(calls_us: Sequence[float]) -> str:
    """Return mean, median and p99 as text."""
    values = list(calls_us)
    return (
        f"{statistics.fmean(values):.1f} ({statistics.median(values):.1f},"
        f" {percentile(values, 0.99):.1f})"
    )


def main(arguments: Sequence[str] = ()) -> None:
    """Print the table."""
    parser = parser_of("recording", __doc__, "64 requests")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--folder", type=Path, help="what HADAL_RECORD named when a server ran")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hadal-b-") as name:
        folder = options.folder or Path(name) / "served"
        if options.folder is None:
            serve(folder, 64 if options.quick else options.requests)
        costs = [
            cost_of(recording, Path(name))
            for recording in read_recordings(folder)
            if recording.calls
        ]
    Console(width=max(NUM_COLUMNS, Console().width), highlight=False).print(table(costs))


if __name__ == "__main__":
    main(sys.argv[1:])
