"""Execution of a schedule: run the ops of all layers and micro-batches in its order, and time them.

Independent of tensors: the caller executes ops in `run_op(micro_batch, layer, op)`. Op x> starts an
exchange x (dispatch or combine). Op >x finishes it, and returns the interval in which the exchange
was on the link. The time of >x until the last byte arrives counts as wait:

    compute  | dispatch> |  another micro-batch's ops  | >dispatch          |
    link           |############### dispatch ################|
    wait                                               |#####|              exposed; the rest of >x, and x>: post
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from hadal.comm.group import Interval
from hadal.core.plans import OpTime, TraceEvent
from hadal.overlap.plan import (
    COMBINE,
    COMBINE_FINISH,
    COMBINE_START,
    DISPATCH,
    DISPATCH_FINISH,
    DISPATCH_START,
    Schedule,
    order,
)

M = TypeVar("M")
RunOp = Callable[[M, int, str], Interval | None]
"""(micro-batch, layer, op) -> link interval if a finishing op's exchange sent anything; else None.
"""

LINK_OPS = {DISPATCH_FINISH: DISPATCH, COMBINE_FINISH: COMBINE}
_STARTS = (DISPATCH_START, COMBINE_START)


@dataclass(slots=True)
class ComputeProgress:
    """Progress of the computing thread, for other threads to read."""

    num_ops: int = 0
    """Number of ops begun since the process started."""
    is_waiting: bool = False
    """True while the thread runs an op that may wait for peers."""


class Recorder:
    """Times of one step: sums per kind of op and, if traced, an event per op."""

    def __init__(
        self, progress: ComputeProgress | None = None, *, rank: int = 0, is_traced: bool = False
    ) -> None:
        self.events: list[TraceEvent] = []
        self._progress = progress if progress is not None else ComputeProgress()
        self._rank = rank
        self._is_traced = is_traced
        self._counts: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._start_s = 0.0
        self._link_free_s = 0.0
        """End of the last exchange on the link, seconds on `time.perf_counter`; 0 before one."""

    def begin(self, op: str) -> None:
        self._progress.is_waiting = op in LINK_OPS
        self._progress.num_ops += 1
        self._start_s = time.perf_counter()

    def end(
        self, op: str, micro_batch: int = 0, layer: int = 0, interval: Interval | None = None
    ) -> None:
        """Record the op that began last. `interval`: time in which its exchange was on the link."""
        start_s, end_s = self._start_s, time.perf_counter()
        self._progress.is_waiting = False
        if op in LINK_OPS:
            link_op = LINK_OPS[op]
            # Without peers, or in a dense layer, nothing was sent: count the op with 0 s.
            arrived_s = start_s if interval is None else min(max(interval.end_s, start_s), end_s)
            if interval is not None:
                # Do not count the time in which an earlier exchange still used the link.
                self._add(
                    link_op, max(0.0, interval.end_s - max(interval.start_s, self._link_free_s))
                )
                self._link_free_s = max(interval.end_s, self._link_free_s)
            else:
                self._add(link_op, 0.0)
            self._add("wait", arrived_s - start_s)
            self._add("post", end_s - arrived_s)
            if self._is_traced:
                if interval is not None:
                    self._note(
                        "link", link_op, micro_batch, layer, interval.start_s, interval.end_s
                    )
                if arrived_s > start_s:
                    self._note("wait", op, micro_batch, layer, start_s, arrived_s)
            start_s = arrived_s
        else:
            self._add("post" if op in _STARTS else op, end_s - start_s)
        if self._is_traced:
            self._note("compute", op, micro_batch, layer, start_s, end_s)

    @contextmanager
    def whole(self, op: str) -> Iterator[Recorder]:
        """Count all ops recorded on the yielded recorder as one op, but trace each of them."""
        self.begin(op)
        inner = Recorder(self._progress, rank=self._rank, is_traced=self._is_traced)
        yield inner
        self.events += inner.events
        self.end(op)

    def op_times(self) -> tuple[OpTime, ...]:
        return tuple(OpTime(op, count, self._seconds[op]) for op, count in self._counts.items())

    def _add(self, op: str, seconds: float) -> None:
        self._counts[op] = self._counts.get(op, 0) + 1
        self._seconds[op] = self._seconds.get(op, 0.0) + seconds

    def _note(
        self, lane: str, op: str, micro_batch: int, layer: int, start_s: float, end_s: float
    ) -> None:
        self.events.append(TraceEvent(self._rank, lane, op, micro_batch, layer, start_s, end_s))


def execute(
    schedule: Schedule,
    num_layers: int,
    micro_batches: Sequence[M],
    run_op: RunOp[M],
    recorder: Recorder | None = None,
    first_layer: int = 0,
) -> None:
    """Run all ops of `num_layers` layers from `first_layer` on, on one or two micro-batches. An
    exception of an op ends the run and is passed on.
    """
    recorder = recorder if recorder is not None else Recorder()
    for index, offset, op in order(schedule, num_layers, len(micro_batches)):
        layer = first_layer + offset
        recorder.begin(op)
        recorder.end(op, index, layer, run_op(micro_batches[index], layer, op))
