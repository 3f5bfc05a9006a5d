"""Which host of a unit rests, because it slowed all others, and until when.

    RankHeartbeat: whom it waited for ──┐
    RankDone: how long it was on its way ┴► a stretch of steps ──► policy/slow_hosts ──► rest the host

A host that rests is as if it had died: its ranks are ended and started again. They join again when
the rest is over, and each rest that follows soon is twice as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hadal.policy.slow_hosts import SlowHost, Stretch, slow_host

STRETCH_S = 4.0
"""Seconds of steps that are judged together: what a rank may be silent for is less than half of them."""
REST_MAX_S = 600.0
"""The longest rest. Who was well for as long begins anew with the shortest."""


@dataclass(slots=True)
class _Rest:
    """A host's latest."""

    seconds: float
    until_s: float


@dataclass(slots=True)
class _Measured:
    """A stretch under way, in one formation."""

    first: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """rank -> what its first heartbeat said, host -> seconds waited since it began."""
    last: dict[int, Mapping[str, float]] = field(default_factory=dict)
    trips_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stepping_s: float = 0.0
    num_steps: int = 0


class SlowHosts:
    """Of one unit. A host is its address, as ranks say it."""

    def __init__(self, rest_s: float) -> None:
        """`rest_s`: the shortest rest; 0: no host ever rests."""
        self._rest_s = rest_s
        self._stretch = _Measured()
        self._rests: dict[str, _Rest] = {}

    def began(self) -> None:
        """A formation begins: what came before says nothing about it."""
        self._stretch = _Measured()

    def heard(self, rank: int, host_to_wait_s: Mapping[str, float]) -> None:
        """A member's heartbeat."""
        self._stretch.first.setdefault(rank, host_to_wait_s)
        self._stretch.last[rank] = host_to_wait_s

    def answered(self, host: str, trip_s: float) -> None:
        """A step's plan and its answer were under way between the leader and a rank of `host` for so
        long.
        """
        self._stretch.trips_s[host].append(trip_s)

    def judge(
        self, stepped_s: float, num_steps: int, rank_to_host: Mapping[int, str]
    ) -> SlowHost | None:
        """The unit stepped for so long, and did so many steps, since this was asked last. Returns a
        host that it should go on without.
        """
        stretch = self._stretch
        stretch.stepping_s += stepped_s
        stretch.num_steps += num_steps
        if not self._rest_s or stretch.stepping_s < STRETCH_S:
            return None
        self._stretch = _Measured(first=stretch.last)
        return slow_host(
            Stretch(
                stretch.stepping_s,
                stretch.num_steps,
                _by_host(stretch, rank_to_host),
                {host: _mean(trips_s) for host, trips_s in stretch.trips_s.items()},
            )
        )

    def rest(self, now_s: float, host: str) -> float:
        """A host rests from now on. Returns for how long."""
        before = self._rests.get(host)
        is_again = before is not None and now_s < before.until_s + REST_MAX_S
        seconds = min(2 * before.seconds, REST_MAX_S) if before and is_again else self._rest_s
        self._rests[host] = _Rest(seconds, now_s + seconds)
        return seconds

    def is_resting(self, now_s: float, host: str) -> bool:
        """Whether a unit should form without the ranks of a host."""
        rest = self._rests.get(host)
        return rest is not None and now_s < rest.until_s


def _by_host(stretch: _Measured, rank_to_host: Mapping[int, str]) -> dict[str, dict[str, float]]:
    """Host -> other host -> mean seconds that its ranks waited for it."""
    waits: dict[str, dict[str, list[float]]] = {}
    for rank, host in rank_to_host.items():
        first, last = stretch.first.get(rank, {}), stretch.last.get(rank, {})
        of_host = waits.setdefault(host, {})
        for other in set(rank_to_host.values()) - {host}:
            of_host.setdefault(other, []).append(last.get(other, 0.0) - first.get(other, 0.0))
    return {
        host: {other: _mean(seconds) for other, seconds in of_host.items()}
        for host, of_host in waits.items()
    }


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0
