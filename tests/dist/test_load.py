"""Hundreds of requests, 64 at a time, every tenth client walks away: the others finish, and nothing is left
behind.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from evals.run import held_out_examples
from evals.tasks import Example
from tests.dist.serving import Server, wait_until
from tests.fresh import FULL, fresh

NUM_REQUESTS, NUM_FIRST = (500, 150) if FULL else (300, 100)
CONCURRENCY = 64
MAX_GROWTH = 1.10
"""Resident memory after the load, over that after a first round of it."""


async def load(
    server: Server, examples: list[Example], num_requests: int, rng: random.Random
) -> list[str]:
    """Send requests and return how each ended: "done", "left" (the client walked away) or what went
    wrong.
    """
    gate = asyncio.Semaphore(CONCURRENCY)
    model = server.model
    async with httpx.AsyncClient(
        base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=80)
    ) as client:

        async def one(number: int) -> str:
            example = rng.choice(examples)
            body = {
                "model": model,
                "messages": list(example.messages),
                "temperature": rng.choice((0, 0.7)),
                "max_tokens": rng.choice((1, 16, 64, 300)),
                "seed": number,
                "stream": number % 2 == 0,
            }
            if number % 10 == 0:
                body |= {"stream": True, "max_tokens": 400, "ignore_eos": True}
            async with gate:
                return await (
                    _leave(client, body, rng) if number % 10 == 0 else _finish(client, body)
                )

        return list(await asyncio.gather(*(one(number) for number in range(num_requests))))


async def _leave(client: httpx.AsyncClient, body: dict[str, object], rng: random.Random) -> str:
    num_lines = rng.choice((1, 3, 10, 40))
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            return f"{reply.status_code}"
        async for _ in reply.aiter_lines():
            num_lines -= 1
            if num_lines == 0:
                break
    return "left"


async def _finish(client: httpx.AsyncClient, body: dict[str, object]) -> str:
    if not body["stream"]:
        reply = await client.post("/v1/chat/completions", json=body)
        if reply.status_code != 200:
            return f"{reply.status_code}: {reply.text}"
        return (
            "done"
            if reply.json()["choices"][0]["finish_reason"] in ("stop", "length")
            else reply.text
        )
    finish = None
    last = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            return f"{reply.status_code}"
        async for line in reply.aiter_lines():
            if '"finish_reason":"' in line:
                finish = line
            last = line or last
    return "done" if finish and last == "data: [DONE]" else f"a stream ended with {last!r}"


def resident_mb(pid: int) -> float:
    """Memory of a process that is its own (not the shared pools), in MB."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return (int(fields["RssAnon"].split()[0])) / 1024


def audit(server: Server) -> dict[str, object]:
    """Every ledger's check(), and what is held."""
    reply: dict[str, object] = httpx.get(f"{server.url}/audit", timeout=30).json()
    return reply


@pytest.mark.timeout(600)
def test_everyone_else_finishes_and_nothing_leaks(server: Server) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    examples = held_out_examples(8, seed=5)
    asyncio.run(load(server, examples, NUM_FIRST, rng))
    before = {name: resident_mb(pid) for name, pid in server.pids().items()}
    ends = asyncio.run(load(server, examples, NUM_REQUESTS, rng))
    after = {name: resident_mb(pid) for name, pid in server.pids().items()}
    assert ends.count("left") == NUM_REQUESTS // 10
    assert ends.count("done") == NUM_REQUESTS - NUM_REQUESTS // 10, {
        e for e in ends if e not in ("done", "left")
    }

    def is_idle() -> bool:
        units = audit(server)["units"]
        assert isinstance(units, dict)
        return all(
            unit["num_blocks_used"] == 0 and unit["num_requests"] == 0 for unit in units.values()
        )

    wait_until(is_idle, 5.0, "every block and slot is free")
    problems = audit(server)["problems"]
    assert problems == []
    grown = {
        name: (before[name], after[name])
        for name in before
        if after[name] > MAX_GROWTH * before[name] + 4
    }
    assert grown == {}, "memory grew (MB before, after)"
