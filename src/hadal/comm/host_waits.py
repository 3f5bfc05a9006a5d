"""For how long a rank waits for its peers in a step, and for which host alone.

While peers of two hosts are missing, neither is to blame: the one may be late because of the other. What
arrives before the rank waits costs nothing. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hadal.core.plans import Member, Waited


class HostWaits:
    """The waits of one rank. One thread calls it."""

    def __init__(self) -> None:
        self._rank = -1
        self._rank_to_host: dict[int, str] = {}
        """Of a unit on several hosts; empty on one."""
        self._seconds = 0.0
        self._host_to_alone_s: dict[str, float] = {}

    def form(self, rank: int, members: Iterable[Member]) -> None:
        """Begin a formation. A host is its address, as members say it."""
        rank_to_host = {member.rank: member.host for member in members}
        self._rank = rank
        self._rank_to_host = rank_to_host if len(set(rank_to_host.values())) > 1 else {}
        self.take()

    def add(self, began_s: float, now_s: float, peer_to_arrived_s: Mapping[int, float]) -> None:
        """Add an exchange that the rank waited for from `began_s` to `now_s`. A host is there when the
        last of its ranks has sent; what never came counts until now.
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
        """Return what was waited since the last call."""
        waited = Waited(self._seconds, self._host_to_alone_s)
        self._seconds, self._host_to_alone_s = 0.0, {}
        return waited
