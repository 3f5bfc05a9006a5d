"""The link of PacedGroup in simulated time: it is as slow as configured, sends first in, first out,
and goes on while the rank computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench import paced
from bench.paced import PacedGroup
from hadal.comm.group import Interval
from tests.unit.comm.groups import mesh_threads

SIZE = 100_000
BYTES_PER_S = 5e6  # 20 ms per exchange.
LATENCY_S = 0.005


@dataclass
class Clock:
    now_s: float

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Instant:
    """Group of two ranks in which the peer answers at once, with ones."""

    clock: Clock
    rank: int = 0
    members: tuple[int, ...] = (0, 1)

    def exchange(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None
    ) -> SimpleNamespace:
        received = {peer: torch.ones_like(data) for peer, data in sends.items()}
        interval = Interval(self.clock.now_s, self.clock.now_s)
        return SimpleNamespace(wait=lambda: received, interval=interval)

    def lost(self) -> tuple[int, ...]:
        return ()


def test_two_exchanges_follow_each_other_on_the_link_while_the_rank_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(10.0)
    monkeypatch.setattr(paced, "time", clock)
    group = PacedGroup(Instant(clock), BYTES_PER_S, LATENCY_S)  # type: ignore[arg-type]
    data = torch.zeros(SIZE, dtype=torch.uint8)
    first, second = group.exchange({1: data}), group.exchange({1: data})
    clock.sleep(0.03)  # The rank computes while the link works.
    assert bool((first.wait()[1] == 1).all())
    assert clock.now_s == pytest.approx(10.03)
    assert first.interval == Interval(10.0, pytest.approx(10.025))
    assert second.wait()[1].numel() == SIZE
    assert clock.now_s == pytest.approx(10.045)
    assert second.interval == Interval(pytest.approx(10.02), pytest.approx(10.045))
    assert (group.members, group.rank, group.lost()) == ((0, 1), 0, ())


def test_a_link_has_a_speed() -> None:
    with mesh_threads(1) as (group,):
        with pytest.raises(ValueError, match="bandwidth"):
            PacedGroup(group, 0)
        assert PacedGroup(group, 1.0).exchange({}).wait() == {}
