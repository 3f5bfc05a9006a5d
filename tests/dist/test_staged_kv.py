"""Units with a cache beside their pool, like on a GPU, but on the CPU. No reader sees a stale byte
of a pool: its memory is zero until blocks are published or pulled.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.dist.oracle import Case, complete_all, differences, everyday_cases
from tests.dist.served import STAGED
from tests.dist.serving import StartServer, kill_at_work

pytestmark = pytest.mark.more("tests of the cache hold what is published and what is pulled")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return everyday_cases(16, seed=47)


@pytest.mark.slow("a pool of few blocks, and a rank that joins again")
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_plain_loops_tokens(
    start_server: StartServer, cases: list[Case], num_ranks: int
) -> None:
    """Few blocks, so that requests are preempted and blocks reused. With two ranks, one is killed;
    requests of the other one continue with KV that only its cache has.
    """
    server = start_server(
        environment={STAGED: "1"},
        prefill={"ranks": num_ranks, "kv_memory_mb": 32},
        decode={
            "ranks": num_ranks,
            "kv_blocks": 40,
            "max_requests": 16,
            "redundant_experts": 64 * (num_ranks - 1),
        },
    )

    async def strike() -> None:
        if num_ranks > 1:
            await kill_at_work(server, "decode-0.1", num_steps=20)

    outputs = asyncio.run(
        complete_all(server.url, server.model, cases, concurrency=16, while_running=strike)
    )
    assert differences(cases, outputs) == []
