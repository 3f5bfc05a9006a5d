"""Units whose cache lies beside their pool, as on a GPU, but on the CPU: nobody sees a stale byte
of a pool.

Every process of the server gets a KvCache that is staged; a pool's memory is zero until something
is published or pulled.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.dist.oracle import Case, complete_all, differences, everyday_cases
from tests.dist.serving import SOURCE, StartServer

STAGED = """
import functools

from hadal.model.cache import KvCache

KvCache.__init__ = functools.partialmethod(KvCache.__init__, is_staged=True)
"""
"""A cache without a pool is as it was."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return everyday_cases(16, seed=47)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_plain_loops_tokens(
    start_server: StartServer, cases: list[Case], tmp_path: Path, num_ranks: int
) -> None:
    """Few blocks, so that requests are preempted and blocks used again; with ranks, one is killed,
    and those on the other join again with what only its cache has.
    """
    (tmp_path / "sitecustomize.py").write_text(STAGED)
    server = start_server(
        environment={"PYTHONPATH": f"{tmp_path}:{SOURCE}"},
        prefill={"ranks": num_ranks, "kv_memory_mb": 32},
        decode={
            "ranks": num_ranks,
            "kv_blocks": 40,
            "max_requests": 16,
            "redundant_experts": 64 * (num_ranks - 1),
        },
    )

    async def strike() -> None:
        await asyncio.sleep(0.4)
        if num_ranks > 1:
            server.kill("decode-0.1", signal.SIGKILL)

    outputs = asyncio.run(
        complete_all(server.url, server.model, cases, concurrency=16, while_running=strike)
    )
    assert differences(cases, outputs) == []
