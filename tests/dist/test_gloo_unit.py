"""Units over gloo give the plain loop's tokens, and a killed rank costs no request.

Gloo notices a dead peer by its connection or never; otherwise the leader's message must end the
wait. The deadline of an exchange is so late here that a test that waits for it hangs.
`HADAL_LEVEL=all`: 64 prompts.
"""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.dist.oracle import FULL, complete_all, differences, everyday_cases
from tests.dist.serving import FORMED, Server, StartServer, kill_at_work
from tests.waiting import DEADLINE_S, PATIENCE_S, wait_until

VICTIM = "decode-0.1"


def members(server: Server) -> list[str]:
    """Return the ranks of each formation of the decode unit, oldest first."""
    return [ranks for unit, _, _, ranks in FORMED.findall(server.log()) if unit == "decode-0"]


@pytest.mark.slow("it serves its prompts twice, and forms anew")
@pytest.mark.more("gloo is for GPUs; here it shows what tcp shows")
def test_the_plain_loops_tokens_with_a_rank_killed_and_without(start_server: StartServer) -> None:
    cases = everyday_cases(64 if FULL else 16, seed=41)
    server = start_server(
        transport="gloo",
        collective_timeout_s=PATIENCE_S,
        prefill={"ranks": 2, "kv_memory_mb": 32},
        decode={"ranks": 2, "kv_memory_mb": 32, "max_requests": 16, "redundant_experts": 64},
    )
    url, model = server.url, server.model
    assert differences(cases, asyncio.run(complete_all(url, model, cases, concurrency=16))) == []
    old_pid = server.pids()[VICTIM]

    async def strike() -> None:
        await kill_at_work(server, VICTIM)

    outputs = asyncio.run(complete_all(url, model, cases, concurrency=16, while_running=strike))
    assert differences(cases, outputs) == [], f"with {VICTIM} killed"
    server.wait_restarted(VICTIM, old_pid)
    wait_until(lambda: members(server)[-1] == "0, 1", f"{VICTIM} belongs to its unit again")
    few = cases[:4]
    assert differences(few, asyncio.run(complete_all(url, model, few, concurrency=4))) == []
    audit = httpx.get(f"{url}/audit", timeout=DEADLINE_S)
    assert audit.status_code == 200, audit.text
