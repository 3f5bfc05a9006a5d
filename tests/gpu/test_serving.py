"""`hadal serve` on one GPU, in FP32: the plain loop's greedy tokens, by units of one rank and of
two that share it.
"""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest
import torch

from tests.dist.oracle import Case, complete_all, differences, make_cases
from tests.dist.serving import StartServer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device (torch.cuda.is_available() is false)"
    ),
]

START_S = 180.0
PATIENT = {"rank_timeout_s": 10.0, "collective_timeout_s": 30.0, "unit_timeout_s": 60.0}
"""The first steps load CUDA's kernels one by one."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases(16, seed=43)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_ranks", "drafts"), [(1, 0), (2, 0), (1, 2), (2, 2)])
def test_the_plain_loops_tokens(
    start_server: StartServer, cases: list[Case], num_ranks: int, drafts: int
) -> None:
    units = {"ranks": num_ranks, "kv_memory_mb": 64}
    server = start_server(
        wait=False,
        device="cuda",
        transport="gloo",
        prefill=units,
        decode={**units, "max_requests": 16, "drafts": drafts},
        **PATIENT,
    )
    server.wait_ready(START_S)
    outputs = asyncio.run(complete_all(server.url, server.model, cases, concurrency=16))
    assert differences(cases, outputs) == []
    audit = httpx.get(f"{server.url}/audit", timeout=60)
    assert audit.status_code == 200, audit.text


@pytest.mark.timeout(900)
def test_a_killed_rank_costs_no_request(start_server: StartServer, cases: list[Case]) -> None:
    """Survivors keep the KV on the device; a request joins again without looking at the pool."""
    units = {"ranks": 2, "kv_memory_mb": 64}
    server = start_server(
        wait=False,
        device="cuda",
        transport="gloo",
        prefill=units,
        decode={**units, "max_requests": 16},
        **PATIENT,
    )
    server.wait_ready(START_S)

    async def strike() -> None:
        await asyncio.sleep(1.0)
        server.kill("decode-0.1", signal.SIGKILL)

    outputs = asyncio.run(
        complete_all(server.url, server.model, cases, concurrency=16, while_running=strike)
    )
    assert differences(cases, outputs) == []
