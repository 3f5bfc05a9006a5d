"""Slow hosts of a unit: their measurement over some steps, and rests, during which the unit runs
without them.

    StepDone of every rank: seconds it waited, and for which host alone ──┐
    RankDone: seconds of the messages on the wire ────────────────────────┴► a stretch of steps ──► policy/slow_hosts

Ranks also wait for a host that has more work. Therefore the time by which that host computes longer
is subtracted, except in decode if it has at most EVEN times the rows of the waiting host.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from statistics import fmean

from hadal.core.plans import StepDone
from hadal.policy.slow_hosts import SlowHost, Stretch, slow_host

STRETCH_S = 2.0
NUM_STRETCHES = 3
"""Number of stretches, of STRETCH_S seconds each, that are judged together. A pause within
`rank_timeout_s`, or the first steps of a new host, are too small a part of them to matter.
"""
EVEN = 1.5
"""Largest ratio of two hosts' rows at which their work counts as equal."""
REST_MAX_S = 600.0
"""Longest rest, seconds. After this time without a rest, a host's next rest is the shortest again."""


@dataclass(slots=True)
class _MeasuredSteps:
    """Measurements of a stretch of steps in one formation."""

    waits_s: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """(host, other host) -> seconds that the first waited for the second."""
    trips_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Host -> seconds that its steps' plans and answers were on the wire, summed."""
    num_trips: Counter[str] = field(default_factory=Counter)
    stepping_s: float = 0.0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class _HostStep:
    """Work and waits of a host's ranks in a step."""

    busy_s: float
    """Busy seconds of the host's slowest rank, for which others wait."""
    num_rows: float
    """Rows per rank, mean over the host's ranks."""
    alone_s: Mapping[str, float]
    """Other host -> seconds waited for it alone, mean over the host's ranks."""


class SlowHosts:
    """Measurement of one unit's hosts. A host is the address that its ranks report."""

    def __init__(self, *, has_rows: bool) -> None:
        """`has_rows`: the number of returned tokens measures each rank's work, as in decode."""
        self._has_rows = has_rows
        self._rank_to_host: Mapping[int, str] = {}
        """Rank -> host, if the unit is on several hosts; empty on one."""
        self._stretches = deque([_MeasuredSteps()], maxlen=NUM_STRETCHES)
        """Latest stretches; the last one is under way."""
        self._done_s = 0.0

    def began(self, rank_to_host: Mapping[int, str]) -> None:
        """Start anew for a new formation."""
        self._rank_to_host = rank_to_host if len(set(rank_to_host.values())) > 1 else {}
        self._stretches.clear()
        self._stretches.append(_MeasuredSteps())

    def answered(self, host: str, trip_s: float) -> None:
        """Add the wire time of a step's plan and its answer between the leader and `host`."""
        self._stretches[-1].trips_s[host] += trip_s
        self._stretches[-1].num_trips[host] += 1

    def stepped(
        self, now_s: float, sent_s: float, parts: Mapping[int, StepDone]
    ) -> SlowHost | None:
        """Add a step that was sent at `sent_s` and is done on all ranks. Returns a host that the unit
        should drop for a while, or None.
        """
        if not self._rank_to_host:
            return None
        measured = self._stretches[-1]
        measured.stepping_s += now_s - max(sent_s, self._done_s)
        measured.num_steps += 1
        self._done_s = now_s
        hosts = _by_host(parts, self._rank_to_host)
        for host, other in permutations(hosts, 2):
            measured.waits_s[host, other] += self._wait_s(hosts[host], other, hosts[other])
        if measured.stepping_s < STRETCH_S:
            return None
        is_full = len(self._stretches) == NUM_STRETCHES
        found = slow_host(_together(self._stretches)) if is_full else None
        self._stretches.append(_MeasuredSteps())
        return found

    def _wait_s(self, of: _HostStep, other: str, there: _HostStep) -> float:
        """Return the seconds that a host waited for `other` beyond what `other`'s work explains."""
        wait_s = of.alone_s.get(other, 0.0)
        if self._has_rows and there.num_rows <= EVEN * of.num_rows:
            return wait_s
        return max(0.0, wait_s - max(0.0, there.busy_s - of.busy_s))


@dataclass(slots=True)
class _Rest:
    """Latest rest of one host."""

    seconds: float
    until_s: float


class Rests:
    """Rests of one unit's hosts, by one leader. A host is the address that its ranks report."""

    def __init__(self, rest_s: float) -> None:
        """`rest_s`: seconds of the first rest; a rest that follows within REST_MAX_S takes twice
        the last one, REST_MAX_S at most. 0: no host rests.
        """
        self._rest_s = rest_s
        self._host_to_rest: dict[str, _Rest] = {}

    @property
    def is_on(self) -> bool:
        """True if hosts rest at all."""
        return self._rest_s > 0.0

    def begin(self, now_s: float, host: str) -> float:
        """Begin a host's rest. Returns the length of the rest, seconds."""
        before = self._host_to_rest.get(host)
        is_again = before is not None and now_s < before.until_s + REST_MAX_S
        seconds = min(2 * before.seconds, REST_MAX_S) if before and is_again else self._rest_s
        self._host_to_rest[host] = _Rest(seconds, now_s + seconds)
        return seconds

    def resting(self, now_s: float) -> set[str]:
        """Return the hosts that are resting."""
        return {host for host, rest in self._host_to_rest.items() if now_s < rest.until_s}


def _together(stretches: Collection[_MeasuredSteps]) -> Stretch:
    """Return the sum of several stretches."""
    waits_s: dict[str, dict[str, float]] = {}
    trips_s: dict[str, float] = {}
    num_trips = Counter[str]()
    for each in stretches:
        num_trips.update(each.num_trips)
        for host, seconds in each.trips_s.items():
            trips_s[host] = trips_s.get(host, 0.0) + seconds
        for (host, other), seconds in each.waits_s.items():
            of_host = waits_s.setdefault(host, {})
            of_host[other] = of_host.get(other, 0.0) + seconds
    return Stretch(
        sum(each.stepping_s for each in stretches),
        sum(each.num_steps for each in stretches),
        waits_s,
        {host: sum_s / num_trips[host] for host, sum_s in trips_s.items()},
    )


def _by_host(
    parts: Mapping[int, StepDone], rank_to_host: Mapping[int, str]
) -> dict[str, _HostStep]:
    """Return host -> work and waits of its ranks in a step."""
    host_to_parts: dict[str, list[StepDone]] = {}
    for rank, part in parts.items():
        host_to_parts.setdefault(rank_to_host[rank], []).append(part)
    return {
        host: _HostStep(
            max(part.elapsed_s - part.waited.seconds for part in its),
            fmean(len(part.keys) for part in its),
            {
                other: fmean(part.waited.alone_s.get(other, 0.0) for part in its)
                for other in {other for part in its for other in part.waited.alone_s}
            },
        )
        for host, its in host_to_parts.items()
    }
