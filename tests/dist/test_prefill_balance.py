"""A live prefill unit of two ranks under a skewed load: cut by cost its ranks take more nearly
equal time, and the tokens are the same as by token budgets.
"""

from __future__ import annotations

import asyncio
import random
import time
from statistics import mean
from typing import Any

import httpx
import pytest

from hadal.core.balance import ATTENTION, TIME, TOKENS
from tests.dist.serving import Server, StartServer
from tests.fresh import fresh
from tests.levels import FULL

VOCAB = 1500
NUM_LONG, NUM_SHORT, NUM_STEPS = (10, 120, 60) if FULL else (5, 60, 32)
"""Prompts, and steps: fewer than the prompts' tokens take at least, at 512 a step."""


def prompts(seed: int, num_long: int, num_short: int) -> list[list[int]]:
    """Long ones among many short ones, in an order of chance."""
    rng = random.Random(seed)
    lengths = [rng.randint(2000, 3900) for _ in range(num_long)] + [
        rng.randint(10, 250) for _ in range(num_short)
    ]
    rng.shuffle(lengths)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]


async def run_load(
    server: Server, before: list[list[int]], asked: list[list[int]]
) -> tuple[list[list[int]], list[dict[str, float]], float]:
    """Return the tokens of every prompt, the balance of the steps meanwhile, and the seconds it
    took.
    """
    model = server.model
    async with httpx.AsyncClient(
        base_url=server.url, timeout=180, limits=httpx.Limits(max_connections=len(asked) + 5)
    ) as client:

        async def ask(prompt: list[int]) -> list[int]:
            reply = await client.post(
                "/v1/completions",
                json={
                    "model": model,
                    "prompt": prompt,
                    "max_tokens": 2,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                },
            )
            assert reply.status_code == 200, reply.text
            return list(reply.json()["choices"][0]["token_ids"])

        await asyncio.gather(*(ask(prompt) for prompt in before))  # Rates are measured.
        began_s = time.monotonic()
        traced = asyncio.create_task(
            client.get("/trace", params={"unit": "prefill-0", "steps": NUM_STEPS, "wait_s": 120})
        )
        tokens = await asyncio.gather(*(ask(prompt) for prompt in asked))
        took_s = time.monotonic() - began_s
        reply = await traced
        assert reply.status_code == 200, reply.text
    return tokens, [step[5] for step in reply.json()["steps"]], took_s


@pytest.mark.timeout(600)
def test_cut_by_cost_ranks_are_more_equal_and_tokens_the_same(start_server: StartServer) -> None:
    seed = fresh().randrange(2**31)
    print("seed", seed)
    # The others are not in the cache, and all their tokens are computed.
    before, asked = prompts(seed + 1, 3, 24), prompts(seed, NUM_LONG, NUM_SHORT)
    seen: dict[str, tuple[list[list[int]], list[dict[str, float]], float]] = {}
    for balance in ("auto", "off"):
        prefill: dict[str, Any] = {"ranks": 2, "kv_memory_mb": 64, "request_balance": balance}
        server = start_server(prefill=prefill, chunk_tokens=256)
        seen[balance] = asyncio.run(run_load(server, before, asked))
        assert server.stop() == 0
    means = {
        balance: {name: mean(step[name] for step in steps) for name in (TIME, ATTENTION, TOKENS)}
        for balance, (_, steps, _) in seen.items()
    }
    print(means, {balance: round(took_s, 2) for balance, (_, _, took_s) in seen.items()})
    assert seen["auto"][0] == seen["off"][0]
    assert means["auto"][TIME] > means["off"][TIME]
