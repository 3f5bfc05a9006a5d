"""Which hosts of a unit rest because they slowed all others, and until when."""

from __future__ import annotations

from dataclasses import dataclass

REST_MAX_S = 600.0
"""The longest rest, seconds. A host that was well for as long begins with the shortest again."""


@dataclass(slots=True)
class _Rest:
    """The latest rest of one host."""

    seconds: float
    until_s: float


class Rests:
    """The rests of one unit, as one leader gives them. A host is its address, as ranks say it."""

    def __init__(self, rest_s: float) -> None:
        """`rest_s`: seconds of the first rest; each that follows soon is twice as long. 0: no host
        rests.
        """
        self._rest_s = rest_s
        self._host_to_rest: dict[str, _Rest] = {}

    @property
    def is_on(self) -> bool:
        """Whether hosts rest at all."""
        return self._rest_s > 0.0

    def begin(self, now_s: float, host: str) -> float:
        """Let a host rest from now on. Returns for how many seconds."""
        before = self._host_to_rest.get(host)
        is_again = before is not None and now_s < before.until_s + REST_MAX_S
        seconds = min(2 * before.seconds, REST_MAX_S) if before and is_again else self._rest_s
        self._host_to_rest[host] = _Rest(seconds, now_s + seconds)
        return seconds

    def resting(self, now_s: float) -> set[str]:
        """Return the hosts that rest now."""
        return {host for host, rest in self._host_to_rest.items() if now_s < rest.until_s}
