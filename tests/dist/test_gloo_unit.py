"""Units over gloo: the plain loop's tokens, and a killed rank that no request shows.

Gloo notices a dead peer by its connection or not at all; the leader's news must end the wait.
`HADAL_LEVEL=all`: 64 prompts.
"""

from __future__ import annotations

import asyncio
import signal
import time

import httpx
import pytest

from tests.dist.oracle import FULL, Case, complete_all, differences, everyday_cases
from tests.dist.serving import FORMED, Server, StartServer, noticed_in
from tests.waiting import wait_until

VICTIM = "decode-0.1"
BROKEN_S = 5.0
"""Well below the deadline of an exchange: a survivor that waited for that has not heard the
leader.
"""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return everyday_cases(64 if FULL else 16, seed=41)


def members(server: Server, unit: str) -> list[str]:
    return [
        ranks.replace(" ", "") for of, _, _, ranks in FORMED.findall(server.log()) if of == unit
    ]


def test_the_plain_loops_tokens_with_a_rank_killed_and_without(
    start_server: StartServer, cases: list[Case]
) -> None:
    server = start_server(
        transport="gloo",
        prefill={"ranks": 2, "kv_memory_mb": 32},
        decode={"ranks": 2, "kv_memory_mb": 32, "max_requests": 16, "redundant_experts": 64},
    )
    outputs = asyncio.run(complete_all(server.url, server.model, cases, concurrency=16))
    assert differences(cases, outputs) == []
    old_pid, struck_s = server.pids()[VICTIM], 0.0

    async def strike() -> None:
        nonlocal struck_s
        await asyncio.sleep(0.5)
        struck_s = time.time()
        server.kill(VICTIM, signal.SIGKILL)
        while "0" not in members(server, "decode-0"):
            assert time.time() - struck_s < BROKEN_S, "the survivor did not form again in time"
            await asyncio.sleep(0.01)

    outputs = asyncio.run(
        complete_all(server.url, server.model, cases, concurrency=16, while_running=strike)
    )
    assert differences(cases, outputs) == [], f"with {VICTIM} killed"
    noticed = [
        found.at_s - struck_s for found in noticed_in(server.log()) if found.unit == "decode-0"
    ]
    print(f"noticed after {noticed} s; formed: {FORMED.findall(server.log())}")
    server.wait_restarted(VICTIM, old_pid)
    wait_until(
        lambda: members(server, "decode-0")[-1] == "0,1",
        f"{VICTIM} belongs to its unit again",
    )
    outputs = asyncio.run(complete_all(server.url, server.model, cases[:4], concurrency=4))
    assert differences(cases[:4], outputs) == []
    audit = httpx.get(f"{server.url}/audit", timeout=30)
    assert audit.status_code == 200, audit.text
