"""Simulated process: a role with its mailbox, its timer and, for a leader, the Runner of its unit.

Messages that arrive within `look_s` after the first are passed to the role together, as the reader
of a socket would find them. Applies effects as live hosts do, and makes no decisions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hadal.core.messages.every import AnyMessage
from hadal.core.messages.generation import Deliver
from hadal.core.messages.pools import Freed, Named, Pull, ReadBlocks, StoreBlocks
from hadal.core.plans import StepDone
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

WIRE_S = 0.0005
"""Time of a message from one process to another."""
LOOK_S = 0.005
"""Time for which a process collects messages before its role gets them."""
HOP_S = WIRE_S + LOOK_S
"""Time from sending a message until a role acts on it."""

Asked = Pull | ReadBlocks | StoreBlocks
"""Effects that a rank carries out over the network or the disk, and answers."""


class Role(Protocol):
    """Role (state machine) that handles several events in one call."""

    def start(self, now_s: float) -> list[Effect]: ...

    def handle(self, now_s: float, *events: Event) -> list[Effect]: ...


class UnitRunner(Protocol):
    """Runner of a unit's steps (lab/sim/runners)."""

    def run(self, plans: Any) -> StepDone: ...


class Outside(Protocol):
    """World around the processes."""

    def send(self, to: str, message: AnyMessage) -> None:
        """Put a message on the wire."""

    def deliver(self, effect: Deliver) -> None:
        """Pass tokens to the user of a request."""

    def ask(self, name: str, effect: Asked) -> tuple[float, Callable[[], Event]]:
        """Begin a copy, a read or a write of the process `name`. Return its duration in seconds and
        the function that makes its answer when it ends.
        """


class StepQueue:
    """Plans in flight of a unit, which its Runner executes one after another."""

    def __init__(
        self, clock: SimClock, runner: UnitRunner, done: Callable[[StepDone], None]
    ) -> None:
        """`done`: called with each result when its step is over."""
        self.num_steps = 0
        self._clock = clock
        self._runner = runner
        self._done = done
        self._plans: deque[Any] = deque()
        self._num_broken = 0
        """Number of calls of `break_off`. A step begun before the last call gives no result."""
        self._is_forming = False

    def execute(self, plans: Any) -> None:
        """Queue one step's plans; from `break_off` to `form`, drop them, because they are void."""
        if self._is_forming:
            return
        self._plans.append(plans)
        assert len(self._plans) <= MAX_STEPS_IN_FLIGHT, "too many plans in flight"
        if len(self._plans) == 1:
            self._run()

    def break_off(self) -> None:
        """Abort the steps in flight; none begins before `form`."""
        self._is_forming = True
        self._num_broken += 1
        self._plans.clear()

    def form(self) -> None:
        """Accept plans again after `break_off`."""
        self._is_forming = False

    def _run(self) -> None:
        done, number = self._runner.run(self._plans[0]), self._num_broken
        self._clock.after(done.elapsed_s, lambda: self._end(done, number))

    def _end(self, done: StepDone, number: int) -> None:
        if number != self._num_broken:
            return
        self._plans.popleft()
        self.num_steps += 1
        if self._plans:
            self._run()
        self._done(done)


class Process:
    """One role with its mailbox and timer."""

    def __init__(
        self,
        name: str,
        role: Role,
        clock: SimClock,
        outside: Outside,
        *,
        look_s: float = LOOK_S,
        runner: UnitRunner | None = None,
    ) -> None:
        self.name = name
        self.role = role
        self.num_events = 0
        self._clock = clock
        self._outside = outside
        self._look_s = look_s
        self._steps = None if runner is None else StepQueue(clock, runner, self.handle)
        self._mail: list[Event] = []
        self._wake_number = 0
        self._is_alive = True
        self._dead: set[int] = set()
        """Dead ranks of the unit, including deaths not yet reported to the role."""
        self._num_deaths: Counter[int] = Counter()
        """Rank -> number of its deaths. A rank does not answer requests from before a death."""

    @property
    def num_steps(self) -> int:
        """Number of finished steps."""
        return 0 if self._steps is None else self._steps.num_steps

    def start(self) -> None:
        """Start the role."""
        self._apply(self.role.start(self._clock.now()))

    def post(self, event: Event) -> None:
        """Put an event into the mailbox; the role gets it within `look_s`."""
        if not self._is_alive:
            return
        self._mail.append(event)
        if len(self._mail) == 1:
            self._clock.after(self._look_s, self._look)

    def handle(self, *events: Event) -> None:
        """Pass events to the role now."""
        self.num_events += len(events)
        self._apply(self.role.handle(self._clock.now(), *events))

    # ---- faults ----
    def end(self) -> None:
        """End the process: it drops all later events, and its steps in flight give no results."""
        self._is_alive = False
        self.break_off(())

    def break_off(self, ranks: Sequence[int]) -> None:
        """Let ranks die and abort the steps in flight; none begins before the unit has formed."""
        if self._steps is not None:
            self._steps.break_off()
        self._dead.update(ranks)
        self._num_deaths.update(ranks)

    def form(self, reset: RankReset) -> None:
        """Accept plans again, and pass the new membership to the role."""
        self._look()  # Answers that arrived before the reset must be handled before it.
        if self._steps is not None:
            self._steps.form()
        self._dead.difference_update(reset.fresh)
        self.handle(reset)

    def _look(self) -> None:
        events, self._mail = self._mail, []
        if events and self._is_alive:
            self.handle(*events)

    def _answer(self, rank: int, delay_s: float, answer: Callable[[], Event]) -> None:
        """Post a rank's answer after `delay_s`, unless the rank is dead or dies before."""
        life = self._num_deaths[rank]
        if rank not in self._dead:
            self._clock.after(
                delay_s, lambda: self.post(answer()) if self._num_deaths[rank] == life else None
            )

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._outside.send(effect.to, effect.message)
            elif isinstance(effect, Deliver):
                self._outside.deliver(effect)
            elif isinstance(effect, Asked):
                delay_s, answer = self._outside.ask(self.name, effect)
                self._answer(effect.rank, delay_s, answer)
            elif isinstance(effect, Execute):
                assert self._steps is not None, f"{self.name} has no runner"
                self._steps.execute(effect.plans)
            elif isinstance(effect, WakeAt):
                self._wake_number += 1
                self._clock.at(effect.time_s, lambda number=self._wake_number: self._wake(number))  # type: ignore[misc]
            else:
                assert isinstance(effect, Freed | Named | UsedBlocks), (
                    f"{self.name} returned an unsupported effect, {type(effect).__name__}"
                )

    def _wake(self, number: int) -> None:
        if number == self._wake_number and self._is_alive:
            self.handle(Tick())
