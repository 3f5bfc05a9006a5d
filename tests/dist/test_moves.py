"""Requests move between the ranks of a live decode unit, and every token is the plain loop's."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.dist.oracle import FULL, complete_all, differences, everyday_cases, make_cases
from tests.dist.serving import Server, StartServer
from tests.fresh import fresh

NUM_FIXED, NUM_FRESH = (80, 80) if FULL else (24, 8)
MAX_ROUNDS = 6


def num_moved(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith('hadal_requests_moved_total{unit="decode-0"}')
    )
    return float(line.rpartition(" ")[2])


@pytest.mark.timeout(600)
def test_tokens_are_the_plain_loops_while_requests_move(start_server: StartServer) -> None:
    """Each third prompt is long, and ends come when they come: no placement stays even.

    Whether a move pays depends on what steps cost here and now: rounds go on until one was made.
    """
    seed = fresh().randrange(2**31)
    print(f"fresh prompts: seed {seed}")
    cases = everyday_cases(NUM_FIXED, seed=23) + make_cases(NUM_FRESH, seed=seed)
    server = start_server(
        prefill={"kv_memory_mb": 32, "max_requests": 8},
        decode={"ranks": 4, "kv_memory_mb": 32, "max_requests": 8, "min_split_tokens": 2},
        chunk_tokens=512,
    )
    for _ in range(MAX_ROUNDS):
        outputs = asyncio.run(complete_all(server.url, server.model, cases, concurrency=20))
        assert differences(cases, outputs) == []
        if num_moved(server) > 0:
            return
    pytest.fail(f"no request moved in {MAX_ROUNDS} rounds of {len(cases)}")
