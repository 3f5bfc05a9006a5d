"""KV transfer from prefill to decode over TCP and NIXL. Tokens equal those of shared memory and of
the plain loop, a unit killed midway costs no request, and nothing leaks.
"""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest

from hadal.runtime.transfer.nixl import package
from tests.dist.oracle import FULL, Case, complete_all, differences, everyday_cases
from tests.dist.serving import Server, StartServer, kill_at_work, metric
from tests.needs import skip_unless
from tests.waiting import DEADLINE_S, wait_until

NUM_CASES = 200 if FULL else 24
NEEDS_NIXL = skip_unless(package() is not None, "no NIXL", "pip install 'hadal[nixl]'")
AS_BETWEEN_HOSTS = {"UCX_TLS": "tcp,self"}
"""Environment for UCX. On one host it would use shared memory and never notice a dead process."""
KILLS = ["decode-0", "prefill-0"] * (10 if FULL else 1)
CONCURRENCY = 8
"""Concurrency of tests that kill a unit, so that requests arrive after the kill."""
TAKEN = re.compile(r"KV of (\S+) is pulled over (\w+)")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return everyday_cases(NUM_CASES, seed=61)


def transports(server: Server) -> set[str]:
    return {transport for _, transport in TAKEN.findall(server.log())}


def is_clean(server: Server) -> bool:
    """Return whether no unit has a used block and the audit finds no problem."""
    reply = httpx.get(f"{server.url}/audit", timeout=DEADLINE_S).json()
    return reply["problems"] == [] and not any(
        unit["num_blocks_used"] for unit in reply["units"].values()
    )


def served(server: Server, cases: list[Case], transport: str) -> None:
    """Check the tokens, and that all KV came over this transport at the first attempt."""
    num_retries = metric(server, "hadal_retries_total")
    outputs = asyncio.run(complete_all(server.url, server.model, cases))
    assert differences(cases, outputs) == []
    assert transports(server) == {transport}
    assert metric(server, "hadal_retries_total") == num_retries


def test_tcp_gives_the_plain_loops_tokens(borrow: StartServer) -> None:
    served(borrow(handover="tcp"), everyday_cases(8, seed=61), "tcp")


@pytest.mark.promise("The request is prefilled again elsewhere.")
@pytest.mark.more("test_supervision kills units")
@pytest.mark.parametrize("handover", ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)])
def test_killed_midway_nothing_is_lost(
    start_server: StartServer, cases: list[Case], handover: str
) -> None:
    server = start_server(environment=AS_BETWEEN_HOSTS, handover=handover)
    served(server, cases, handover)
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
