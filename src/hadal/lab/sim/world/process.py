"""A simulated process: a role with its mailbox, its timer and, for a leader, the Runner of its
unit.

What arrives within `look_s` of the first of it is handed to the role together, as a socket's reader
would find it. Applies effects as the live hosts do, and decides nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from hadal.core.messages.every import AnyMessage
from hadal.core.messages.generation import Deliver
from hadal.core.messages.pools import Freed, Named, Pull, ReadBlocks, StoreBlocks
from hadal.core.plans import (
    NO_BYTES,
    NO_LINK_BYTES,
    BlocksRead,
    BlocksStored,
    ByNode,
    KvPulled,
    LinkBytes,
    StepDone,
)
from hadal.core.seams import (
    MAX_STEPS_IN_FLIGHT,
    Effect,
    Event,
    Execute,
    RankReset,
    Send,
    Tick,
    UsedBlocks,
    WakeAt,
)
from hadal.lab.sim.world.clock import SimClock

DiskAnswer = tuple[float, BlocksRead | BlocksStored]
"""How long a read or write takes, and what comes of it."""


class Role(Protocol):
    """A role that takes events together."""

    def start(self, now_s: float) -> list[Effect]: ...

    def handle(self, now_s: float, *events: Event) -> list[Effect]: ...


class UnitRunner(Protocol):
    """What executes a unit's steps (lab/sim/runners)."""

    def run(self, plans: Any) -> StepDone: ...


class Process:
    """One role at work. `send(to, message)` puts a message on the wire; `pull_s(effect)` says how
    long a copy takes.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        clock: SimClock,
        send: Callable[[str, AnyMessage], None],
        *,
        look_s: float = 0.0,
        runner: UnitRunner | None = None,
        pull_s: Callable[[Pull], float] | None = None,
        deliver: Callable[[Deliver], None] | None = None,
        disk: Callable[[ReadBlocks | StoreBlocks], DiskAnswer] | None = None,
        pull_error: Callable[[Pull], str | None] = lambda effect: None,
        kv_bytes: Callable[[Pull], ByNode] = lambda effect: NO_BYTES,
    ) -> None:
        """`pull_error`: asked when a copy ends, why it is void. `kv_bytes`: what one that is not
        took within a node, and between two.
        """
        self.name = name
        self.role = role
        self.num_events = 0
        self.num_steps = 0
        self._clock = clock
        self._send = send
        self._look_s = look_s
        self._runner = runner
        self._pull_s = pull_s
        self._deliver = deliver
        self._disk = disk
        self._pull_error = pull_error
        self._kv_bytes = kv_bytes
        self._mail: list[Event] = []
        self._plans: deque[Any] = deque()
        self._wake_number = 0
        self._is_alive = True
        self._is_forming = False
        self._num_broken = 0
        """How often steps were broken off: one that was is not done any more."""
        self._dead: set[int] = set()
        """Ranks of the unit, whether the role knows it or not."""
        self._num_deaths: Counter[int] = Counter()
        """Deaths of each rank: what one began is not answered by the next."""

    def start(self) -> None:
        """Begin to live."""
        self._apply(self.role.start(self._clock.now()))

    def post(self, event: Event) -> None:
        """Something arrived."""
        if not self._is_alive:
            return
        self._mail.append(event)
        if len(self._mail) == 1:
            self._clock.after(self._look_s, self._look)

    def handle(self, *events: Event) -> None:
        """Give the role events now."""
        self.num_events += len(events)
        self._apply(self.role.handle(self._clock.now(), *events))

    # ---- what goes wrong ----
    def end(self) -> None:
        """The process dies: nothing reaches it any more, and nothing comes of it."""
        self._is_alive = False
        self.break_off(())

    def break_off(self, ranks: Sequence[int]) -> None:
        """These ranks die; steps in flight end, and none begins before the unit has formed."""
        self._is_forming = True
        self._num_broken += 1
        self._plans.clear()
        self._dead.update(ranks)
        self._num_deaths.update(ranks)

    def form(self, reset: RankReset) -> None:
        """The unit works again, with the ranks that the role knows of now."""
        self._look()  # What was answered before is heard before.
        self._is_forming = False
        self._dead.difference_update(reset.fresh)
        self.handle(reset)

    def _look(self) -> None:
        events, self._mail = self._mail, []
        if events and self._is_alive:
            self.handle(*events)

    def _answer(self, rank: int, delay_s: float, answer: Callable[[], Event]) -> None:
        """A rank is asked for something: it answers, unless it dies."""
        life = self._num_deaths[rank]
        if rank not in self._dead:
            self._clock.after(
                delay_s, lambda: self.post(answer()) if self._num_deaths[rank] == life else None
            )

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.to, effect.message)
            elif isinstance(effect, Deliver):
                if self._deliver is not None:
                    self._deliver(effect)
            elif isinstance(effect, Pull):
                self._pull(effect)
            elif isinstance(effect, Execute):
                if self._is_forming:
                    continue  # The next formation makes it void.
                self._plans.append(effect.plans)
                assert len(self._plans) <= MAX_STEPS_IN_FLIGHT, (
                    f"{self.name} has too many plans in flight"
                )
                if len(self._plans) == 1:
                    self._run()
            elif isinstance(effect, WakeAt):
                self._wake_number += 1
                self._clock.at(effect.time_s, lambda number=self._wake_number: self._wake(number))  # type: ignore[misc]
            elif isinstance(effect, ReadBlocks | StoreBlocks):
                assert self._disk is not None, f"{self.name} has no disk"
                delay_s, answer = self._disk(effect)
                self._answer(effect.rank, delay_s, partial(_same, answer))
            else:
                assert isinstance(effect, Freed | Named | UsedBlocks), (
                    f"{self.name} asks for {type(effect).__name__}"
                )

    def _pull(self, effect: Pull) -> None:
        assert self._pull_s is not None, f"{self.name} has no wire for KV"

        def pulled() -> KvPulled:
            error = self._pull_error(effect)
            link_bytes = NO_LINK_BYTES if error else LinkBytes(kv=self._kv_bytes(effect))
            return KvPulled(effect.request_id, effect.attempt, error, link_bytes)

        self._answer(effect.rank, self._pull_s(effect), pulled)

    def _run(self) -> None:
        assert self._runner is not None, f"{self.name} has no runner"
        done, number = self._runner.run(self._plans[0]), self._num_broken
        self._clock.after(done.elapsed_s, lambda: self._done(done, number))

    def _done(self, done: StepDone, number: int) -> None:
        if number != self._num_broken:
            return
        self._plans.popleft()
        self.num_steps += 1
        if self._plans:
            self._run()
        self.handle(done)

    def _wake(self, number: int) -> None:
        if number == self._wake_number and self._is_alive:
            self.handle(Tick())


def _same(event: Event) -> Event:
    return event
