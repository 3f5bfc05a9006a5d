"""Does one host slow its unit so much that the unit is better off without it?

In a step all ranks wait for the slowest, so a slow processor or a slow link of one host costs all of
them. Who is to blame is seen in whom they wait for: the others wait for the slow host, and hardly for
each other. A host with a slow link waits for everybody, and nobody but it says so of them.

Knows no messages and no ranks: a role measures (roles/ranks/slow), and acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STEP_S = 0.05
"""What a host has to cost every step, at least: at DeepSeek's own speed a token takes so long."""
SHARE = 0.5
"""And the share of the unit's time: without the host, steps would take half as long."""
WORTH = 1.5
"""A host of few is more of the unit: one of two must cost three quarters of the time."""
CLEAR = 2.0
"""Times as long as for the next host."""
AGREE = 3
"""All but one in so many of the others must have waited so long for a host: a link between two of them says
nothing of the rest.
"""
ROUND_TRIP_S = 0.01
"""Of two hosts that wait for each other, the one that messages take longer to reach is slow, from such a
difference on.
"""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What was measured while a unit stepped."""

    stepping_s: float
    num_steps: int
    waits_s: Mapping[str, Mapping[str, float]]
    """Host -> other host -> seconds for which exchanges of the one waited for the other alone."""
    round_trip_s: Mapping[str, float]
    """Host -> seconds that a message of the leader and the answer were on their way, on average."""


@dataclass(frozen=True, slots=True)
class SlowHost:
    """A host, and the share of the unit's time that it costs."""

    host: str
    share: float


def slow_host(stretch: Stretch) -> SlowHost | None:
    """The host that the unit should go on without; None: all are as fast as each other, or nearly."""
    blame_s = {host: _blame_s(host, stretch.waits_s) for host in stretch.waits_s}
    if len(blame_s) < 2 or stretch.stepping_s <= 0.0:
        return None
    *_, second, first = sorted(blame_s, key=lambda host: (blame_s[host], host))
    if blame_s[first] < CLEAR * blame_s[second]:
        if len(blame_s) > 2:
            return None
        # A slow link has two ends, and either host waits for the other.
        trip_s = stretch.round_trip_s
        first, other = sorted(blame_s, key=lambda host: -trip_s.get(host, 0.0))
        if trip_s.get(first, 0.0) - trip_s.get(other, 0.0) < ROUND_TRIP_S:
            return None
    share = blame_s[first] / stretch.stepping_s
    is_enough = share >= max(SHARE, WORTH / len(blame_s))
    is_felt = blame_s[first] >= STEP_S * stretch.num_steps
    return SlowHost(first, min(1.0, share)) if is_enough and is_felt else None


def _blame_s(host: str, waits_s: Mapping[str, Mapping[str, float]]) -> float:
    """Seconds that nearly all others waited for a host alone."""
    waited_s = sorted(waited.get(host, 0.0) for other, waited in waits_s.items() if other != host)
    return waited_s[(len(waited_s) - 1) // AGREE] if waited_s else 0.0
