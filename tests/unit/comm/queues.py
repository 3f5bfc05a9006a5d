"""A Group of ranks in threads over queues; a seed draws the order of arrival."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from hadal.comm.group import Interval, PeerLost
from hadal.core.plans import NO_WAIT, Member, Waited
from tests.unit.comm.groups import DEADLINE_S, run_threads

T = TypeVar("T")


class QueueExchange:
    def __init__(self, group: QueueGroup, recvs: Mapping[int, Tensor] | None) -> None:
        self._group = group
        self._recvs = recvs
        self.interval = Interval(0.0, 0.0)

    def wait(self) -> dict[int, Tensor]:
        got = {}
        peers = [peer for peer in self._group.members if peer != self._group.rank]
        self._group.random.shuffle(peers)
        for peer in peers:
            try:
                data = self._group.queues[peer, self._group.rank].get(timeout=DEADLINE_S)
            except queue.Empty:
                raise PeerLost((peer,), "silent") from None
            if self._recvs is None:
                got[peer] = data
            else:
                assert len(data) <= len(self._recvs[peer]), "beyond the buffer"
                self._recvs[peer][: len(data)].copy_(data)
                got[peer] = self._recvs[peer][: len(data)]
        return got


@dataclass
class QueueGroup:
    rank: int
    members: tuple[int, ...]
    queues: dict[tuple[int, int], queue.SimpleQueue[Tensor]]
    random: random.Random
    sent_bytes: list[int] = field(default_factory=list)
    """Bytes sent in each exchange."""
    sent_to: list[dict[int, int]] = field(default_factory=list)
    """Bytes sent in each exchange, by peer."""

    def form(self, formation: int, members: Sequence[Member]) -> None:
        raise NotImplementedError

    def exchange(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None = None
    ) -> QueueExchange:
        assert set(sends) == set(self.members) - {self.rank}
        assert recvs is None or set(recvs) == set(sends)
        for peer, tensor in sends.items():
            assert tensor.dtype is torch.uint8
            assert tensor.is_contiguous()
            self.queues[self.rank, peer].put(tensor.clone())
        self.sent_to.append({peer: len(tensor) for peer, tensor in sends.items()})
        self.sent_bytes.append(sum(self.sent_to[-1].values()))
        return QueueExchange(self, recvs)

    def abort(self) -> None: ...

    def lost(self) -> tuple[int, ...]:
        return ()

    def take_waits(self) -> Waited:
        return NO_WAIT

    def close(self) -> None: ...


def queue_groups(members: Sequence[int], seed: int = 0) -> dict[int, QueueGroup]:
    queues: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
        (a, b): queue.SimpleQueue() for a in members for b in members if a != b
    }
    return {
        rank: QueueGroup(rank, tuple(members), queues, random.Random(seed * 97 + rank))
        for rank in members
    }


def in_threads(work: Callable[[int], T], ranks: Sequence[int]) -> dict[int, T]:
    """Run work(rank) for every rank at once; raise the first error here."""
    return dict(zip(ranks, run_threads([partial(work, rank) for rank in ranks]), strict=True))
