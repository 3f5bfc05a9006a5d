"""Any process of a server dies or freezes while answers stream: the texts equal those of an
undisturbed server.

Each round strikes one process (gateway, leader, rank or supervisor) with SIGKILL or SIGSTOP while
the gate holds the answers midway. A plain client repeats its request if its connection breaks,
which only the end of the gateway or of the whole server may cause. The test itself restarts a
supervisor; a stopped one continues after PAUSE_S. `HADAL_LEVEL=all`: 30 rounds, and 10 on a starved
processor.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Any

import httpx
import pytest

from tests.dist import gate
from tests.dist.oracle import FULL
from tests.dist.serving import Server, StartServer, blocks_used
from tests.dist.test_starved import NUM_SPINNING, ON_ONE_PROCESSOR, spinning
from tests.fresh import fresh
from tests.levels import MORE
from tests.waiting import DEADLINE_S, PATIENCE_S, wait_for

pytestmark = pytest.mark.more(
    "test_rank_processes and test_supervision strike each kind of process"
)
NUM_ROUNDS = 30 if FULL else 8 if MORE else 2
NUM_STARVED = 10
RANKS = 2
"""Ranks of each unit, more than one, so that each unit has a leader process."""
NUM_ANSWERS = 6
NUM_TOKENS = 240 if FULL else 100
PAUSE_S = 3.0
"""Seconds for which a supervisor is stopped."""
GATEWAY, LEADER, RANK, SUPERVISOR = KINDS = ("gateway", "leader", "rank", "supervisor")
Strike = tuple[Signals, str]
STRIKES: list[Strike] = [(number, kind) for number in (SIGKILL, SIGSTOP) for kind in KINDS]


@dataclass
class Answer:
    """Part of an answer that one client has."""

    text: str = ""
    is_done: bool = False
    num_breaks: int = 0


@dataclass
class Rounds:
    """A server that is struck round after round, and replaced if its supervisor is killed; with the
    texts that it gives undisturbed.
    """

    start: Callable[[], Server]
    rng: random.Random
    server: Server = field(init=False)
    texts: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.server = self.start()
        self.model = self.server.model
        answers = asyncio.run(self._ask_all([Answer() for _ in range(NUM_ANSWERS)]))
        self.texts = [answer.text for answer in answers]

    def run(self, strike: Strike) -> None:
        """Strike once while answers stream; assert that they are right and that the server recovers."""
        number, kind = strike
        before = self.server.pids()
        victim = self._victim(kind)
        what = f"{number.name} of {victim}"
        print(what, flush=True)
        answers = [Answer() for _ in range(NUM_ANSWERS)]
        asyncio.run(self._strike_midway(strike, victim, answers))
        assert [answer.text for answer in answers] == self.texts, what
        num_breaks = sum(answer.num_breaks for answer in answers)
        may_break = kind == GATEWAY or strike == (SIGKILL, SUPERVISOR)
        assert may_break or not num_breaks, f"{what} broke {num_breaks} connections"
        now = self.server.pids()
        others = {name for name in before if not _is_near(name, victim)}
        assert kind == SUPERVISOR or {name for name in others if now[name] != before[name]} == set()
        assert "the server ends" not in self.server.log()

    def _victim(self, kind: str) -> str:
        names = sorted(self.server.pids())
        if kind == RANK:
            return self.rng.choice([name for name in names if "." in name])
        if kind == LEADER:
            return self.rng.choice([name for name in names if "-" in name and "." not in name])
        return kind

    async def _strike_midway(self, strike: Strike, victim: str, answers: list[Answer]) -> None:
        """Ask, strike once an answer has begun, and read every answer to its end."""
        number, kind = strike
        before = self.server.pids()
        self.server.gate.hold(gate.DECODE, self.rng.randrange(5, NUM_TOKENS - 5))
        asking = asyncio.ensure_future(self._ask_all(answers))
        await wait_for(lambda: any(answer.text for answer in answers), "an answer streams")
        if kind == SUPERVISOR:
            self.server.process.send_signal(number)
        else:
            self.server.kill(victim, number)
        self.server.gate.open()
        if strike == (SIGSTOP, SUPERVISOR):
            await asyncio.sleep(PAUSE_S)
            self.server.process.send_signal(SIGCONT)
        elif strike == (SIGKILL, SUPERVISOR):
            self.server.process.wait(DEADLINE_S)
            self.server = await asyncio.to_thread(self.start)
        await wait_for(lambda: self._is_whole(victim, before), f"whole again without {victim}")
        await asking

    async def _ask_all(self, answers: list[Answer]) -> list[Answer]:
        limits = httpx.Limits(max_connections=2 * NUM_ANSWERS)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
            await asyncio.gather(
                *(self._ask(client, index, answer) for index, answer in enumerate(answers))
            )
        return answers

    async def _ask(self, client: httpx.AsyncClient, index: int, answer: Answer) -> None:
        """Ask until an answer is complete. Text received before a break must be right so far, then
        is dropped.
        """
        while not answer.is_done:
            try:
                await self._stream(client, index, answer)
            except (httpx.NetworkError, httpx.ProtocolError):
                assert self.texts[index].startswith(answer.text)
                answer.text = ""
                answer.num_breaks += 1
                await asyncio.sleep(0.05)

    async def _stream(self, client: httpx.AsyncClient, index: int, answer: Answer) -> None:
        body = {
            "model": self.model,
            "prompt": [20 + 7 * index + i for i in range(100 + 40 * index)],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stop_repetition": False,
        }
        async with client.stream("POST", f"{self.server.url}/v1/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    answer.is_done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    answer.text += "".join(choice["text"] for choice in event["choices"])

    async def _is_whole(self, victim: str, before: dict[str, int]) -> bool:
        """Return whether every process is ready, all ranks are counted, and the victim was replaced."""
        processes = self.server.status().processes
        if any(process.phase != "ready" for process in processes.values()):
            return False
        if victim in before and processes[victim].pid == before[victim]:
            return False
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                health = await client.get(f"{self.server.url}/health")
        except httpx.TransportError:
            return False
        whole = {"prefill-0": RANKS, "decode-0": RANKS}
        return health.status_code == 200 and health.json()["ranks_up"] == whole


def _is_near(name: str, victim: str) -> bool:
    """Return whether a victim's end may end this process as well: a leader's may end its ranks."""
    return name == victim or name.startswith(f"{victim}.")


def start_ranked(start_server: StartServer, **options: Any) -> Server:
    unit = {"ranks": RANKS, "kv_memory_mb": 32}
    decode = unit | {"redundant_experts": 64}
    return start_server(prefill=unit, decode=decode, collective_timeout_s=PATIENCE_S, **options)


def drawn(num_rounds: int, rng: random.Random) -> list[Strike]:
    """Return strikes in random order: all of STRIKES once before any repeats."""
    found: list[Strike] = []
    while len(found) < num_rounds:
        found += rng.sample(STRIKES, len(STRIKES))
    return found[:num_rounds]


@pytest.mark.promise(
    "A dead or frozen rank is detected within two seconds, its unit goes on without "
    "it, and requests get the same tokens"
)
@pytest.mark.slow("each round waits until the server is whole again")
@pytest.mark.timeout(3600)
def test_no_answer_shows_what_died_or_froze(start_server: StartServer) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    rounds = Rounds(lambda: start_ranked(start_server), random.Random(seed))
    for strike in drawn(NUM_ROUNDS, random.Random(seed)):
        rounds.run(strike)
    assert blocks_used(rounds.server) == 0


@pytest.mark.full
@pytest.mark.slow("fifteen spinning processes share its processor")
@pytest.mark.timeout(7200)
def test_nothing_is_lost_or_given_up_on_a_starved_machine(start_server: StartServer) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    rounds = Rounds(
        lambda: start_ranked(start_server, environment=ON_ONE_PROCESSOR), random.Random(seed)
    )
    with spinning(NUM_SPINNING):
        for strike in drawn(NUM_STARVED, random.Random(seed)):
            rounds.run(strike)
    assert blocks_used(rounds.server) == 0
