"""Ranks killed during exchanges: every survivor is notified, forms anew and continues.

The end of a connection reveals a kill. The deadline of an exchange is so late here that a test
which waits for it hangs. How soon all are notified is asserted in simulated time
(tests/sim/test_membership.py).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from hadal.comm.group import PeerLost
from hadal.comm.mesh.mesh import MeshGroup
from hadal.core.plans import Member
from tests.fresh import fresh
from tests.levels import FULL, MORE
from tests.unit.comm.mesh.test_mesh import exchange_sized
from tests.waiting import DEADLINE_S

NUM_ROUNDS = 100 if FULL else 8 if MORE else 4
NUM_RANKS = 3
NEVER_S = 3600.0
PAYLOAD_BYTES = 4 << 20


def serve(rank: int, epoch: str, pipe: Connection) -> None:
    """Run a rank that follows the test's commands: form, check one exchange, or exchange until a peer
    is lost.
    """
    torch.set_num_threads(1)
    group = MeshGroup(rank, epoch, key=b"k" * 32, deadline_s=NEVER_S)
    pipe.send(group.port)
    while (command := pipe.recv()) is not None:
        if command[0] == "form":
            try:
                group.form(command[1], command[2])
                pipe.send("formed")
            except PeerLost as error:
                pipe.send(f"not formed: {error}")
        elif command[0] == "check":
            pipe.send(exchange_sized(group, command[1]))
        else:
            pipe.send("running")
            pipe.send(run_until_lost(group))
    group.close()


def run_until_lost(group: MeshGroup) -> tuple[int, ...]:
    """Exchange large payloads, two in flight. Return the ranks that the failure named."""
    peers = [rank for rank in group.members if rank != group.rank]
    data = torch.zeros(PAYLOAD_BYTES, dtype=torch.uint8)
    recvs = [{peer: torch.empty_like(data) for peer in peers} for _ in range(2)]
    num_done = 0
    try:
        before = group.exchange(dict.fromkeys(peers, data), recvs[0])
        while True:
            after = group.exchange(dict.fromkeys(peers, data), recvs[(num_done + 1) % 2])
            before.wait()
            before = after
            num_done += 1
    except PeerLost as error:
        return error.ranks


class Ranks:
    """Processes of a unit, managed like a leader does."""

    def __init__(self) -> None:
        # Forked from an idle process that has loaded torch, so that a replacement starts at once.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "tests.dist.test_peer_loss"])
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}
        self._members: dict[int, Member] = {}
        self._generation = 0
        for rank in range(NUM_RANKS):
            self.start(rank)

    def start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        epoch = f"{rank}-{self._generation}"
        process = self._context.Process(target=serve, args=(rank, epoch, theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes[rank], self._pipes[rank] = process, ours
        self._members[rank] = Member(rank, epoch, "127.0.0.1", self.answer(rank))

    def tell(self, ranks: list[int], command: Any) -> None:
        for rank in ranks:
            self._pipes[rank].send(command)

    def answer(self, rank: int) -> Any:
        assert self._pipes[rank].poll(DEADLINE_S), f"rank {rank} hangs"
        return self._pipes[rank].recv()

    def form(self, ranks: list[int]) -> None:
        self._generation += 1
        self.tell(ranks, ("form", self._generation, [self._members[rank] for rank in ranks]))
        assert [self.answer(rank) for rank in ranks] == ["formed"] * len(ranks)

    def check(self, ranks: list[int], num_bytes: int) -> None:
        self.tell(ranks, ("check", num_bytes))
        for rank in ranks:
            self.answer(rank)

    def signal(self, rank: int, which: signal.Signals) -> None:
        os.kill(self._processes[rank].pid, which)

    def replace(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join(DEADLINE_S)
        self._pipes[rank].close()
        self.start(rank)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join(DEADLINE_S)
        for pipe in self._pipes.values():
            pipe.close()


def lose_one(ranks: Ranks, seed: int, *, is_half_way: bool) -> None:
    """Run one round: form, exchange, kill one rank, form again."""
    chance = random.Random(seed)
    everybody = list(range(NUM_RANKS))
    ranks.form(everybody)
    ranks.check(everybody, chance.randrange(400_000))
    victim = chance.randrange(NUM_RANKS)
    survivors = [rank for rank in everybody if rank != victim]
    ranks.tell(everybody, ("run",))
    assert [ranks.answer(rank) for rank in everybody] == ["running"] * NUM_RANKS
    time.sleep(chance.uniform(0.0, 0.15))
    if is_half_way:  # Freezes the victim first, so that messages to and from it are incomplete.
        ranks.signal(victim, signal.SIGSTOP)
        time.sleep(chance.uniform(0.02, 0.2))
    ranks.signal(victim, signal.SIGKILL)
    for rank in survivors:
        assert ranks.answer(rank) == (victim,), (seed, rank)
    ranks.form(survivors)
    ranks.check(survivors, chance.randrange(400_000))
    ranks.replace(victim)


@pytest.mark.campaign("more rounds")
def test_a_killed_peer_is_named_to_all_and_the_others_go_on() -> None:
    drawn = fresh().randrange(1 << 30)
    with closing(Ranks()) as ranks:
        for index in range(NUM_ROUNDS):
            seed = index if index % 2 else drawn + index
            print("seed", seed)
            lose_one(ranks, seed, is_half_way=index % 4 < 2)
