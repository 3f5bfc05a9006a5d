"""A simulated process: a role, its Runner and its timer; effects are applied as they are live."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Protocol

from hadal.core.cache import num_names
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.generation import Deliver
from hadal.core.messages.pools import Freed, Pull, ReadBlocks, StoreBlocks
from hadal.core.plans import KvPulled, StepPlan
from hadal.core.seams import Effect, Event, Execute, Send, Tick, UsedBlocks, WakeAt
from hadal.lab.sim.world.clock import SimClock
from tests.sim.disk import SimDisk
from tests.sim.engine import DecodeEngine, Pool, PrefillEngine, pull
from tests.sim.starving import Starving


class Role(Protocol):
    def start(self, now_s: float) -> list[Effect]: ...

    def handle(self, now_s: float, event: Event) -> list[Effect]: ...


class Host:
    """One run of a process, from start to end. `pools` maps names to all pools of the world."""

    def __init__(
        self,
        name: str,
        role: Role,
        check: Callable[[], list[str]],
        clock: SimClock,
        random: Random,
        send: Callable[[str, AnyMessage], None],
        *,
        deliver: Callable[[Deliver], None] | None = None,
        pools: dict[str, Pool] | None = None,
        pool_name: str = "",
        engine: PrefillEngine | DecodeEngine | None = None,
        step_s: float = 0.01,
        pull_s: float = 0.02,
        fault_rate: float = 0.0,
        disk: SimDisk | None = None,
    ) -> None:
        self.name = name
        self.role = role
        self.is_alive = True
        self.is_stuck = False
        """True if the process is alive and handles no event."""
        self.life = 0
        self.starving = Starving()
        self.check_every = 1
        """Number of events per check of the role: a check takes longer, the more state the role has."""
        self._num_unchecked = 0
        self._late: deque[Event] = deque()
        """Events that arrived while the process had no processor."""
        self._check = check
        self._clock = clock
        self._random = random
        self._send = send
        self._deliver = deliver
        self._pools = pools if pools is not None else {}
        self.pool_name = pool_name
        self._engine = engine
        self._step_s = step_s
        self._pull_s = pull_s
        self._fault_rate = fault_rate
        self._plans: deque[StepPlan] = deque()
        self._wake_number = 0
        self._disk = disk
        self._disk_free_s: dict[type, float] = {}
        """Effect type (read or write) -> time at which all effects of that type so far are done."""

    def start(self) -> None:
        self._apply(self.role.start(self._clock.now()))

    def handle(self, event: Event) -> None:
        """Pass an event to the role; a dead or stuck process drops it."""
        if not self.is_alive or self.is_stuck:
            return
        runs_s = self.starving.next_s(self.name, self._clock.now())
        if self._late or runs_s > self._clock.now():
            self._late.append(event)
            if len(self._late) == 1:
                self._clock.at(runs_s, self._take_late)
            return
        self._take(event)

    def _take_late(self) -> None:
        """Handle the events that arrived while this process did not run, in order."""
        while self._late:
            if self.is_alive and not self.is_stuck:
                self._take(self._late[0])
            self._late.popleft()

    def _take(self, event: Event) -> None:
        self._apply(self.role.handle(self._clock.now(), event))
        self._num_unchecked += 1
        if self._num_unchecked < self.check_every:
            return
        self._num_unchecked = 0
        problems = self._check()
        assert not problems, f"{self.name} after {type(event).__name__}: {problems}"

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self._send(to, message)
                case Execute((plan,)):
                    self._plans.append(plan)
                    if len(self._plans) == 1:
                        self._run_step()
                    assert len(self._plans) <= 2, "more than two plans are in flight"
                case Pull():
                    self._clock.after(
                        self._random.uniform(0, self._pull_s), lambda e=effect: self._pulled(e)
                    )
                case ReadBlocks() | StoreBlocks():
                    self._to_disk(effect)
                case UsedBlocks(locations):
                    assert self._disk is not None
                    self._disk.used(locations)
                case Freed(block_ids):
                    self._pools[self.pool_name].freed(block_ids)
                case WakeAt(time_s):
                    self._wake_number += 1
                    self._clock.at(time_s, lambda number=self._wake_number: self._wake(number))
                case Deliver():
                    assert self._deliver is not None
                    self._deliver(effect)

    def _to_disk(self, effect: ReadBlocks | StoreBlocks) -> None:
        """Start a read or write. Reads run one after the other, and so do writes."""
        assert self._disk is not None, f"{self.name} has no disk"
        disk, kind = self._disk, type(effect)
        delay_s = disk.delay_s(num_names(effect.names))
        self._disk_free_s[kind] = max(self._disk_free_s.get(kind, 0.0), self._clock.now()) + delay_s
        self._clock.at(self._disk_free_s[kind], lambda: self._disk_done(disk, effect))

    def _disk_done(self, disk: SimDisk, effect: ReadBlocks | StoreBlocks) -> None:
        if not self.is_alive:
            return
        pool = self._pools[self.pool_name]
        self.handle(
            disk.read(effect, pool) if isinstance(effect, ReadBlocks) else disk.write(effect, pool)
        )

    def _wake(self, number: int) -> None:
        if number == self._wake_number:
            self.handle(Tick())

    def _run_step(self) -> None:
        self._clock.after(self._step_s * self._random.uniform(0.5, 1.5), self._step_done)

    def _step_done(self) -> None:
        """Compute the step when it ends, so that blocks freed or copied too early show."""
        if not self.is_alive:
            return
        assert self._engine is not None
        plan = self._plans.popleft()
        error = "a rank failed" if self._random.random() < self._fault_rate else None
        done = self._engine.execute(plan, self._step_s, error)  # type: ignore[arg-type]
        if self._plans:
            self._run_step()
        self.handle(done)

    def _pulled(self, effect: Pull) -> None:
        if not self.is_alive:
            return
        error: str | None = "the copy failed"
        if self._random.random() >= self._fault_rate:
            own = self._pools[self.pool_name]
            error = pull(self._pools.get(effect.lease.source), effect.lease, own, effect.into)
        self.handle(KvPulled(effect.request_id, effect.attempt, error))
