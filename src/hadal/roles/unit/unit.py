"""What both kinds of leader do alike: say that they are up, report their load, and keep the
heartbeat.

Holds no request. A leader asks `heartbeat` at the end of every event; it answers with what is due. A
unit none of whose ranks has lived yet is silent: nobody could do anything with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hadal.core.messages import (
    SUPERVISOR,
    FrontUp,
    Generation,
    Key,
    Returned,
    Trace,
    TracedStep,
    TraceRequest,
    UnitReport,
    UnitUp,
)
from hadal.core.plans import NO_LINK_BYTES, Sampling, StepDone
from hadal.core.seams import Effect, Send, WakeAt
from hadal.roles.ranks.pools import RankPools

# What a request's token means for its end, and what its sampler must know. Shared by both
# leaders.


STOP = "stop"
LENGTH = "length"

History = tuple[tuple[int, ...], tuple[int, ...]]


def finish_of(generation: Generation, index: int, token: int) -> str | None:
    """How the output ends with `token` at `index`; None if it goes on. A stop id counts from
    `min_tokens` on.
    """
    if token in generation.stop_ids and index + 1 > generation.min_tokens:
        return STOP
    return LENGTH if index + 1 >= generation.max_tokens else None


def given_back(unit: str, key: Key, reason: str) -> Send:
    """The front is to try an attempt elsewhere, or later."""
    return Send("front", Returned(unit, *key, reason))


def has_other_weights(generation: Generation, fingerprint: str) -> bool:
    """Whether an attempt was meant for a unit whose KV is not of this fingerprint, as the one that
    had the name before.
    """
    asked = generation.fingerprint
    return asked != fingerprint and bool(asked and fingerprint)


def has_penalty(sampling: Sampling) -> bool:
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


def needs_output(sampling: Sampling) -> bool:
    """Whether what is drawn depends on the output so far."""
    return has_penalty(sampling) or sampling.grammar is not None


def history_of(generation: Generation) -> History:
    """Prompt and output for the sampler; empty where nothing asks for them, as they are long."""
    sampling = generation.sampling
    return (
        generation.prompt if has_penalty(sampling) else (),
        generation.output if needs_output(sampling) else (),
    )


# Smoothed measurements that roles report, computed from what their events say. No clock of their
# own.


_LINE_VARIANCE = 2.0
"""Least variance of the numbers of requests in steps with which a line through them means
something.
"""
_CROWD = 2.0
"""Least mean number of requests in steps with which a line from a single one to them does."""
_FALLS, _RISES = 0.03, 0.0003
"""How far one step moves what a single request's steps are taken to need: one of a hundred is
quicker. Those of requests that cost more, and those that other work on the host held up, hardly
count.
"""


class StepMeter:
    """Steps so far, and the smoothed time of one in the Runner."""

    def __init__(self, smoothing: float = 0.1) -> None:
        self._smoothing = smoothing
        self.num_steps = 0
        self.step_ms = 0.0

    def done(self, elapsed_s: float) -> None:
        """A step took `elapsed_s` in the Runner."""
        weight = self._smoothing if self.num_steps else 1.0
        self.step_ms += weight * (elapsed_s * 1e3 - self.step_ms)
        self.num_steps += 1


class LineMeter:
    """Seconds of a step by the requests in it, as a line: from what a single one's steps take to
    what was seen lately.

    A crowd's own steps do not show what one alone would take: on a CPU the second request brings
    experts of its own, the twelfth hardly any. Where no step had a single request, it is the line
    of least squares through what was seen.
    """

    def __init__(self, memory: float = 256.0) -> None:
        """`memory`: how many steps weigh."""
        self._keeps = 1.0 - 1.0 / memory
        self._weight = self._mean_x = self._mean_y = self._var_x = self._cov = 0.0
        self._alone_s = 0.0
        """What a single request's steps take; 0: none was seen."""
        self.line = (0.0, 0.0)
        """Seconds of a step without requests and of each request, neither negative; 0 while steps
        were too alike.
        """

    def add(self, num: int, seconds: float) -> None:
        """A step of so many requests took so long."""
        self._weight = self._weight * self._keeps + 1.0
        share = 1.0 / self._weight
        from_x, from_y = num - self._mean_x, seconds - self._mean_y
        self._mean_x += share * from_x
        self._mean_y += share * from_y
        self._var_x = (1.0 - share) * (self._var_x + share * from_x * from_x)
        self._cov = (1.0 - share) * (self._cov + share * from_x * from_y)
        if num == 1:
            alone_s = self._alone_s or seconds
            self._alone_s = min(max(seconds, alone_s * (1.0 - _FALLS)), alone_s * (1.0 + _RISES))
        if self._alone_s > 0.0 and self._mean_x >= _CROWD:
            slope = (self._mean_y - self._alone_s) / (self._mean_x - 1.0)
            slope = min(max(slope, 0.0), self._alone_s * (1.0 - _FALLS))
            self.line = (self._alone_s - slope, slope)
        elif self._alone_s == 0.0 and self._var_x >= _LINE_VARIANCE:
            slope = min(max(self._cov / self._var_x, 0.0), self._mean_y / self._mean_x)
            self.line = (self._mean_y - slope * self._mean_x, slope)


class BalanceMeter:
    """Smooths what each step says of the balance between ranks, by objective (core/balance)."""

    def __init__(self, smoothed: dict[str, float], smoothing: float = 0.05) -> None:
        """`smoothed` is kept up to date in place; an objective that no step spoke of yet is not in
        it.
        """
        self._smoothed = smoothed
        self._smoothing = smoothing

    def add(self, balance: Mapping[str, float]) -> None:
        """A step was balanced like this."""
        for name, value in balance.items():
            before = self._smoothed.get(name, value)
            self._smoothed[name] = before + self._smoothing * (value - before)

    def reset(self) -> None:
        """Other ranks share the work now."""
        self._smoothed.clear()


class RateMeter:
    """Events per second, with exponentially fading memory."""

    def __init__(self, time_constant_s: float = 30.0) -> None:
        self._time_constant_s = time_constant_s
        self._weight = 0.0
        self._began_s: float | None = None
        self._last_s = 0.0

    def count(self, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = self._last_s = now_s
        self._weight = self._faded(now_s) + 1.0
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """0 until something was counted."""
        if self._began_s is None:
            return 0.0
        # Divide by the memory's effective length, which is shorter than the time constant at first.
        seen_s = self._time_constant_s * (
            1.0 - math.exp(-(now_s - self._began_s) / self._time_constant_s)
        )
        return self._faded(now_s) / max(seen_s, 1.0)

    def _faded(self, now_s: float) -> float:
        return self._weight * math.exp(-(now_s - self._last_s) / self._time_constant_s)


# Which of a unit's next steps are recorded, and the answer once they are done. Looks at no event
# itself.


STEPS_MAX = 256
"""Most steps of one trace; more are not recorded, so that the answer stays a message."""
REQUESTS_MAX = 8
"""Traces asked for and not answered; one more is answered with no steps at once."""


@dataclass(slots=True)
class _Asked:
    reply_id: int
    num_steps: int
    until_s: float
    """Until then somebody waits for it."""
    num_planned: int = 0
    steps: list[TracedStep] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Planned:
    schedule: str
    num_micro_batches: int
    num_tokens: int
    balance: dict[str, float]


class Tracer:
    """Requests are served one after another, each step for the oldest one that misses some."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._asked: deque[_Asked] = deque()
        self._in_flight: dict[int, _Planned] = {}

    def ask(self, now_s: float, request: TraceRequest) -> list[Effect]:
        """Record the next steps; a trace of nothing is answered at once. A unit without work keeps no
        place for those who gave up.
        """
        waiting = (asked for asked in self._asked if asked.num_planned or now_s < asked.until_s)
        self._asked = deque(waiting)
        if request.num_steps < 1 or len(self._asked) >= REQUESTS_MAX:
            return [Send("front", Trace(self._unit, request.reply_id, ()))]
        self._asked.append(
            _Asked(request.reply_id, min(request.num_steps, STEPS_MAX), now_s + request.wait_s)
        )
        return []

    @property
    def is_wanted(self) -> bool:
        """The next plan is to be recorded."""
        return any(asked.num_planned < asked.num_steps for asked in self._asked)

    def planned(
        self,
        step_id: int,
        schedule: str,
        num_micro_batches: int,
        num_tokens: int,
        balance: dict[str, float] | None = None,
    ) -> None:
        """A plan that is recorded was made. `balance`: of its ranks, by objective
        (core/balance).
        """
        asked = next(asked for asked in self._asked if asked.num_planned < asked.num_steps)
        asked.num_planned += 1
        self._in_flight[step_id] = _Planned(schedule, num_micro_batches, num_tokens, balance or {})

    def done(self, done: StepDone) -> list[Effect]:
        """A step is done; steps are done in the order of their plans."""
        if not self._in_flight or (planned := self._in_flight.pop(done.step_id, None)) is None:
            return []
        asked = self._asked[0]
        asked.steps.append(
            TracedStep(
                done.step_id,
                planned.schedule,
                planned.num_micro_batches,
                planned.num_tokens,
                done.events,
                planned.balance,
                done.link_bytes,
            )
        )
        if len(asked.steps) < asked.num_steps:
            return []
        self._asked.popleft()
        return [Send("front", Trace(self._unit, asked.reply_id, tuple(asked.steps)))]

    def forget(self) -> None:
        """Whoever asked is gone: another front counts its requests from 1 as well."""
        self._asked.clear()
        self._in_flight.clear()

    def reset(self) -> None:
        """Steps in flight will not be done: others are recorded instead."""
        self._in_flight.clear()
        for asked in self._asked:
            asked.num_planned = len(asked.steps)


class UnitReporter:
    """The unit's name and voice towards the front."""

    def __init__(
        self,
        unit: str,
        role: str,
        epoch: str,
        pools: RankPools,
        num_requests_max: int,
        heartbeat_s: float,
        cache_totals: Callable[[], dict[str, int]] = dict,
        held: Callable[[], tuple[int, ...]] = tuple,
        fingerprint: str = "",
    ) -> None:
        """`num_requests_max`: of each rank. `cache_totals`: what the unit's KV cache counted, by
        the names in core/cache; asked for each UnitReport. `held`: attempt ids that UnitUp names,
        as it does `fingerprint`.
        """
        self.unit = unit
        self.role = role
        self.epoch = epoch
        self.meter = StepMeter()
        self.balance: dict[str, float] = {}
        """Objective (core/balance) -> mean over maximum of the ranks, smoothed: the leader keeps it
        (BalanceMeter).
        """
        self.rates_s = (0.0, 0.0)
        """Seconds of a token and of a pair, measured; 0 while unknown. The leader keeps it."""
        self.step_s = 0.0
        """Seconds of a step besides, measured. A decode leader keeps it."""
        self.link_bytes = NO_LINK_BYTES
        """Bytes between ranks since the start. The leader adds to it."""
        self.num_requests_moved = 0
        """Requests that moved from rank to rank. A decode leader counts them."""
        self.num_drafts = 0
        """Drafts that the last plan makes of each request; this and the next two, a decode leader
        keeps.
        """
        self.drafts_tried: Sequence[int] = ()
        self.drafts_accepted: Sequence[int] = ()
        self._pools = pools
        self._num_requests_max = num_requests_max
        self._heartbeat_s = heartbeat_s
        self._cache_totals = cache_totals
        self._held = held
        self._fingerprint = fingerprint
        self._front_epoch: str | None = None
        self._is_known = False
        """The front knows that the unit is up."""
        self._was_up = pools.num_living > 0
        self._said: tuple[int, ...] = ()
        self._busy_s: float | None = None
        """When it last had something to do."""
        self._next_heartbeat_s = -math.inf
        self._wake_s = math.inf

    def up(self) -> list[Effect]:
        """Say that the unit is up, once somebody can work in it. The supervisor waits for it as the
        front does.
        """
        self._is_known = self._pools.num_living > 0
        if not self._is_known:
            return []
        self._was_up = True
        pools, most = self._pools, self._num_requests_max * self._pools.num_living
        up = UnitUp(
            self.unit,
            self.role,
            self.epoch,
            pools.num_usable,
            most,
            pools.num_blocks_request,
            self._held(),
            self._fingerprint,
        )
        return [Send("front", up), Send(SUPERVISOR, up)]

    def reset(self) -> list[Effect]:
        """Ranks came or went: if the front does not know the unit yet, now may be the time."""
        return [] if self._is_known else self.up()

    @property
    def has_front(self) -> bool:
        """A front was met."""
        return self._front_epoch is not None

    def is_new_front(self, message: FrontUp) -> bool:
        """Whether this front is another than the one before. The first one met counts as new.

        A front's epoch is new at every start. What a unit holds for an earlier one is nobody's, as
        the present one knows none of its attempts and will never release them.
        """
        is_new = message.epoch != self._front_epoch
        self._front_epoch = message.epoch
        return is_new

    def heartbeat(
        self, now_s: float, num_requests: int, num_tokens_waiting: int, deadline_s: float | None
    ) -> list[Effect]:
        """Load if it changed or is due, and the next wake-up if that changed. `deadline_s` is the
        leader's own.
        """
        effects: list[Effect] = []
        pools = self._pools
        if self._busy_s is None or num_requests or num_tokens_waiting:
            self._busy_s = now_s
        says = (
            pools.num_used,
            num_requests,
            num_tokens_waiting,
            pools.num_living,
            pools.formation,
        )
        if says != self._said or now_s >= self._next_heartbeat_s:
            self._said = says
            self._next_heartbeat_s = now_s + self._heartbeat_s
            if self._was_up:
                effects.append(Send("front", self._load(now_s - self._busy_s)))
        wake_s = (
            self._next_heartbeat_s
            if deadline_s is None
            else min(self._next_heartbeat_s, deadline_s)
        )
        # A wake-up that is early does no harm, so it is moved only when it passed or became too
        # late.
        if self._wake_s <= now_s or wake_s < self._wake_s:
            self._wake_s = wake_s
            effects.append(WakeAt(wake_s))
        return effects

    def _load(self, idle_s: float) -> UnitReport:
        num_blocks_used, num_requests, num_tokens_waiting, num_ranks, formation = self._said
        return UnitReport(
            self.unit,
            self.epoch,
            self._pools.num_usable,
            num_blocks_used,
            num_requests,
            self._num_requests_max * num_ranks,
            num_tokens_waiting,
            self.meter.num_steps,
            self.meter.step_ms,
            num_ranks=num_ranks,
            formation=formation,
            num_blocks_request=self._pools.num_blocks_request,
            token_s=self.rates_s[0],
            pair_s=self.rates_s[1],
            balance=dict(self.balance),
            num_requests_moved=self.num_requests_moved,
            cache=self._cache_totals(),
            idle_s=idle_s,
            step_s=self.step_s,
            num_drafts=self.num_drafts,
            drafts_tried=tuple(self.drafts_tried),
            drafts_accepted=tuple(self.drafts_accepted),
            link_bytes=self.link_bytes,
        )
