"""A recorded live run once more: fresh roles of the serving classes, under the simulated clock,
deciding anew.

`replay` gives all roles of a run nothing but what came from outside: what they say to each other is
what they say now, and only how long it took (messages, steps, copies, late timers) and what was
computed (tokens, measured op times) is as it was recorded. Every call is compared with the recorded
one (sim/replay/relived); the first that differs ends it.

What makes it exact: recorded are the bounds of every call, so what a role heard together it
hears together again; and the monotone clock counts nanoseconds, so a time plus a recorded delay is
the very time that was read.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from hadal.core.messages import AnyMessage, RankHeartbeat, UnitReport
from hadal.core.plans import StepDone
from hadal.core.seams import Send, WakeAt
from hadal.roles.recording import AnyEffect, AnyEvent, Recording, encode, ns_of, seconds_of
from hadal.sim.replay.relived import (
    CausalLinks,
    Consequence,
    Difference,
    Life,
    MakeRole,
    is_of_runner,
    link,
)
from hadal.sim.world.process import SimClock

_PROGRESS_CALLS = 1000
"""Calls from one word on how far the replay is to the next."""

_decoder = msgspec.msgpack.Decoder(AnyMessage)


@dataclass(frozen=True)
class Steps:
    """Step times of one unit or rank, in milliseconds."""

    num_steps: int
    elapsed_ms: float
    """Mean, inside the Runner."""
    answered_ms: float
    """Mean from a step's start to when the role heard of its end: what the host adds is the
    difference.
    """


@dataclass(frozen=True)
class Way:
    """Messages from one process to another, in milliseconds from decision to decision."""

    num_messages: int
    median_ms: float
    max_ms: float


@dataclass
class ReplayReport:
    """What was compared. `difference` None: everything was as in the live run."""

    num_processes: int
    num_recorded: int
    """Calls."""
    span_s: float
    num_calls: int = 0
    """Calls that were decided the same."""
    decisions: Counter[str] = field(default_factory=Counter)
    """Decisions by kind; timers, heartbeats and reports of load are not among them."""
    outside: Counter[str] = field(default_factory=Counter)
    """What was given to the roles because no role said it, by kind."""
    num_lost: int = 0
    """Messages that reached nobody, live or now."""
    steps: dict[str, Steps] = field(default_factory=dict)
    ways: dict[tuple[str, str], Way] = field(default_factory=dict)
    difference: Difference | None = None

    @property
    def num_decisions(self) -> int:
        return self.decisions.total()


def replay(
    recordings: Sequence[Recording],
    make_role: MakeRole,
    advance: Callable[[int, int], None] = lambda done, of: None,
) -> ReplayReport:
    """Let all roles of a run live together again. `advance` is called with how many calls are made,
    of how many.
    """
    return _Run(recordings, make_role, advance).run()


class _Run:
    """All lives of a run under one clock."""

    def __init__(
        self,
        recordings: Sequence[Recording],
        make_role: MakeRole,
        advance: Callable[[int, int], None],
    ) -> None:
        recordings = [recording for recording in recordings if recording.calls]
        if not recordings:
            raise ValueError("there is nothing to replay: no process was called.")
        begin_s = min(recording.calls[0].now_s for recording in recordings)
        end_s = max(recording.calls[-1].now_s for recording in recordings)
        self._advance = advance
        self._clock = SimClock()
        self._links = link(recordings)
        self._lives = [
            Life(recording, make_role(recording.opening), begin_s) for recording in recordings
        ]
        self._report = ReplayReport(
            len(recordings), sum(len(r.calls) for r in recordings), end_s - begin_s
        )
        self._report.num_lost = self._links.num_lost
        self._report.steps, self._report.ways = (
            _steps(recordings, self._links),
            _ways(recordings, self._links),
        )

    def run(self) -> ReplayReport:
        report = self._report
        for index, life in enumerate(self._lives):
            self._clock.at(life.recording.calls[0].now_s, lambda index=index: self._call(index, ()))  # type: ignore[misc]
        for index, number, event_index in self._links.outside:
            call = self._lives[index].recording.calls[number]
            report.outside[type(call.events[event_index]).__name__] += 1
            self._at(
                ns_of(call.now_s),
                Consequence(index, number, event_index, 0),
                call.events[event_index],
            )
        self._clock.run(float("inf"), lambda: report.difference is not None)
        if report.difference is None:
            missing = [
                difference for life in self._lives if (difference := life.missing()) is not None
            ]
            report.difference = min(missing, key=lambda difference: difference.at_s, default=None)
        return report

    def _at(self, time_ns: int, arrival: Consequence, event: AnyEvent) -> None:
        self._clock.at(seconds_of(time_ns), lambda: self._arrive(arrival, event))

    def _arrive(self, arrival: Consequence, event: AnyEvent) -> None:
        """Call the role once everything is there that it heard in one call."""
        life = self._lives[arrival.index]
        heard = life.inbox.setdefault(arrival.call, {})
        heard[arrival.event_index] = event
        if len(heard) == len(life.recording.calls[arrival.call].events):
            del life.inbox[arrival.call]
            self._call(
                arrival.index, tuple(heard[event_index] for event_index in range(len(heard)))
            )

    def _call(self, index: int, events: Sequence[AnyEvent]) -> None:
        life, now_s = self._lives[index], self._clock.now()
        self._report.difference = life.call(now_s, *events)
        if self._report.difference is not None:
            return
        self._report.num_calls += 1
        if self._report.num_calls % _PROGRESS_CALLS == 0:
            self._advance(self._report.num_calls, self._report.num_recorded)
        for event in events:
            if is_of_runner(event) and life.plans:
                life.plans.popleft()
                if life.plans:
                    self._begin_step(index)
        for effect in life.last:
            kind = decision_of(effect)
            if kind is not None:
                self._report.decisions[kind] += 1
            consequence = self._links.effect_to_consequence.get((index, life.num_effects))
            life.num_effects += 1
            if consequence is not None:
                self._follow(index, effect, consequence)

    def _follow(self, index: int, effect: AnyEffect, came: Consequence) -> None:
        """Let happen what came of the effect live, after the time it took live."""
        life, now_ns = self._lives[index], ns_of(self._clock.now())
        recorded = self._heard(came)
        if isinstance(effect, WakeAt):
            self._at(ns_of(effect.time_s) + came.delay_ns, came, recorded)
        elif isinstance(effect, Send):
            # The replayed message, not the recorded one, by the wire's encoding: what is in a
            # role's hands stays there.
            message = _decoder.decode(encode(effect.message))
            if isinstance(message, UnitReport) and isinstance(recorded, UnitReport):
                message = msgspec.structs.replace(
                    message, overhead_ms=recorded.overhead_ms
                )  # The host measures it.
            self._at(now_ns + came.delay_ns, came, message)
        elif is_of_runner(effect):
            life.plans.append(came)
            if len(life.plans) == 1:
                self._begin_step(index)
        else:
            self._at(now_ns + came.delay_ns, came, recorded)

    def _begin_step(self, index: int) -> None:
        came = self._lives[index].plans[0]
        self._at(ns_of(self._clock.now()) + came.delay_ns, came, self._heard(came))

    def _heard(self, came: Consequence) -> AnyEvent:
        return self._lives[came.index].recording.calls[came.call].events[came.event_index]


def decision_of(effect: AnyEffect) -> str | None:
    """Name of a decision; None for timers and for what only reports."""
    if isinstance(effect, Send):
        return (
            None
            if isinstance(effect.message, UnitReport | RankHeartbeat)
            else type(effect.message).__name__
        )
    return None if isinstance(effect, WakeAt) else type(effect).__name__


def _steps(recordings: Sequence[Recording], links: CausalLinks) -> dict[str, Steps]:
    times: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for consequence in links.effect_to_consequence.values():
        recording = recordings[consequence.index]
        event = recording.calls[consequence.call].events[consequence.event_index]
        if isinstance(event, StepDone):
            times[recording.process].append((event.elapsed_s, consequence.delay_ns))
    return {
        process: Steps(
            len(of),
            1e3 * statistics.fmean(elapsed_s for elapsed_s, _ in of),
            statistics.fmean(delay_ns for _, delay_ns in of) / 1e6,
        )
        for process, of in sorted(times.items())
    }


def _ways(recordings: Sequence[Recording], links: CausalLinks) -> dict[tuple[str, str], Way]:
    delays: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for (sender, _), consequence in links.effect_to_consequence.items():
        if sender != consequence.index:
            pair = recordings[sender].process, recordings[consequence.index].process
            delays[pair].append(consequence.delay_ns)
    return {
        pair: Way(len(of), statistics.median(of) / 1e6, max(of) / 1e6)
        for pair, of in sorted(delays.items())
    }
