"""How long a rank's exchanges waited for one other host of its unit alone, so that its leader can tell
a slow host from a slow unit (policy/slow_hosts).

What arrived before anybody waited for it was waited for by nobody, and while two hosts are missing
neither is to blame: the one may be late because of the other. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hadal.core.plans import Member


class HostWaits:
    """Of one rank, since its process began. One thread adds, any may ask for the total."""

    def __init__(self) -> None:
        self._peer_to_host: dict[int, str] = {}
        """Peers on other hosts."""
        self._host_to_s: dict[str, float] = {}

    def form(self, rank: int, members: Iterable[Member]) -> None:
        """A formation begins. A host is its address, as members say it."""
        rank_to_host = {member.rank: member.host for member in members}
        own = rank_to_host.get(rank)
        self._peer_to_host = {peer: host for peer, host in rank_to_host.items() if host != own}
        known = self._host_to_s
        self._host_to_s = {host: known.get(host, 0.0) for host in {*known, *rank_to_host.values()}}

    def add(self, began_s: float, now_s: float, peer_to_arrived_s: Mapping[int, float]) -> None:
        """An exchange was waited for from `began_s` on, until `now_s`. A host is there when the last of
        its ranks has sent; what never came counts until now.
        """
        host_to_s: dict[str, float] = {}
        for peer, host in self._peer_to_host.items():
            arrived_s = peer_to_arrived_s.get(peer, now_s)
            host_to_s[host] = max(arrived_s, host_to_s.get(host, began_s))
        if host_to_s:
            last = max(host_to_s, key=host_to_s.__getitem__)
            last_s = host_to_s.pop(last)
            self._host_to_s[last] += last_s - max(host_to_s.values(), default=began_s)

    def total(self) -> dict[str, float]:
        """Host -> seconds that nobody else was missing; empty while the unit is on one host."""
        return dict(self._host_to_s) if self._peer_to_host else {}
