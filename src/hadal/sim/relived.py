"""One role that lives a recorded life again: each call is compared with the recorded one, time,
heard and decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from hadal.core.seams import Send
from hadal.roles.recording import (
    AnyEffect,
    AnyEvent,
    Call,
    Opening,
    Recording,
    canonical,
    encode,
    ns_of,
)
from hadal.sim.recorded_links import Consequence

_SHOWN = 400
"""Characters of a value in a difference."""


class Role(Protocol):
    """Any role."""

    @property
    def start(self) -> Callable[[float], Sequence[Any]]: ...

    @property
    def handle(self) -> Callable[..., Sequence[Any]]: ...


MakeRole = Callable[[Opening], Role]
"""Makes the role that a recording's process hosted, as that process did."""


@dataclass(frozen=True)
class Difference:
    """The first call that was not as recorded."""

    process: str
    call: int
    at_s: float
    """Since the first call of the run."""
    what: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"{self.process}, call {self.call}, {self.at_s:.6f} s after the start: {self.what}\n"
            f"  recorded  {self.recorded}\n  replayed  {self.replayed}"
        )


class Life:
    """One role, and how far it has come in its recording."""

    def __init__(self, recording: Recording, role: Role, begin_s: float) -> None:
        self.recording = recording
        self.num_calls = 0
        self.num_effects = 0
        self.last: Sequence[AnyEffect] = ()
        self.plans: deque[Consequence] = deque()
        """Steps of the Runner; the first one runs."""
        self.inbox: dict[int, dict[int, AnyEvent]] = {}
        """Call -> place -> event, of calls of which not everything is there."""
        self._role = role
        self._begin_s = begin_s

    def call(self, now_s: float, *events: AnyEvent) -> Difference | None:
        """Give the role events, or let it start; compare the call with the recorded one."""
        number, calls = self.num_calls, self.recording.calls
        if number >= len(calls):
            return self._differ(now_s, "it was called once more", "nothing", kinds(events))
        self.num_calls += 1
        error = ""
        try:
            self.last = self._role.handle(now_s, *events) if events else self._role.start(now_s)
        except Exception as raised:  # One that was raised live as well is as recorded.
            self.last, error = (), f"{type(raised).__name__}: {raised}"
        made, wanted = Call(now_s, events, tuple(self.last), error), calls[number]
        if canonical(made) == canonical(wanted):
            return None
        if ns_of(now_s) != ns_of(wanted.now_s):
            late_us = (ns_of(now_s) - ns_of(wanted.now_s)) / 1e3
            what = f"the time of {kinds(wanted.events)} is {late_us:+.3f} us off"
            return self._differ(now_s, what, kinds(wanted.events), kinds(events))
        if encode(events) != encode(wanted.events):
            path, old, new = _narrowed("events", wanted.events, events)
            return self._differ(now_s, f"it heard something else: {path}", _shown(old), _shown(new))
        if error != wanted.error:
            return self._differ(
                now_s, "it raised something else", wanted.error or "nothing", error or "nothing"
            )
        return self._first_effect(now_s, made, wanted)

    def _first_effect(self, now_s: float, made: Call, wanted: Call) -> Difference:
        heard = f"after {kinds(wanted.events)} it decided"
        for index, (new, old) in enumerate(zip(made.effects, wanted.effects, strict=False)):
            if encode(new) != encode(old):
                path, old, new = _narrowed(f"{_name(old)}", old, new)
                return self._differ(
                    now_s,
                    f"{heard} something else, effect {index}: {path}",
                    _shown(old),
                    _shown(new),
                )
        most = min(len(made.effects), len(wanted.effects))
        return self._differ(
            now_s,
            f"{heard} {len(made.effects)} things, not {len(wanted.effects)}",
            _shown(wanted.effects[most:]),
            _shown(made.effects[most:]),
        )

    def missing(self) -> Difference | None:
        """The first recorded call that never came."""
        if self.num_calls == len(self.recording.calls):
            return None
        call = self.recording.calls[self.num_calls]
        self.num_calls += 1
        return self._differ(call.now_s, "it was never called", _shown(call.events), "nothing")

    def _differ(self, now_s: float, what: str, recorded: str, replayed: str) -> Difference:
        number = max(self.num_calls - 1, 0)
        return Difference(
            self.recording.process, number, now_s - self._begin_s, what, recorded, replayed
        )


def replay_alone(recording: Recording, make_role: MakeRole) -> Difference | None:
    """Let a fresh role hear what one process heard; the first answer that differs."""
    life = Life(
        recording,
        make_role(recording.opening),
        recording.calls[0].now_s if recording.calls else 0.0,
    )
    for call in recording.calls:
        if (difference := life.call(call.now_s, *call.events)) is not None:
            return difference
    return None


def kinds(events: Sequence[AnyEvent]) -> str:
    """Names of what was heard together."""
    return ", ".join(type(event).__name__ for event in events) or "start"


def _name(effect: AnyEffect) -> str:
    return type(effect.message).__name__ if isinstance(effect, Send) else type(effect).__name__


def _narrowed(path: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """The part in which two unequal values differ first, and where it is."""
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
