"""`kill -9` at any moment of a server that writes its KV to disk: every restart serves, and never
returns an answer from damaged KV.

Rounds share one folder. A server starts on the last round's blocks. It answers chats of that
round's tenant from them and of a new tenant, which adds blocks. It is then killed: the whole tree,
only its supervisor, or first one unit, which restarts under load. The first rounds have a large
budget, the others a tight one. Each moment is a number of scans of the folder, drawn from a printed
seed. `HADAL_LEVEL=all`: 200 rounds.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from hadal.core.cache import DISK_HIT_TOKENS, STORED_BLOCKS
from hadal.core.messages.base import BLOCK_TOKENS
from tests.dist.cached import cache_fields, counts, settle, wait_found
from tests.dist.chats import Answer, Chat, ask, client_for, everyday_chats, talk, wrong
from tests.dist.keyed import model_of
from tests.dist.oracle import FULL
from tests.dist.segments import Record, names_on_disk, records_on_disk
from tests.dist.serving import Server, StartServer, is_alive
from tests.fresh import fresh
from tests.waiting import DEADLINE_S, wait_until

NUM_ROOMY, NUM_TIGHT = (100, 100) if FULL else (2, 1)
NUM_CHATS = 24 if FULL else 8
NUM_ASKED_AGAIN = 4
"""Number of chats that a round repeats for the previous round's tenant."""
CONCURRENCY = 8
MAX_LOOKS = 60
"""Maximum number of scans of the folder before the kill."""
WAYS = ("group", "supervisor", "one process", "one process")
"""Kinds of kills; "one process" kills a unit or a rank."""
RANKS = (1, 1, 1, 2)
"""Values from which a round draws the number of ranks of both units. Each rank has a writer, so a
changed number makes segments change owners.
"""
ROOMY_MB, TIGHT_MB = 4096, 1
"""Budgets: with ROOMY_MB no block is ever overwritten, with TIGHT_MB nearly every block is."""

LAST_TOKENS = 4 * BLOCK_TOKENS
"""Number of tokens that the last chat's prompts stay below, so that they fit into the prefill unit's
part of a tight budget, five blocks.
"""


@dataclass
class Found:
    """Knowledge of the folder over all rounds."""

    records: set[Record] = field(default_factory=set)
    """Records found by the last scan."""
    num_acknowledged: int = 0
    num_disk_hit_tokens: int = 0
    num_killed_writing: int = 0
    """Rounds in which blocks were being written when the kill came."""


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    return everyday_chats(NUM_CHATS, seed=29, num_turns=3)


def key_of(number: int) -> str:
    """Return the key of a round's tenant. Every tenant has its own blocks for the same chats."""
    return f"tenant-{number}"


@dataclass
class Load:
    """Chats in progress on a server that will be killed."""

    server: Server
    cache: Path
    key: str
    answers: dict[int, list[Answer]] = field(default_factory=dict)
    acknowledged: int = 0
    seen: set[bytes] = field(default_factory=set)
    """Names of blocks that could be found on disk before the kill."""
    is_killed: bool = False

    async def run(self, chats: list[Chat], rng: random.Random, victim: str) -> None:
        """Run the chats until the kill. After the kill of one process they continue, since it restarts."""
        url, model = self.server.url, model_of(self.server, self.key)
        gate = asyncio.Semaphore(CONCURRENCY)
        async with client_for(url, CONCURRENCY, self.key) as client:

            async def hold(number: int) -> None:
                async with gate:
                    for case in chats[number]:
                        try:
                            answer = await ask(client, model, case)
                        except httpx.HTTPError:
                            if self.is_killed:
                                return
                            raise
                        self.answers.setdefault(number, []).append(answer)

            order = list(range(len(chats)))
            rng.shuffle(order)
            holding = asyncio.gather(*map(hold, order))
            num_writes = rng.choice((None, rng.randint(1, 12)))
            await self._watch(rng.randint(0, MAX_LOOKS), holding, num_writes)
            if victim not in WAYS:
                await asyncio.to_thread(self.server.kill, victim)
                await holding
                await self._watch(rng.randint(0, 10), holding)
            self.is_killed = True
            kill_all(self.server, victim)
            await holding

    async def _watch(
        self, num_looks: int, holding: asyncio.Future[list[None]], num_writes: int | None = None
    ) -> None:
        """Record the durable blocks, for `num_looks` scans or until `num_writes` of them saw new
        blocks. Raises any error of `holding`.
        """
        for _ in range(num_looks):
            seen = await asyncio.to_thread(counts, self.server, self.key)
            # A restarted unit counts from 0, but blocks reported earlier stay durable.
            self.acknowledged = max(self.acknowledged, seen[STORED_BLOCKS])
            num_seen = len(self.seen)
            self.seen |= await asyncio.to_thread(names_on_disk, self.cache)
            if num_writes is not None:
                num_writes -= len(self.seen) > num_seen
                if num_writes <= 0:
                    return
            if holding.done():
                holding.result()
            await asyncio.sleep(0.01)


def kill_all(server: Server, way: str) -> None:
    """Kill the whole tree, or its supervisor; the kernel then ends the rest."""
    pids = [pid for pid in server.pids().values() if pid]
    if way == "supervisor":
        server.process.kill()
    else:
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(DEADLINE_S)
    wait_until(lambda: not any(map(is_alive, pids)), "every process of the server is gone")


def serve(
    start_server: StartServer, cache: Path, disk_mb: int, keys: list[str], **fields: Any
) -> Server:
    """Start a server that finds every block on disk. The first key is an operator's."""
    known = {"HADAL_API_KEYS": ",".join([f"{keys[0]} operator", *keys[1:]])}
    server = start_server(environment=known, **cache_fields(cache, disk_mb=disk_mb), **fields)
    wait_found(server, cache, keys[0])
    return server


def one_round(
    start_server: StartServer,
    chats: list[Chat],
    cache: Path,
    disk_mb: int,
    rng: random.Random,
    number: int,
    found: Found,
) -> None:
    """Run one round: start, read the earlier blocks, write, kill, and scan the folder."""
    keys = [key_of(number), key_of(number - 1)]
    units = {"ranks": rng.choice(RANKS), "kv_memory_mb": 32}
    server = serve(
        start_server, cache, disk_mb, keys, chunk_tokens=128, prefill=units, decode=units
    )
    again = chats[:NUM_ASKED_AGAIN]
    answers = talk(server.url, model_of(server, keys[1]), again, key=keys[1])
    assert wrong(again, answers) == []
    found.num_disk_hit_tokens += settle(server, keys[0])[DISK_HIT_TOKENS]
    victim = rng.choice(WAYS)
    if victim == "one process":
        victim = rng.choice(sorted(server.pids().keys() - {"gateway"}))
    load = Load(server, cache, keys[0])
    asyncio.run(load.run(chats, rng, victim))
    told = f"round {number}, {victim} killed"
    asked = sorted(load.answers)
    assert (
        wrong([chats[i][: len(load.answers[i])] for i in asked], [load.answers[i] for i in asked])
        == []
    ), told
    if victim not in WAYS:
        assert all(len(load.answers[i]) == len(chat) for i, chat in enumerate(chats)), (
            f"{told}: not all was answered"
        )
    look(cache, disk_mb, load, found, told)


def look(cache: Path, disk_mb: int, load: Load, found: Found, told: str) -> None:
    """Assert that all blocks in the folder are whole, and under a large budget that none is lost."""
    records = set(records_on_disk(cache))
    assert [r for r in records if not r.is_whole] == [], (
        f"{told}: blocks that can be found and are broken"
    )
    if disk_mb == ROOMY_MB:
        lost = ({record.name for record in found.records} | load.seen) - {
            record.name for record in records
        }
        assert lost == set(), f"{told}: {len(lost)} blocks that could be found before are gone"
        num_new = len(records - found.records)
        assert num_new >= load.acknowledged, (
            f"{told}: {load.acknowledged} blocks were durable, {num_new} are there"
        )
        found.num_killed_writing += num_new > load.acknowledged
    found.records = records
    found.num_acknowledged += load.acknowledged


@pytest.mark.promise("Everything that kill -9 leaves behind is therefore complete or absent")
@pytest.mark.timeout(7200)
@pytest.mark.more("whole servers are killed; test_disk_kills kills writers in `make test`")
@pytest.mark.slow("rounds of servers, each killed")
def test_every_restart_serves(start_server: StartServer, chats: list[Chat], folder: Path) -> None:
    seed = 37 if FULL else fresh().randrange(2**31)
    print(f"seed {seed}")
    rng, found = random.Random(seed), Found()
    for number in range(1, NUM_ROOMY + NUM_TIGHT + 1):
        disk_mb = ROOMY_MB if number <= NUM_ROOMY else TIGHT_MB
        one_round(start_server, chats, folder, disk_mb, rng, number, found)
        if number % 20 == 0:
            print(f"{number} rounds, {found.num_acknowledged} blocks durable", flush=True)
    # Under a tight budget only the last written blocks are certain to be found.
    keys = [key_of(number + 1), key_of(number + 2)]
    fitting = [chat for chat in chats if len(chat[-1].prompt) < LAST_TOKENS]
    last = [max(fitting, key=lambda chat: len(chat[-1].prompt))]
    server = serve(start_server, folder, TIGHT_MB, keys)
    for key, those in zip(keys, (chats, last), strict=True):
        model = model_of(server, key)
        assert wrong(those, talk(server.url, model, those, key=key)) == [], key
        settle(server, keys[0])
    kill_all(server, "group")
    server = serve(start_server, folder, TIGHT_MB, keys)
    assert wrong(last, talk(server.url, model_of(server, keys[1]), last, key=keys[1])) == []
    print(
        f"{number} kills: {found.num_acknowledged} blocks were durable, {len(found.records)} were"
        f" found at the end; more than had been said in {found.num_killed_writing} rounds; restarts"
        f" hit {found.num_disk_hit_tokens} tokens"
    )
    assert found.num_acknowledged > 0
    assert settle(server, keys[0])[DISK_HIT_TOKENS] > 0
    # In a few rounds the previous tenant may have no blocks left, or none that were requested.
    assert not FULL or found.num_disk_hit_tokens > 0
