"""Hundreds of requests, 64 at a time, with tools, structured outputs and a tenant's quota. Every
tenth client disconnects: the others finish, and nothing leaks.
"""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from evals.run import held_out_examples, request_body
from evals.tasks import TASKS, Example
from tests.dist.keyed import AUDITOR, ask, header, model_of, with_keys
from tests.dist.serving import Server, StartServer, metric
from tests.fresh import fresh
from tests.levels import FULL
from tests.waiting import PATIENCE_S, wait_until

PATH = "/v1/chat/completions"
MOST_AT_ONCE = 20
"""Quota of concurrent requests of one of two tenants, low enough that some are refused."""

NUM_REQUESTS, NUM_FIRST = (500, 150) if FULL else (300, 100)
CONCURRENCY = 64
MAX_GROWTH = 1.10
"""Largest allowed resident memory after the load, as a multiple of the memory after a first, smaller
load; 4 MiB more are allowed.
"""


async def load(
    server: Server,
    keys: list[str],
    examples: list[Example],
    num_requests: int,
    rng: random.Random,
    *,
    concurrency: int = CONCURRENCY,
) -> list[str]:
    """Send requests of all tenants and return how each ended: "done", "left" (the client
    disconnected), "refused" or the error.
    """
    gate = asyncio.Semaphore(concurrency)
    model = model_of(server, keys[0]) if keys else server.model
    async with httpx.AsyncClient(
        base_url=server.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=80)
    ) as client:

        async def one(number: int) -> str:
            body = {
                **request_body(model, rng.choice(examples)),
                "temperature": rng.choice((0, 0.7)),
                "max_tokens": rng.choice((1, 16, 64, 300)),
                "seed": number,
                "stream": rng.random() < 0.5,
            }
            leaves = number % 10 == 0
            if leaves:
                body |= {"stream": True, "max_tokens": 400, "ignore_eos": True}
                body.pop("tool_choice", None)
                body.pop("response_format", None)
            headers = header(rng.choice(keys)) if keys else {}
            async with gate:
                return await (
                    _leave(client, body, headers, rng) if leaves else _finish(client, body, headers)
                )

        return list(await asyncio.gather(*(one(number) for number in range(num_requests))))


async def _leave(
    client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str], rng: random.Random
) -> str:
    num_lines = rng.choice((1, 3, 10, 40))
    async with client.stream("POST", PATH, json=body, headers=headers) as reply:
        if reply.status_code != 200:
            return _refused(reply)
        async for _ in reply.aiter_lines():
            num_lines -= 1
            if num_lines == 0:
                break
    return "left"


async def _finish(client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> str:
    if not body["stream"]:
        reply = await client.post(PATH, json=body, headers=headers)
        if reply.status_code != 200:
            return _refused(reply)
        return _judged(body, reply.json()["choices"][0]) or reply.text
    finish = None
    last = ""
    async with client.stream("POST", PATH, json=body, headers=headers) as reply:
        if reply.status_code != 200:
            return _refused(reply)
        async for line in reply.aiter_lines():
            if '"finish_reason":"' in line:
                finish = line
            last = line or last
    return "done" if finish and last == "data: [DONE]" else f"a stream ended with {last!r}"


def _refused(reply: httpx.Response) -> str:
    has_headers = reply.headers.get("x-ratelimit-limit-requests") == str(MOST_AT_ONCE)
    return "refused" if reply.status_code == 429 and has_headers else f"status {reply.status_code}"


def _judged(body: dict[str, Any], choice: dict[str, Any]) -> str:
    """Return "done"; an empty string for an unexpected finish reason. Raises an error if the answer
    violates its schema or a call's arguments are not JSON.
    """
    if choice["finish_reason"] == "stop" and "response_format" in body:
        said = body["response_format"].get("json_schema", {"schema": {"type": "object"}})
        jsonschema.validate(json.loads(choice["message"]["content"]), said["schema"])
    for call in choice["message"].get("tool_calls") or ():
        if choice["finish_reason"] == "tool_calls":
            json.loads(call["function"]["arguments"])
    return "done" if choice["finish_reason"] in ("stop", "length", "tool_calls") else ""


def resident_mb(pid: int) -> float:
    """Return a process's own memory (without shared pools), in MiB."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return (int(fields["RssAnon"].split()[0])) / 1024


@pytest.mark.promise(
    "The end of a process is detected immediately; without requests no block has an owner."
)
@pytest.mark.more("hundreds of requests")
@pytest.mark.slow("hundreds of requests")
def test_everyone_else_finishes_and_nothing_leaks(borrow: StartServer) -> None:
    """The pool's audit finds leaked blocks and slots."""
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    examples = held_out_examples(8, seed=5, tasks=(*TASKS, "tools", "schema"))
    keys = ["sk-free", "sk-held"]
    server = borrow(*with_keys("sk-free", f"sk-held requests={MOST_AT_ONCE}"))
    asyncio.run(load(server, keys, examples, NUM_FIRST, rng))
    before = {name: resident_mb(pid) for name, pid in server.pids().items()}
    ends = asyncio.run(load(server, keys, examples, NUM_REQUESTS, rng))
    after = {name: resident_mb(pid) for name, pid in server.pids().items()}
    assert set(ends) <= {"left", "done", "refused"}, set(ends)
    assert {"left", "done"} <= set(ends)
    wait_until(lambda: metric(server, "hadal_generations_now", key=AUDITOR) == 0, "all have ended")
    grown = {
        name: (before[name], after[name])
        for name in before
        if after[name] > MAX_GROWTH * before[name] + 4
    }
    assert grown == {}, "memory grew (MB before, after)"
    # Requests that ended have released their tenant's quota.
    model = model_of(server, keys[1])
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        asked = pool.map(lambda n: ask(server, keys[1], model, f"{n}"), range(MOST_AT_ONCE))
        assert {reply.status_code for reply in asked} == {200}
