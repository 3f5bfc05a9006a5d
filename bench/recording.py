"""What HADAL_RECORD costs a server: microseconds and bytes of each call of a role that is written
down.

    python -m bench.recording [--quick] [--requests 300] [--folder FOLDER]

`hadal serve` is recorded under chat requests, 32 at a time. Then what its roles heard and said is
written once more by the same recorder, call by call, without the roles, and timed: each call's time
is the median of some rounds. Once with one call right after the other, once with a millisecond's
sleep before each, when the processor's caches are about as cold as a server's that waits for its
next message. `--folder`: a recording that is there already, instead of a server.
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
"""Of each process, its first."""
NUM_COLUMNS = 110
"""Of characters: the table needs so many."""


@dataclass(frozen=True)
class Cost:
    """Of one process's calls."""

    process: str
    span_s: float
    """From its first call to its last."""
    calls_us: tuple[float, ...]
    """What each call takes longer for being recorded, one right after the other,"""
    apart_us: tuple[float, ...]
    """and with a pause before each."""
    num_bytes: int
    """Of the file, the opening among them."""

    @property
    def call_bytes(self) -> float:
        return self.num_bytes / len(self.calls_us)

    @property
    def core_share(self) -> float:
        """Of a core, while it lasted, with a pause before each."""
        return (
            1e-6 * statistics.fmean(self.apart_us) * len(self.calls_us) / self.span_s
            if self.span_s
            else 0.0
        )


class Echo:
    """A role that says what another said, in the same order."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._answers = iter([list(call.effects) for call in calls])

    def start(self, now_s: float) -> list[AnyEffect]:
        return next(self._answers)

    def handle(self, now_s: float, *events: AnyEvent) -> list[AnyEffect]:
        return next(self._answers)


def cost_of(recording: Recording, folder: Path, rounds: int = ROUNDS) -> Cost:
    """Record its calls again, each round in a folder of its own. Raises ValueError if there are
    none.
    """
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
    """Record the first `count` calls into a folder: what each takes longer for it, us."""
    calls, opening = recording.calls[:count], recording.opening
    with recording_into(folder):
        noted = recorded(
            Echo(calls), recording.process, opening.made, opening.run_id, opening.deployment
        )
    bare_us = times_us(Echo(calls), calls, apart_s)
    return [new - bare for new, bare in zip(times_us(noted, calls, apart_s), bare_us, strict=True)]


def times_us(role: RecordedRole, calls: Sequence[Call], apart_s: float) -> list[float]:
    """How long each call takes, with a pause before it."""
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
    """Roles that are made meanwhile are recorded there."""
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
    """Record a server that answers so many requests."""
    with serving(environment={RECORD: str(folder)}) as running:
        asyncio.run(run_load(running.address, bodies(num_requests), CONCURRENCY))


def table(costs: Sequence[Cost]) -> Table:
    """By process."""
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
    """In short."""
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
