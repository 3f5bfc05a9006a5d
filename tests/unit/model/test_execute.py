"""Executing a schedule: order, counts, traces, and progress as other threads see it."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import pytest

from hadal.comm.group import Interval
from hadal.core.plans import TraceEvent
from hadal.model import execute as module
from hadal.model.execute import ComputeProgress, Recorder, execute
from hadal.overlap.plan import DECODE_FIVE, SCHEDULES, SEQUENTIAL, Schedule, order
from tests.waiting import DEADLINE_S, join

NUM_LAYERS = 3


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=str)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_order_is_the_schedules(schedule: Schedule, num_micro_batches: int) -> None:
    ran: list[tuple[int, int, str]] = []

    def run_op(micro_batch: int, layer: int, op: str) -> None:
        ran.append((micro_batch, layer, op))

    execute(schedule, NUM_LAYERS, range(num_micro_batches), run_op)
    in_order = list(order(schedule, NUM_LAYERS, num_micro_batches))
    assert ran == in_order
    ran.clear()
    execute(schedule, NUM_LAYERS, range(num_micro_batches), run_op, first_layer=5)
    assert ran == [(index, 5 + layer, op) for index, layer, op in in_order]


class VirtualLink:
    """Ops and exchanges that take time on a clock of their own; a Recorder reads that clock."""

    def __init__(self, op_s: float, link_s: float) -> None:
        self.now_s = 0.0
        self._op_s, self._link_s = op_s, link_s
        self._posted: dict[tuple[int, str], float] = {}

    def perf_counter(self) -> float:
        return self.now_s

    def run_op(self, micro_batch: int, layer: int, op: str) -> Interval | None:
        key = micro_batch, op.strip(">")
        if op.endswith(">"):
            self._posted[key] = self.now_s
            return None
        if op.startswith(">"):
            interval = Interval(self._posted[key], self._posted.pop(key) + self._link_s)
            self.now_s = max(self.now_s, interval.end_s)
            return interval
        self.now_s += self._op_s
        return None


def test_communication_hides_under_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check waits: sequential steps wait for the link, overlapped ones compute meanwhile."""
    link_s, op_s, waits = 0.004, 0.002, {}
    for schedule in SCHEDULES.values():
        recorder, link = Recorder(rank=5, is_traced=True), VirtualLink(op_s, link_s)
        monkeypatch.setattr(module, "time", link)
        execute(schedule, NUM_LAYERS, range(2), link.run_op, recorder)
        times = {time.op: time for time in recorder.op_times()}
        counted = {op: time.count for op, time in times.items()}
        each = 2 * NUM_LAYERS
        computing = ("attn_in", "attn_core", "gate", "shared", "experts")
        assert counted == dict.fromkeys((*computing, "dispatch", "combine"), each) | {
            "wait": 2 * each,
            "post": 4 * each,
        }
        assert times["experts"].seconds == pytest.approx(each * op_s)
        waits[schedule.name] = times["wait"].seconds
        assert link.now_s == pytest.approx(len(computing) * each * op_s + waits[schedule.name])
        check_lanes(recorder.events, waits[schedule.name])
    assert waits["sequential"] == pytest.approx(2 * each * link_s)
    print(waits)
    assert max(waits["prefill_dual"], waits["decode_five"]) < 0.2 * waits["sequential"]


def check_lanes(events: list[TraceEvent], waited_s: float) -> None:
    assert {event.rank for event in events} == {5}
    found = Counter(event.lane for event in events if event.lane == "link")
    assert found == {"link": 4 * NUM_LAYERS}
    compute = sorted(
        (e for e in events if e.lane in ("compute", "wait")), key=lambda e: (e.start_s, e.end_s)
    )
    for before, after in itertools.pairwise(compute):
        assert before.end_s <= after.start_s, "one thread does one thing at a time"
    assert sum(e.end_s - e.start_s for e in events if e.lane == "wait") == pytest.approx(waited_s)


def test_nothing_was_sent() -> None:
    """Execute a step that sends nothing, as on a single rank: exchanges count, but take 0 s."""
    recorder = Recorder(is_traced=True)
    execute(DECODE_FIVE, 1, range(1), lambda micro_batch, layer, op: None, recorder)
    times = {time.op: time for time in recorder.op_times()}
    assert (times["dispatch"].count, times["dispatch"].seconds) == (1, 0.0)
    assert times["wait"].seconds == 0.0
    assert {event.lane for event in recorder.events} == {"compute"}


def test_an_untraced_step_keeps_no_events() -> None:
    recorder = Recorder()
    execute(SEQUENTIAL, 1, range(1), lambda micro_batch, layer, op: None, recorder)
    assert recorder.events == []


def test_progress_is_seen_from_another_thread() -> None:
    """Read progress from a thread: `is_waiting` only while an op waits for a peer."""
    progress, arrived, in_op = ComputeProgress(), threading.Event(), threading.Event()
    seen: list[tuple[str, bool]] = []

    def run_op(micro_batch: int, layer: int, op: str) -> None:
        seen.append((op, progress.is_waiting))
        if op == ">dispatch":
            in_op.set()
            assert arrived.wait(DEADLINE_S)

    thread = threading.Thread(
        target=execute, args=(SEQUENTIAL, 1, range(1), run_op, Recorder(progress))
    )
    thread.start()
    try:
        assert in_op.wait(DEADLINE_S)
        assert (progress.num_ops, progress.is_waiting) == (5, True)
    finally:
        arrived.set()
        join(thread)
    assert (progress.num_ops, progress.is_waiting) == (9, False)
    assert [op for op, is_waiting in seen if is_waiting] == [">dispatch", ">combine"]


def test_what_an_op_raises_ends_it() -> None:
    recorder = Recorder()

    def run_op(micro_batch: int, layer: int, op: str) -> None:
        if op == "gate":
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        execute(SEQUENTIAL, NUM_LAYERS, range(1), run_op, recorder)
    assert {time.op for time in recorder.op_times()} == {"attn_in", "attn_core"}
