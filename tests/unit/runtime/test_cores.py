"""Where the threads of a kernel team run: chosen, pinned, let go where others want the cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hadal.core.config import Deployment
from hadal.runtime import cores
from hadal.runtime.cores import FREE_S, LOOK_S, Cores, allowed_cores, cores_of


def deployment(threads: int, ranks: int = 1, **changes: object) -> Deployment:
    plain = Deployment(device="cpu")
    prefill = msgspec.structs.replace(plain.prefill, threads=threads)
    decode = msgspec.structs.replace(
        plain.decode, threads=threads, ranks=ranks, ranks_per_node=ranks
    )
    return msgspec.structs.replace(plain, prefill=prefill, decode=decode, **changes)


@pytest.mark.parametrize(
    ("threads", "ranks", "process", "chosen"),
    [
        (2, 1, "prefill-0", (0, 1)),
        (2, 1, "decode-0", (2, 3)),
        (4, 1, "decode-0", (0, 1, 2, 3)),
        (3, 1, "decode-0", (3, 0, 1)),
        (1, 2, "decode-0.0", (1,)),
        (1, 2, "decode-0.1", (2,)),
        (5, 1, "decode-0", ()),
    ],
)
def test_ranks_of_a_host_take_cores_one_behind_the_other(
    threads: int, ranks: int, process: str, chosen: tuple[int, ...]
) -> None:
    assert cores_of(deployment(threads, ranks), process, (0, 1, 2, 3)) == chosen


def test_a_rank_on_a_gpu_takes_none() -> None:
    on_gpu = msgspec.structs.replace(deployment(2), device="cuda")
    assert cores_of(on_gpu, "decode-0", (0, 1, 2, 3)) == ()


def test_of_each_physical_core_one_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for core in range(4):
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 2},{core % 2 + 2}\n")
    monkeypatch.setattr(cores, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert allowed_cores() == (0, 1, 2, 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 3})
    assert allowed_cores() == (0, 3, 2)


class Team:
    """A computing thread with another member, whose waits a test writes."""

    def __init__(self, folder: Path) -> None:
        self.told: list[bool] = []
        self.threads: list[int] = []
        self._folder, self._is_over = folder, threading.Event()
        self.cores = Cores(lambda allowed: allowed[:2], self._members, self.told.append)
        self._running = [threading.Thread(target=self._caller), threading.Thread(target=self._run)]
        self._known = threading.Barrier(3)
        for thread in self._running:
            thread.start()
        self._known.wait(10.0)
        self.wait(0.0)

    def wait(self, waited_s: float) -> None:
        """Both members waited so long in all."""
        for thread in self.threads:
            (self._folder / str(thread)).mkdir(exist_ok=True)
            (self._folder / str(thread) / "schedstat").write_text(f"5 {int(1e9 * waited_s)} 7\n")

    @property
    def allowed(self) -> list[set[int]]:
        return [os.sched_getaffinity(thread) for thread in self.threads]

    def end(self) -> None:
        self._is_over.set()
        for thread in self._running:
            thread.join(10.0)

    def _members(self) -> list[int]:
        return self.threads[1:]

    def _run(self) -> None:
        self.threads.append(threading.get_native_id())
        self._known.wait(10.0)
        self._is_over.wait(60.0)

    def _caller(self) -> None:
        while not self.threads:
            pass
        self.threads.insert(0, threading.get_native_id())
        self.cores.enter()
        self._known.wait(10.0)
        self._is_over.wait(60.0)


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Team]:
    monkeypatch.setattr(cores, "_TASKS", tmp_path)
    made = Team(tmp_path)
    yield made
    made.end()


two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="members of a team need two cores to be pinned"
)


@two_cores
def test_members_get_a_core_each_and_give_way_for_ever_longer(team: Team) -> None:
    here = allowed_cores()
    team.cores.look(0.0)
    each = [{core} for core in here[:2]]
    assert (team.allowed, team.told) == (each, [True])
    now_s, waited_s, free_s = 0.0, 0.0, []
    for _ in range(3):
        now_s, waited_s = now_s + LOOK_S, waited_s + 0.5 * LOOK_S
        team.wait(waited_s)
        team.cores.look(now_s)
        assert team.allowed == [set(here)] * 2
        began_s = now_s
        while team.allowed != each:
            now_s += LOOK_S
            team.wait(waited_s)
            team.cores.look(now_s)
        free_s.append(now_s - began_s)
    assert free_s == [FREE_S, 2 * FREE_S, 4 * FREE_S]
    assert team.told == [True, False] * 3 + [True]
    now_s += LOOK_S
    team.cores.look(now_s)  # Nothing was waited for: all is as at first.
    team.wait(waited_s + 0.5 * LOOK_S)
    team.cores.look(now_s + LOOK_S)
    team.cores.look(now_s + LOOK_S + FREE_S)
    assert team.allowed == each


@two_cores
def test_a_process_whose_cores_change_is_placed_anew(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = allowed_cores()
    team.cores.look(0.0)
    monkeypatch.setattr(cores, "allowed_cores", lambda: here[:1])
    team.cores.look(LOOK_S)
    assert team.allowed == [{here[0]}] * 2, "one core for both"
    assert team.told[-1] is False
    monkeypatch.undo()


def test_cores_that_are_gone_meanwhile_are_tried_again_later(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "allowed_cores", lambda: (4000, 4001))
    before = team.allowed
    team.cores.look(0.0)
    assert (team.allowed, team.told) == (before, [])
