"""The link of PacedGroup: as slow as asked, first in, first out, and busy while nobody waits."""

from __future__ import annotations

import time

import pytest
import torch

from bench.paced import PacedGroup
from hadal.comm.mesh.mesh import MeshGroup
from tests.unit.comm.groups import mesh_threads, run_threads

SIZE = 100_000
BYTES_PER_S = 5e6  # 20 ms an exchange.
LATENCY_S = 0.005


def test_two_exchanges_follow_each_other_on_the_link_while_the_rank_computes() -> None:
    def run(group: MeshGroup) -> None:
        paced = PacedGroup(group, BYTES_PER_S, LATENCY_S)
        peer = 1 - group.rank
        data = torch.full((SIZE,), group.rank, dtype=torch.uint8)
        start_s = time.perf_counter()
        first, second = paced.exchange({peer: data}), paced.exchange({peer: data})
        time.sleep(0.03)  # Computing: the link goes on.
        assert bool((first.wait()[peer] == peer).all())
        assert first.interval.end_s - start_s >= SIZE / BYTES_PER_S + LATENCY_S
        assert second.wait()[peer].numel() == SIZE
        assert time.perf_counter() - start_s >= 2 * SIZE / BYTES_PER_S + LATENCY_S
        assert second.interval.start_s >= first.interval.end_s - LATENCY_S - 1e-9
        assert paced.members == (0, 1)
        assert paced.rank == group.rank
        assert paced.lost() == ()

    with mesh_threads(2) as groups:
        run_threads([lambda group=group: run(group) for group in groups])  # type: ignore[misc]


def test_a_link_has_a_speed() -> None:
    with mesh_threads(1) as (group,):
        with pytest.raises(ValueError, match="bandwidth"):
            PacedGroup(group, 0)
        assert PacedGroup(group, 1.0).exchange({}).wait() == {}
