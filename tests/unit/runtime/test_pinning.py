"""Test that each thread of a kernel team is pinned to a core, and unpinned where other processes need it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from hadal.runtime import pinning
from hadal.runtime.core_use import CoreUse
from hadal.runtime.cores import allowed_cores
from hadal.runtime.pinning import LOOK_S, TAKEN, PinnedTeam

two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="threads need two cores to be bound"
)


class Computing:
    """Team of two threads on cores with a load set by the test; the test's thread is its maker."""

    def __init__(self) -> None:
        self.told: list[bool] = []
        self.member = 0
        self.taken: float | None = 0.0
        self._is_over = threading.Event()
        self.pinned = PinnedTeam(lambda allowed: allowed[:2], lambda: self)
        self._begun = threading.Semaphore(0)
        self._running = [threading.Thread(target=target) for target in (self._work, self._call)]
        for thread in self._running:
            thread.start()
            assert self._begun.acquire(timeout=10.0)

    # Interface of a team.
    @property
    def threads(self) -> tuple[int, ...]:
        return (self.member,)

    def set_pinned(self, is_pinned: bool) -> None:
        self.told.append(is_pinned)

    # Interface for tests.
    @property
    def may_use(self) -> list[set[int]]:
        return [os.sched_getaffinity(thread) for thread in self._each]

    def end(self) -> None:
        self._is_over.set()
        for thread in self._running:
            thread.join(10.0)

    @property
    def _each(self) -> tuple[int, int]:
        return self.caller, self.member

    def _work(self) -> None:
        self.member = threading.get_native_id()
        self._begun.release()
        self._is_over.wait(60.0)

    def _call(self) -> None:
        self.caller = threading.get_native_id()
        self.pinned.enter(0.0)
        self._begun.release()
        self._is_over.wait(60.0)


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    made: list[Computing] = []
    monkeypatch.setattr(
        CoreUse, "by_others", lambda use, now_s, cores: made[0].taken if made else 0.0
    )
    made.append(Computing())
    yield made[0]
    made[0].end()


@two_cores
def test_threads_have_a_core_each_while_others_leave_them(computing: Computing) -> None:
    here = allowed_cores()
    each, anywhere = [{core} for core in here[:2]], [set(here)] * 2
    assert (computing.may_use, computing.told) == (each, [True])
    shares = (TAKEN, TAKEN + 0.01, 1.0, TAKEN + 0.01, TAKEN, 0.0)
    for number, computing.taken in enumerate(shares, start=1):
        computing.pinned.look(LOOK_S * number)
        assert computing.may_use == (anywhere if computing.taken > TAKEN else each)
    assert computing.told == [True, False, True]
    computing.taken = 1.0
    computing.pinned.look(LOOK_S * (len(shares) + 0.5))  # The next look is not due yet.
    assert computing.may_use == each


@two_cores
def test_threads_of_a_process_whose_cores_change_are_placed_anew(
    computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = allowed_cores()
    monkeypatch.setattr(pinning, "allowed_cores", lambda thread: here[:1])
    computing.pinned.look(LOOK_S)
    assert (computing.may_use, computing.told[-1]) == ([{here[0]}] * 2, False)
    monkeypatch.setattr(pinning, "allowed_cores", lambda thread: here[::-1])
    computing.pinned.look(2 * LOOK_S)
    assert (computing.may_use, computing.told[-1]) == ([{core} for core in here[::-1][:2]], True)


@two_cores
@pytest.mark.parametrize("gone", ["cores", "counters"])
def test_where_threads_cannot_be_bound_they_run_anywhere(
    computing: Computing, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    if gone == "cores":
        monkeypatch.setattr(pinning, "allowed_cores", lambda thread: (4000, 4001))
    else:
        computing.taken = None
    for number in range(1, 5):
        computing.pinned.look(LOOK_S * number)
        assert computing.told[-1] is False
    assert computing.told.count(True) == 1


@two_cores
def test_a_thread_that_a_bound_one_started_runs_anywhere(computing: Computing) -> None:
    started = threading.Event()
    born_bound = threading.Thread(target=lambda: started.wait(60.0))
    born_bound.start()
    thread, here = born_bound.native_id or 0, allowed_cores()
    os.sched_setaffinity(thread, {here[0]})
    computing.pinned.look(LOOK_S)
    assert os.sched_getaffinity(thread) == set(here)
    started.set()
    born_bound.join(10.0)
