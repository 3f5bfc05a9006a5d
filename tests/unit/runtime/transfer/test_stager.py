"""Test the stage thread: plans run in order, and each is answered once unless a newer formation or the
end of the process voids the plan.

The wire is real; the stager fetches from itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from hadal.core.handshake import key_of
from hadal.core.plans import Source, Staged, StagePlan
from hadal.model.experts import Fetch, Overtaken
from hadal.runtime.transfer.experts import ExpertTransfer
from hadal.runtime.transfer.stager import MAX_WAITING, Stager
from hadal.runtime.worker import NICE
from tests.stored import stored_mlp
from tests.waiting import DEADLINE_S, wait_until

HOST = "127.0.0.1"
HELD = stored_mlp(*torch.full((2, 32, 192), 2.0), torch.full((192, 32), 3.0))


class Store:
    """Store that fetches a plan's experts into unused memory. The first stage blocks until `go` is
    set.
    """

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.priorities: list[int] = []
        self.got: list[float] = []
        self.go = threading.Event()

    def stage(self, plan: StagePlan, fetch: Fetch, rest: Callable[[], None]) -> Staged:
        self.begun.append(plan.stage_id)
        self.priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if plan.layer == 99:
            raise RuntimeError("a bug")
        assert self.go.wait(DEADLINE_S)
        num_received = 0
        for source in plan.sources:
            into = stored_mlp(*torch.zeros(2, 32, 192), torch.zeros(192, 32))
            try:
                rest()
                num_received += fetch(plan.layer, source, into)
            except Overtaken as over:
                return Staged(plan.formation, plan.stage_id, plan.layer, str(over))
            self.got.append(float(sum(part.sum() for part in into.parts)))
        return Staged(plan.formation, plan.stage_id, plan.layer, None, num_received)


class Rank:
    """Stager with its store, and the event that wakes its host."""

    def __init__(self) -> None:
        self.store, self.woken = Store(), threading.Event()
        wire = ExpertTransfer(
            HOST, key_of(b"a run", "experts"), lambda layer, expert: HELD if expert < 100 else None
        )
        self.port = wire.port
        self.stager = Stager(self.store.stage, wire, self.woken.set)

    def plan(
        self, stage_id: int, *, layer: int | None = None, formation: int = 1, experts: int = 2
    ) -> StagePlan:
        sources = tuple(
            Source(99 + expert, HOST, self.port) for expert in range(experts)
        )  # Only expert 99 is held.
        return StagePlan(formation, stage_id, stage_id if layer is None else layer, (), sources)

    def take(self, count: int) -> list[Staged]:
        done: list[Staged] = []
        while len(done) < count:
            assert self.woken.wait(DEADLINE_S)
            self.woken.clear()
            done += self.stager.take()
        assert len(done) == count
        return done


@pytest.fixture
def rank() -> Iterator[Rank]:
    before = set(threading.enumerate())
    made = Rank()
    yield made
    made.store.go.set()
    assert made.stager.stop(DEADLINE_S)
    assert set(threading.enumerate()) <= before


def test_plans_are_staged_in_order_beside_everything_else(rank: Rank) -> None:
    for stage_id in range(4):
        rank.stager.submit(rank.plan(stage_id))
    assert rank.stager.take() == []
    rank.store.go.set()
    assert rank.take(4) == [Staged(1, stage_id, stage_id, None, 1) for stage_id in range(4)]
    assert rank.store.priorities == [min(os.getpriority(os.PRIO_PROCESS, 0) + NICE, 19)] * 4
    assert rank.store.got == [float(sum(part.sum() for part in HELD.parts)), 0.0] * 4


def test_a_new_generation_voids_what_waits_and_breaks_off_what_runs(rank: Rank) -> None:
    for stage_id in range(3):
        rank.stager.submit(rank.plan(stage_id))
    wait_until(lambda: rank.store.begun == [0], "it has begun")
    rank.stager.void(2)
    rank.stager.submit(rank.plan(7))  # Of the old formation, late.
    rank.stager.submit(rank.plan(8, formation=2))
    rank.store.go.set()
    assert rank.take(1) == [Staged(2, 8, 8, None, 1)]
    assert rank.store.begun == [0, 8]
    assert len(rank.store.got) == 2, "nothing was fetched for the old one"


def test_the_plan_of_a_new_generation_voids_as_well_and_an_old_form_does_not(rank: Rank) -> None:
    for stage_id in range(2):
        rank.stager.submit(rank.plan(stage_id))
    rank.stager.submit(rank.plan(5, formation=3))
    rank.stager.void(2)
    rank.store.go.set()
    assert rank.take(1) == [Staged(3, 5, 5, None, 1)]
    assert 1 not in rank.store.begun


def test_a_result_that_came_too_late_is_none(rank: Rank) -> None:
    rank.stager.submit(rank.plan(0, experts=0))  # Only a fetch could interrupt the stage.
    wait_until(lambda: rank.store.begun == [0], "it has begun")
    rank.stager.void(2)
    rank.store.go.set()
    rank.stager.submit(rank.plan(1, formation=2))
    assert rank.take(1) == [Staged(2, 1, 1, None, 1)]


def test_a_plan_that_waits_gives_way_to_the_next_of_its_layer(rank: Rank) -> None:
    rank.stager.submit(rank.plan(0))
    wait_until(lambda: rank.store.begun == [0], "it has begun")
    rank.stager.submit(rank.plan(1, layer=5))
    rank.stager.submit(rank.plan(2, layer=5))
    (refused,) = rank.take(1)
    assert (refused.stage_id, refused.layer, refused.error) == (
        1,
        5,
        "it was superseded by stage 2",
    )
    rank.store.go.set()
    assert [staged.stage_id for staged in rank.take(2)] == [0, 2]


def test_more_than_may_wait_are_refused(rank: Rank) -> None:
    rank.stager.submit(rank.plan(0))
    wait_until(lambda: rank.store.begun == [0], "it has begun")
    for stage_id in range(1, MAX_WAITING + 3):
        rank.stager.submit(rank.plan(stage_id))
    refused = rank.take(2)
    assert [staged.stage_id for staged in refused] == [MAX_WAITING + 1, MAX_WAITING + 2]
    assert all("queued already" in str(staged.error) for staged in refused)
    rank.store.go.set()
    assert [staged.stage_id for staged in rank.take(MAX_WAITING + 1)] == list(
        range(MAX_WAITING + 1)
    )


def test_what_a_store_raises_is_raised_in_the_host(rank: Rank) -> None:
    rank.stager.submit(rank.plan(0, layer=99))
    assert rank.woken.wait(DEADLINE_S)
    with pytest.raises(RuntimeError, match="a bug"):
        rank.stager.take()
    rank.store.go.set()
    rank.stager.submit(rank.plan(1))
    assert rank.take(1) == [Staged(1, 1, 1, None, 1)]


def test_the_end_of_the_process_breaks_off_what_runs() -> None:
    rank = Rank()
    rank.stager.submit(rank.plan(0, experts=100_000))
    rank.stager.submit(rank.plan(1))
    rank.store.go.set()
    wait_until(lambda: len(rank.store.got) > 2, "some were fetched")
    assert rank.stager.stop(DEADLINE_S)
    assert rank.stager.take() == []
    assert rank.store.begun == [0]


def test_a_store_that_does_not_come_back_is_left_behind() -> None:
    rank = Rank()
    rank.stager.submit(rank.plan(0))
    wait_until(lambda: rank.store.begun == [0], "it has begun")
    assert not rank.stager.stop(0.1)
    rank.store.go.set()
    assert rank.stager.stop(DEADLINE_S)
