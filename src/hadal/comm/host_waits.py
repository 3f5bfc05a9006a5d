"""Time that a rank waits for its peers in a step, and the part due to one host alone.

While peers of two hosts are missing, neither host is blamed: one may be late because of the other.
Data that arrive before the rank waits cost nothing. Does not depend on sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hadal.core.plans import Member, Waited


class HostWaits:
    """Waiting times of one rank. One thread calls it."""

    def __init__(self) -> None:
        self._rank = -1
        self._rank_to_host: dict[int, str] = {}
        """Rank -> host, in a unit on several hosts; empty on one host."""
        self._seconds = 0.0
        self._host_to_alone_s: dict[str, float] = {}

    def form(self, rank: int, members: Iterable[Member]) -> None:
        """Start a formation. A host is identified by the address that its members report."""
        rank_to_host = {member.rank: member.host for member in members}
        self._rank = rank
        self._rank_to_host = rank_to_host if len(set(rank_to_host.values())) > 1 else {}
        self.take()

    def add(self, began_s: float, now_s: float, peer_to_arrived_s: Mapping[int, float]) -> None:
        """Add an exchange for which the rank waited from `began_s` to `now_s`. A host has arrived
        when the last of its ranks has; a rank without data counts as arriving at `now_s`.
        """
        self._seconds += max(0.0, now_s - began_s)
        host_to_there_s: dict[str, float] = {}
        for peer, host in self._rank_to_host.items():
            if peer != self._rank:
                arrived_s = peer_to_arrived_s.get(peer, now_s)
                host_to_there_s[host] = max(arrived_s, host_to_there_s.get(host, began_s))
        if not host_to_there_s:
            return
        last = max(host_to_there_s, key=host_to_there_s.__getitem__)
        last_s = host_to_there_s.pop(last)
        alone_s = last_s - max(host_to_there_s.values(), default=began_s)
        if alone_s > 0.0 and last != self._rank_to_host[self._rank]:
            self._host_to_alone_s[last] = self._host_to_alone_s.get(last, 0.0) + alone_s

    def take(self) -> Waited:
        """Return the waiting times since the last call."""
        waited = Waited(self._seconds, self._host_to_alone_s)
        self._seconds, self._host_to_alone_s = 0.0, {}
        return waited
