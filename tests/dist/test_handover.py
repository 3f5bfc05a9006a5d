"""Served with KV going from prefill to decode over TCP and NIXL: the tokens are those of shared
memory and of the plain loop; whoever is killed in the middle, no request is lost and nothing leaks.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from hadal.runtime.transfer.nixl import package
from tests.dist.oracle import FULL, Case, complete_all, differences, everyday_cases
from tests.dist.serving import Server, StartServer, kill_at_work, metric
from tests.waiting import wait_until

NUM_CASES = 200 if FULL else 24
TRANSPORTS = [
    "shm",
    "tcp",
    pytest.param("nixl", marks=pytest.mark.skipif(not package(), reason="no NIXL here")),
]
AS_BETWEEN_HOSTS = {"UCX_TLS": "tcp,self"}
"""On one host UCX would take shared memory, and a dead process would never be noticed by it."""
KILLS = ["decode-0", "prefill-0"] * (10 if FULL else 1)
CONCURRENCY = 8
"""Where one is killed, so that others come after it."""
TAKEN = re.compile(r"KV of (\S+) comes over (\w+)")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return everyday_cases(NUM_CASES, seed=61)


def transports(server: Server) -> set[str]:
    return {transport for _, transport in TAKEN.findall(server.log())}


def is_clean(server: Server) -> bool:
    """No block of any unit is held once nobody asks for anything."""
    reply: dict[str, Any] = httpx.get(f"{server.url}/audit", timeout=30).json()
    return reply["problems"] == [] and all(
        not unit["num_blocks_used"] for unit in reply["units"].values()
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("handover", TRANSPORTS)
def test_tokens_are_those_of_the_plain_loop(
    start_server: StartServer, cases: list[Case], handover: str
) -> None:
    server = start_server("--log-level", "info", environment=AS_BETWEEN_HOSTS, handover=handover)
    outputs = asyncio.run(complete_all(server.url, server.model, cases))
    assert differences(cases, outputs) == []
    assert transports(server) == {handover}
    assert metric(server, "hadal_retries_total") == 0
    wait_until(lambda: is_clean(server), "nothing is held")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("handover", TRANSPORTS[1:])
def test_killed_midway_nothing_is_lost(
    start_server: StartServer, cases: list[Case], handover: str
) -> None:
    server = start_server("--log-level", "info", environment=AS_BETWEEN_HOSTS, handover=handover)
    for victim in KILLS:

        async def kill(victim: str = victim) -> None:
            await kill_at_work(server, victim)

        old_pid = server.pids()[victim]
        num_retries = metric(server, "hadal_retries_total")
        outputs = asyncio.run(
            complete_all(
                server.url, server.model, cases, concurrency=CONCURRENCY, while_running=kill
            )
        )
        assert differences(cases, outputs) == []
        assert metric(server, "hadal_retries_total") > num_retries, (
            f"nothing was in flight at {victim}; this test shows nothing"
        )
        server.wait_restarted(victim, old_pid)
        wait_until(lambda: is_clean(server), "nothing is held")
    assert transports(server) == {handover}


@pytest.mark.timeout(300)
def test_ranks_pull_over_tcp(start_server: StartServer, cases: list[Case]) -> None:
    server = start_server(
        "--log-level",
        "info",
        handover="tcp",
        prefill={"ranks": 2, "threads": 1},
        decode={"ranks": 2, "threads": 1},
    )
    outputs = asyncio.run(complete_all(server.url, server.model, cases[:12]))
    assert differences(cases[:12], outputs) == []
    assert transports(server) == {"tcp"}
    wait_until(lambda: is_clean(server), "nothing is held")
