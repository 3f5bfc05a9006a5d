"""Replay of a recorded live run: new instances of the server's roles receive the recorded events at
the recorded times, and each answer is compared with the recorded one.

    recorded call    time, events -> effects
    replayed call    time, events -> effects: equal byte for byte, or the replay ends here

Each role is replayed on its own: if every role gives its recorded answers, the run is repeated.
Recordings of several hosts may be in one folder; only times of one host can be compared.
"""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hadal.core.messages.ranks import RankHeartbeat
from hadal.core.messages.units import UnitReport
from hadal.core.plans import StepDone
from hadal.core.seams import Send, WakeAt
from hadal.roles.recording import (
    AnyEffect,
    AnyEvent,
    Call,
    Opening,
    RecordedRole,
    Recording,
    canonical,
    encode,
)

_PROGRESS_CALLS = 1000
"""Calls between two reports of progress."""
_SHOWN = 400
"""Characters of a value in a difference."""
MakeRole = Callable[[Opening], RecordedRole]
"""Function that makes the role of a recorded process, as that process did."""


@dataclass(frozen=True)
class Difference:
    """First call with an answer that differs from the recorded one."""

    process: str
    call: int
    at_s: float
    """Seconds since the first call of the process."""
    what: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"{self.process}, call {self.call}, {self.at_s:.6f} s after its start: {self.what}\n"
            f"  recorded  {self.recorded}\n  replayed  {self.replayed}"
        )


@dataclass
class ReplayReport:
    """Result of a comparison. `difference` None: every answer equals the recorded one."""

    num_processes: int
    """Number of processes with at least one recorded call."""
    num_recorded: int
    """Number of recorded calls."""
    span_s: float
    """Length of the longest recording, in seconds."""
    num_calls: int = 0
    """Number of calls with the recorded answer."""
    decisions: Counter[str] = field(default_factory=Counter)
    """Decisions by kind, without timers, heartbeats of ranks and reports of units."""
    events: Counter[str] = field(default_factory=Counter)
    """Events by kind."""
    step_ms: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Process -> (number of its steps, their mean time in the Runner in milliseconds)."""
    difference: Difference | None = None

    @property
    def num_decisions(self) -> int:
        return self.decisions.total()


def replay(
    recordings: Sequence[Recording],
    make_role: MakeRole,
    advance: Callable[[int, int], None] = lambda done, of: None,
) -> ReplayReport:
    """Replay all roles of a run in the order of time, up to the first difference. `advance` gets
    the number of finished calls and of all calls. Raises ValueError if no recording has a call.
    """
    recordings = [recording for recording in recordings if recording.calls]
    if not recordings:
        raise ValueError("the recording is empty: it has no calls of any process.")
    span_s = max(recording.calls[-1].now_s - recording.calls[0].now_s for recording in recordings)
    num_recorded = sum(len(recording.calls) for recording in recordings)
    report = ReplayReport(len(recordings), num_recorded, span_s)
    roles = [make_role(recording.opening) for recording in recordings]
    step_s: defaultdict[str, list[float]] = defaultdict(list)
    in_time = heapq.merge(
        *(
            [(call.now_s, index, number) for number, call in enumerate(recording.calls)]
            for index, recording in enumerate(recordings)
        )
    )
    for now_s, index, number in in_time:
        process, call = recordings[index].process, recordings[index].calls[number]
        answer = _answer(roles[index], call)
        if (found := _compare(call, answer)) is not None:
            at_s = now_s - recordings[index].calls[0].now_s
            report.difference = Difference(process, number, at_s, *found)
            break
        report.num_calls += 1
        if report.num_calls % _PROGRESS_CALLS == 0:
            advance(report.num_calls, num_recorded)
        report.decisions.update(filter(None, map(decision_of, call.effects)))
        report.events.update(type(event).__name__ for event in call.events)
        step_s[process] += [e.elapsed_s for e in call.events if isinstance(e, StepDone)]
    report.step_ms = {
        process: (len(times), 1e3 * statistics.fmean(times))
        for process, times in sorted(step_s.items())
        if times
    }
    return report


def decision_of(effect: AnyEffect) -> str | None:
    """Return a decision's name; None for timers, heartbeats of ranks and reports of units."""
    if isinstance(effect, Send):
        is_report = isinstance(effect.message, UnitReport | RankHeartbeat)
        return None if is_report else type(effect.message).__name__
    return None if isinstance(effect, WakeAt) else type(effect).__name__


def _answer(role: RecordedRole, call: Call) -> Call:
    """Call a role with the time and events of `call`. Return the call with the role's answer."""
    try:
        answer = role.handle(call.now_s, *call.events) if call.events else role.start(call.now_s)
    except Exception as raised:  # An error that was raised live as well is no difference.
        return Call(call.now_s, call.events, (), f"{type(raised).__name__}: {raised}")
    return Call(call.now_s, call.events, tuple(answer))


def _compare(old: Call, new: Call) -> tuple[str, str, str] | None:
    """Return the first place at which two answers differ, and both values; None if equal."""
    if canonical(old) == canonical(new):
        return None
    if old.error != new.error:
        return "it raised a different error", old.error or "nothing", new.error or "nothing"
    decided = f"after {_kinds(old.events)} it decided"
    for index, (was, now) in enumerate(zip(old.effects, new.effects, strict=False)):
        if encode(was) != encode(now):
            path, was, now = _narrowed(_name(was), was, now)
            return f"{decided} differently, effect {index}: {path}", _shown(was), _shown(now)
    most = min(len(old.effects), len(new.effects))
    what = f"{decided} {len(new.effects)} effects, not {len(old.effects)}"
    return what, _shown(old.effects[most:]), _shown(new.effects[most:])


def _kinds(events: Sequence[AnyEvent]) -> str:
    return ", ".join(type(event).__name__ for event in events) or "start"


def _name(effect: AnyEffect) -> str:
    return type(effect.message).__name__ if isinstance(effect, Send) else type(effect).__name__


def _narrowed(path: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Return path and values of the first part in which two unequal values differ."""
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(old, msgspec.Struct) and type(old) is type(new):
        parts = [
            (f"{path}.{name}", getattr(old, name), getattr(new, name))
            for name in old.__struct_fields__
        ]
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        parts = [
            (f"{path}[{index}]", *pair) for index, pair in enumerate(zip(old, new, strict=True))
        ]
    for part in parts:
        if encode(part[1]) != encode(part[2]):
            return _narrowed(*part)
    return path, old, new


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
