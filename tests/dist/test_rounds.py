"""Any process of a server dies or freezes while answers stream: the texts are those of an
undisturbed server.

Each round strikes one process, the gateway, a leader, a rank or the supervisor, with SIGKILL or
SIGSTOP, when some of the answers are in the middle, and prints when that was and how many. Who asks
is a plain client: where its connection breaks, which only the end of the gateway or of the whole
server may cause, it asks again. Nobody restarts a supervisor but the test; a stopped one goes on
after a while. `HADAL_LEVEL=all`: 30 rounds, and 10 on a starved processor.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Any

import httpx
import pytest

from tests.dist.oracle import FULL
from tests.dist.serving import Server, StartServer
from tests.dist.test_starved import NUM_SPINNING, on_one_processor, spinning
from tests.fresh import fresh
from tests.waiting import wait_until

NUM_ROUNDS, NUM_STARVED = (30, 10) if FULL else (3, 1)
NUM_FIXED = 2
"""Of the rounds where not all are run; the others are new in every run."""
RANKS = 2
"""Of each unit, so that each has a leader of its own."""
NUM_ANSWERS = 6
NUM_TOKENS = 240 if FULL else 140
NUM_TRIES = 5
"""Until a strike comes in the middle of some answers: on a starved processor all of an answer may
come at once.
"""
WHOLE_AGAIN_S = 120.0
STARVED_S = 900.0
"""The same on a starved processor."""
PAUSE_S = 3.0
"""Of a stopped supervisor."""
GATEWAY, LEADER, RANK, SUPERVISOR = KINDS = ("gateway", "leader", "rank", "supervisor")
Strike = tuple[Signals, str]
STRIKES: list[Strike] = [(number, kind) for number in (SIGKILL, SIGSTOP) for kind in KINDS]


@dataclass
class Answer:
    """What one client has of its answer."""

    text: str = ""
    is_done: bool = False
    num_breaks: int = 0

    @property
    def is_streaming(self) -> bool:
        return bool(self.text) and not self.is_done


@dataclass
class Rounds:
    """A server, or one after another; the texts it gives undisturbed; and what the rounds
    showed.
    """

    start: Callable[[], Server]
    rng: random.Random
    whole_again_s: float
    server: Server = field(init=False)
    texts: list[str] = field(init=False)
    took_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """From the strike until the server was whole again, by what was struck how."""

    def __post_init__(self) -> None:
        self.server = self.start()
        self.model = self.server.model
        answers = asyncio.run(self._ask_all([Answer() for _ in range(NUM_ANSWERS)]))
        self.texts = [answer.text for answer in answers]

    def run(self, strike: Strike) -> None:
        """One round."""
        number, kind = strike
        victim, what = self._victim(kind), f"{number.name} of {kind}"
        before = self.server.pids()
        answers = [Answer() for _ in range(NUM_ANSWERS)]
        took_s = asyncio.run(self._strike_midway(strike, victim, answers))
        assert [answer.text for answer in answers] == self.texts, f"{what} ({victim})"
        num_breaks = sum(answer.num_breaks for answer in answers)
        may_break = kind == GATEWAY or strike == (SIGKILL, SUPERVISOR)
        assert may_break or not num_breaks, f"{what} ({victim}) broke {num_breaks} connections"
        self.took_s[what].append(took_s)
        print(
            f"    whole again after {took_s:.1f} s; connections that broke or were refused:"
            f" {num_breaks}",
            flush=True,
        )
        others = (
            {name for name in before if not _is_near(name, victim)} if kind != SUPERVISOR else set()
        )
        assert {name: self.server.pids()[name] for name in others} == {
            name: before[name] for name in others
        }
        assert "the server ends" not in self.server.log()

    def told(self) -> str:
        """How long it took, by what was done."""
        every = [seconds for took_s in self.took_s.values() for seconds in took_s]
        return "\n".join(
            f"{what}: {len(took_s)} rounds, median {statistics.median(took_s):.1f} s, worst"
            f" {max(took_s):.1f} s"
            for what, took_s in [*sorted(self.took_s.items()), ("all", every)]
        )

    def _victim(self, kind: str) -> str:
        names = self.server.pids().keys()
        if kind == RANK:
            return self.rng.choice(sorted(name for name in names if "." in name))
        if kind == LEADER:
            return self.rng.choice(
                sorted(name for name in names if "-" in name and "." not in name)
            )
        return kind

    async def _strike_midway(self, strike: Strike, victim: str, answers: list[Answer]) -> float:
        """Ask, strike when a part of an answer is there, and get every answer. Returns how long it
        took from the strike until the server was whole.
        """
        number, kind = strike
        before = self.server.pids()
        for _ in range(NUM_TRIES):
            asking = asyncio.ensure_future(self._ask_all(answers))
            share = self.rng.uniform(0.05, 0.7)
            while len(answers[0].text) < share * len(self.texts[0]) and not asking.done():
                await asyncio.sleep(0.005)
            num_streaming = sum(answer.is_streaming for answer in answers)
            if num_streaming:
                break
            await asking
            assert [answer.text for answer in answers] == self.texts
            answers[:] = [Answer() for _ in answers]
        struck_s = time.monotonic()
        now = time.strftime("%H:%M:%S")
        print(
            f"  {now} {number.name} of {victim}: {num_streaming} of {len(answers)} answers stream",
            flush=True,
        )
        assert num_streaming, "there is nothing to lose"
        if kind == SUPERVISOR:
            self.server.process.send_signal(number)
        else:
            self.server.kill(victim, number)
        if strike == (SIGSTOP, SUPERVISOR):
            await asyncio.sleep(PAUSE_S)
            self.server.process.send_signal(SIGCONT)
        elif strike == (SIGKILL, SUPERVISOR):
            self.server.process.wait(10)
            self.server = await asyncio.to_thread(self.start)
        took_s = await asyncio.to_thread(self._wait_whole, victim, before, struck_s)
        await asking
        return took_s

    def _wait_whole(self, victim: str, before: dict[str, int], struck_s: float) -> float:
        wait_until(
            lambda: self._is_whole(victim, before),
            f"whole again without {victim}",
        )
        return time.monotonic() - struck_s

    async def _ask_all(self, answers: list[Answer]) -> list[Answer]:
        deadline_s = time.monotonic() + self.whole_again_s
        limits = httpx.Limits(max_connections=2 * NUM_ANSWERS)
        async with httpx.AsyncClient(timeout=self.whole_again_s, limits=limits) as client:
            await asyncio.gather(
                *(
                    self._ask(client, index, answer, deadline_s)
                    for index, answer in enumerate(answers)
                )
            )
        return answers

    async def _ask(
        self, client: httpx.AsyncClient, index: int, answer: Answer, deadline_s: float
    ) -> None:
        """Ask until an answer has come to its end. What came before a break is forgotten, and was
        right so far.
        """
        while not answer.is_done:
            assert time.monotonic() < deadline_s, (
                f"answer {index} does not come; it has {len(answer.text)} characters"
            )
            try:
                await self._stream(client, index, answer)
            except httpx.TransportError:
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
            if reply.status_code != 200:
                raise AssertionError(f"{reply.status_code}: {(await reply.aread()).decode()}")
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    answer.is_done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    answer.text += "".join(choice["text"] for choice in event["choices"])

    def _is_whole(self, victim: str, before: dict[str, int]) -> bool:
        """Everything runs and is known to the front, and the victim is another."""
        processes = self.server.status().processes
        if any(process.phase != "ready" for process in processes.values()):
            return False
        if victim in before and processes[victim].pid == before[victim]:
            return False
        try:
            health = httpx.get(f"{self.server.url}/health", timeout=10)
        except httpx.TransportError:
            return False
        return health.status_code == 200 and health.json()["ranks_up"] == {
            "prefill-0": RANKS,
            "decode-0": RANKS,
        }


def _is_near(name: str, victim: str) -> bool:
    """Whether the end of a process may be another's as well: a leader's is, of its ranks."""
    return name == victim or name.startswith(f"{victim}.")


def start_ranked(start_server: StartServer, **options: Any) -> Server:
    unit = {"ranks": RANKS, "kv_memory_mb": 32}
    return start_server(prefill=unit, decode=unit | {"redundant_experts": 64}, **options)


def start_starved(start_server: StartServer) -> Server:
    """Where the spinning processes are. Who asks is elsewhere, and sees what comes when it comes."""
    with on_one_processor():
        server = start_ranked(start_server, wait=False, is_plain=True)  # A fork would be elsewhere.
    server.wait_ready(STARVED_S)
    return server


def drawn(num_rounds: int, rng: random.Random) -> list[Strike]:
    """Each of STRIKES once before any of them comes again, in random order."""
    found: list[Strike] = []
    while len(found) < num_rounds:
        found += rng.sample(STRIKES, len(STRIKES))
    return found[:num_rounds]


def audited(server: Server) -> None:
    """Nothing leaked, at rest."""
    reply = httpx.get(f"{server.url}/audit", timeout=30)
    assert reply.status_code == 200, reply.text
    assert all(unit["num_blocks_used"] == 0 for unit in reply.json()["units"].values()), reply.text


@pytest.mark.timeout(3600)
def test_no_answer_shows_what_died_or_froze(start_server: StartServer) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    strikes = drawn(NUM_ROUNDS, random.Random(41))
    if not FULL:
        strikes = strikes[:NUM_FIXED] + drawn(NUM_ROUNDS - NUM_FIXED, random.Random(seed))
    rounds = Rounds(lambda: start_ranked(start_server), random.Random(seed), WHOLE_AGAIN_S)
    for strike in strikes:
        rounds.run(strike)
    audited(rounds.server)
    print(rounds.told())


@pytest.mark.timeout(7200)
def test_nothing_is_lost_or_given_up_on_a_starved_machine(start_server: StartServer) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    rounds = Rounds(lambda: start_starved(start_server), random.Random(seed), STARVED_S)
    strikes = drawn(NUM_STARVED, random.Random(seed)) if FULL else [(SIGKILL, GATEWAY)]
    with spinning(NUM_SPINNING):
        for strike in strikes:
            rounds.run(strike)
    audited(rounds.server)
    print(rounds.told())
