"""The threads of a kernel team have a core each, and are let go where others want it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hadal.runtime import pinning
from hadal.runtime.cores import allowed_cores
from hadal.runtime.pinning import FREE_S, LOOK_S, PinnedTeam

two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="threads need two cores to be bound"
)


class Computing:
    """A team of two threads, whose waits a test writes; this one's maker is the test's thread."""

    def __init__(self, tasks: Path) -> None:
        self.told: list[bool] = []
        self.member = 0
        self._tasks, self._is_over = tasks, threading.Event()
        self.pinned = PinnedTeam(lambda allowed: allowed[:2], lambda: self)
        self._begun = threading.Semaphore(0)
        self._running = [threading.Thread(target=target) for target in (self._work, self._call)]
        for thread in self._running:
            thread.start()
            assert self._begun.acquire(timeout=10.0)

    # What a team tells and hears.
    @property
    def threads(self) -> tuple[int, ...]:
        return (self.member,)

    def set_pinned(self, is_pinned: bool) -> None:
        self.told.append(is_pinned)

    # What a test does.
    def wait(self, waited_s: float) -> None:
        """Both threads waited so long for a core in all."""
        for thread in self._each:
            self._write(thread, waited_s)

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

    def _write(self, thread: int, waited_s: float) -> None:
        (self._tasks / str(thread)).mkdir(exist_ok=True)
        (self._tasks / str(thread) / "schedstat").write_text(f"5 {int(1e9 * waited_s)} 7\n")

    def _work(self) -> None:
        self.member = threading.get_native_id()
        self._write(self.member, 0.0)
        self._begun.release()
        self._is_over.wait(60.0)

    def _call(self) -> None:
        self.caller = threading.get_native_id()
        self._write(self.caller, 0.0)
        self.pinned.enter(0.0)
        self._begun.release()
        self._is_over.wait(60.0)


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Computing]:
    monkeypatch.setattr(pinning, "_TASKS", tmp_path)
    made = Computing(tmp_path)
    yield made
    made.end()


@two_cores
def test_threads_get_a_core_each_and_give_way_for_ever_longer(computing: Computing) -> None:
    here = allowed_cores()
    each = [{core} for core in here[:2]]
    assert (computing.may_use, computing.told) == (each, [True])
    now_s, waited_s, free_s = 0.0, 0.0, []
    for _ in range(3):
        now_s, waited_s = now_s + LOOK_S, waited_s + 0.5 * LOOK_S
        computing.wait(waited_s)
        computing.pinned.look(now_s)
        assert computing.may_use == [set(here)] * 2
        began_s = now_s
        while computing.may_use != each:
            now_s += LOOK_S
            computing.pinned.look(now_s)
        free_s.append(now_s - began_s)
    assert free_s == [FREE_S, 2 * FREE_S, 4 * FREE_S]
    assert computing.told == [True, False] * 3 + [True]
    now_s += LOOK_S
    computing.pinned.look(now_s)  # Nothing was waited for: all is as at first.
    computing.wait(waited_s + 0.5 * LOOK_S)
    computing.pinned.look(now_s + LOOK_S)
    computing.pinned.look(now_s + LOOK_S + FREE_S)
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
    computing.pinned.look(LOOK_S + FREE_S)
    assert (computing.may_use, computing.told[-1]) == ([{core} for core in here[::-1][:2]], True)


@two_cores
@pytest.mark.parametrize("gone", ["cores", "schedstat"])
def test_where_threads_cannot_be_bound_they_run_anywhere_and_it_is_tried_seldom(
    computing: Computing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: str
) -> None:
    here, asked = allowed_cores(), []

    def allowed(thread: int) -> tuple[int, ...]:
        asked.append(thread)
        return here if gone == "schedstat" else (4000, 4001)

    monkeypatch.setattr(pinning, "allowed_cores", allowed)
    if gone == "schedstat":
        monkeypatch.setattr(pinning, "_TASKS", tmp_path / "none")
    computing.pinned.look(LOOK_S)
    assert computing.told[-1] is False
    for number in range(1, 200):
        computing.pinned.look(LOOK_S * number)
    assert len(asked) < 10
    assert computing.told.count(True) == 1


@two_cores
def test_a_thread_that_a_bound_one_started_runs_anywhere(computing: Computing) -> None:
    started = threading.Event()
    born_bound = threading.Thread(target=lambda: started.wait(60.0))
    born_bound.start()
    thread, here = born_bound.native_id or 0, allowed_cores()
    os.sched_setaffinity(thread, {here[0]})
    (pinning._TASKS / str(thread)).mkdir()
    computing.pinned.look(LOOK_S)
    assert os.sched_getaffinity(thread) == set(here)
    started.set()
    born_bound.join(10.0)
