"""A slow link for tests of schedules: exchanges of any group, ended no earlier than on a link of a given speed.

    exchange 1   |posted ----- link busy -----|latency|
    exchange 2      |posted, queued           ------ link busy -----|latency|

One link per rank, first in, first out; the larger of its two directions counts. Waiting costs no CPU, so the
machine's noise has little effect. This is a model of a link, not evidence about a network. Independent of the
payload.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from hadal.comm.group import Exchange, Group, Interval
from hadal.core.plans import Member, Waited


class PacedExchange:
    """An exchange that ends when the link would have carried it."""

    def __init__(self, group: PacedGroup, inner: Exchange, sent_bytes: int) -> None:
        self._group = group
        self._inner = inner
        self._sent_bytes = sent_bytes
        self._posted_s = time.perf_counter()
        self._interval: Interval | None = None

    def wait(self) -> dict[int, Tensor]:
        """Return the inner exchange's messages when the link would have carried them. Raises PeerLost."""
        received = self._inner.wait()
        if self._interval is None:
            num_bytes = max(self._sent_bytes, sum(tensor.numel() for tensor in received.values()))
            self._interval = self._group.occupy(self._posted_s, num_bytes)
            end_s = max(self._interval.end_s, self._inner.interval.end_s)
            self._interval = Interval(self._interval.start_s, end_s)
        left_s = self._interval.end_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        return received

    @property
    def interval(self) -> Interval:
        """Time span on the link; valid after `wait`."""
        return self._interval or self._inner.interval


class PacedGroup:
    """A group over a link of `bytes_per_s` in each direction and `latency_s`. Exchanges must be
    waited for in the order of posting.
    """

    def __init__(self, group: Group, bytes_per_s: float, latency_s: float = 0.0) -> None:
        if bytes_per_s <= 0 or latency_s < 0:
            raise ValueError("a link needs a positive bandwidth and no negative latency.")
        self._group = group
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = 0.0
        """Time at which the link has carried all its exchanges."""
        self.rank = group.rank
        self.members = group.members

    def form(self, formation: int, members: Sequence[Member]) -> None:
        self._group.form(formation, members)
        self.members = self._group.members
        self._free_s = 0.0

    def exchange(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None = None
    ) -> PacedExchange:
        sent_bytes = sum(tensor.numel() for tensor in sends.values())
        return PacedExchange(self, self._group.exchange(sends, recvs), sent_bytes)

    def occupy(self, posted_s: float, num_bytes: int) -> Interval:
        """Put `num_bytes` on the link; return the interval of their transfer."""
        start_s = max(posted_s, self._free_s)
        self._free_s = start_s + num_bytes / self._bytes_per_s
        return Interval(start_s, self._free_s + self._latency_s)

    def abort(self) -> None:
        self._group.abort()

    def lost(self) -> tuple[int, ...]:
        return self._group.lost()

    def take_waits(self) -> Waited:
        return self._group.take_waits()

    def close(self) -> None:
        self._group.close()
