"""However a request is served, its greedy tokens are those of the plain single-request loop."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import Any

import httpx
import pytest

from tests.dist.serving import Server, StartServer
from tests.dist.oracle import FULL, Case, complete_all, differences, make_cases

NUM_CASES = 200 if FULL else 24


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Fixed prompts and fresh ones; the fresh seed is printed when a test fails."""
    fresh = random.SystemRandom().randrange(2**31)
    print(f"fresh prompts: seed {fresh}")
    return make_cases(NUM_CASES - NUM_CASES // 4, seed=7) + make_cases(NUM_CASES // 4, seed=fresh)


def metric(server: Server, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk_tokens", [16, 64, 4096])
def test_chunks(start_server: StartServer, cases: list[Case], chunk_tokens: int) -> None:
    server = start_server(chunk_tokens=chunk_tokens)
    outputs = asyncio.run(complete_all(server.url, server.model, cases))
    assert differences(cases, outputs) == []


@pytest.mark.timeout(900)
def test_preemption(start_server: StartServer, cases: list[Case]) -> None:
    num_blocks = max(-(-(len(c.prompt) + 160) // 64) for c in cases) + 6
    server = start_server(decode={"kv_blocks": num_blocks, "kv_memory_mb": 0})
    outputs = asyncio.run(complete_all(server.url, server.model, cases))
    assert differences(cases, outputs) == []
    assert metric(server, "hadal_preemptions_total") > 0, "the pool was large enough; this test shows nothing"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_killed_midway(start_server: StartServer, cases: list[Case], victim: str) -> None:
    server = start_server()

    async def kill() -> None:
        # Once tokens flow, and far from the end.
        while metric(server, "hadal_tokens_out_total") < 60:
            await asyncio.sleep(0.005)
        server.kill(victim, signal.SIGKILL)

    outputs = asyncio.run(complete_all(server.url, server.model, cases, while_running=kill))
    assert differences(cases, outputs) == []
    assert metric(server, "hadal_retries_total") > 0, "nothing was in flight at the unit; this test shows nothing"



def test_the_test_can_fail(cases: list[Case]) -> None:
    """A changed token is seen."""
    changed: list[Any] = [case.output for case in cases]
    changed[3] = (*changed[3][:-1], changed[3][-1] + 1)
    assert len(differences(cases, changed)) == 1
