"""The exchange over gloo, in threads: the mesh's bytes, a new formation, the deadline."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from hadal.comm.group import PeerLost
from hadal.comm.torch_group import TorchExchange, TorchGroup
from hadal.core.plans import Member
from tests.fresh import fresh
from tests.unit.comm.groups import DEADLINE_S, run_threads
from tests.waiting import wait_until

SEED = fresh().randrange(1 << 30)
NEVER_S = 3600.0
SIZES = (0, 1, 1000, 65_536, 1_000_003)


def members(ranks: list[int], epoch: str = "e") -> list[Member]:
    return [Member(rank, f"{epoch}{rank}", "127.0.0.1", 0) for rank in ranks]


@contextlib.contextmanager
def gloo_threads(num_ranks: int, deadline_s: float = DEADLINE_S) -> Iterator[list[TorchGroup]]:
    with tempfile.TemporaryDirectory() as folder:
        groups = [
            TorchGroup(rank, backend="gloo", folder=Path(folder), deadline_s=deadline_s)
            for rank in range(num_ranks)
        ]
        try:
            form_all(groups, 1)
            yield groups
        finally:
            run_threads([group.close for group in groups])


def form_all(groups: list[TorchGroup], formation: int, epoch: str = "e") -> None:
    everybody = members([group.rank for group in groups], epoch)
    run_threads([lambda group=group: group.form(formation, everybody) for group in groups])  # type: ignore[misc]


def shuffle(group: TorchGroup, seed: int, num_steps: int) -> None:
    """Exchange random sizes, two in flight, every other one into fixed buffers."""
    peers = [rank for rank in group.members if rank != group.rank]

    def data(sender: int, receiver: int, step: int) -> torch.Tensor:
        chance = torch.Generator().manual_seed(hash((seed, sender, receiver, step)) % (1 << 31))
        size = SIZES[int(torch.randint(len(SIZES), (), generator=chance))]
        return torch.randint(256, (size,), generator=chance, dtype=torch.uint8)

    flying = []
    for step in range(num_steps):
        recvs = (
            {peer: torch.empty(max(SIZES), dtype=torch.uint8) for peer in peers}
            if step % 2
            else None
        )
        flying.append(
            (step, group.exchange({peer: data(group.rank, peer, step) for peer in peers}, recvs))
        )
        while len(flying) > (1 if step + 1 < num_steps else 0):
            at, exchange = flying.pop(0)
            got = exchange.wait()
            assert list(got) == peers
            for peer in peers:
                assert torch.equal(got[peer], data(peer, group.rank, at)), (seed, at, peer)
            assert exchange.interval.end_s >= exchange.interval.start_s


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_byte_arrives_and_the_group_forms_anew(num_ranks: int) -> None:
    print("seed", SEED)
    with gloo_threads(num_ranks) as groups:
        run_threads([lambda group=group: shuffle(group, SEED, 6) for group in groups])  # type: ignore[misc]
        survivors = groups[:1] + groups[2:]
        form_all(survivors, 2)
        run_threads([lambda group=group: shuffle(group, SEED + 1, 2) for group in survivors])  # type: ignore[misc]


def lose(group: TorchGroup, size: int = 10, room: int = 10) -> PeerLost:
    peers = [rank for rank in group.members if rank != group.rank]
    recvs = {peer: torch.empty(room, dtype=torch.uint8) for peer in peers}
    with pytest.raises(PeerLost) as caught:
        group.exchange({peer: torch.zeros(size, dtype=torch.uint8) for peer in peers}, recvs).wait()
    return caught.value


def test_a_silent_peer_ends_the_generation_at_the_deadline() -> None:
    with gloo_threads(2) as groups:
        groups[0].deadline_s = 0.4  # Forming is done.
        assert 1 in lose(groups[0]).ranks
        groups[0].deadline_s = DEADLINE_S
        form_all(groups, 2)
        run_threads([lambda group=group: shuffle(group, SEED, 2) for group in groups])  # type: ignore[misc]


def test_an_abort_ends_a_wait_at_once_and_the_thread_with_it() -> None:
    """Abort two ranks that wait for a third; they form again without it long before the deadline."""
    with gloo_threads(3, deadline_s=NEVER_S) as groups:
        waiting = groups[:2]
        exchanges = [
            group.exchange({peer: torch.zeros(10).byte() for peer in {0, 1, 2} - {group.rank}})
            for group in waiting
        ]

        def lose_it(exchange: TorchExchange) -> None:
            with pytest.raises(PeerLost):
                exchange.wait()

        run_threads(
            [partial(lose_it, exchange) for exchange in exchanges]
            + [group.abort for group in waiting]
        )
        form_all(waiting, 2)
        run_threads([lambda group=group: shuffle(group, SEED, 2) for group in waiting])  # type: ignore[misc]


def test_an_abort_ends_forming() -> None:
    with gloo_threads(1, deadline_s=NEVER_S) as (group,):

        def abort() -> None:
            wait_until(lambda: any(group._place.folder.glob("formation-2-*")), "it forms")
            group.abort()

        def form() -> None:
            with pytest.raises(PeerLost, match="aborted"):
                group.form(2, members([0, 1]))

        run_threads([form, abort])
        group.form(3, members([0]))


def test_a_number_used_by_other_processes_before_is_no_obstacle(tmp_path: Path) -> None:
    for epoch in ("old", "new"):
        groups = [
            TorchGroup(rank, backend="gloo", folder=tmp_path, deadline_s=DEADLINE_S)
            for rank in range(2)
        ]
        form_all(groups, 1, epoch)
        run_threads([lambda group=group: shuffle(group, SEED, 2) for group in groups])  # type: ignore[misc]
        run_threads([group.close for group in groups])


def test_a_payload_too_large_is_refused_before_it_is_received() -> None:
    with gloo_threads(2) as groups:
        errors = run_threads([lambda group=group: lose(group, 11, 10) for group in groups])  # type: ignore[misc]
        assert any("11 bytes for a buffer of 10" in str(error) for error in errors)


def test_nobody_there_to_form_with() -> None:
    with gloo_threads(1, deadline_s=0.5) as (group,):
        with pytest.raises(PeerLost) as caught:
            group.form(2, members([0, 1]))
        assert caught.value.ranks == (1,)


def test_a_back_end_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gloo or nccl"):
        TorchGroup(0, backend="mpi", folder=tmp_path, deadline_s=1)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="CUDA"):
            TorchGroup(0, backend="nccl", folder=tmp_path, deadline_s=1)
