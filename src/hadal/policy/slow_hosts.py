"""Choose the host that a unit should drop for a while ("rest") because it slows every step.

In a step all ranks wait for the slowest, so one slow processor or link costs all of them. The other
hosts wait for the slow one, and hardly for each other. A host with a slow link waits for all others,
but each of them waits for that host alone.

Independent of messages and ranks: a role measures (roles/ranks/slow) and acts (roles/ranks/membership).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STEP_S = 0.05
"""Minimum wait per step for a host to rest, seconds: one token takes as long at DeepSeek's own speed."""
SHARE = 1 / 3
"""Minimum share of the unit's time spent waiting for the host: steps without it take two thirds."""
WORTH = 1.5
"""The share must also reach WORTH / number of hosts (0.75 of two): a rest costs one host."""
CLEAR = 2.0
"""Minimum ratio of the wait for the slowest host to the wait for the next slowest."""
AGREE = 3
"""(n - 1) // AGREE of n other hosts may have waited less: none of two or three, one of four."""
ROUND_TRIP_S = 0.01
"""If two hosts wait for each other, the one with the longer round trip to the leader rests, but
only if the difference is at least this many seconds.
"""
REST_SHARE = 4
"""One in REST_SHARE hosts of a unit may rest at a time; one host in a smaller unit."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Measurements over some steps of a unit."""

    stepping_s: float
    num_steps: int
    waits_s: Mapping[str, Mapping[str, float]]
    """Host -> other host -> seconds that exchanges on the first host waited for the other alone."""
    round_trip_s: Mapping[str, float]
    """Host -> mean round-trip time of the leader's messages, seconds."""


@dataclass(frozen=True, slots=True)
class SlowHost:
    """Host to drop, with the share of the unit's time that it costs."""

    host: str
    share: float


def slow_host(stretch: Stretch) -> SlowHost | None:
    """Return the host that the unit should drop; None if no host is slow."""
    waited_s = {host: _waited_s(host, stretch.waits_s) for host in stretch.waits_s}
    if len(waited_s) < 2 or stretch.stepping_s <= 0.0:
        return None
    *_, second, first = sorted(waited_s, key=lambda host: (waited_s[host], host))
    host: str | None = first
    if waited_s[first] < CLEAR * waited_s[second]:
        # A slow link has two ends: with only two hosts, each waits for the other.
        host = _farther(stretch.round_trip_s, first, second) if len(waited_s) == 2 else None
    if host is None:
        return None
    share = waited_s[host] / stretch.stepping_s
    is_enough = share >= max(SHARE, WORTH / len(waited_s))
    is_felt = waited_s[host] >= STEP_S * stretch.num_steps
    return SlowHost(host, min(1.0, share)) if is_enough and is_felt else None


def may_rest(num_resting: int, num_hosts: int) -> bool:
    """Return True if one more host may rest. `num_hosts`: all hosts of the unit, resting ones included."""
    return num_resting < max(1, num_hosts // REST_SHARE) and num_resting + 1 < num_hosts


def _waited_s(host: str, waits_s: Mapping[str, Mapping[str, float]]) -> float:
    """Return the seconds that nearly all other hosts waited for this host alone."""
    seconds = sorted(waits.get(host, 0.0) for other, waits in waits_s.items() if other != host)
    return seconds[(len(seconds) - 1) // AGREE] if seconds else 0.0


def _farther(round_trip_s: Mapping[str, float], one: str, other: str) -> str | None:
    """Return the host with a clearly longer round trip to the leader; None if there is none or a
    round trip is unknown.
    """
    if one not in round_trip_s or other not in round_trip_s:
        return None
    farther = max(one, other, key=lambda host: round_trip_s[host])
    gap_s = abs(round_trip_s[one] - round_trip_s[other])
    return farther if gap_s >= ROUND_TRIP_S else None
