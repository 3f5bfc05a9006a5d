"""The tokens of a live prefill unit of two ranks are the same whether its steps are cut by cost or by
token budgets.

That ranks take more nearly equal time by cost is asserted in simulated time (tests/unit/test_balance_bench.py,
tests/unit/sim/world/test_world.py) and measured by bench/balance_live.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.live_load import Ask, ClosedLoop, http_client
from tests.dist.serving import RANKED, Server, StartServer
from tests.fresh import fresh
from tests.levels import FULL

pytestmark = [
    pytest.mark.more("the cut of a step is a policy; its tokens are those of test_exactness"),
    pytest.mark.slow("two servers of six ranks, and prompts of thousands of tokens"),
]

VOCAB = 1500
NUM_LONG, NUM_SHORT = (10, 120) if FULL else (4, 28)


def prompts(seed: int) -> list[Ask]:
    """Long ones among many short ones, in an order of chance."""
    rng = random.Random(seed)
    lengths = [rng.randint(2000, 3900) for _ in range(NUM_LONG)] + [
        rng.randint(10, 250) for _ in range(NUM_SHORT)
    ]
    rng.shuffle(lengths)
    return [
        Ask(tuple(rng.randrange(2, VOCAB) for _ in range(length)), 2, ignore_eos=True)
        for length in lengths
    ]


async def answers(server: Server, asks: list[Ask]) -> list[tuple[int, ...]]:
    """Tokens of all prompts, asked at once."""
    async with http_client(server.url, len(asks)) as http:
        return await asyncio.gather(*map(ClosedLoop(http, server.model, asks, 0).ask, asks))


def test_tokens_are_the_same_however_steps_are_cut(borrow: StartServer) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    asks = prompts(seed)
    by_budget = borrow(**{**RANKED, "prefill": {**RANKED["prefill"], "request_balance": "off"}})
    assert asyncio.run(answers(by_budget, asks)) == asyncio.run(answers(borrow(**RANKED), asks))
