"""A rank dies or freezes in the middle of serving: everybody else notices in time, and no request
shows it.

Rounds on one server: 16 streams run, a random rank of a random unit gets SIGKILL or SIGSTOP, all
answers must be those of the plain loop, every survivor must have noticed within the promised time,
and the unit must be whole again before the next round. `HADAL_LEVEL=all`: 50 kills and 20 stops.
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from tests.dist.conftest import starting
from tests.dist.oracle import FULL, Case, complete_all, differences, everyday_cases
from tests.dist.serving import FORMED, Server, noticed_in
from tests.fresh import fresh
from tests.waiting import wait_until

NUM_KILLS, NUM_STOPS = (50, 20) if FULL else (2, 1)
NUM_CASES, CONCURRENCY = 24 if FULL else 16, 16
KILL_NOTICED_S, STOP_NOTICED_S = 1.0, 2.0
WHOLE_AGAIN_S = 60.0
PREFILL_RANKS, DECODE_RANKS = 2, 4


@dataclass
class Findings:
    """What all rounds showed."""

    noticed_s: list[float] = field(default_factory=list)
    formed_s: list[float] = field(default_factory=list)
    """Of a generation without the victim."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return everyday_cases(NUM_CASES, seed=23)


def ranks(server: Server) -> dict[str, int]:
    return {name: pid for name, pid in server.pids().items() if "." in name}


def is_whole(server: Server) -> bool:
    """All processes run, and every unit's newest generation has all its ranks."""
    if any(process.phase != "ready" for process in server.status().processes.values()):
        return False
    newest = {unit: members for unit, _, _, members in FORMED.findall(server.log())}
    sizes = {unit: len(members.split(",")) for unit, members in newest.items()}
    return sizes == {"prefill-0": PREFILL_RANKS, "decode-0": DECODE_RANKS}


def break_one(
    server: Server, cases: list[Case], rng: random.Random, number: int, findings: Findings
) -> None:
    """One round."""
    wait_until(lambda: is_whole(server), "every rank is back")
    victim = rng.choice(sorted(ranks(server)))
    unit, _, index = victim.rpartition(".")
    survivors = {name for name in ranks(server) if name.startswith(f"{unit}.")} - {victim}
    log_before, struck_s = len(server.log()), 0.0

    async def strike() -> None:
        nonlocal struck_s
        await asyncio.sleep(rng.uniform(0.05, 1.0))
        struck_s = time.time()
        server.kill(victim, number)

    rng.shuffle(cases)
    outputs = asyncio.run(
        complete_all(server.url, server.model, cases, concurrency=CONCURRENCY, while_running=strike)
    )
    assert differences(cases, outputs) == [], f"{signal.Signals(number).name} of {victim}"
    limit_s = KILL_NOTICED_S if number == signal.SIGKILL else STOP_NOTICED_S

    def noticed() -> dict[str, float]:
        return {
            f"{unit}.{one.rank}": one.at_s - struck_s
            for one in reversed(noticed_in(server.log()[log_before:]))
            if (one.unit, one.gone) == (unit, int(index))
        }

    wait_until(
        lambda: survivors <= noticed().keys(),
        f"{survivors} noticed that {victim} is gone",
    )
    late = {name: after_s for name, after_s in noticed().items() if after_s > limit_s}
    assert not late, f"{victim} was gone at 0 s and noticed at {late}"
    findings.noticed_s += noticed().values()
    formed = FORMED.findall(server.log()[log_before:])
    findings.formed_s += [
        float(took_s) for of, _, took_s, members in formed if of == unit and index not in members
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with starting() as start:
        yield start(
            prefill={"ranks": PREFILL_RANKS, "kv_memory_mb": 32},
            decode={
                "ranks": DECODE_RANKS,
                "kv_memory_mb": 32,
                "max_requests": 8,
                "redundant_experts": 64,
            },
        )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("number", "num_rounds"),
    [(signal.SIGKILL, NUM_KILLS), (signal.SIGSTOP, NUM_STOPS)],
    ids=["SIGKILL", "SIGSTOP"],
)
def test_no_request_shows_that_a_rank_is_gone(
    server: Server, cases: list[Case], number: int, num_rounds: int
) -> None:
    seed = 31 if FULL else fresh().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    findings = Findings()
    for _ in range(num_rounds):
        break_one(server, list(cases), rng, number, findings)
    # A survivor may have noticed before the front heard that the unit is not whole: the pools tell,
    # too.
    num_ranks = PREFILL_RANKS + DECODE_RANKS
    wait_until(
        lambda: is_whole(server) and len(server.shared_pools()) == num_ranks,
        "every rank is back",
    )
    audit = httpx.get(f"{server.url}/audit", timeout=30)
    assert audit.status_code == 200, audit.text
    print(
        f"{num_rounds} rounds of {signal.Signals(number).name}: noticed after"
        f" {told(findings.noticed_s)}, formed without it in {told(findings.formed_s)}"
    )


def told(seconds: list[float]) -> str:
    return (
        f"median {statistics.median(seconds):.3f} s, worst {max(seconds):.3f} s"
        if seconds
        else "nothing measured"
    )
