"""One role that lives a recorded life again: each call is compared with the recorded one, time,
heard and decided.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from hadal.core.messages import Message, UnitReport
from hadal.core.plans import BlocksRead, BlocksStored, Formed, KvPulled, Staged, StepDone
from hadal.core.seams import Execute, Form, Pull, ReadBlocks, Send, Stage, StoreBlocks, Tick, WakeAt
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

# What caused each call in recordings of a live run, and how long after its cause it came: all that
# a world measures.
#
#     cause                    call                        measured
#     Send                     a message, elsewhere        its way: from the sender's call to the receiver's
#     Execute, Form    StepDone, Formed    the step: from its start, which is the end of the one before it
#     Pull, ReadBlocks, ...    KvPulled, BlocksRead ...  the copy
#     WakeAt                   Tick                        how late the host's timer was
#     none                     from outside                the moment: requests, clients that leave, a process that died
#
# An effect without a consequence had none: a message to a process that was not there yet, a timer
# that was replaced, what was under way when the recording ended. Delays are whole nanoseconds
# (roles/recording).


@dataclass(frozen=True, slots=True)
class Consequence:
    """Event `event_index` of call `call` of recording `index`, which comes `delay_ns` after its
    cause.
    """

    index: int
    call: int
    event_index: int
    delay_ns: int


@dataclass
class CausalLinks:
    """The causes of all events. An effect is (index of its recording, its number among all effects
    there).
    """

    effect_to_consequence: dict[tuple[int, int], Consequence] = field(default_factory=dict)
    outside: list[tuple[int, int, int]] = field(default_factory=list)
    """(recording, call, event_index) of those without a cause in the recordings."""
    num_lost: int = 0
    """Messages that reached nobody."""


@dataclass(slots=True)
class _Ask:
    """An effect that waits for its consequence."""

    number: int
    at_ns: int


_Mail = dict[tuple[str, bytes], deque[tuple[int, int, int]]]
"""(receiver, content) -> (sent at, index of the sender, number of the effect), in the order of
sending.
"""


def link(recordings: Sequence[Recording]) -> CausalLinks:
    """Find the cause of every call."""
    links, mail = CausalLinks(), _mail(recordings)
    num_sent = sum(len(letters) for letters in mail.values())
    num_received = 0
    for index, recording in enumerate(recordings):
        causes = _Causes()
        for number, call in enumerate(recording.calls):
            at_ns = ns_of(call.now_s)
            for event_index, event in enumerate(call.events):
                letters = (
                    mail.get((recording.process, _content(event)))
                    if isinstance(event, Message)
                    else None
                )
                if letters and letters[0][0] <= at_ns:
                    cause_ns, sender, effect = letters.popleft()
                    num_received += 1
                elif (cause := causes.of(at_ns, event)) is not None:
                    cause_ns, sender, effect = cause.at_ns, index, cause.number
                else:
                    links.outside.append((index, number, event_index))
                    continue
                links.effect_to_consequence[sender, effect] = Consequence(
                    index, number, event_index, at_ns - cause_ns
                )
            causes.add(at_ns, call.effects)
    links.num_lost = num_sent - num_received
    return links


class _Causes:
    """What one process asked of its host and has no answer to."""

    def __init__(self) -> None:
        self._num_effects = 0
        self._asks: defaultdict[Hashable, deque[_Ask]] = defaultdict(deque)
        self._timer: tuple[int, float] | None = None
        """(number of the effect, when it is due)"""
        self._runner_free_ns = 0

    def add(self, at_ns: int, effects: Sequence[AnyEffect]) -> None:
        for effect in effects:
            if isinstance(effect, WakeAt):
                self._timer = self._num_effects, effect.time_s
            elif (key := key_of(effect)) is not None:
                self._asks[key].append(_Ask(self._num_effects, at_ns))
            self._num_effects += 1

    def of(self, at_ns: int, event: AnyEvent) -> _Ask | None:
        """Take the effect that this is the outcome of; for steps, with the time at which the Runner
        was free for it.
        """
        if isinstance(event, Tick):
            timer, self._timer = self._timer, None
            return None if timer is None else _Ask(timer[0], ns_of(timer[1]))
        key = key_of(event)
        if key is None or not (asks := self._asks.get(key)):
            return None
        ask = asks.popleft()
        if is_of_runner(event):
            ask.at_ns = max(ask.at_ns, self._runner_free_ns)
            self._runner_free_ns = at_ns
        return ask


def _mail(recordings: Sequence[Recording]) -> _Mail:
    letters = []
    for index, recording in enumerate(recordings):
        number = 0
        for call in recording.calls:
            at_ns = ns_of(call.now_s)
            for effect in call.effects:
                if isinstance(effect, Send):
                    letters.append((at_ns, index, number, (effect.to, _content(effect.message))))
                number += 1
    mail: _Mail = {}
    for at_ns, index, number, key in sorted(letters):
        mail.setdefault(key, deque()).append((at_ns, index, number))
    return mail


def _content(message: Message) -> bytes:
    if isinstance(message, UnitReport):
        message = msgspec.structs.replace(
            message, overhead_ms=0.0
        )  # Put in by the host, on the way.
    return encode(message)


def key_of(entry: AnyEffect | AnyEvent) -> Hashable | None:
    """Equal for what a role asks of its host and for the outcome; None for all else."""
    match entry:
        case Execute(plans):
            return StepDone, plans[0].step_id
        case StepDone(step_id):
            return StepDone, step_id
        case Form(plan):
            return Formed, plan.formation
        case Formed(formation):
            return Formed, formation
        case Stage(plan):
            return Staged, plan.formation, plan.stage_id
        case Staged(formation, stage_id):
            return Staged, formation, stage_id
        case Pull(request_id, attempt) | KvPulled(request_id, attempt):
            return KvPulled, request_id, attempt
        case ReadBlocks(read_id) | BlocksRead(read_id):
            return BlocksRead, read_id
        case StoreBlocks(store_id) | BlocksStored(store_id):
            return BlocksStored, store_id
    return None


def is_of_runner(entry: AnyEffect | AnyEvent) -> bool:
    """Whether it is work of the Runner, which does one thing after the other, or such work done."""
    return isinstance(entry, Execute | Form | StepDone | Formed)


_SHOWN = 400
"""Characters of a value in a difference."""


class RelivedRole(Protocol):
    """Any role."""

    @property
    def start(self) -> Callable[[float], Sequence[Any]]: ...

    @property
    def handle(self) -> Callable[..., Sequence[Any]]: ...


MakeRole = Callable[[Opening], RelivedRole]
"""Makes the role that a recording's process hosted, as that process did."""


@dataclass(frozen=True)
class Difference:
    """The first call that was not as recorded."""

    process: str
    call: int
    at_s: float
    """Time since the first call of the run."""
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

    def __init__(self, recording: Recording, role: RelivedRole, begin_s: float) -> None:
        self.recording = recording
        self.num_calls = 0
        self.num_effects = 0
        self.last: Sequence[AnyEffect] = ()
        self.plans: deque[Consequence] = deque()
        """Steps of the Runner; the first one runs."""
        self.inbox: dict[int, dict[int, AnyEvent]] = {}
        """Call -> event_index -> event, of calls of which not everything is there."""
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
