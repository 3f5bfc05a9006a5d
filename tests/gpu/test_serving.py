"""`hadal serve` on one GPU, in FP32: the plain loop's greedy tokens, by units of one rank and of
two ranks that share it.
"""

from __future__ import annotations

import asyncio

import httpx
import pytest
import torch

from tests.dist.oracle import Case, complete_all, differences, make_cases
from tests.dist.serving import StartServer, kill_at_work
from tests.needs import skip_unless
from tests.waiting import DEADLINE_S

pytestmark = [
    pytest.mark.gpu,
    skip_unless(torch.cuda.is_available(), "no CUDA device", "a machine with an NVIDIA GPU"),
]

PATIENT = {"rank_timeout_s": 10.0, "collective_timeout_s": 30.0, "unit_timeout_s": 60.0}
"""Long timeouts: the first steps load CUDA's kernels one by one."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases(16, seed=43)


@pytest.mark.parametrize(("num_ranks", "drafts"), [(1, 0), (2, 0), (1, 2), (2, 2)])
def test_the_plain_loops_tokens(
    start_server: StartServer, cases: list[Case], num_ranks: int, drafts: int
) -> None:
    units = {"ranks": num_ranks, "kv_memory_mb": 64}
    server = start_server(
        device="cuda",
        transport="gloo",
        prefill=units,
        decode={**units, "max_requests": 16, "drafts": drafts},
        **PATIENT,
    )
    outputs = asyncio.run(complete_all(server.url, server.model, cases, concurrency=16))
    assert differences(cases, outputs) == []
    audit = httpx.get(f"{server.url}/audit", timeout=DEADLINE_S)
    assert audit.status_code == 200, audit.text


def test_a_killed_rank_costs_no_request(start_server: StartServer, cases: list[Case]) -> None:
    """Kill a rank: survivors keep their KV on the device; requests rejoin without reading the pool."""
    units = {"ranks": 2, "kv_memory_mb": 64}
    server = start_server(
        device="cuda",
        transport="gloo",
        prefill=units,
        decode={**units, "max_requests": 16},
        **PATIENT,
    )

    async def strike() -> None:
        await kill_at_work(server, "decode-0.1")

    outputs = asyncio.run(
        complete_all(server.url, server.model, cases, concurrency=16, while_running=strike)
    )
    assert differences(cases, outputs) == []
