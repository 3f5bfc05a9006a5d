"""A group between the model and the real one, so that compute and link can be measured apart, and
bytes counted.

    both      everything travels
    compute   nothing does: a peer's message is one's own to it, at once. Sizes and work are those of the real thing,
              because every rank holds as many experts; what is computed is nonsense.

The sizes of what was sent are noted, so that the same exchanges can be played again without any
computing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hadal.comm.group import Exchange, Group, Interval
from hadal.core.plans import Member, Waited

Sizes = dict[int, int]
"""Peer -> bytes."""


class _Echo:
    """What was sent, as if the peers had."""

    def __init__(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None) -> None:
        now_s = time.perf_counter()
        self.interval = Interval(now_s, now_s)
        self._received = dict(sends)
        if recvs is not None:
            for peer, data in sends.items():
                recvs[peer][: len(data)].copy_(data)
                self._received[peer] = recvs[peer][: len(data)]

    def wait(self) -> dict[int, Tensor]:
        return self._received


class SwitchGroup:
    """A Group, in front of another."""

    def __init__(self, inner: Group) -> None:
        self._inner = inner
        self.is_live = True
        self.sizes: list[Sizes] = []
        """Of every exchange since it was emptied."""

    @property
    def rank(self) -> int:
        return self._inner.rank

    @rank.setter
    def rank(self, value: int) -> None:
        raise AttributeError("a rank keeps its number.")

    @property
    def members(self) -> tuple[int, ...]:
        return self._inner.members

    @members.setter
    def members(self, value: tuple[int, ...]) -> None:
        raise AttributeError("form() makes members.")

    def form(self, formation: int, members: Sequence[Member]) -> None:
        self._inner.form(formation, members)

    def exchange(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None = None
    ) -> Exchange:
        self.sizes.append({peer: data.numel() for peer, data in sends.items()})
        return self._inner.exchange(sends, recvs) if self.is_live else _Echo(sends, recvs)

    def abort(self) -> None:
        self._inner.abort()

    def lost(self) -> tuple[int, ...]:
        return self._inner.lost()

    def take_waits(self) -> Waited:
        return self._inner.take_waits()

    def close(self) -> None:
        self._inner.close()


def replay(group: Group, sizes: Sequence[Sizes]) -> list[float]:
    """Send as many bytes as were noted, one exchange after the other; seconds of each on the
    link.
    """
    most = max(max(exchange.values()) for exchange in sizes)
    data = torch.zeros(most, dtype=torch.uint8)
    seconds = []
    for exchange in sizes:
        under_way = group.exchange({peer: data[:num_bytes] for peer, num_bytes in exchange.items()})
        under_way.wait()
        seconds.append(under_way.interval.end_s - under_way.interval.start_s)
    return seconds
