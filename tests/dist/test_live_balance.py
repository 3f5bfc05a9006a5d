"""Experts and requests move between the ranks of a live EP4 decode unit while it serves, and no
token changes.

The balancers decide by load alone (tests/dist/eager), and the load continues until something has
moved. Every answer is compared with the plain loop's. Simulated units assert that loads become even
and that no request pauses for long (tests/sim/test_experts.py, tests/sim/test_moves.py).
bench/balance_live measures the gain. `HADAL_LEVEL=all`: more prompts, 20 kills.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Any

import pytest

from bench.live_load import Ask, ClosedLoop, http_client
from tests.dist import eager
from tests.dist.conftest import starting
from tests.dist.oracle import Case, everyday_cases, make_cases
from tests.dist.serving import FORMED, RANKED, Server, metric
from tests.fresh import fresh
from tests.levels import FULL, MORE
from tests.waiting import wait_for

FLIPPED = (
    r"^\S+ {unit} .*MoE layer (\d+) flipped in step (\d+), begun after step (-?\d+); replicas"
    r" moved: (\d+)"
)
STAGING = (
    r"^\S+ {unit} .*MoE layer (\d+): staging begins after step (-?\d+); replicas to move:"
    r" ([1-9]\d*)"
)
"""Patterns of lines of a leader's log. FLIPPED: new experts of a layer are in use. STAGING: their transfer begins."""
UNIT = "decode-0"
LABEL = f'unit="{UNIT}"'
NUM_CLIENTS = 20
MAX_TOKENS = 160 if MORE else 64
NUM_CASES = 24 if MORE else 6
NUM_FRESH = 80 if FULL else 8 if MORE else 0
NUM_KILLS = 20 if FULL else 1
NUM_SKEWED = 3
"""Number of different prompts in use at a time while ranks die. Few prompts skew the experts' loads."""
NUM_ANSWERS = 2 * NUM_CLIENTS
"""Number of answers after which the next group of prompts is sent."""
ABANDONED = "keeps its placement: the formation is over"
PATIENT: dict[str, Any] = {**RANKED, "rank_timeout_s": 60.0, "unit_timeout_s": 90.0}
"""Deployment in which no process is replaced, however busy the machine is."""
MOVED = ("hadal_replicas_moved_total", "hadal_requests_moved_total")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with starting() as start:
        yield start(environment=eager.ENVIRONMENT, **PATIENT)


class Load:
    """A closed loop of greedy requests with every answer compared."""

    def __init__(self, loop: ClosedLoop, groups: Sequence[Sequence[Case]]) -> None:
        self.loop = loop
        self.wrong: list[str] = []
        self._expected = {case.prompt: case.output for group in groups for case in group}
        self._groups = cycle([[Ask(case.prompt, MAX_TOKENS) for case in group] for group in groups])
        loop.on_answer = self._compare
        loop.asks = next(self._groups)

    def _compare(self, ask: Ask, tokens: tuple[int, ...]) -> None:
        expected = self._expected[ask.prompt][:MAX_TOKENS]
        if tokens != expected:
            self.wrong.append(f"prompt of {len(ask.prompt)}: {tokens} instead of {expected}")
        if self.loop.num_answers % NUM_ANSWERS == 0:
            self.loop.asks = next(self._groups)


@asynccontextmanager
async def loaded(server: Server, groups: Sequence[Sequence[Case]]) -> AsyncIterator[Load]:
    """Have a server answer groups of cases in turn; at the end all answers must be the plain loop's."""
    async with http_client(server.url, NUM_CLIENTS) as http:
        load = Load(ClosedLoop(http, server.model, [], NUM_CLIENTS), groups)
        async with load.loop:
            yield load
            await load.loop.finish()
        assert load.wrong == []
        assert load.loop.num_answers >= NUM_CLIENTS
        assert (await http.get("/audit")).status_code == 200


@pytest.mark.promise("Results do not depend on the placement, so tokens never change.")
@pytest.mark.campaign("more prompts, some of them fresh")
@pytest.mark.slow("it serves until experts and a request have moved")
def test_experts_and_requests_move_and_no_token_shows_it(server: Server) -> None:
    seed = fresh().randrange(2**31)
    print(f"fresh prompts: seed {seed}")
    cases = everyday_cases(NUM_CASES, seed=23) + make_cases(NUM_FRESH, seed=seed)
    pids, formation = server.pids(), metric(server, "hadal_unit_formation", LABEL)

    async def scene() -> None:
        async with loaded(server, [cases]) as load:

            def has_moved() -> bool:
                load.loop.check()
                return all(metric(server, name, LABEL) > 0 for name in MOVED)

            await wait_for(has_moved, "experts and a request have moved")

    asyncio.run(scene())
    assert metric(server, "hadal_unit_formation", LABEL) == formation
    assert metric(server, "hadal_retries_total") == 0
    assert server.pids() == pids


def newest_formation(server: Server) -> tuple[int, int]:
    """Return number and size of the decode unit's newest formation."""
    formed = [
        (int(number), len(members.split(",")))
        for unit, number, _, members in FORMED.findall(server.log())
        if unit == UNIT
    ]
    return max(formed)


@pytest.mark.more("simulated units do it at every seed")
@pytest.mark.slow("a rank is started again")
def test_a_rank_dies_while_experts_move(server: Server) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    cases = everyday_cases(NUM_CASES, seed=23)
    groups = [cases[first : first + NUM_SKEWED] for first in range(0, NUM_CASES, NUM_SKEWED)]
    for _ in range(NUM_KILLS):
        asyncio.run(one_kill(server, rng, groups))
        assert len(server.shared_pools()) == 2 + 4
    print(f"{server.log().count(ABANDONED)} of {NUM_KILLS} kills hit an installation")


async def one_kill(server: Server, rng: random.Random, groups: Sequence[Sequence[Case]]) -> None:
    """Kill a rank once the log shows that an installation begins; it may end before the kill. Wait
    until the unit has all ranks again and experts move again.
    """
    async with loaded(server, groups) as load:

        def num_lines(pattern: str) -> int:
            load.loop.check()
            return len(re.findall(pattern.format(unit=UNIT), server.log(), re.M))

        num_staged = num_lines(STAGING)
        await wait_for(lambda: num_lines(STAGING) > num_staged, "an installation begins")
        number, size = newest_formation(server)
        rank = f"{UNIT}.{rng.randrange(size)}"
        old_pid = server.kill(rank)
        await wait_for(
            lambda: (
                newest_formation(server) > (number, size)
                and newest_formation(server)[1] == size
                and server.pids()[rank] not in (0, old_pid)
            ),
            "the unit forms anew, with its successor",
        )
        num_flipped = num_lines(FLIPPED)
        await wait_for(lambda: num_lines(FLIPPED) > num_flipped, "balancing goes on")
