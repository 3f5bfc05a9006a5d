"""Greedy tokens of a request equal the plain single-request loop's, however it is served."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import httpx
import pytest

from hadal.core.messages.base import BLOCK_TOKENS
from tests.dist import gate
from tests.dist.keyed import AUDITOR, with_keys
from tests.dist.oracle import (
    FULL,
    MAX_TOKENS,
    NUM_EVERYDAY,
    Case,
    bordering_cases,
    complete_all,
    differences,
    everyday_cases,
    make_cases,
)
from tests.dist.serving import Server, StartServer, kill_at_work, metric
from tests.fresh import fresh
from tests.levels import LEVEL
from tests.waiting import PATIENCE_S, wait_for

NUM_CASES, NUM_FRESH = (200, 50) if FULL else (10, 2) if LEVEL == "test" else (36, 12)
NUM_GROWING = 48 if FULL else 32
CONCURRENCY = 16
"""Concurrency of tests that kill a unit, so that requests arrive after the kill."""
OTHER_WAY = pytest.mark.more("another way to serve; small chunks are in `make test`")
CHUNK_TOKENS = 16
"""Chunk size of the flooded server. No other deployment has smaller chunks."""
DECODING = 'state="decoding"'
NUM_SLOTS, NUM_BLOCKS = 4, 6


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Return fixed and fresh prompts; the fresh seed is printed if a test fails."""
    seed = fresh().randrange(2**31)
    print(f"fresh prompts: seed {seed}")
    return everyday_cases(NUM_CASES - NUM_FRESH, seed=7) + make_cases(NUM_FRESH, seed=seed)


@pytest.mark.promise(
    "Batching, chunking, preemption, KV transfer, caches, widths, placements and "
    "retries affect when a token is generated, never which token."
)
@pytest.mark.promise("Greedy output equals a plain single-request loop over the reference model")
@pytest.mark.parametrize("chunk_tokens", [64, pytest.param(4096, marks=pytest.mark.full)])
def test_chunks(borrow: StartServer, cases: list[Case], chunk_tokens: int) -> None:
    server = borrow(chunk_tokens=chunk_tokens)
    outputs = asyncio.run(complete_all(server.url, server.model, cases))
    assert differences(cases, outputs) == []


@pytest.mark.promise(
    "The latest request of the tenant with the most blocks is preempted: the front "
    "requeues it, and it is prefilled again later."
)
@pytest.mark.promise("admission, and preemption that loses no token")
@OTHER_WAY
def test_preemption(borrow: StartServer) -> None:
    # Every request needs one more block before it ends, and the pool has blocks for only a few
    # requests even without that block.
    def num_blocks(num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_TOKENS)

    cases = bordering_cases(NUM_CASES if FULL else NUM_EVERYDAY, seed=7)
    sizes = [(len(case.prompt), len(case.prompt) + len(case.output)) for case in cases]
    growing = [
        case
        for case, (start, end) in zip(cases, sizes, strict=True)
        if num_blocks(start + 4) < num_blocks(end) and end <= 3 * BLOCK_TOKENS
    ]
    assert growing
    growing *= -(-NUM_GROWING // len(growing))
    server = borrow(decode={"kv_blocks": 1 + NUM_BLOCKS, "kv_memory_mb": 0})

    before = metric(server, "hadal_preemptions_total")

    def was_preempted() -> bool:
        return metric(server, "hadal_preemptions_total") > before

    async def fill() -> None:
        server.gate.hold(gate.DECODE)
        await wait_for(
            lambda: metric(server, "hadal_generations_now", DECODING) > NUM_BLOCKS // 2,
            "more are decoded than can grow",
        )
        await wait_for(server.gate.stepping(gate.DECODE, was_preempted), "one is put back")
        server.gate.open()

    outputs = asyncio.run(complete_all(server.url, server.model, growing, while_running=fill))
    assert differences(growing, outputs) == []


async def ask_as(server: Server, key: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """Return the result of every request of a key, all sent at once: tokens, or the text of a stream."""

    async def one(body: dict[str, Any]) -> Any:
        if not body.get("stream"):
            reply = await client.post("/v1/completions", json={"model": model, **body})
            assert reply.status_code == 200, reply.text
            return tuple(reply.json()["choices"][0]["token_ids"])
        text = ""
        async with client.stream("POST", "/v1/completions", json={"model": model, **body}) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    text += "".join(
                        choice["text"] for choice in json.loads(line[len("data: ") :])["choices"]
                    )
        return text

    headers, limits = {"Authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=PATIENCE_S, limits=limits, headers=headers
    ) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        return await asyncio.gather(*(one(body) for body in bodies))


@OTHER_WAY
@pytest.mark.slow("all prompts twice, in chunks of few tokens")
def test_a_flood_gives_way(borrow: StartServer, cases: list[Case]) -> None:
    keys = flood, other = "flood", "other"
    slots = {"max_requests": NUM_SLOTS}
    # The flood is sent at once. While both tenants wait, each may fill half of the queue.
    limits = {"max_queued": 8 * len(cases)}
    server = borrow(*with_keys(*keys), decode=slots, chunk_tokens=CHUNK_TOKENS, limits=limits)
    num = functools.partial(metric, server, key=AUDITOR)
    greedy = [
        {"prompt": list(case.prompt), "temperature": 0, "max_tokens": MAX_TOKENS} for case in cases
    ]
    sampled = [
        {**body, "temperature": 1.0, "seed": seed, "stream": True}
        for seed, body in enumerate(greedy)
    ]
    greedy = [{**body, "return_token_ids": True} for body in greedy]
    bodies = [*greedy, *sampled]
    expected = asyncio.run(ask_as(server, flood, bodies))
    assert num("hadal_gave_way_total") == 0, "there is no other tenant"

    async def ask_beside() -> list[Any]:
        server.gate.hold(gate.DECODE, 10)
        flooding = asyncio.ensure_future(ask_as(server, flood, bodies))
        await wait_for(
            lambda: num("hadal_generations_now", DECODING) == NUM_SLOTS,
            "the flood has all slots",
        )
        asking = asyncio.ensure_future(ask_as(server, other, bodies[:12]))
        await wait_for(lambda: num("hadal_gave_way_total"), "one gave way")
        server.gate.open()
        return [*await asking, *await flooding]

    came = asyncio.run(ask_beside())
    assert came == expected[:12] + expected
    assert differences(cases, came[12 : 12 + len(cases)]) == []


@OTHER_WAY
@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_killed_midway(mortal: StartServer, cases: list[Case], victim: str) -> None:
    server = mortal()
    before = metric(server, "hadal_retries_total")

    async def kill() -> None:
        await kill_at_work(server, victim, num_steps=3 if victim == "decode-0" else 0)

    outputs = asyncio.run(
        complete_all(server.url, server.model, cases, concurrency=CONCURRENCY, while_running=kill)
    )
    assert differences(cases, outputs) == []
    assert metric(server, "hadal_retries_total") > before, (
        "nothing was in flight at the unit; this test shows nothing"
    )


def test_the_test_can_fail(cases: list[Case]) -> None:
    """A changed token is detected."""
    changed: list[Any] = [case.output for case in cases]
    changed[3] = (*changed[3][:-1], changed[3][-1] + 1)
    assert len(differences(cases, changed)) == 1
