"""A random rank of a random unit dies or freezes while 16 answers are under way, round after round: the
tokens are those of the plain loop, all others notice, and the unit is whole before the next round.

`HADAL_LEVEL=all`: 50 kills and 20 stops.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.dist import gate
from tests.dist.conftest import starting
from tests.dist.oracle import FULL, Case, complete_all, differences, everyday_cases
from tests.dist.serving import FORMED, RANKED, Server, metric, noticed_in
from tests.fresh import fresh
from tests.waiting import wait_for, wait_until

pytestmark = pytest.mark.more("test_rank_processes has a rank that dies and one that freezes")
NUM_KILLS, NUM_STOPS = (50, 20) if FULL else (3, 1)
NUM_CASES = 24 if FULL else 16
NUM_RANKS = {f"{kind}-0": RANKED[kind]["ranks"] for kind in ("prefill", "decode")}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with starting() as start:
        yield start(**RANKED)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return everyday_cases(NUM_CASES, seed=23)


def is_whole(server: Server) -> bool:
    """Return whether all processes run, and every unit's newest formation has all its ranks."""
    if any(process.phase != "ready" for process in server.status().processes.values()):
        return False
    newest = {unit: members for unit, _, _, members in FORMED.findall(server.log())}
    return {unit: len(members.split(",")) for unit, members in newest.items()} == NUM_RANKS


def break_one(
    server: Server, cases: list[Case], rng: random.Random, number: signal.Signals
) -> None:
    """One round."""
    unit = rng.choice(sorted(NUM_RANKS))
    rank = rng.randrange(NUM_RANKS[unit])
    victim, log_before = f"{unit}.{rank}", len(server.log())
    is_prefill = unit == "prefill-0"
    state = "prefilling" if is_prefill else "decoding"
    # The longest answer cannot end within these steps.
    after = 0 if is_prefill else rng.randrange(max(len(case.output) for case in cases) // 2)
    server.gate.hold(gate.PREFILL if is_prefill else gate.DECODE, after)

    async def strike() -> None:
        await wait_for(
            lambda: metric(server, "hadal_generations_now", f'state="{state}"'),
            f"an answer is {state}",
        )
        server.kill(victim, number)
        server.gate.open()

    rng.shuffle(cases)
    outputs = asyncio.run(
        complete_all(server.url, server.model, cases, concurrency=16, while_running=strike)
    )
    assert differences(cases, outputs) == [], f"{number.name} of {victim}"
    noticed = {(unit, other, rank) for other in range(NUM_RANKS[unit]) if other != rank}
    wait_until(
        lambda: noticed_in(server.log()[log_before:]) >= noticed,
        f"all others of {unit} noticed that {victim} was gone",
    )
    wait_until(lambda: is_whole(server), "every rank is back")


@pytest.mark.promise(
    "A dead or frozen rank is noticed within two seconds, the unit goes on without it, no"
    " request shows it"
)
@pytest.mark.promise(
    "experts that have no replica left are read again by the survivors, whose requests "
    "keep their KV and are rolled back to the last delivered token"
)
@pytest.mark.slow("many rounds")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("number", "num_rounds"), [(signal.SIGKILL, NUM_KILLS), (signal.SIGSTOP, NUM_STOPS)]
)
def test_no_request_shows_that_a_rank_is_gone(
    server: Server, cases: list[Case], number: signal.Signals, num_rounds: int
) -> None:
    seed = 31 if FULL else fresh().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(num_rounds):
        break_one(server, list(cases), rng, number)
    # A survivor may have noticed before the front heard that the unit is not whole: pools show it, too.
    wait_until(lambda: len(server.shared_pools()) == sum(NUM_RANKS.values()), "every rank is back")
    audit = httpx.get(f"{server.url}/audit", timeout=60)
    assert audit.status_code == 200, audit.text
