"""Test the host: every kind of effect reaches its target and returns as an event; errors end the
host, signals stop it.
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from hadal.comm.mesh.refusals import Refusals
from hadal.core.handshake import key_of
from hadal.core.messages.generation import Deliver
from hadal.core.messages.pools import Freed, Pull
from hadal.core.messages.questions import Audit, AuditRequest
from hadal.core.messages.ranks import RankStep, RankUp
from hadal.core.messages.units import Cancel, KvLease, Refused, UnitReport
from hadal.core.plans import (
    Formed,
    FormPlan,
    KvPulled,
    PrefillPlan,
    Source,
    Staged,
    StagePlan,
    StepDone,
    StepPlan,
)
from hadal.core.seams import Effect, Event, Execute, Form, Send, Stage, Tick, WakeAt
from hadal.model.experts import Fetch, Overtaken
from hadal.runtime.host import UnitHost
from hadal.runtime.process.clock import LiveClock
from hadal.runtime.process.process import EXIT_STUCK
from hadal.runtime.side_work import SideParts
from hadal.runtime.transfer.experts import ExpertTransfer
from hadal.runtime.transfer.pool import KvPool, pool_name, remove_shared_memory
from hadal.runtime.transfer.stager import Stager
from hadal.runtime.wire import ZmqWire
from tests.stored import stored_mlp
from tests.unit.runtime.test_compute import Clock
from tests.waiting import DEADLINE_S, join, wait_until

RUN = f"testhost{os.getpid()}"
SHAPE = (20, 4, 64, 1024)
"""Pool shape with 1 MiB blocks, so that both ways of copying are used."""


@dataclass
class Script:
    """Leader that records its events and answers each as the test wants."""

    answer: Callable[[float, Event], list[Effect]] = lambda now_s, event: []
    events: list[Event] = field(default_factory=list)

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        self.events.append(event)
        return self.answer(now_s, event)


class Runner:
    """Runner with steps that take no time and draw their own number."""

    def execute(self, plan: StepPlan | FormPlan) -> StepDone | Formed:
        if isinstance(plan, FormPlan):
            return Formed(plan.formation, None)
        return StepDone(plan.step_id, (0,), (plan.step_id,), {}, 0.0)

    def abort(self) -> None:
        return None

    def close(self) -> None:
        return None


@dataclass
class World:
    """Hosted leader, and its front."""

    script: Script
    host: UnitHost
    front: ZmqWire
    pool: KvPool
    source: KvPool
    failure: BaseException | None = None
    thread: threading.Thread | None = None

    def run(self, *first: Effect) -> None:
        """Host the leader in a thread until a test stops it."""

        def run() -> None:
            try:
                self.host.run(first)
            except Exception as error:
                self.failure = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def join(self) -> None:
        if self.thread is not None:
            join(self.thread)


@contextmanager
def hosted(host: UnitHost, *first: Effect) -> Iterator[None]:
    """Run a host in a thread until the block ends."""
    thread = threading.Thread(target=lambda: host.run(first))
    thread.start()
    yield
    host.stop()
    join(thread)
    host.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hadal-w-") as name:
        yield Path(name)


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="hadal-w-") as name:
        script = Script()
        pool = KvPool.create(pool_name(RUN, "decode-0", "1"), SHAPE)
        source = KvPool.create(pool_name(RUN, "prefill-0", "1"), SHAPE)
        wire, front = ZmqWire("decode-0", Path(name)), ZmqWire("front", Path(name))
        host = UnitHost(script, Runner(), wire, SideParts(pool), LiveClock(), step_deadline_s=60)
        made = World(script, host, front, pool, source)
        yield made
        host.stop()
        made.join()
        host.close()
        front.close()
        remove_shared_memory(RUN)


def test_steps_come_back_and_the_next_follows(world: World) -> None:
    def answer(now_s: float, event: Event) -> list[Effect]:
        if not isinstance(event, StepDone) or event.step_id == 200:
            return []
        if event.step_id < 200:
            return [Execute((PrefillPlan(event.step_id + 2, ()),))]
        return [Send("front", Cancel("done", 0))]

    world.script.answer = answer
    world.run(Execute((PrefillPlan(0, ()),)), Execute((PrefillPlan(1, ()),)))
    assert world.front.receive(DEADLINE_S) == [Cancel("done", 0)]
    assert [event.step_id for event in world.script.events if isinstance(event, StepDone)] == list(
        range(202)
    )
    world.host.stop()
    world.join()
    assert world.failure is None


def test_messages_reach_the_leader_and_its_answers_the_front(world: World) -> None:
    world.script.answer = lambda now_s, event: (
        [Send("front", Audit("decode-0", event.reply_id, 0, 0, ()))]
        if isinstance(event, AuditRequest)
        else []
    )
    world.run()
    for number in range(20):
        world.front.send("decode-0", AuditRequest(number))
        assert world.front.receive(DEADLINE_S) == [Audit("decode-0", number, 0, 0, ())]


def test_what_it_listens_for_is_told_before_the_first_refusal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter that starts at 1 shows no rise to a monitor."""
    monkeypatch.setattr("hadal.runtime.host._TELL_REFUSED_S", 0.01)
    refusals = Refusals("kv", "decode-0")
    world.run()
    assert world.front.receive(DEADLINE_S) == [Refused("decode-0", {"kv": 0})]
    refusals.count("no proof")
    assert world.front.receive(DEADLINE_S) == [Refused("decode-0", {"kv": 1})]


@pytest.mark.parametrize("num_blocks", [1, 10])
def test_a_pull_fills_the_blocks_and_says_so(world: World, num_blocks: int) -> None:
    world.source.cache[:] = bytes([7]) * len(world.source.cache)
    lease = KvLease(
        world.source.name, tuple(range(1, 1 + num_blocks)), (0,) * num_blocks, 64 * num_blocks
    )
    void = KvLease(world.source.name, (1,), (5,), 64)
    into = tuple(range(4, 4 + num_blocks))
    outcomes: list[KvPulled] = []

    def answer(now_s: float, event: Event) -> list[Effect]:
        if isinstance(event, KvPulled):
            outcomes.append(event)
            if len(outcomes) == 2:
                return [Send("front", Cancel("both", 0))]
        return []

    world.script.answer = answer
    world.run(Pull("good", 3, lease, into), Pull("void", 4, void, (18,)))
    assert world.front.receive(DEADLINE_S) == [Cancel("both", 0)]
    said = sorted((o.request_id, o.attempt, o.error is None) for o in outcomes)
    assert said == [("good", 3, True), ("void", 4, False)]
    size = world.pool.block_bytes
    assert bytes(world.pool.cache[4 * size : (4 + num_blocks) * size]) == bytes([7]) * (
        num_blocks * size
    )
    assert bytes(world.pool.cache[18 * size : 19 * size]) == bytes(size)


def test_freed_blocks_get_a_new_generation(world: World) -> None:
    world.run(Freed((3, 5)), Freed((5,)), Send("front", Cancel("freed", 0)))
    assert world.front.receive(DEADLINE_S)
    assert world.pool.versions.tolist()[:7] == [0, 0, 0, 1, 0, 2, 0]


def test_it_wakes_when_asked_and_a_later_wish_replaces_an_earlier(world: World) -> None:
    clock = LiveClock()
    ticks: list[float] = []

    def answer(now_s: float, event: Event) -> list[Effect]:
        if isinstance(event, Tick):
            ticks.append(now_s)
            return [WakeAt(now_s + 0.05)] if len(ticks) < 3 else [Send("front", Cancel("third", 0))]
        return []

    world.script.answer = answer
    wished_s = clock.now() + 0.1
    world.run(WakeAt(wished_s + 2 * DEADLINE_S), WakeAt(wished_s))
    assert world.front.receive(DEADLINE_S) == [Cancel("third", 0)]
    assert ticks[0] >= wished_s
    assert ticks[1] - ticks[0] >= 0.05


def test_the_load_carries_the_measured_overhead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("hadal.runtime.compute.time", clock)

    def answer(now_s: float, event: Event) -> list[Effect]:
        if isinstance(event, StepDone) and event.step_id < 50:
            clock.now_s += 0.002  # A leader this slow keeps its runner waiting.
            return [Execute((PrefillPlan(event.step_id + 1, ()),))]
        return [Send("front", UnitReport("decode-0", "1", 9, 0, 0, 8, 0, 51, 1.0, 77.0))]

    world.script.answer = answer
    world.run(Execute((PrefillPlan(0, ()),)))
    (load,) = world.front.receive(DEADLINE_S)
    assert isinstance(load, UnitReport)
    assert load.overhead_ms == pytest.approx(2.0, rel=0.01)
    assert load.step_ms == 1.0


def test_the_leader_of_other_ranks_has_no_runner_and_no_pool(folder: Path) -> None:
    script = Script()
    wire, rank = ZmqWire("decode-0", folder), ZmqWire("decode-0.0", folder)
    step = RankStep(1, PrefillPlan(0, ()))
    script.answer = lambda now_s, event: (
        [Send("decode-0.0", step)] if isinstance(event, RankUp) else []
    )
    with hosted(UnitHost(script, None, wire, SideParts(), LiveClock(), step_deadline_s=60)):
        rank.send("decode-0", RankUp("decode-0", 0, "e", "127.0.0.1", 1, "pool"))
        assert rank.receive(DEADLINE_S) == [step]
    with pytest.raises(TypeError, match="Freed"):
        UnitHost(script, None, rank, SideParts(), LiveClock(), step_deadline_s=60).run(
            [Freed((1,))]
        )
    rank.close()


def test_a_generation_is_formed_by_the_runner_and_its_outcome_handled(world: World) -> None:
    world.script.answer = lambda now_s, event: (
        [Send("front", Cancel("formed", 0))] if isinstance(event, Formed) else []
    )
    world.run(Execute((PrefillPlan(0, ()),)), Form(FormPlan(3, 2, (), b"", 0)))
    assert world.front.receive(DEADLINE_S) == [Cancel("formed", 0)]
    assert [event.formation for event in world.script.events if isinstance(event, Formed)] == [3]


def test_layers_are_staged_beside_the_steps_until_a_generation_voids_them(folder: Path) -> None:
    held = stored_mlp(*torch.full((2, 2, 3), 2.0), torch.full((3, 2), 3.0))
    begun, go, voided = threading.Event(), threading.Event(), threading.Event()

    def stage(plan: StagePlan, fetch: Fetch, rest: Callable[[], None]) -> Staged:
        if plan.stage_id == 1:
            begun.set()
            assert go.wait(DEADLINE_S)
        got = held.empty_like()
        try:
            rest()
            num_received = sum(fetch(plan.layer, source, got) for source in plan.sources)
        except Overtaken as over:
            voided.set()
            return Staged(plan.formation, plan.stage_id, plan.layer, str(over))
        assert all(torch.equal(a, b) for a, b in zip(got.parts, held.parts, strict=True))
        return Staged(plan.formation, plan.stage_id, plan.layer, None, num_received)

    def answer(now_s: float, event: Event) -> list[Effect]:
        if isinstance(event, StepDone):
            assert begun.wait(DEADLINE_S), (
                "the step did not wait for the stage, nor the stage for the step"
            )
            return [Form(FormPlan(2, 2, (), b"", 0))]
        if isinstance(event, Formed):
            go.set()
            assert voided.wait(DEADLINE_S), "the generation did it, not the next stage"
            return [Stage(StagePlan(2, 2, 0, (), sources))]
        return [Send("front", Cancel("staged", 0))] if isinstance(event, Staged) else []

    threads = set(threading.enumerate())
    wire = ExpertTransfer("127.0.0.1", key_of(b"a run", "experts"), lambda layer, expert: held)
    sources = (Source(7, "127.0.0.1", wire.port),)
    script, front = Script(answer), ZmqWire("front", folder)
    host = UnitHost(
        script,
        Runner(),
        ZmqWire("decode-0.0", folder),
        SideParts(make_stager=lambda wake: Stager(stage, wire, wake)),
        LiveClock(),
        step_deadline_s=60,
    )
    with hosted(host, Stage(StagePlan(1, 1, 0, (), sources)), Execute((PrefillPlan(0, ()),))):
        said = list(front.receive(DEADLINE_S))
        while len(said) < 2:
            said += front.receive(DEADLINE_S)
            assert said[1:], "no more came"
        assert said == [Refused("decode-0.0", {"experts": 0}), Cancel("staged", 0)]
    front.close()
    assert [event for event in script.events if isinstance(event, Staged)] == [
        Staged(2, 2, 0, None, 1)
    ]
    assert set(threading.enumerate()) <= threads


def test_without_a_stager_nothing_can_be_staged(world: World) -> None:
    world.run(Stage(StagePlan(1, 1, 0, (), ())))
    world.join()
    assert isinstance(world.failure, TypeError)


def with_news(folder: Path, script: Script, news: Callable[[float], list[Effect]]) -> UnitHost:
    """Return a host of a small pool that passes news to its leader."""
    pool = KvPool.create(pool_name(RUN, "decode-0", "2"), (2, 1, 64, 4))
    wire = ZmqWire("decode-0", folder)
    return UnitHost(
        script, Runner(), wire, SideParts(pool), LiveClock(), step_deadline_s=60, news=news
    )


def test_news_come_before_the_results_they_explain(folder: Path) -> None:
    order: list[str] = []
    script = Script(lambda now_s, event: order.append(type(event).__name__) or [])
    host = with_news(folder, script, lambda now_s: order.append("news") or [])
    with hosted(host, Execute((PrefillPlan(0, ()),))):
        wait_until(lambda: "StepDone" in order, "the step is handled")
    assert order[: order.index("StepDone") + 1][-2:] == ["news", "StepDone"]


def test_a_roles_time_never_goes_back(folder: Path) -> None:
    """News are passed before a tick, and a tick has the time of its own delivery."""
    told_s: list[float] = []

    def answer(now_s: float, event: Event) -> list[Effect]:
        told_s.append(now_s)
        return [WakeAt(now_s + 0.001)] if isinstance(event, Tick) else []

    host = with_news(folder, Script(answer), lambda now_s: told_s.append(now_s) or [])
    with hosted(host, WakeAt(0.0)):
        wait_until(lambda: len(told_s) >= 20, "much is told")
    assert told_s == sorted(told_s)


def test_what_a_leader_raises_ends_the_host(world: World) -> None:
    def answer(now_s: float, event: Event) -> list[Effect]:
        raise RuntimeError("a bug")

    world.script.answer = answer
    world.run()
    world.front.send("decode-0", AuditRequest(1))
    world.join()
    assert isinstance(world.failure, RuntimeError)


def test_an_effect_that_is_not_a_leaders_ends_the_host(world: World) -> None:
    world.run(Deliver("r", ()))
    world.join()
    assert isinstance(world.failure, TypeError)


@pytest.mark.promise(
    "A leader's heartbeat is missing for unit_timeout_s, or a step exceeds its deadline: "
    "the process is ended"
)
def test_a_stuck_step_ends_the_process(folder: Path) -> None:
    done = run_stuck(str(folder))
    remove_shared_memory(RUN)  # The child removes nothing.
    assert done.returncode == EXIT_STUCK
    assert b"its deadline is" in done.stderr
    assert b"in execute" in done.stderr, "it shows where"


def run_stuck(folder: str) -> subprocess.CompletedProcess[bytes]:
    """Run a host with a step that does not end; return the finished process."""
    code = f"""
import time
from pathlib import Path
from hadal.core.plans import PrefillPlan
from hadal.core.seams import Execute
from hadal.runtime.process.clock import LiveClock
from hadal.runtime.host import UnitHost
from hadal.runtime.transfer.pool import KvPool, pool_name
from hadal.runtime.side_work import SideParts
from hadal.runtime.wire import ZmqWire

class Stuck:
    def execute(self, plan):
        time.sleep(600)

class Silent:
    def handle(self, now_s, event):
        return []

pool = KvPool.create(pool_name({RUN!r}, "stuck-0", "1"), (2, 1, 64, 4))
wire = ZmqWire("stuck-0", Path({folder!r}))
host = UnitHost(Silent(), Stuck(), wire, SideParts(pool), LiveClock(), step_deadline_s=0.2)
host.run([Execute((PrefillPlan(0, ()),))])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
        env=environment,
    )
